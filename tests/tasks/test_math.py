r"""MATH: what stands in the box, when two answers are equal, rows and splits, and the datasets' own solutions."""

import gzip
import importlib.util
import json
import logging
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest

from recipes.arithmetic import make_tokenizer
from tba.config import ConfigError, TaskConfig, load_config
from tba.tasks.data.make_prompt import read_problems, read_splits
from tba.tasks.math.answers import last_boxed, normal_form, plain_number
from tba.tasks.math.dataset import MathTask
from tba.tasks.math.grading import same_answer
from tba.tasks.math.symbolic import SymbolicEquality, symbolic_equality
from tba.tasks.registry import make_task
from tba.tasks.rewards.worker import JobService
from tba.types import Completion

REPOSITORY = Path(__file__).parents[2]
REAL_DATA = Path(os.environ.get("TBA_DATA", REPOSITORY.parent / "shared" / "data")) / "math"

needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed: pip install 'tba-rl[math]'"
)
needs_real_data = pytest.mark.skipif(
    not REAL_DATA.is_dir(), reason=f"the real MATH is not at {REAL_DATA}; TBA_DATA names the folder above math"
)


@pytest.fixture(scope="module", autouse=True)
def no_worker_stays_behind():
    """Other tests count the children of this process."""
    yield
    symbolic_equality().close()


def never(given, wanted):
    raise AssertionError(f"{given!r} and {wanted!r} should be decided by their text")


def row(index):
    return {"problem": f"Mia has {index} pens.", "solution": f"She has $\\boxed{{{index}}}$.", "level": "Level 1"}


@pytest.fixture
def folder(tmp_path):
    for name, numbers in (("train", range(1, 31)), ("test", range(101, 105))):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row(i)) + "\n" for i in numbers))
    return tmp_path


def make(data, tokenizer=None, **settings):
    config = TaskConfig(**{"name": "math", "data": str(data), "num_validation_prompts": 5, **settings})
    return make_task(config, tokenizer or make_tokenizer(), max_prompt_tokens=200)


def completion(*, finish="stop"):
    logs = np.zeros(2, np.float32)
    return Completion(
        prompt_id="train-1",
        sample_index=0,
        token_ids=np.array([5, 2], np.int32),
        behaviour_log_probs=logs,
        policy_log_probs=logs,
        version_spans=((0, 0),),
        finish=finish,
    )


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"so $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"\boxed{1}, no: \boxed{2}", "2"),
        (r"\boxed {17}.", "17"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.} and } more", r"\left\{ x \right."),
        (r"\boxed{a \\ {b}} {", r"a \\ {b}"),
        (r"\boxed{1} but \boxed{\frac{1}{2}", None),
        (r"\boxed{}", ""),
        ("The answer is 5.", None),
        (r"\boxed", None),
        ("", None),
    ],
)
def test_the_answer_is_what_stands_in_the_last_box(text, box):
    assert last_boxed(text) == box


@pytest.mark.parametrize(
    ("answer", "form"),
    [
        (r"x = \dfrac12 \text{ cm}", r"\frac{1}{2}"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        (r"15\mbox{ cm}^2", "15"),
        (r"12 square units", "12"),
        (r"7\text{ hours}.", "7"),
        (r"137.5^{\circ}", "137.5"),
        (r"11,\! 111,\! 111", "11111111"),
        ("8{,}880", "8880"),
        (r"\$1{,}250.50", "1250.50"),
        (r"7.2\%", "7.2"),
        ("(1,234)", "(1,234)"),
        (r"\text{(C)}", "C"),
        (r"(\text{E})", "E"),
        (r"\text{Sunday}", "sunday"),
        (r"9\text{ a.m.}", "9am"),
        (r"6, 8\text{, and }10", "6,8,10"),
        (r"-2 \text{ or } -12", "-2,-12"),
        (r"\frac1{72}", r"\frac{1}{72}"),
        (r"6\sqrt3", r"6\sqrt{3}"),
        ("-3/4", r"-\frac{3}{4}"),
        (".5", "0.5"),
        (r"x \in [2, +\infty)", r"[2,\infty)"),
        (r"f(x) = 2x^{2}", "2x^2"),
        (r"x \leq 3", r"x\le3"),
        (r"2 \times 10^{12}", r"2\cdot10^{12}"),
        (r"\begin{pmatrix} 1 \\ -7 \end{pmatrix}", r"\begin{pmatrix}1\\-7\end{pmatrix}"),
        ("  ", ""),
    ],
)
def test_the_normal_form_leaves_out_what_does_not_matter(answer, form):
    assert normal_form(answer) == form


@pytest.mark.parametrize(
    ("given", "wanted", "equal"),
    [
        (r"\dfrac{1}{2}", "0.5", True),
        ("2\\frac{1}{3}", "7/3", True),
        ("-2\\frac{1}{3}", "\\frac{-7}{3}", True),
        ("0.3333333", r"\frac{1}{3}", True),  # within 1e-6
        ("0.33", r"\frac{1}{3}", False),
        ("1,000", "1000.0", True),
        ("12", "21", False),
        ("9" * 90, "9" * 89, False),
        ("", "5", False),
        (None, "5", False),
        ("7" * 2000, "5", False),
        (r"\text{odd}", "Odd", True),
    ],
)
def test_text_and_numbers_decide_without_symbols(given, wanted, equal):
    assert same_answer(given, wanted, question="", symbolic=never) is equal


@pytest.mark.parametrize(
    "part", ["5", "5 ", "5,", "{", "(5", "\\frac{", "x=", "\\pm5,", "5\\text{ cm", "$5$ ", "\\\\ ", "- "]
)
def test_long_babble_is_never_right_and_never_raises(part):
    for babble in (part * 20, part * 300, part * 100_000):
        assert not same_answer(babble, "7", question=babble[:10_000], symbolic=lambda given, wanted: False)


def test_a_fraction_of_zero_is_no_number():
    assert plain_number(r"\frac{1}{0}") is None


@needs_math_verify
@pytest.mark.parametrize(
    ("given", "wanted", "equal"),
    [
        (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", True),
        ("-2, 1", "1,-2", True),
        ("(x+1)^2", "x^2 + 2x + 1", True),
        (r"\sqrt{108}.", r"6\sqrt{3}", True),
        ("4i + 8", "8+4i", True),
        (r"\begin{pmatrix} 1/4 \\ 2 \end{pmatrix}", r"\begin{pmatrix} \frac14 \\ 2 \end{pmatrix}", True),
        ("(1,2)", "(2,1)", False),
        (r"\sqrt{2}", r"\sqrt{3}", False),
        (r"\text{even}", r"\text{odd}", False),
        (r"}{ \frac{1}", r"\sqrt{2}", False),
    ],
)
def test_symbols_decide_the_rest(given, wanted, equal):
    assert same_answer(given, wanted, question="", symbolic=symbolic_equality().equal) is equal


@needs_math_verify
def test_tiny_numbers_are_told_apart():
    # 1/2003! and 1/2004! both have hundreds of zeros after the point, but one is 2004 times the other
    equal = symbolic_equality().equal
    assert not equal(r"\frac{1}{2003!}", r"\frac{1}{2004!}")
    assert equal(r"\frac{1}{2003! \cdot 2004}", r"\frac{1}{2004!}")
    assert not equal("0", r"\frac{1}{2004!}")


@needs_math_verify
def test_a_comparison_without_end_is_killed_told_once_and_not_equal(caplog):
    symbolic = SymbolicEquality(comparison_seconds=0.5)
    try:
        assert symbolic.equal("p - q", "-q + p")
        started = time.monotonic()
        with caplog.at_level(logging.WARNING, logger="tba.tasks"):
            assert not symbolic.equal("9^{9^{9^9}}", "3")
            assert not symbolic.equal("1000000!", "3")
            assert not symbolic.equal("9^{9^{9^9}}", "3")  # remembered
        assert time.monotonic() - started < 10.0
        assert symbolic.num_failures == 2
        assert [record.getMessage().count("took longer than 0.5 s") for record in caplog.records] == [1]
        assert symbolic.equal("p - q", "p - q + 0")  # by another worker
    finally:
        symbolic.close()


def test_a_worker_that_dies_costs_one_comparison(monkeypatch, caplog):
    class Dies(JobService):
        greeting = "ready"

        def __call__(self, given, wanted):
            raise MemoryError("no more")

    monkeypatch.setattr("tba.tasks.math.symbolic.Comparer", Dies)
    symbolic = SymbolicEquality(comparison_seconds=20.0)
    assert not symbolic.equal("p", "q")
    assert not symbolic.equal("p", "r")
    assert symbolic.num_failures == 2
    assert "the worker died" in caplog.text


def test_without_math_verify_the_package_is_named(folder, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"`math-verify` package, which is not installed: `pip install 'tba-rl\[math\]'"
    ):
        make(folder)


@needs_math_verify
def test_the_reward_is_one_for_the_right_box(folder):
    task = make(folder)
    prompt = task.prompts("held_out")[0]
    texts = [r"\boxed{50 + 51}", r"\boxed{101}, so \boxed{102}", "The answer is 101.", r"It is $\boxed{101.0}$."]
    outcomes = task.score(prompt, texts, [completion()] * 4)
    assert [outcome["exact_match"] for outcome in outcomes] == [1.0, 0.0, 0.0, 1.0]
    assert [task.solved(outcome) for outcome in outcomes] == [True, False, False, True]
    assert task.score(prompt, texts[3:], [completion(finish="length")]) == [{"exact_match": 0.0}]


@needs_math_verify
def test_rows_are_split_as_gsm8k_splits_them(folder, tmp_path):
    task = make(folder)
    assert [len(task.prompts(split)) for split in ("train", "validation", "held_out")] == [25, 5, 4]
    assert task.prompts("held_out")[0].columns == {"question": "Mia has 101 pens.", "answer": "101"}
    other = tmp_path / "math500.jsonl"
    other.write_text(json.dumps({"problem": "What?", "answer": 7, "subject": "Algebra"}) + "\n")
    assert make(folder, eval_data=str(other)).prompts("held_out")[0].columns["answer"] == "7"


@needs_math_verify
def test_the_prompt_asks_for_a_box_with_and_without_chat(folder):
    text = make(folder).prompts("held_out")[0].text
    assert text.startswith("Problem:\nMia has 101 pens.\n\nReason")
    assert text.endswith("in \\boxed{}.\n\nSolution:")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    content = make(folder, tokenizer).prompts("held_out")[0].text[0]["content"]
    assert content == "Mia has 101 pens.\n\nReason step by step, and put the final answer in \\boxed{}."


@needs_math_verify
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('"a"', "train.jsonl line 1 is no object with a `problem` and a `solution` or `answer`"),
        ('{"solution": "\\\\boxed{1}"}', "train.jsonl line 1 has no `problem` column; it has solution"),
        ('{"problem": "a"}', "train.jsonl line 1 has no `solution` column; it has problem"),
        ('{"problem": "a", "solution": "It is 5."}', "line 1: `solution` has no \\boxed{...}; it ends with 'It is 5.'"),
        ('{"problem": "a", "solution": "\\\\boxed{}"}', "train.jsonl line 1: the answer is empty"),
        ('{"problem": "a", "answer": [1]}', "train.jsonl line 1: `answer` is [1], it must be text or a number"),
    ],
)
def test_a_broken_row_is_named_by_file_and_line(folder, line, message):
    (folder / "train.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError) as error:
        make(folder)
    assert message in str(error.value)


def test_data_is_asked_for():
    with pytest.raises(ConfigError, match=r"task.data is needed for task.name=math: .*MATH-lighteval"):
        load_config(None, ["task.name=math"])


def test_the_paper_config_has_the_paper_settings():
    config = load_config(REPOSITORY / "configs" / "math.yaml")
    train, replay = config.train, config.replay
    assert (config.objective.name, config.beta_at(0, config.progress_at(0)), config.reference.reset_every) == (
        "tba_prime",
        0.005,
        50,
    )
    assert (train.prompts_per_step, train.samples_per_prompt, train.max_steps) == (32, 16, 400)
    assert [config.learning_rate_at(step, config.progress_at(step)) for step in (0, 399)] == [1e-6, 1e-6]
    assert (train.adam_betas, train.weight_decay, train.max_grad_norm) == ((0.9, 0.99), 0.01, 1.0)
    assert (replay.on_policy_probability, replay.max_replay_ratio) == (1.0, 1.0)
    assert (config.generate.max_new_tokens, config.generate.temperature) == (3072, 1.0)


@needs_real_data
@needs_math_verify
@pytest.mark.parametrize(("file", "num_rows", "num_bad"), [("train", 7500, 2), ("test", 5000, 0), ("math500", 500, 0)])
def test_the_gold_solutions_get_full_marks(file, num_rows, num_bad):
    """As they are written, so that text decides."""
    path = REAL_DATA / f"{file}.jsonl.gz"
    problems = read_problems(TaskConfig(on_bad_row="skip"), str(path), ("train",), MathTask.source)
    assert len(problems) == num_rows - num_bad  # two boxes are empty
    responses = _solutions(path)
    equal = symbolic_equality().equal
    wrong = [
        p
        for p in problems
        if not same_answer(last_boxed(responses[p.line]), p.answer, question=p.question, symbolic=equal)
    ]
    assert not wrong, [(problem.line, problem.answer) for problem in wrong]


@needs_real_data
@needs_math_verify
def test_no_formula_of_a_test_question_is_its_answer_unless_it_is_the_stored_one():
    problems = read_problems(TaskConfig(), str(REAL_DATA / "test.jsonl.gz"), ("test",), MathTask.source)
    equal, accepted, num_tried = symbolic_equality().equal, [], 0
    for problem in problems:
        spans = re.findall(r"\$([^$]+)\$", problem.question.replace("\\$", "").replace("$$", "$"))
        for formula in {part.strip(" \n.,;?") for span in spans for part in (span, *span.split("="))}:
            if normal_form(formula) not in ("", normal_form(problem.answer)):
                num_tried += 1
                if same_answer(formula, problem.answer, question=problem.question, symbolic=equal):
                    accepted.append((problem.line, formula, problem.answer))
    assert num_tried > 10_000
    assert not accepted


@needs_real_data
def test_the_real_splits_are_fixed():
    splits = read_splits(TaskConfig(name="math", data=str(REAL_DATA), on_bad_row="skip"), MathTask.source)
    questions = {split: {problem.question for problem in problems} for split, problems in splits.items()}
    assert {split: len(own) for split, own in questions.items()} == {"train": 6997, "validation": 500, "held_out": 5000}
    assert not questions["train"] & questions["validation"]
    assert [problem.line for problem in splits["validation"][:5]] == [21, 49, 79, 96, 110]
    # The dataset has one test problem among its train problems, with another space at the end, which is left out of train.
    trained_on = questions["train"] | questions["validation"]
    assert not trained_on & questions["held_out"]
    fewer = read_problems(TaskConfig(), str(REAL_DATA / "math500.jsonl.gz"), ("test",), MathTask.source)
    assert not trained_on & {problem.question for problem in fewer}


def _solutions(path):
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return {line: json.loads(text)["solution"] for line, text in enumerate(file, start=1)}
