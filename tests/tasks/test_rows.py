"""Bad rows: counted with their line numbers and told, then fatal or left out, whatever is wrong with them."""

import gzip
import json
import logging
import tracemalloc

import pytest

from recipes.arithmetic import make_tokenizer
from tba.config import RewardConfig, TaskConfig
from tba.tasks.data.rows import BadRows, jsonl_rows
from tba.tasks.registry import make_task

REWARD = "def score(completions):\n    return [0.0 for _ in completions]\n"
LONG = "Mia has 3 pens. " * 30


def encoded(value):
    return value if isinstance(value, bytes) else json.dumps(value).encode()


# A good row, and bad rows by the reason that they are counted under, as each task wants them.
CUSTOM = (
    {"prompt": "Mia has 3 pens.", "id": "a"},
    {
        "broken UTF-8": b'{"prompt": "Mia \xff has"}',
        "not JSON": b'{"prompt": "Mia',
        "no object": ["Mia"],
        "missing column": {"question": "Mia"},
        "wrong type": {"prompt": 3},
        "empty prompt": {"prompt": " \n"},
        "duplicate id": {"prompt": "Mia has 4 pens.", "id": "a"},
        "over-long prompt": {"prompt": LONG},
    },
)
GSM8K = (
    {"question": "Mia has 3 pens.", "answer": "#### 3", "id": 1},
    {
        "broken UTF-8": b'{"question": "Mia \xc3\x28", "answer": "#### 3"}',
        "not JSON": b"question,answer",
        "no object": 17,
        "missing column": {"question": "Mia has 3 pens."},
        "wrong type": {"question": "Mia has 3 pens.", "answer": 3},
        "empty prompt": {"question": "", "answer": "#### 3"},
        "duplicate id": {"question": "Mia has 4 pens.", "answer": "#### 4", "id": 1},
        "no answer": {"question": "Mia has 3 pens.", "answer": "three"},
        "over-long prompt": {"question": LONG, "answer": "#### 3"},
    },
)
MATH = (
    {"problem": "Mia has 3 pens.", "solution": "\\boxed{3}", "unique_id": "a"},
    {
        "broken UTF-8": b'{"problem": "\\ud83d", "solution": "\\\\boxed{3}"}',  # half of a character
        "not JSON": b"[" * 100_000,
        "no object": None,
        "missing column": {"problem": "Mia has 3 pens."},
        "wrong type": {"problem": {"text": "Mia has 3 pens."}, "answer": "3"},
        "empty prompt": {"problem": "", "answer": "3"},
        "duplicate id": {"problem": "Mia has 4 pens.", "answer": "4", "unique_id": "a"},
        "no answer": {"problem": "Mia has 3 pens.", "solution": "3"},
        "over-long prompt": {"problem": LONG, "answer": "3"},
    },
)
TASKS = {"custom": CUSTOM, "gsm8k": GSM8K, "math": MATH}
EVERY_FAULT = [(name, reason) for name, (_, faults) in TASKS.items() for reason in faults]


@pytest.fixture
def write(tmp_path):
    def write_file(*rows, name="rows.jsonl"):
        content = b"".join(encoded(row) + b"\n" for row in rows)
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        (tmp_path / "rewards.py").write_text(REWARD)
        return tmp_path / name

    return write_file


def prompts(name, path, on_bad_row):
    if name == "math":
        pytest.importorskip("math_verify")
    rewards = (RewardConfig(function=f"{path.parent}/rewards.py:score"),) if name == "custom" else ()
    config = TaskConfig(
        name=name, data=str(path), rewards=rewards, eval_fraction=0.0, num_validation_prompts=0, on_bad_row=on_bad_row
    )
    return make_task(config, make_tokenizer(), max_prompt_tokens=100).prompts("train")


@pytest.mark.parametrize(("name", "reason"), EVERY_FAULT)
def test_every_fault_stops_with_file_line_and_number(write, name, reason):
    good, faults = TASKS[name]
    path = write(good, faults[reason], b"", faults[reason])  # the blank line counts as a line
    with pytest.raises(ValueError) as error:
        prompts(name, path, "stop")
    words = str(error.value)
    assert words.startswith(f"{path} line 2")
    assert f"And 1 more: in all 2 bad rows: 2 x {reason} (lines 2, 4)." in words
    assert "task.on_bad_row=skip" in words


@pytest.mark.parametrize(("name", "reason"), EVERY_FAULT)
def test_every_fault_can_be_left_out_with_a_warning(write, caplog, name, reason):
    good, faults = TASKS[name]
    path = write(good, faults[reason])
    with caplog.at_level(logging.WARNING, logger="tba.tasks"):
        kept = prompts(name, path, "skip")
    assert [prompt.id for prompt in kept] == ["a" if name == "custom" else "train-1"]
    (record, *more) = caplog.records
    assert len(more) == (name == "custom"), "a single prompt is left of its file, which is said too"
    assert f"1 bad row: 1 x {reason} (line 2). The first: {path} line 2" in record.getMessage()


@pytest.mark.parametrize("name", TASKS)
def test_one_warning_counts_every_reason(write, caplog, name):
    good, faults = TASKS[name]
    path = write(good, *faults.values(), *faults.values(), name="rows.jsonl.gz")
    with caplog.at_level(logging.WARNING, logger="tba.tasks"):
        assert len(prompts(name, path, "skip")) == 1
    words = " ".join(record.getMessage() for record in caplog.records)
    for line, reason in enumerate(faults, start=2):
        assert f"2 x {reason} (lines {line}, {line + len(faults)})" in words
    # The tokens of a question are counted when its split is asked for, later than the rest; of custom one prompt is left.
    assert len(caplog.records) == 2


def test_a_clean_file_says_nothing(write, caplog):
    assert len(prompts("custom", write(CUSTOM[0], {"prompt": "Mia has 4 pens.", "id": None}), "stop")) == 2
    assert not caplog.records


def test_only_the_first_lines_of_a_reason_are_named(write):
    bad = BadRows("stop")
    assert [row.line for row in jsonl_rows(write(*[b"{"] * 9, {}), bad)] == [10]
    with pytest.raises(ValueError, match=r"9 x not JSON \(lines 1, 2, 3, 4, 5, \.\.\.\)"):
        bad.report()


def test_a_file_with_bad_rows_only_is_refused_also_when_they_are_left_out(write):
    with pytest.raises(ValueError, match=r"rows.jsonl is empty but for 2 bad rows"):
        prompts("custom", write(b"{", b"{"), "skip")
    with pytest.raises(ValueError, match=r"has no rows for train"):
        prompts("gsm8k", write(b"{"), "skip")
    with pytest.raises(ValueError, match=r"no train row is left, all 1 are bad"):
        prompts("gsm8k", write(GSM8K[1]["over-long prompt"]), "skip")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [{"role": "user", "content": None}]},
        {"prompt": [{"role": "user", "content": ["Mia"]}]},
        {"prompt": "Mia has 3 pens.", "id": [1]},
    ],
)
def test_messages_and_ids_of_a_wrong_type_are_bad(write, row):
    with pytest.raises(ValueError, match=r"2 x wrong type \(lines 2, 3\)"):
        prompts("custom", write(CUSTOM[0], row, row), "stop")


def test_a_byte_order_mark_is_no_fault(write):
    assert len(prompts("custom", write(b"\xef\xbb\xbf" + encoded(CUSTOM[0])), "stop")) == 1


def test_a_line_beyond_the_limit_costs_itself_and_is_not_read_into_memory(write, monkeypatch):
    monkeypatch.setattr("tba.tasks.data.rows.LONGEST_LINE", 1000)
    path = write({"a": 1}, {"a": "x" * 100_000}, {"a": 2}, {"a": "x" * 1500})
    bad = BadRows("stop")
    assert [row.value["a"] for row in jsonl_rows(path, bad)] == [1, 2]
    with pytest.raises(ValueError, match=r"2 x line too long \(lines 2, 4\)"):
        bad.report()


@pytest.mark.parametrize("name", ["large.jsonl", "large.jsonl.gz"])
def test_reading_holds_one_line_and_not_the_file(write, name):
    row = encoded({"prompt": "Mia has 3 pens. " * 50})
    num_rows = 20_000
    path = write(b"\n".join([row] * (num_rows - 1)), b'{"prompt": "broken \xff', name=name)
    size = (len(row) + 1) * num_rows
    bad = BadRows("skip")
    tracemalloc.start()
    try:
        count = sum(1 for _ in jsonl_rows(path, bad))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (count, bad.total) == (num_rows - 1, 1)
    assert peak < 0.1 * size, f"{peak:,} bytes for a file of {size:,}"
