"""The command line: what it prints, how it exits, what its errors say."""

import json
import os
import subprocess
import sys

import pytest
import yaml
from problem import SETTINGS
from typer.testing import CliRunner

from tba.cli import app, main, resolve
from tba.config import ConfigError
from tba.tasks.tldr.task import start_model_path

RUNNER = CliRunner()


def tba(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tba", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


def test_dry_run_prints_the_resolved_config(folder):
    options = ["--model", "some/model", "--data", "d.jsonl", "--reward", "r.py:f", "--max-steps", "7"]
    result = RUNNER.invoke(app, ["train", *options, "seed=5", "--dry-run"])
    config = yaml.safe_load(result.stdout)
    assert (config["train"]["max_steps"], config["seed"], config["model"]["path"]) == (7, 5, "some/model")
    assert config["task"]["name"] == "custom"
    assert config["task"]["rewards"][0]["function"] == "r.py:f"


def test_two_config_files_are_refused():
    with pytest.raises(ConfigError, match="one config file at a time"):
        resolve(["a.yaml", "b.yaml"], model=None, data=None, reward=[], max_steps=None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "train.max_step=1"], "did you mean train.max_steps?"),
        (["train", "nowhere.yaml"], "config file nowhere.yaml does not exist"),
    ],
)
def test_errors_are_words_without_a_traceback_and_exit_status_2(arguments, message):
    done = tba(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "model.path=./nowhere"], "there is no such folder"),
        (["train", "model.path=tba:nothing"], "is not shipped with the package"),
        (["prepare", "nothing"], "task 'nothing' has nothing to prepare"),
    ],
)
def test_so_are_those_that_come_later(arguments, message, monkeypatch, capsys, tmp_path):
    """In this process: by then torch is loaded, which takes seconds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tba", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_train_and_evaluate_from_the_command_line(folder):
    options = [
        "--model",
        f"{folder}/model",
        "--data",
        f"{folder}/data.jsonl",
        "--reward",
        f"{folder}/rewards.py:sevens",
    ]
    settings = [*SETTINGS, "mode=sync", f"output={folder}/runs", "name=cli", "train.max_steps=2"]
    done = tba("train", *options, *settings)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 2
    done = tba("evaluate", f"{folder}/runs/cli", "--samples", "2", "--num-prompts", "3")
    names = ["accuracy", "reward", "pass@2", "avg@2", "reward@2"]
    errors = {f"{name}_standard_error" for name in names}
    assert set(json.loads(done.stdout)) == {*names, "num_prompts"} | errors
    assert json.loads(done.stdout)["num_prompts"] == 2  # of 3 that were asked for: the file holds out no more


def test_doctor_names_what_the_machine_has():
    result = RUNNER.invoke(app, ["doctor"])
    assert result.exit_code == 0
    for word in ("python", "torch", "transformers", "cores", "memory", "disk", "gpu", "wandb"):
        assert word in result.stdout


def test_a_reward_model_is_trained_on_pairs(tmp_path):
    pairs = [
        {"prompt": f"so place harbour {i} TL;DR:", "chosen": "place harbour", "rejected": "so so"} for i in range(40)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    options = ["--pairs", str(tmp_path / "pairs.jsonl"), "--output", str(tmp_path / "rm"), "--learning-rate", "1e-3"]
    result = RUNNER.invoke(
        app, ["prepare", "reward_model", "--model", str(start_model_path()), *options, "--epochs", "3"]
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["accuracy"] > 0.9
    assert (tmp_path / "rm" / "reward.json").is_file()


def test_preparing_without_what_it_needs_is_refused():
    with pytest.raises(ConfigError, match="needs --model"):
        RUNNER.invoke(app, ["prepare", "reward_model"], catch_exceptions=False)
    with pytest.raises(ConfigError, match=r"are for `tba prepare reward_model`, not for tldr"):
        RUNNER.invoke(app, ["prepare", "tldr", "--model", "x"], catch_exceptions=False)
