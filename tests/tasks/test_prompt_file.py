"""Prompts that stay in their file."""

import gc
import gzip
import json
import tracemalloc
import warnings

import numpy as np
import pytest
from builders import tiny_tokenizer

from tba.config import TaskConfig
from tba.tasks.custom import CustomTask
from tba.tasks.task import TaskInputs

REWARD = {"function": lambda completions, **_: [0.0]}


def task(path, **settings) -> CustomTask:
    config = TaskConfig(name="custom", data=str(path), rewards=(REWARD,), **settings)
    return CustomTask(TaskInputs(config=config, tokenizer=tiny_tokenizer(), max_prompt_tokens=10))


def write(path, rows) -> None:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    data = b"\n".join(lines) + b"\n"
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


ROWS = [{"prompt": f"w{i} w{i + 1}", "answer": i, "id": f"row-{i}"} for i in range(3, 30)]


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.jsonl.gz"])
def test_what_is_read_for_a_prompt_is_what_the_file_holds(tmp_path, name):
    path = tmp_path / name
    write(path, [b"", *ROWS[:10], b"not json", *ROWS[10:]])
    prompts = task(path, eval_fraction=0.0, on_bad_row="skip").prompts("train")
    assert len(prompts) == len(ROWS)
    for index in (0, 26, 11, 10, 0, -1):  # in any order, again and again
        assert prompts[index].id == ROWS[index]["id"]
        assert prompts[index].columns["answer"] == ROWS[index]["answer"]
    np.testing.assert_array_equal(prompts[3].token_ids, [6, 7])
    assert [prompt.id for prompt in prompts[5:8]] == ["row-8", "row-9", "row-10"]


def test_held_out_prompts_are_the_same_whether_the_file_is_compressed_or_not(tmp_path):
    sides = []
    for name in ("prompts.jsonl", "prompts.jsonl.gz"):
        write(tmp_path / name, ROWS)
        own = task(tmp_path / name, eval_fraction=0.3)
        sides.append([[prompt.id for prompt in own.prompts(split)] for split in ("train", "held_out")])
    assert sides[0] == sides[1]
    assert sorted(sides[0][0] + sides[0][1]) == sorted(row["id"] for row in ROWS)
    assert sides[0][1]


def test_prompts_are_not_kept_in_memory(tmp_path):
    write(tmp_path / "prompts.jsonl", [{"prompt": "w5", "blob": "x" * 50_000, "id": i} for i in range(200)])  # 10 MB
    tracemalloc.start()
    own = task(tmp_path / "prompts.jsonl", eval_fraction=0.0)
    prompts = own.prompts("train")
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1_000_000
    assert prompts[199].columns["blob"] == "x" * 50_000


def test_a_file_that_changes_is_noticed(tmp_path):
    path = tmp_path / "prompts.jsonl"
    write(path, ROWS)
    prompts = task(path, eval_fraction=0.0).prompts("train")
    with path.open("ab") as file:
        file.write(b"{}")
    with pytest.raises(RuntimeError, match="has changed since the run began"):
        prompts[0]


def test_the_file_is_closed_with_its_prompts(tmp_path):
    write(tmp_path / "prompts.jsonl", ROWS)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", ResourceWarning)
        task(tmp_path / "prompts.jsonl", eval_fraction=0.3)
        gc.collect()
    assert not [warning.message for warning in found if "prompts.jsonl" in str(warning.message)]


def test_ids_must_be_unique_all_the_same(tmp_path):
    write(tmp_path / "prompts.jsonl", [ROWS[0], ROWS[1], ROWS[0]])
    with pytest.raises(ValueError, match="line 3: id 'row-3' occurs twice"):
        task(tmp_path / "prompts.jsonl")
