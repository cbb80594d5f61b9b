"""Held-out questions that occur in train as well: noticed, counted, never trained on."""

import gzip
import json
import logging
import os
from pathlib import Path

import pytest

from recipes.arithmetic import make_tokenizer
from tba.config import TaskConfig
from tba.tasks.data.make_prompt import question_key, read_splits
from tba.tasks.gsm8k import GSM8KTask
from tba.tasks.registry import TASKS, make_task

DATA = Path(os.environ.get("TBA_DATA", Path(__file__).parents[3] / "shared" / "data"))


@pytest.fixture
def write(tmp_path):
    def write_file(name, rows):
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
        return str(tmp_path / name)

    return write_file


def row(question, answer=1):
    return {"question": question, "answer": f"#### {answer}"}


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_white_space_and_capital_letters_do_not_make_another_question():
    assert question_key(" Two\n  TWOS ") == question_key("two twos")
    assert question_key("two twos") != question_key("twotwos")
    chat = [{"role": "user", "content": "Two  twos"}]
    assert question_key(chat) == question_key([{"role": "user", "content": "two twos"}])
    assert question_key(chat) != question_key([{"role": "system", "content": "two twos"}])


def test_train_rows_with_a_held_out_question_are_counted_and_left_out(write, caplog):
    data = write("train.jsonl", [*(row(f"What is {i} + 1?") for i in range(20)), row("what is  3 + 1?")])
    held_out = write("test.jsonl", [row("What is 3 + 1?"), row("WHAT IS 7 + 1?"), row("What is 99 + 1?")])
    config = TaskConfig(name="gsm8k", data=data, eval_data=held_out, num_validation_prompts=5)
    splits = read_splits(config, GSM8KTask.source)
    # 21 rows less lines 4, 8 and 21; the held-out rows stay.
    assert {split: len(problems) for split, problems in splits.items()} == {"train": 13, "validation": 5, "held_out": 3}
    assert not {p.line for split in ("train", "validation") for p in splits[split]} & {4, 8, 21}
    (warning,) = warnings(caplog)
    assert "3 of 21 rows to train on have a question that is held out too" in warning
    assert data in warning
    assert held_out in warning


@pytest.mark.parametrize("name", ["gsm8k", "custom"])
def test_an_evaluation_alone_does_not_warn_of_what_is_left_out_of_training(write, tmp_path, caplog, name):
    (tmp_path / "rewards.py").write_text("def score(completions, **kwargs):\n    return [0.0 for _ in completions]\n")
    own = {"rewards": [{"function": f"{tmp_path}/rewards.py:score"}]} if name == "custom" else {}
    rows = [{**row(text), "prompt": text} for text in ("one", "two")]
    config = TaskConfig(
        name=name, data=write("a.jsonl", rows), eval_data=write("b.jsonl", rows[:1]), **own, num_validation_prompts=0
    )
    for trains in (False, True):
        assert not warnings(caplog)
        task = make_task(config, make_tokenizer(), max_prompt_tokens=200, trains=trains)
        assert len(task.prompts("held_out")) == 1
    assert "1 of 2 rows" in warnings(caplog)[0]


def test_without_a_common_question_there_is_no_warning(write, caplog):
    data, held_out = write("train.jsonl", [row("one"), row("two")]), write("test.jsonl", [row("three")])
    splits = read_splits(
        TaskConfig(name="gsm8k", data=data, eval_data=held_out, num_validation_prompts=0), GSM8KTask.source
    )
    assert len(splits["train"]) == 2
    assert not warnings(caplog)


def test_trained_questions_may_be_evaluated_but_leave_nothing_to_train_on(write):
    data = write("train.jsonl", [row("one"), row("two")])
    config = TaskConfig(name="gsm8k", data=data, eval_data=data, num_validation_prompts=1)
    task = make_task(config, make_tokenizer(), max_prompt_tokens=200)
    assert len(task.prompts("held_out")) == 2
    with pytest.raises(ValueError, match=r"nothing is left to train on\. Give other train rows as task\.data"):
        task.prompts("train")


def test_posts_to_summarise_are_compared_too(write, caplog):
    rows = [{"query": f"post {i}", "reference_response": " short"} for i in range(6)]
    data, held_out = write("train.jsonl", rows), write("held.jsonl", [{**rows[2], "query": "POST 2"}])
    models = {"reward_model": "org/reward", "gold_model": "org/gold"}
    config = TaskConfig(name="tldr", data=data, eval_data=held_out, num_validation_prompts=1, tldr=models)
    task = make_task(config, make_tokenizer(), max_prompt_tokens=200)
    assert [len(task.prompts(split)) for split in ("train", "validation", "held_out")] == [4, 1, 1]
    assert "1 of 6 rows" in warnings(caplog)[0]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_prompts_of_own_data_are_compared_too(write, tmp_path, caplog, suffix):
    """In a plain file they stay where they are, compressed ones are in memory."""
    (tmp_path / "rewards.py").write_text("def score(completions, **kwargs):\n    return [0.0 for _ in completions]\n")
    settings = {"name": "custom", "rewards": [{"function": f"{tmp_path}/rewards.py:score"}]}
    rows = [{"prompt": f"Mia has {i} pens."} for i in range(5)]
    data, held_out = write(f"train{suffix}", rows), write("held.jsonl", [{"prompt": "mia  has 2 pens."}])
    config = TaskConfig(**settings, data=data, eval_data=held_out)
    task = make_task(config, make_tokenizer(), max_prompt_tokens=200)
    assert [prompt.text for prompt in task.prompts("train")] == [f"Mia has {i} pens." for i in (0, 1, 3, 4)]
    assert [prompt.id for prompt in task.prompts("held_out")] == ["held-1"]
    assert "1 of 5 rows" in warnings(caplog)[0]

    same = make_task(config.model_copy(update={"eval_data": data}), make_tokenizer(), max_prompt_tokens=200)
    with pytest.raises(ValueError, match="nothing is left to train on"):
        same.prompts("train")


def test_a_task_of_one_prompt_is_evaluated_on_it(write, tmp_path, caplog):
    (tmp_path / "rewards.py").write_text("def score(completions, **kwargs):\n    return [0.0 for _ in completions]\n")
    data = write("one.jsonl", [{"prompt": "Make 24."}])
    settings = {"name": "custom", "rewards": [{"function": f"{tmp_path}/rewards.py:score"}]}
    task = make_task(TaskConfig(**settings, data=data, eval_data=data), make_tokenizer(), max_prompt_tokens=200)
    assert len(task.prompts("train")) == len(task.prompts("held_out")) == 1
    (warning,) = warnings(caplog)
    assert warning.endswith(
        "in 1 rows: all that is learned is how to answer this one, and that is what evaluations ask too."
    )


def test_a_file_of_one_prompt_is_not_split_however_often_it_stands_there(write, tmp_path, caplog):
    (tmp_path / "rewards.py").write_text("def score(completions, **kwargs):\n    return [0.0 for _ in completions]\n")
    data = write("one.jsonl", [{"prompt": "Make 24."}] * 40)
    config = TaskConfig(name="custom", rewards=[{"function": f"{tmp_path}/rewards.py:score"}], data=data)
    task = make_task(config, make_tokenizer(), max_prompt_tokens=200)
    assert len(task.prompts("train")) == len(task.prompts("held_out")) == 40
    assert (
        "trains and is evaluated on the same 40 prompts: fewer than 20 different ones are not split"
        in task.split_message
    )
    (warning,) = warnings(caplog)
    assert "has one prompt, in 40 rows" in warning


def test_own_data_split_by_a_share_has_no_question_on_both_sides(write, tmp_path):
    (tmp_path / "rewards.py").write_text("def score(completions, **kwargs):\n    return [0.0 for _ in completions]\n")
    rows = [{"prompt": text} for i in range(40) for text in (f"Mia has {i} pens.", f"mia has {i}  pens.")]
    settings = {"data": write("data.jsonl", rows), "eval_fraction": 0.5}
    config = TaskConfig(name="custom", rewards=[{"function": f"{tmp_path}/rewards.py:score"}], **settings)
    task = make_task(config, make_tokenizer(), max_prompt_tokens=200)
    train, held_out = ({question_key(p.text) for p in task.prompts(split)} for split in ("train", "held_out"))
    assert train
    assert not train & held_out


@pytest.mark.skipif(
    not DATA.is_dir(), reason="no GSM8K and MATH data: TBA_DATA names the folder above gsm8k/ and math/"
)
@pytest.mark.parametrize(("name", "num_train"), [("gsm8k", 7473), ("math", 7497)])
def test_one_train_row_of_math_is_held_out_too_and_none_of_gsm8k(name, num_train):
    """Of 7,473 and, without two that have no answer, 7,498 train rows."""
    config = TaskConfig(name=name, data=str(DATA / name), num_validation_prompts=0, on_bad_row="skip")
    assert len(read_splits(config, TASKS[name].source)["train"]) == num_train
