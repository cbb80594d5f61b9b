"""The arithmetic task: problems, answers, splits, rewards."""

import random
from itertools import islice

import numpy as np
import pytest
import torch

from recipes.arithmetic import make_tokenizer
from tba.config import ModelConfig, TaskConfig
from tba.models.load import load_model
from tba.run import evaluate_model
from tba.tasks.arithmetic.problems import (
    LARGEST,
    ArithmeticTask,
    Earlier,
    Problem,
    Step,
    draw_problem,
    draw_problems,
    exact_match,
    held_out_problems,
    train_problems,
    validation_problems,
    work,
)
from tba.tasks.gsm8k import final_number, same_number
from tba.tasks.task import TaskInputs
from tba.types import Completion

HELD_OUT_FIRST = (
    "Eva has 19 books. She gives 9 to Leo. She shares them equally among 2 friends. "
    "How many books does each friend get?\n"
)
"""Changes only if the generator changes; every published accuracy is measured on these problems."""
VALIDATION_FIRST = (
    "Eva has 36 stamps. She gives 9 to Leo. Zoe has 3 fewer. How many stamps do they have together?\n",
    "Mia has 37 pens. She gives 10 to Ann. She loses 13. Max has 13 more. How many pens do they have together?\n",
)
"""With the default 20,000 training problems; a set that changes makes settings tuned on it incomparable."""


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def task(tokenizer):
    return ArithmeticTask(
        TaskInputs(config=TaskConfig(num_train_prompts=50), tokenizer=tokenizer, max_prompt_tokens=100)
    )


def completion(prompt, *, finish):
    logs = np.zeros(2, np.float32)
    return Completion(
        prompt_id=prompt.id,
        sample_index=0,
        token_ids=np.array([5, 2], np.int32),
        behaviour_log_probs=logs,
        policy_log_probs=logs,
        version_spans=((0, 0),),
        finish=finish,
    )


def test_steps_are_worked_out_in_order_with_earlier_results():
    # 4 boxes of 6 are 24; 5 given away leave 19; somebody with 3 fewer has 16; together 19 + 16 = 35
    steps = (
        Step(4, "*", 6, "boxes"),
        Step(Earlier(0), "-", 5, "gives"),
        Step(Earlier(1), "-", 3, "fewer"),
        Step(Earlier(1), "+", Earlier(2), "together"),
    )
    problem = Problem(text="", steps=steps, canonical="")
    assert problem.solution == "4*6=24\n24-5=19\n19-3=16\n19+16=35\n#### 35"
    assert problem.answer == "35"


def test_negative_too_large_and_broken_results_are_refused():
    assert work((Step(4, "-", 9, "gives"),)) is None
    assert work((Step(40, "+", LARGEST, "buys"),)) is None
    assert work((Step(13, "/", 4, "shares"),)) is None
    assert work((Step(12, "/", 4, "shares"),)) == [("12/4=3", 3)]


def test_known_problems_read_as_expected():
    problems = {problem.canonical: problem for problem in islice(draw_problems("train", seed=0), 4000)}
    for canonical, problem in problems.items():
        kinds = [part.split() for part in canonical.split("|")]
        if [kind[0] for kind in kinds] == ["has", "buys", "times"]:
            start, more, factor = (int(kind[1]) for kind in kinds)
            assert problem.answer == str((start + more) * factor)
            assert f"has {start} " in problem.text
            assert f"buys {more} more." in problem.text
            assert f"has {factor} times as many." in problem.text
            return
    pytest.fail("no has-buys-times problem among 4000")


def test_every_problem_has_two_to_four_steps_and_small_numbers():
    rng = random.Random(5)
    for problem in (draw_problem(rng) for _ in range(2000)):
        assert 2 <= len(problem.worked) <= 4
        assert all(1 <= result <= LARGEST for _, result in problem.worked)
        assert all(eval(equation.replace("=", "==").replace("/", "//")) for equation, _ in problem.worked)
        assert problem.solution.endswith(f"#### {problem.answer}")


def test_a_problem_text_has_one_canonical_content_so_the_split_is_a_function_of_the_text():
    # If two contents could read the same, one might be held out and the other trained on.
    rng = random.Random(9)
    by_text: dict[str, str] = {}
    for problem in (draw_problem(rng) for _ in range(20_000)):
        assert by_text.setdefault(problem.text, problem.canonical) == problem.canonical


@pytest.mark.parametrize("seed", [0, 1, 20_250_318])
def test_no_held_out_problem_occurs_in_training_whatever_the_seed(seed):
    held_out_texts = {problem.text for problem in held_out_problems()}
    held_out_contents = {problem.canonical for problem in held_out_problems()}
    for problem in islice(draw_problems("train", seed=seed), 5000):
        assert problem.split == "train"
        assert problem.text not in held_out_texts
        assert problem.canonical not in held_out_contents


def test_the_held_out_set_is_fixed_and_has_no_repetitions():
    problems = held_out_problems()
    assert len(problems) == len({problem.canonical for problem in problems}) == 2000
    assert all(problem.split == "held_out" for problem in problems)
    assert problems[0].text == HELD_OUT_FIRST


@pytest.mark.parametrize("num_train", [50, 20_000])
def test_validation_problems_are_neither_trained_on_nor_held_out(num_train):
    problems = validation_problems(num_train)
    contents = {problem.canonical for problem in problems}
    assert len(problems) == len(contents) == 1000
    assert all(problem.split == "train" for problem in problems)
    assert not contents & {problem.canonical for problem in held_out_problems()}
    assert not contents & {problem.canonical for problem in train_problems(num_train)}


def test_the_validation_set_is_fixed_and_numbered(tokenizer):
    assert tuple(problem.text for problem in validation_problems(20_000)[:2]) == VALIDATION_FIRST
    prompts = ArithmeticTask(TaskInputs(config=TaskConfig(), tokenizer=tokenizer, max_prompt_tokens=100)).prompts(
        "validation"
    )
    assert [(prompt.id, prompt.text) for prompt in prompts[:2]] == list(
        zip(("validation-0", "validation-1"), VALIDATION_FIRST)
    )


@torch.no_grad()
def greedy_accuracy(model, tokenizer, problems):
    """By plain transformers `generate`."""
    inputs = tokenizer([p.text for p in problems], return_tensors="pt", padding=True, padding_side="left")
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        do_sample=False,
        max_new_tokens=48,
    )
    responses = output[:, inputs["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    finished = (responses == tokenizer.eos_token_id).any(dim=1).tolist()
    right = [exact_match(text, p.answer, finished=end) for text, p, end in zip(texts, problems, finished)]
    return sum(right) / len(right)


def test_the_validation_split_is_evaluated_where_it_is_asked_for():
    settings = ["task.num_train_prompts=50", "evaluate.num_prompts=60", "generate.max_new_tokens=48"]
    loaded = load_model(ModelConfig(path="tba:arithmetic"))
    by_generate = {
        split: greedy_accuracy(loaded.model, loaded.tokenizer, problems[:60])
        for split, problems in (("validation", validation_problems(50)), ("held_out", held_out_problems()))
    }
    assert by_generate["validation"] != by_generate["held_out"]
    assert evaluate_model("tba:arithmetic", settings)["accuracy"] == by_generate["held_out"]
    validation = evaluate_model("tba:arithmetic", [*settings, "evaluate.split=validation"])
    assert validation["accuracy"] == by_generate["validation"]


def test_training_problems_are_the_start_of_one_stream():
    assert train_problems(20) == train_problems(30)[:20]


def test_encoding_and_decoding_give_the_text_back(tokenizer):
    for problem in islice(draw_problems("train", seed=7), 500):
        text = problem.text + problem.solution
        token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(token_ids) == text
        assert tokenizer.unk_token_id not in token_ids


def test_a_number_is_its_digits(tokenizer):
    assert tokenizer.tokenize(" 24\n24-5=19\n#### 19") == [
        " 2", "4", "\n", "2", "4", "-", "5", "=", "1", "9", "\n", "####", " 1", "9",
    ]  # fmt: skip


def test_prompts_start_with_one_bos_and_carry_answer_and_solution(task, tokenizer):
    prompt = task.prompts("train")[3]
    assert prompt.id == "train-3"
    assert prompt.token_ids.tolist().count(tokenizer.bos_token_id) == 1
    assert prompt.token_ids[0] == tokenizer.bos_token_id
    assert prompt.columns["solution"].endswith(f"#### {prompt.columns['answer']}")
    assert (len(task.prompts("train")), len(task.prompts("held_out"))) == (50, 2000)


def test_prompts_and_solutions_are_short(task, tokenizer):
    lengths = [len(prompt.token_ids) for prompt in task.prompts("held_out")]
    solutions = tokenizer([prompt.columns["solution"] for prompt in task.prompts("held_out")])["input_ids"]
    assert max(lengths) <= 45
    assert max(map(len, solutions)) <= 45


def test_the_reward_is_one_for_the_right_number_in_a_finished_response_only(task):
    prompt = task.prompts("train")[0]
    right, wrong = prompt.columns["solution"], "1+1=2\n#### 61"
    outcomes = task.score(
        prompt,
        [right, wrong, right],
        [completion(prompt, finish="stop"), completion(prompt, finish="stop"), completion(prompt, finish="length")],
    )
    assert outcomes == [{"exact_match": 1.0}, {"exact_match": 0.0}, {"exact_match": 0.0}]
    assert [task.solved(outcome) for outcome in outcomes] == [True, False, False]


def test_the_number_after_the_last_marker_counts():
    assert final_number("#### 3\n#### 1,028") == "1028"
    assert final_number("7*4=28") is None
    assert final_number("#### none") is None
    assert final_number("####-4") == "-4"
    assert same_number("28.0", "28")
    assert not same_number(None, "28")
    assert exact_match("4*7=28\n####28", "28", finished=True) == 1.0
    assert exact_match("#### 28", "28", finished=False) == 0.0


def test_a_prompt_beyond_the_context_is_refused_by_its_id(tokenizer):
    task = ArithmeticTask(TaskInputs(config=TaskConfig(num_train_prompts=5), tokenizer=tokenizer, max_prompt_tokens=10))
    with pytest.raises(ValueError, match=r"prompt 'train-0' has \d+ tokens, beyond the 10 .* generate.max_new_tokens"):
        task.prompts("train")
