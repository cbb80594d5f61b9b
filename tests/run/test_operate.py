"""A run is looked at and steered from outside."""

import json
import os
import time

import pytest
from problem import children, make_config, records_so_far, wait_for
from test_failures import ENDLESS, steps_done, when

from tba.cli import app
from tba.observe.run_folder import RunFolder
from tba.run import train
from tba.run.status import StatusWriter, ask_for_searchers, describe, read_status, searchers_asked, start_of
from tba.runtime.counters import SharedCounters


def alive(config) -> float:
    steps = [record for record in records_so_far(config) if "loss" in record]
    return steps[-1]["searchers/alive"] if steps else 0.0


@pytest.mark.slow
def test_a_run_tells_what_it_does_changes_its_searchers_and_stops_when_asked(folder, capfd):
    config = make_config(folder, "name=operated", ENDLESS)
    seen = {}

    def operate() -> None:
        run = config.run_folder
        wait_for(lambda: RunFolder(run).status.is_file())
        wait_for(lambda: len(read_status(run)["roles"]) == 2)  # it is written once a second, two steps may take less
        seen["status"] = read_status(run)
        seen["sockets"] = [p.net_connections("inet") for p in children() if p.is_running()]
        ask_for_searchers(run, 3)
        seen["three"] = wait_for(lambda: alive(config) == 3.0)
        ask_for_searchers(run, 1)
        seen["one"] = wait_for(lambda: alive(config) == 1.0)
        seen["rc"] = app(["stop", str(run)], standalone_mode=False)

    thread = when(lambda: steps_done(config) >= 2, operate)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    thread.join(30.0)
    ended = read_status(config.run_folder)
    assert (ended["alive"], ended["outcome"]) == (False, "interrupted")  # this process lives on, the run does not
    assert seen["three"]
    assert seen["one"]
    assert not seen["rc"]
    assert f"asked process {os.getpid()} to save and end" in capfd.readouterr().out
    assert seen["status"]["alive"] is True
    assert seen["status"]["pid"] == os.getpid()
    assert not any(seen["sockets"]), "a run on one machine uses no network"
    assert [role["name"] for role in seen["status"]["roles"]] == ["trainer", "searcher-0"]
    assert "searcher-0" in describe(seen["status"])


def status(**changes) -> dict:
    role = {"name": "trainer", "doing": "works", "since": 90.0, "responses_per_second": 0.0, "waited_share": 0.0}
    found = {"step": 7, "time": 100.0, "host": "here", "pid": 1, "pid_started": 0.0, "roles": [role]}
    of_metrics = {"max_steps": 60, "reward": None, "seconds_left": None}
    return {**found, **of_metrics, "alive": True, "age": 0.5, **changes}


def test_a_status_says_since_when_and_whether_anybody_still_writes_it():
    assert describe(status()) == "at step 7 of 60 (process 1 on here)\n  trainer      works, for 10 s"
    assert describe(status(alive=False, age=50.0)).startswith(
        "died (process 1 on here is gone) 50 s ago at step 7 of 60"
    )
    assert describe(status(alive=False, age=50.0, ended=True)).startswith("ended 50 s ago at step 7 of 60")
    assert describe(status(age=50.0)).startswith("silent for 50 s at step 7 of 60")


def test_a_status_has_the_time_that_has_passed_the_time_left_and_the_reward():
    lines = describe(status(started=10.0, seconds_left=610.0, reward=0.25)).splitlines()
    assert lines[1] == "  1 min 30 s elapsed, about 10 min left, reward 0.250"


def test_the_time_left_is_by_the_pace_so_far(tmp_path):
    folder = RunFolder(tmp_path)
    folder.config.write_text("train: {max_steps: 60}")
    own = os.getpid()
    told = {"step": 12, "time": 100.0, "host": os.uname().nodename, "pid": own, "pid_started": start_of(own)}
    folder.status.write_text(json.dumps({**told, "roles": []}))
    assert read_status(tmp_path)["seconds_left"] is read_status(tmp_path)["reward"] is None, "no step was made yet"
    lines = [{"step": step, "loss": 0.1, "seconds": 2.0 * step, "reward": step / 100} for step in (11, 12)]
    evaluation = {"step": 10, "seconds": 20.0, "eval/custom/reward": 0.9}
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in [*lines, evaluation]) + '{"step": 13, "lo')
    found = read_status(tmp_path)
    # 2 s a step, 48 to come
    assert (found["max_steps"], found["reward"], found["seconds_left"]) == (60, 0.12, 96.0)
    folder.config.write_text("train: {max_seconds: 60}")  # 24 s are over
    found = read_status(tmp_path)
    assert (found["max_steps"], found["seconds_left"]) == (None, 36.0)
    assert describe(status(max_steps=None)).startswith("at step 7 (process 1 on here)")


def test_a_clock_that_is_set_changes_no_age_and_ends_no_run(tmp_path, monkeypatch):
    folder, counters, clock = RunFolder(tmp_path), SharedCounters.create(), time.time
    writer = StatusWriter(folder, counters)
    writer.write()
    for hours in (2, -3, 0):
        monkeypatch.setattr(time, "time", lambda jump=3600.0 * hours: clock() + jump)
        before = read_status(tmp_path)
        writer.write()
        after = read_status(tmp_path)
        assert (before["alive"], after["alive"]) == (True, True)
        assert min(before["age"], after["age"]) >= 0.0
        assert 0.0 <= after["time"] - after["roles"][0]["since"] < 600.0
        assert 0.0 <= after["age"] < 600.0


def test_roles_of_a_run_that_died_are_not_said_to_work():
    assert describe(status(alive=False, age=60.0)) == "died (process 1 on here is gone) 1 min 00 s ago at step 7 of 60"


def test_a_status_says_how_a_run_ended():
    ended = status(alive=False, age=60.0, ended=True, roles=[])
    assert describe({**ended, "outcome": "finished", "error": None}) == "finished 1 min 00 s ago at step 7 of 60"
    failed = describe({**ended, "outcome": "failed", "error": "RoleDied: searcher-0 ended"})
    assert failed == "failed 1 min 00 s ago at step 7 of 60: RoleDied: searcher-0 ended"


def test_a_run_that_is_gone_is_not_stopped_and_gets_no_searchers(tmp_path, capfd):
    folder = RunFolder(tmp_path)
    folder.config.write_text("")
    gone = {
        "step": 3,
        "time": time.time(),
        "host": os.uname().nodename,
        "pid": 2**22 - 1,
        "pid_started": 1.0,
        "roles": [],
    }
    folder.status.write_text(json.dumps(gone))
    with pytest.raises(ValueError, match="does not run: it ended at step 3"):
        ask_for_searchers(tmp_path, 2)
    with pytest.raises(ValueError, match="a run has 1 to 64 searchers"):
        ask_for_searchers(tmp_path, 65)


def test_a_folder_without_a_status_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a run folder"):
        read_status(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"searchers": "two"}', '{"searchers": 0}'])
def test_nonsense_in_the_control_file_asks_for_nothing(text, tmp_path):
    path = tmp_path / "control.json"
    path.write_text(text)
    assert searchers_asked(path) is None
