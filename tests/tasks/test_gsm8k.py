"""GSM8K: rows from files and the hub, splits, prompts, rewards, and a whole run on a tiny model."""

import gzip
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from builders import tiny_llama, tiny_tokenizer

from recipes.arithmetic import make_tokenizer
from tba.config import ConfigError, TaskConfig, load_config
from tba.run import train
from tba.tasks.data.make_prompt import QuestionAnswer, read_problems, read_splits, split_off_validation
from tba.tasks.gsm8k import GSM8KTask, Number, equal_answers, given_answer, marked_answer
from tba.tasks.registry import make_task
from tba.types import Completion

REPOSITORY = Path(__file__).parents[2]
REAL_DATA = Path(os.environ.get("TBA_DATA", REPOSITORY.parent / "shared" / "data")) / "gsm8k"
TEMPLATE = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"


def row(index, answer=None):
    return {"question": f"Mia has {index} pens.", "answer": f"She has {index}.\n#### {answer or index}"}


@pytest.fixture
def write(tmp_path):
    """Write rows, or text as it is, into the test's folder."""

    def write_file(name, content):
        text = content if isinstance(content, str) else "".join(json.dumps(r) + "\n" for r in content)
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return path

    return write_file


@pytest.fixture
def folder(write, tmp_path):
    write("train.jsonl", [row(i) for i in range(1, 31)])
    write("test.jsonl", [row(i) for i in range(101, 105)])
    return tmp_path


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for `datasets`: what load_dataset returns or raises."""

    def use(load_dataset):
        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))

    return use


def make(data, tokenizer=None, *, max_prompt_tokens=200, **settings):
    config = TaskConfig(**{"name": "gsm8k", "data": str(data), "num_validation_prompts": 5, **settings})
    return make_task(config, tokenizer or make_tokenizer(), max_prompt_tokens=max_prompt_tokens)


def completion(*, finish):
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


def test_a_folder_has_train_rows_less_validation_and_test_rows(folder):
    task = make(folder)
    prompts = {split: task.prompts(split) for split in ("train", "validation", "held_out")}
    assert [len(own) for own in prompts.values()] == [25, 5, 4]
    assert [prompt.id for prompt in prompts["held_out"]] == ["held_out-1", "held_out-2", "held_out-3", "held_out-4"]
    assert prompts["held_out"][0].columns == row(101)
    questions = [prompt.columns["question"] for prompt in (*prompts["train"], *prompts["validation"])]
    assert sorted(questions) == sorted(row(i)["question"] for i in range(1, 31))


def test_compressed_files_are_read_as_they_are(write, tmp_path):
    write("train.jsonl.gz", [row(i) for i in range(1, 31)])
    write("test.jsonl.gz", [row(101)])
    task = make(tmp_path)
    assert (len(task.prompts("train")), task.prompts("held_out")[0].columns) == (25, row(101))


def test_one_file_has_train_rows_and_takes_the_test_rows_from_another(write):
    train_file, test_file = write("a.jsonl", [row(i) for i in range(1, 31)]), write("b.jsonl", [row(101)])
    assert len(make(train_file).prompts("validation")) == 5
    assert len(make(train_file, eval_data=str(test_file)).prompts("held_out")) == 1
    with pytest.raises(ValueError, match=r"evaluate.split=held_out: .*a.jsonl is one file.* as task.eval_data"):
        make(train_file).prompts("held_out")


def test_the_validation_problems_depend_on_nothing_but_their_questions():
    # The two smallest of blake2b("Mia has i pens.", 8 bytes) for i = 1 ... 30; other problems would change every
    # accuracy that settings were tuned on.
    problems = [QuestionAnswer(line=i, question=f"Mia has {i} pens.", answer="#### 1") for i in range(1, 31)]
    for order in (problems, problems[::-1]):
        assert sorted(problem.line for problem in split_off_validation(order, 2)["validation"]) == [6, 17]


def test_a_question_that_occurs_twice_falls_on_one_side():
    problems = [QuestionAnswer(line=i, question=f"Mia has {i % 15} pens.", answer="#### 1") for i in range(30)]
    splits = split_off_validation(problems, 4)
    assert not {p.question for p in splits["train"]} & {p.question for p in splits["validation"]}
    assert (len(splits["train"]), len(splits["validation"])) == (22, 8)


def test_validation_can_be_left_out_and_cannot_take_everything(folder):
    task = make(folder, num_validation_prompts=0)
    assert len(task.prompts("train")) == 30
    with pytest.raises(ValueError, match=r"evaluate.split=validation: task.num_validation_prompts is 0"):
        task.prompts("validation")
    with pytest.raises(ValueError, match=r"task.num_validation_prompts=500 leaves nothing of the 30 train rows"):
        make(folder, num_validation_prompts=500)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "a", "answer"', "train.jsonl line 2 is not valid JSON"),
        ('["a", "#### 1"]', "train.jsonl line 2 is no object with a `question` and an `answer`"),
        ('{"answer": "#### 1"}', "train.jsonl line 2 has no `question` column; it has answer"),
        (
            '{"question": "a", "solution": "#### 1"}',
            "train.jsonl line 2 has no `answer` column; it has question, solution",
        ),
        ('{"question": 3, "answer": "#### 1"}', "train.jsonl line 2: `question` is 3, it must be text"),
        ('{"question": "a", "answer": null}', "train.jsonl line 2: `answer` is None, it must be text"),
        ('{"question": " ", "answer": "#### 1"}', "train.jsonl line 2: `question` is empty"),
        ('{"question": "a", "answer": "it is 72"}', "train.jsonl line 2: `answer` has no number after `####`"),
        ('{"question": "a", "answer": "72 ####"}', "train.jsonl line 2: `answer` has no number after `####`"),
    ],
)
def test_a_broken_row_is_named_by_file_and_line(folder, write, line, message):
    write("train.jsonl", json.dumps(row(1)) + "\n" + line + "\n")
    with pytest.raises(ValueError) as error:
        make(folder)
    assert message in str(error.value)


def test_broken_test_rows_are_found_before_anybody_evaluates(folder, write):
    write("test.jsonl", '\n{"question": "a"}\n')
    with pytest.raises(ValueError, match=r"test.jsonl line 2 has no `answer`"):
        make(folder)


def test_missing_and_unreadable_files_are_named(write, tmp_path):
    with pytest.raises(ValueError, match=r"folder .* has no train.jsonl or train.jsonl.gz"):
        make(REPOSITORY / "tests")
    with pytest.raises(ValueError, match=r"task.data='/nowhere/gsm8k': there is no such file or folder"):
        make("/nowhere/gsm8k")
    with pytest.raises(ValueError, match=r"task.data='data/train.jsonl': there is no such file"):
        make("data/train.jsonl")
    broken = tmp_path / "broken.jsonl.gz"
    broken.write_bytes(b"not compressed")
    with pytest.raises(ValueError, match=r"broken.jsonl.gz cannot be read"):
        make(broken)
    with pytest.raises(ValueError, match=r"has no rows for train"):
        make(write("blank.jsonl", "\n"), num_validation_prompts=0)


def test_hub_data_has_the_same_rows(hub):
    asked = []

    def load_dataset(name, subset, *, split):
        asked.append((name, subset, split))
        return [row(i) for i in (range(1, 31) if split == "train" else range(101, 105))]

    hub(load_dataset)
    task = make("openai/gsm8k")
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    assert [len(task.prompts(split)) for split in ("train", "validation", "held_out")] == [25, 5, 4]
    hub(lambda *names, split: [row(1), {"question": "a"}])
    with pytest.raises(ValueError, match="openai/gsm8k train row 2 has no `answer` column"):
        make("openai/gsm8k")


def test_a_hub_out_of_reach_is_explained(hub, monkeypatch):
    def load_dataset(*names, split):
        raise ConnectionError("no route to host")

    hub(load_dataset)
    with pytest.raises(ValueError, match=r"could not be loaded from the hub \(ConnectionError: no route to host\)"):
        make("openai/gsm8k")
    monkeypatch.setitem(sys.modules, "datasets", None)  # as where it is not installed
    with pytest.raises(
        ValueError, match=r"'openai/gsm8k' is no file or folder here.* `pip install datasets`, or .*folder"
    ):
        make("openai/gsm8k")


def test_without_chat_the_question_goes_into_the_template(folder):
    tokenizer = make_tokenizer()
    prompt = make(folder, tokenizer).prompts("held_out")[0]
    assert prompt.text == "[MATH_TASK] Problem:\nMia has 101 pens.\n\nSolution:"
    assert prompt.token_ids.tolist() == tokenizer(prompt.text)["input_ids"]
    own = make(folder, tokenizer, prompt_template="{question} \\frac{1}{2} ####").prompts("held_out")[0]
    assert own.text == "Mia has 101 pens. \\frac{1}{2} ####"


def test_a_chat_model_is_asked_in_its_template_with_one_bos(folder):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    prompt = make(folder, tokenizer, prompt_template="{question}\n\nHow many pens?").prompts("held_out")[0]
    assert prompt.text == [{"role": "user", "content": "Mia has 101 pens.\n\nHow many pens?"}]
    words = "<bos><user>Mia has 101 pens.\n\nHow many pens?<assistant>"
    assert prompt.token_ids.tolist() == tokenizer(words, add_special_tokens=False)["input_ids"]
    assert prompt.token_ids.tolist().count(tokenizer.bos_token_id) == 1


def test_chat_can_be_forced_either_way(folder):
    plain, chat = make_tokenizer(), make_tokenizer()
    chat.chat_template = TEMPLATE
    assert isinstance(make(folder, chat, chat=False).prompts("held_out")[0].text, str)
    bare = make(folder, chat, chat=True, prompt_template="{question}").prompts("held_out")[0]
    assert bare.text == [{"role": "user", "content": "Mia has 101 pens."}]
    with pytest.raises(ValueError, match=r"task.chat=true, but the tokenizer has no chat template"):
        make(folder, plain, chat=True)


def test_the_default_instruction_shows_an_answer_that_the_grader_reads():
    assert given_answer(GSM8KTask.instruction) == Number(42, is_decimal=False)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task.name=gsm8k"], "task.data is needed for task.name=gsm8k"),
        (
            ["task.name=gsm8k", "task.data=data", "task.prompt_template='Problem: {q}'"],
            "task.prompt_template='Problem: {q}' has no {question}",
        ),
        (["task.prompt_template='Problem: {question}'"], "task.prompt_template is for gsm8k and math"),
        (["model.path=null"], "model.path has no value"),
    ],
)
def test_bad_settings_are_explained(overrides, message):
    with pytest.raises(ConfigError) as error:
        load_config(None, overrides)
    assert message in str(error.value)


def test_the_reward_is_one_for_the_right_number(folder):
    task = make(folder)
    prompt = task.prompts("held_out")[0]
    texts = ["She has **101.00** pens.", "101 pens\n#### 102", "#### 101", "pens"]
    outcomes = task.score(prompt, texts, [completion(finish="stop")] * 4)
    assert outcomes == [{"exact_match": 1.0}, {"exact_match": 0.0}, {"exact_match": 1.0}, {"exact_match": 0.0}]
    assert [task.solved(outcome) for outcome in outcomes] == [True, False, True, False]


def test_a_cut_off_response_is_wrong_unless_asked_otherwise(folder):
    for settings, reward in (({}, 0.0), ({"cut_off_is_wrong": False}, 1.0)):
        task = make(folder, **settings)
        scored = task.score(task.prompts("held_out")[0], ["#### 101"], [completion(finish="length")])
        assert scored == [{"exact_match": reward}]


def test_a_question_beyond_the_context_is_refused_by_its_line(folder):
    with pytest.raises(ValueError, match=r"prompt 'held_out-1' has \d+ tokens, beyond the 10 "):
        make(folder, max_prompt_tokens=10).prompts("held_out")


def test_the_paper_config_has_the_paper_settings():
    config = load_config(REPOSITORY / "configs" / "gsm8k.yaml")
    assert (config.train.prompts_per_step, config.train.samples_per_prompt) == (7, 20)
    assert config.samples_generated_per_prompt == 24
    assert [config.beta_at(step, config.progress_at(step)) for step in (0, 250, 500, 699)] == pytest.approx(
        [0.014, 0.009, 0.004, 0.004]
    )
    assert [config.learning_rate_at(step, config.progress_at(step)) for step in (0, 49, 400, 600)] == pytest.approx(
        [4e-8, 2e-6, 2e-6, 1.5e-6]
    )


def test_the_one_gpu_config_asks_for_a_model():
    path = REPOSITORY / "configs" / "gsm8k_one_gpu.yaml"
    with pytest.raises(ConfigError, match=r"model.path has no value"):
        load_config(path)
    config = load_config(path, ["model.path=some/model"])
    assert (config.train.prompts_per_step, config.evaluate.split, config.evaluate.num_prompts) == (
        16,
        "validation",
        500,
    )


def test_a_run_trains_and_evaluates_on_rows_of_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tba.observe.recorder.SAMPLES_EVERY", 1)
    for part in (tiny_llama(), tiny_tokenizer()):
        part.save_pretrained(tmp_path / "model")
    rows = [{"question": f"w{3 + i % 37} w{3 + i // 37}", "answer": "w5 + w2\n#### 7"} for i in range(60)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows[:50]))
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows[50:]))
    task = {"name": "gsm8k", "data": str(tmp_path), "num_validation_prompts": 10, "cut_off_is_wrong": False}
    settings = ["mode=sync", "train.max_steps=12", "train.responses_per_step=64", "train.learning_rate=3e-3"]
    settings += [
        "generate.max_new_tokens=3",
        "objective.beta=0.05",
        "observe.progress=false",
    ]
    values = {"model": {"path": str(tmp_path / "model")}, "output": str(tmp_path / "runs"), "task": task}
    config = load_config(None, settings, **values)
    summary = train(config)
    assert (summary["task"], summary["steps"], summary["responses_trained"]) == ("gsm8k", 12, 768)
    metrics = [json.loads(line) for line in (config.run_folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [record["reward"] for record in metrics if "loss" in record]
    assert sum(rewards[-3:]) > sum(rewards[:3])
    samples = [json.loads(line) for line in (config.run_folder / "samples.jsonl").read_text().splitlines()]
    for response in (response for sample in samples for response in sample["responses"]):
        words = [word for word in response["text"].split() if word.startswith("w")]
        assert response["rewards"] == {"exact_match": float(words[-1:] == ["w7"])}


needs_real_data = pytest.mark.skipif(
    not REAL_DATA.is_dir(), reason=f"the real GSM8K is not at {REAL_DATA}; TBA_DATA names the folder above gsm8k"
)


@needs_real_data
@pytest.mark.parametrize(("split", "num_rows"), [("train", 7473), ("test", 1319)])
def test_every_gold_solution_gets_full_marks(split, num_rows):
    problems = read_problems(TaskConfig(), str(REAL_DATA), (split,), GSM8KTask.source)
    assert len(problems) == num_rows
    failures = []
    for problem in problems:
        body, _, tail = problem.answer.rpartition("####")
        wanted = marked_answer(problem.answer)
        number = tail.strip()
        said = [problem.answer, f"{body}So the answer is ${number}.", f"{body}\\boxed{{{number}}} in 7 days"]
        right = [equal_answers(given_answer(text), wanted) for text in said]
        wrong = equal_answers(given_answer(f"{problem.answer}1"), wanted)  # a digit too many
        if not all(right) or wrong or wanted.value != int(number.replace(",", "")):
            failures.append((problem.line, number, right, wrong))
    assert not failures, failures


@needs_real_data
def test_the_real_splits_are_fixed_and_do_not_overlap():
    splits = read_splits(TaskConfig(name="gsm8k", data=str(REAL_DATA)), GSM8KTask.source)
    questions = {split: {problem.question for problem in problems} for split, problems in splits.items()}
    assert {split: len(own) for split, own in questions.items()} == {"train": 6973, "validation": 500, "held_out": 1319}
    assert not questions["train"] & questions["validation"]
    assert not (questions["train"] | questions["validation"]) & questions["held_out"]
    assert [problem.line for problem in splits["validation"][:5]] == [3, 6, 10, 19, 36]
