"""Run folders that another user may have written: commands read them, and run no code that they name (SECURITY.md)."""

import json
import os
import subprocess
import sys
import time

import pytest
import yaml
from problem import make_config
from typer.testing import CliRunner

from tba.cli import app
from tba.cli.training import run_arguments
from tba.config import ConfigError
from tba.observe.run_folder import RunFolder
from tba.replay.database import open_database
from tba.run import evaluate_model, train
from tba.run.status import start_of, stop_run

RUNNER = CliRunner()
EVIL = """
import pathlib
pathlib.Path({marker!r}).touch()
from transformers import PreTrainedTokenizer

class T(PreTrainedTokenizer):
    vocab_size = 1
    def get_vocab(self): return {{}}
    def _tokenize(self, text): return []
"""


def test_an_export_runs_the_code_of_a_tokenizer_only_when_the_reader_asks_for_it(tmp_path, monkeypatch):
    """The run's own config.yaml asks for it, and counts for nothing."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    run, marker = tmp_path / "run", tmp_path / "ran"
    checkpoint = run / "checkpoints" / "step-10"
    checkpoint.mkdir(parents=True)
    open_database(run / "replay.sqlite", "process").close()
    (run / "config.yaml").write_text("model: {path: tba:arithmetic, trust_remote_code: true}\n")
    (checkpoint / "manifest.json").write_text(json.dumps({"format": 1, "files": {}}))
    tokenizer = {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["evil.T", None]}}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (checkpoint / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (checkpoint / "evil.py").write_text(EVIL.format(marker=str(marker)))
    options = ["replay", str(run), "--export", str(tmp_path / "x.jsonl")]
    done = RUNNER.invoke(app, options)
    assert done.exit_code == 0
    assert "--trust-remote-code for tba replay, runs it" in done.output
    assert not marker.exists()
    assert RUNNER.invoke(app, [*options, "--trust-remote-code"]).exit_code == 0
    assert marker.exists()


@pytest.fixture(scope="module")
def strangers(folder):
    """A run whose folder every user may write, with a reward file that is gone but for its copy in the folder."""
    reward = folder / "theirs.py"
    reward.write_text("def f(completions, **columns):\n    return [0.25] * len(completions)\n")
    (folder / "mine.py").write_text(reward.read_text().replace("0.25", "0.5"))
    config = make_config(folder, "name=theirs", "mode=sync", "train.max_steps=1")
    rewards = (config.task.rewards[0].model_copy(update={"function": f"{reward}:f", "weight": 2.0}),)
    config = config.model_copy(update={"task": config.task.model_copy(update={"rewards": rewards})})
    train(config)
    reward.unlink()
    config.run_folder.chmod(0o757)
    return RunFolder(config.run_folder)


def test_the_reward_of_a_strangers_run_is_called_only_when_the_command_names_it(strangers, folder):
    run, copy = str(strangers.path), f"{strangers.sources.absolute()}/0/theirs.py:f"
    with pytest.raises(ConfigError, match=r"can be written by other users.*names code to run here") as refused:
        evaluate_model(run, [])
    named = f'task.rewards=[{{"function": "{copy}", "weight": 2.0}}]'
    assert named in str(refused.value)
    assert evaluate_model(run, [named])["reward"] == 0.5
    assert evaluate_model(run, [f"task.rewards=[{{function: {folder}/mine.py:f}}]"])["reward"] == 0.5
    with pytest.raises(ConfigError, match="names code"):
        evaluate_model(str(strangers.newest_checkpoint()), ["evaluate.num_prompts=1"])
    # A name of the user's own that leads nowhere must not lead into the folder.
    with pytest.raises(ValueError, match=r"file .*/theirs.py does not exist"):
        evaluate_model(run, [f"task.rewards=[{{function: {folder}/theirs.py:f}}]"])


def test_the_code_of_a_strangers_model_and_task_counts_too(strangers):
    before = strangers.config.read_text()
    stored = yaml.safe_load(before)
    stored["model"]["trust_remote_code"] = True
    stored["task"].update(name="/their/task.py:Task", rewards=[])
    strangers.config.write_text(yaml.safe_dump(stored))
    try:
        with pytest.raises(ConfigError, match=r"model.trust_remote_code=true task.name=/their/task.py:Task"):
            evaluate_model(str(strangers.path), [])
        with pytest.raises(ConfigError, match=r"\.\.\. task.name=/their/task.py:Task$"):
            evaluate_model(str(strangers.path), ["model.trust_remote_code=false"])
    finally:
        strangers.config.write_text(before)


def test_a_strangers_run_is_resumed_only_by_its_config(strangers):
    path = strangers.path
    for arguments in ([str(path)], [str(strangers.newest_checkpoint())], [f"output={path.parent}", "name=theirs"]):
        with pytest.raises(ConfigError, match=f"name it yourself: tba train {path}/config.yaml --resume"):
            run_arguments(arguments)
    named = [str(strangers.config), f"output={path.parent}", "name=theirs"]
    assert run_arguments(named) == named


def test_a_folder_of_this_user_is_resumed_by_its_name(folder):
    config = make_config(folder, "name=own", "mode=sync", "train.max_steps=1")
    train(config)
    assert run_arguments([str(config.run_folder)])[0] == str(config.run_folder / "config.yaml")
    assert evaluate_model(str(config.run_folder), [])["num_prompts"] > 0
    if os.geteuid() == 0:  # only root can give a folder to another user
        os.chown(config.run_folder / "config.yaml", 12345, 12345)
        with pytest.raises(ConfigError, match=r"config.yaml belongs to user 12345"):
            evaluate_model(str(config.run_folder), [])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_strangers_status_stops_no_process_of_this_user(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = start_of(process.pid)
        status = {"step": 3, "time": time.time(), "host": os.uname().nodename, "pid": process.pid}
        (tmp_path / "status.json").write_text(json.dumps({**status, "pid_started": started, "roles": []}))
        os.chown(tmp_path / "status.json", 12345, 12345)
        with pytest.raises(ValueError, match=f"belongs to user 12345 and names process {process.pid} of user 0"):
            stop_run(tmp_path)
        assert process.poll() is None
        process.communicate(b"\n")
    assert process.returncode == 0
