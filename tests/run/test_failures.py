"""What goes wrong stops the run in words, and leaves nothing running (conftest checks that after every test)."""

import itertools
import json
import re
import signal
import sys
import threading

import psutil
import pytest
from commands import Command
from problem import children, make_config, records_so_far, wait_for, with_settings

from tba.observe.run_folder import RunFolder
from tba.run import train
from tba.runtime.channels import WaitedTooLong
from tba.runtime.processes import RoleDied

ENDLESS = "train.max_steps=1000000"


def has_stepped(config) -> bool:
    return any("loss" in record for record in records_so_far(config))


def when(condition, action) -> threading.Thread:
    """Do something to a run from outside, once it has come so far."""
    thread = threading.Thread(target=lambda: wait_for(condition) and action(), daemon=True)
    thread.start()
    return thread


def searcher_processes() -> list[psutil.Process]:
    return [process for process in children() if name_of(process).startswith("searcher-")]


def name_of(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def steps_done(config) -> int:
    return max((record["step"] for record in records_so_far(config) if "loss" in record), default=0)


def test_killed_searchers_are_replaced_and_the_run_goes_on(folder, caplog):
    """Two are killed, one after the other, while they have rollouts in hand; the last evaluation comes all the same."""
    config = make_config(folder, "name=killed", "train.max_steps=24", "evaluate.every=8")
    killed = [
        when(lambda step=step: steps_done(config) >= step, lambda: searcher_processes()[0].kill()) for step in (2, 10)
    ]
    summary = train(config)
    assert not any(thread.is_alive() for thread in killed)
    assert summary["steps"] == 24
    assert caplog.text.count("searcher-0 ended (exit status -9)") == 2
    assert caplog.text.count("It is replaced") == 2
    assert [record["searchers/replaced"] for record in records_so_far(config) if "loss" in record][-1] == 2
    assert max(record["step"] for record in records_so_far(config) if "eval/custom/solved" in record) == 24


@pytest.mark.slow
def test_a_hung_searcher_is_replaced(folder, caplog, monkeypatch):
    monkeypatch.setattr("tba.runtime.searcher_pool.STOP_SECONDS", 1.0)
    config = make_config(folder, "name=silent", "train.max_steps=12", "runtime.wait_seconds=2")
    when(lambda: steps_done(config) >= 2, lambda: [p.suspend() for p in searcher_processes()])
    assert train(config)["steps"] == 12
    assert "has shown no sign of life for runtime.wait_seconds=2 s" in caplog.text


@pytest.mark.slow
def test_searchers_that_never_send_a_group_end_the_run_with_the_last_error(folder, monkeypatch):
    """Each one dies at once, with a gap between two starts that grows."""
    monkeypatch.setattr("tba.runtime.searcher_pool.FIRST_BACK_OFF_SECONDS", 0.01)
    config = make_config(folder, "name=stillborn", "replay.max_lag=0", ENDLESS)
    when(lambda: bool(searcher_processes()), lambda: keep_killing(config))
    with pytest.raises(RoleDied, match=r"searcher-0 ended \(exit status -9\)(.|\n)*5 searchers in a row ended before"):
        train(config)


def keep_killing(config) -> None:
    for _ in range(5):
        seen = searcher_processes()[0]
        seen.kill()
        wait_for(lambda seen=seen: any(p.pid != seen.pid for p in searcher_processes()), 20.0)


@pytest.mark.slow
def test_a_searcher_that_fails_says_why(folder):
    config = make_config(folder, "name=fails", reward="always_raises")
    with pytest.raises(RoleDied) as error:
        train(config)
    assert "the reward failed on 100 samples in a row" in str(error.value)
    assert "rewards.py:" in str(error.value)
    assert "KeyError: 'answer'" in str(error.value)
    summary = json.loads(RunFolder(config.run_folder).summary.read_text())
    assert (summary["outcome"], summary["steps"]) == ("failed", 0)
    assert summary["error"].startswith("RoleDied: searcher-0 failed: ")
    assert "\n" not in summary["error"]


def command(folder, name: str, *overrides: str) -> list[str]:
    options = [
        "--model",
        f"{folder}/model",
        "--data",
        f"{folder}/data.jsonl",
        "--reward",
        f"{folder}/rewards.py:sevens",
    ]
    settings = with_settings(ENDLESS, f"output={folder}/runs", f"name={name}", *overrides)
    return [sys.executable, "-m", "tba", "train", *options, *settings]


def test_a_killed_trainer_leaves_no_orphan(folder):
    config = make_config(folder, "name=trainer-killed")
    with Command(command(folder, "trainer-killed")) as trainer:
        assert wait_for(lambda: has_stepped(config))
        below = psutil.Process(trainer.pid).children(recursive=True)
        assert below
        trainer.kill()
        trainer.wait()
    assert wait_for(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in below), 10.0)


@pytest.mark.slow
def test_ctrl_c_saves_and_leaves_nothing_running(folder):
    config = make_config(folder, "name=ctrl-c")
    with Command(command(folder, "ctrl-c")) as trainer:
        assert wait_for(lambda: has_stepped(config))
        below = psutil.Process(trainer.pid).children(recursive=True)
        trainer.send_signal(signal.SIGINT)
        _, errors = trainer.communicate(timeout=120)
    assert trainer.returncode == 130, errors
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in below)
    run = RunFolder(config.run_folder)
    summary = json.loads(run.summary.read_text())
    assert run.newest_checkpoint().name == f"step-{summary['steps']}"
    assert (summary["outcome"], summary["error"]) == ("interrupted", None)


@pytest.mark.slow
def test_a_hanging_reward_costs_its_samples_only(folder, caplog):
    config = make_config(
        folder, "mode=sync", "name=hangs", "seed=1", "train.max_steps=1", "search.reward_timeout_seconds=2",
        "task.eval_fraction=0", "train.responses_per_step=8", reward="hangs_on_w9",
    )  # fmt: skip
    assert train(config)["steps"] == 1
    stored = next(record["buffer/responses"] for record in records_so_far(config) if "loss" in record)
    told = re.findall(
        r"(\d) of 4 responses have no reward .* took longer than search.reward_timeout_seconds=2 s", caplog.text
    )
    lost = sum(map(int, told))
    assert 1 <= lost <= 3
    assert stored == 8 - lost


def test_a_nan_reward_costs_its_samples_only(folder):
    config = make_config(folder, "mode=sync", "name=not-a-number", "train.max_steps=2", reward="sometimes_nan")
    assert train(config)["steps"] == 2
    rewards = [record["reward"] for record in records_so_far(config) if "reward" in record]
    assert rewards == [1.0, 1.0]


@pytest.mark.slow
def test_the_first_fill_has_a_deadline_that_names_who_waits_for_whom(folder):
    config = make_config(folder, "name=fill", "runtime.wait_seconds=0.05")
    with pytest.raises(
        (RoleDied, WaitedTooLong),
        match=r"searcher-0 .* no sign of life for runtime.wait_seconds=0.05|the trainer waited for 4 prompts and has 0",
    ):
        train(config)


@pytest.mark.slow
def test_a_group_lost_whole_does_not_stop_a_paced_run(folder):
    """At lag 0 searcher and trainer wait for each other's last word: a lost group must count as one."""
    config = make_config(
        folder, "name=lost", "replay.max_lag=0", "replay.max_replay_ratio=1",
        "runtime.wait_seconds=20", "train.max_steps=4", reward="fails_on_w5_prompts",
    )  # fmt: skip
    assert train(config)["steps"] == 4


@pytest.mark.slow
def test_a_run_most_of_whose_groups_are_lost_trains_whole_batches_of_the_others(folder):
    """More are lost in a step than it trains on: were they counted as trained on, searchers would soon wait for versions
    that can never come."""
    config = make_config(
        folder, "name=mostly-lost", "runtime.wait_seconds=20", "train.max_steps=12", reward="fails_on_most"
    )
    assert train(config)["steps"] == 12
    steps = [record for record in records_so_far(config) if "loss" in record]
    assert {record["buffer/trained"] / record["step"] for record in steps} == {16.0}
    assert steps[-1]["buffer/generated"] > 3 * steps[-1]["buffer/trained"]


@pytest.mark.slow
def test_the_trainer_waits_at_the_replay_ratio_and_never_exceeds_it(folder):
    config = make_config(folder, "name=limit", "replay.max_replay_ratio=0.5", "train.max_steps=10")
    summary = train(config)
    assert summary["responses_trained"] <= 0.5 * summary["responses_generated"]
    for record in (
        record for record in records_so_far(config) if "loss" in record
    ):  # the metric is the number that is limited
        assert record["buffer/replay_ratio"] == record["buffer/trained"] / record["buffer/generated"] <= 0.5
    assert sum(record.get("time/wait_for_batch", 0.0) for record in records_so_far(config)) > 0
    steps = [record for record in records_so_far(config) if "loss" in record]
    assert all(record["time/receive"] > 0 for record in steps)
    for before, after in itertools.pairwise(steps):  # no second is counted twice
        parts = after["time/receive"] + after["time/wait_for_batch"] + after["time/step"]
        assert parts <= after["seconds"] - before["seconds"]
