"""What a script gives becomes files, and files of earlier runs are left alone."""

import gzip
import json
from functools import partial
from pathlib import Path

import pytest
from script_rewards import flat, sevens

from tba import TBAConfig, TBATrainer
from tba.api.inputs import dataset_file, num_rows, reward_configs
from tba.config import ConfigError


def test_the_rows_of_an_earlier_trainer_are_not_replaced(tmp_path):
    """The run of an earlier one may still go on with them, or is evaluated later."""
    path = tmp_path / "inputs" / "train.jsonl"
    first = dataset_file([{"prompt": "a"}], path, what="train_dataset")
    before = path.stat()
    assert dataset_file([{"prompt": "a"}], path, what="train_dataset") == first == str(path)
    other = dataset_file([{"prompt": "b"}], path, what="train_dataset")
    assert dataset_file([{"prompt": "b"}], path, what="train_dataset") == other
    assert json.loads(Path(other).read_text()) == {"prompt": "b"}
    assert Path(other).name == "train.jsonl"  # the ids of prompts begin with it
    assert (json.loads(path.read_text()), path.stat().st_mtime_ns) == ({"prompt": "a"}, before.st_mtime_ns)
    assert sorted(entry.name for entry in path.parent.iterdir()) == sorted([Path(other).parent.name, "train.jsonl"])
    with pytest.raises(ConfigError, match="row 1 of train_dataset cannot be written as JSON"):
        dataset_file([{"prompt": "a"}, {"prompt": object()}], path, what="train_dataset")
    assert json.loads(path.read_text()) == {"prompt": "a"}


def test_rows_of_a_compressed_file_are_counted(tmp_path):
    path = tmp_path / "data.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    assert num_rows(str(path)) == 2
    path.write_bytes(path.read_bytes()[:-12])
    assert num_rows(str(path)) == 0


def test_a_script_without_an_output_dir_has_one_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = TBATrainer("x", flat, TBAConfig(max_steps=1), [{"prompt": "a"}])
    assert trainer.args.output_dir == str(trainer.run_folder) == "runs/custom-tb-seed0"
    assert Path(trainer.config.task.data) == tmp_path / "runs" / "custom-tb-seed0.inputs" / "train.jsonl"


def test_rewards_of_one_name_are_told_apart(tmp_path):
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("def score(completions, **columns): ...")
    given = [partial(sevens), partial(sevens), f"{tmp_path}/a.py:score", f"{tmp_path}/b.py:score", flat]
    found = reward_configs(given, None, None, tmp_path)
    assert [config.get("name") for config in found] == ["partial-0", "partial-1", "score-2", "score-3", None]


def test_arguments_of_another_library_are_refused_by_name():
    with pytest.raises(ConfigError, match="args is a SomeArguments: give a TBAConfig"):
        TBATrainer("x", flat, type("SomeArguments", (), {})(), [{"prompt": "a"}])
