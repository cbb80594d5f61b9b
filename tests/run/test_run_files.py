"""What a run leaves in its folder is safe: only what a run wrote is replaced, and a run can be evaluated from anywhere, also
when the files that it was made from are gone. Its status and its summary say how it ended, and what its rewards cost."""

import json
import shutil

import pytest
from problem import SETTINGS, make_config, scores_of

from tba.config import load_config
from tba.observe.run_folder import RunFolder, foreign
from tba.run import evaluate_model, train

REWARDS = "from words import WANTED\ndef f(completions, **_): return [float(WANTED in text) for text in completions]\n"


def read(path) -> dict:
    return json.loads(path.read_text())


def test_a_run_replaces_a_run_and_nothing_else(folder):
    config = make_config(
        folder, "name=again", "mode=sync", "observe.progress=true", "train.max_steps=2", "overwrite=true"
    )
    train(config)
    run = RunFolder(config.run_folder)
    assert foreign(run.path) == []
    train(config)  # its own
    for name in ("notes.txt", "logs/notes.txt", "checkpoints/mine.safetensors", "checkpoints/step-2/mine.txt"):
        (run.path / name).write_text("mine")
        with pytest.raises(FileExistsError, match="holds what no run wrote"):
            train(config)
        assert (run.path / name).read_text() == "mine"
        assert run.newest_checkpoint().name == "step-2"
        (run.path / name).unlink()


def test_a_run_is_evaluated_from_anywhere_also_when_its_rewards_are_gone(folder, tmp_path, monkeypatch, caplog):
    problem = tmp_path / "problem"
    problem.mkdir()
    shutil.copyfile(folder / "data.jsonl", problem / "data.jsonl")
    shutil.copytree(folder / "model", problem / "model")
    (problem / "rewards.py").write_text(REWARDS)
    (problem / "words.py").write_text("WANTED = 'w7'\n")
    monkeypatch.chdir(problem)
    task = {"name": "custom", "data": "data.jsonl", "rewards": [{"function": "rewards.py:f"}]}
    config = load_config(
        None,
        [*SETTINGS, "mode=sync", "train.max_steps=2"],
        model={"path": "model"},
        task=task,
        output=str(tmp_path / "runs"),
    )
    train(config)
    assert config.task.data == str(problem / "data.jsonl")
    monkeypatch.chdir("/")
    expected = scores_of(config)
    (problem / "rewards.py").write_text(REWARDS + "# changed\n")
    assert scores_of(config) == expected
    assert "rewards.py has changed since the run" in caplog.text
    for name in ("rewards.py", "words.py"):
        (problem / name).unlink()
    assert scores_of(config) == expected
    assert "rewards.py is gone: its copy" in caplog.text


def test_status_and_summary_end_with_the_outcome(folder):
    done = make_config(folder, "name=done", "mode=sync", "train.max_steps=1")
    train(done)
    status = read(RunFolder(done.run_folder).status)
    assert (status["ended"], status["outcome"], status["error"]) == (True, "finished", None)
    failed = make_config(folder, "name=failed", "mode=sync", reward="always_raises")
    with pytest.raises(RuntimeError):
        train(failed)
    status, summary = read(RunFolder(failed.run_folder).status), read(RunFolder(failed.run_folder).summary)
    assert (status["outcome"], summary["outcome"]) == ("failed", "failed")
    assert "KeyError: 'answer'" in status["error"] == summary["error"]


def test_a_run_that_fails_before_it_trains_has_status_and_summary_too(folder, monkeypatch):
    config = make_config(folder, "name=early", "mode=sync")
    monkeypatch.setattr("tba.run.modes.SyncRun.make", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(config)
    status, summary = read(RunFolder(config.run_folder).status), read(RunFolder(config.run_folder).summary)
    assert status["error"] == summary["error"] == "ZeroDivisionError: division by zero"


def test_rewards_that_fail_now_and_then_are_told_and_counted(folder, caplog):
    config = make_config(folder, "name=half-failing", reward="fails_on_w5_prompts")
    lost = train(config)["lost"]  # by searchers in processes of their own
    assert 0 < lost["share"] < 1
    assert "rewards.py:" in lost["last"]
    assert "ValueError: not this one" in lost["last"]
    told = [record.message for record in caplog.records if "responses have no reward" in record.message]
    assert "ValueError: not this one" in told[0]
    assert len(told) <= 4


def test_an_evaluation_on_no_prompts_says_so_and_measures_nothing(folder, caplog, capfd):
    config = make_config(
        folder, "name=unmeasured", "mode=sync", "train.max_steps=1", "task.eval_fraction=0", "observe.progress=true"
    )
    train(config)
    shown = "".join(capfd.readouterr())
    assert "trains on 30 prompts and is not evaluated: none is held out (task.eval_fraction=0.0)." in shown
    assert "custom, tb, seed 0\nnothing was evaluated" in shown
    assert evaluate_model(str(config.run_folder), ["evaluate.samples_per_prompt=2"]) == {"num_prompts": 0.0}
    assert "nothing was measured: custom has no prompts in evaluate.split=held_out" in caplog.text
