"""What goes wrong stops the run in words, and leaves nothing running (conftest checks that after every test)."""

import json
import signal
import subprocess
import sys
import threading

import psutil
import pytest
from problem import SETTINGS, children, make_config, wait_for

from tba.launch import train
from tba.observe.files import RunFolder
from tba.runtime.processes import RoleDied
from tba.runtime.waiting import WaitedTooLong

ENDLESS = "train.max_steps=1000000"


def records(config) -> list[dict]:
    path = RunFolder(config.run_folder).metrics
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def has_stepped(config) -> bool:
    return any("loss" in record for record in records(config))


def when(condition, action) -> threading.Thread:
    """Do something to a run from outside, once it has come so far."""
    thread = threading.Thread(target=lambda: wait_for(condition) and action(), daemon=True)
    thread.start()
    return thread


def searcher_processes() -> list[psutil.Process]:
    return [p for p in children() if "tba.runtime.child" in p.cmdline() and p.ppid() == psutil.Process().pid]


def test_a_killed_searcher_stops_the_run_with_its_log(folder):
    config = make_config(folder, "name=killed", ENDLESS)
    when(lambda: has_stepped(config), lambda: searcher_processes()[0].kill())
    with pytest.raises(RoleDied, match=r"searcher-0 ended \(exit status -9\)"):
        train(config)


def test_a_searcher_that_fails_says_why(folder):
    config = make_config(folder, "name=fails", "search.max_reward_failures=8", reward="always_raises")
    with pytest.raises(RoleDied) as error:
        train(config)
    assert "the reward failed on 8 samples in a row" in str(error.value)
    assert "rewards.py:" in str(error.value)
    assert "KeyError: 'answer'" in str(error.value)


def command(folder, name: str, *overrides: str) -> list[str]:
    options = [
        "--model",
        f"{folder}/model",
        "--data",
        f"{folder}/data.jsonl",
        "--reward",
        f"{folder}/rewards.py:sevens",
    ]
    settings = [*SETTINGS, ENDLESS, f"output={folder}/runs", f"name={name}", *overrides]
    return [sys.executable, "-m", "tba", "train", *options, *settings]


def test_a_killed_trainer_leaves_no_orphan(folder):
    config = make_config(folder, "name=trainer-killed")
    with subprocess.Popen(command(folder, "trainer-killed"), stderr=subprocess.PIPE) as trainer:
        assert wait_for(lambda: has_stepped(config))
        below = psutil.Process(trainer.pid).children(recursive=True)
        assert below
        trainer.kill()
        trainer.wait()
    assert wait_for(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in below), 10.0)


def test_ctrl_c_saves_and_leaves_nothing_running(folder):
    config = make_config(folder, "name=ctrl-c")
    with subprocess.Popen(command(folder, "ctrl-c"), stderr=subprocess.PIPE, text=True) as trainer:
        assert wait_for(lambda: has_stepped(config))
        below = psutil.Process(trainer.pid).children(recursive=True)
        trainer.send_signal(signal.SIGINT)
        _, errors = trainer.communicate(timeout=60)
    assert trainer.returncode == 130, errors
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in below)
    run = RunFolder(config.run_folder)
    summary = json.loads(run.summary.read_text())
    assert run.newest_checkpoint().name == f"step-{summary['steps']}"


def test_a_hanging_reward_costs_its_samples_only(folder):
    config = make_config(
        folder, "mode=sync", "name=hangs", "train.max_steps=1", "search.reward_timeout_seconds=0.5",
        "task.eval_fraction=0", "train.responses_per_step=8", reward="hangs_on_w9",
    )  # fmt: skip
    summary = train(config)
    assert summary["steps"] == 1
    assert summary["responses_generated"] == 8


def test_a_nan_reward_costs_its_samples_only(folder):
    config = make_config(folder, "mode=sync", "name=not-a-number", "train.max_steps=2", reward="sometimes_nan")
    assert train(config)["steps"] == 2
    rewards = [record["reward"] for record in records(config) if "reward" in record]
    assert rewards == [1.0, 1.0]


def test_the_first_fill_has_a_deadline_that_names_who_waits_for_whom(folder):
    config = make_config(folder, "name=fill", "runtime.start_seconds=0.05")
    with pytest.raises(WaitedTooLong, match="the trainer waited for 4 prompts and has 0 from 1 searchers"):
        train(config)


def test_a_stopped_searcher_is_noticed_at_the_deadline_of_the_replay_ratio(folder):
    """A searcher that lives but does nothing: the trainer waits at the limit, then says for whom."""
    config = make_config(folder, "name=ratio", ENDLESS, "runtime.wait_seconds=3")
    when(lambda: has_stepped(config), lambda: [p.suspend() for p in searcher_processes()])
    with pytest.raises((WaitedTooLong, RoleDied)) as error:
        train(config)
    assert "searcher" in str(error.value)
    assert "replay_ratio" in str(error.value) or "no sign of life" in str(error.value)


def test_the_trainer_waits_at_the_replay_ratio_and_never_exceeds_it(folder):
    config = make_config(folder, "name=limit", "replay.max_trained_per_generated=0.5", "train.max_steps=10")
    summary = train(config)
    assert summary["responses_trained"] <= 0.5 * summary["responses_generated"]
    assert sum(record.get("time/wait_for_batch", 0.0) for record in records(config)) > 0
