"""`tba train` as a supervisor: a trainer that is killed is resumed, with searchers of its own."""

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from commands import Command
from problem import command, make_config, steps_of, wait_for
from test_failures import when

from tba.observe.run_folder import RunFolder
from tba.run import train
from tba.run.status import describe, read_status, stop_run
from tba.run.supervise import MAX_RESTARTS, supervise
from tba.runtime import processes
from tba.runtime.processes import ForkServer, prepare_roles

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from chaos_bench.accounting import account, read_notes, read_rows

pytestmark = pytest.mark.slow


def role(run: RunFolder, name: str) -> dict:
    """What status.json says of a role; empty while it does not know it."""
    try:
        roles = json.loads(run.status.read_text())["roles"]
    except (OSError, ValueError):
        return {}
    return next((found for found in roles if found["name"] == name and found["pid"]), {})


@pytest.mark.parametrize("killed", [("trainer",), ("searcher-0", "trainer")])
def test_a_trainer_that_is_killed_is_resumed_with_new_searchers(folder, tmp_path, monkeypatch, killed):
    """Nothing that was acknowledged is lost, nothing is stored twice, and every step is recorded once."""
    (tmp_path / "notes").mkdir()
    monkeypatch.setenv("TBA_ACKNOWLEDGED_LOG", str(tmp_path / "notes"))
    name, settings = f"killed-{len(killed)}", ("train.max_steps=30", "train.checkpoint_every=5")
    config = make_config(folder, f"name={name}", *settings)
    run = RunFolder(config.run_folder)
    with Command(command(folder, name, *settings)) as process:
        assert wait_for(lambda: max(steps_of(config), default=0) >= 7 and role(run, "searcher-0"))
        before = {role_name: role(run, role_name)["pid"] for role_name in ("searcher-0", "trainer")}
        for role_name in killed:
            os.kill(before[role_name], signal.SIGKILL)
        for role_name, pid in before.items():
            assert wait_for(lambda one=role_name, pid=pid: role(run, one).get("pid", pid) != pid)
        # It ends with its trainer; the first process of the machine may take a second to ask how.
        assert wait_for(lambda: not psutil.pid_exists(before["searcher-0"]), 10.0)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "the trainer was killed by signal 9" in errors
    assert steps_of(config) == list(range(1, 31))
    summary, status = json.loads(run.summary.read_text()), json.loads(run.status.read_text())
    assert (summary["outcome"], summary["steps"], status["trainer_restarts"]) == ("finished", 30, 1)
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert all(record["off_policy/lag_mean"] >= 0 for record in records if "off_policy/lag_mean" in record)
    found = account(read_notes(tmp_path / "notes"), *read_rows(run.replay))
    assert found.acknowledged >= 30
    assert (found.lost, found.changed, found.twice) == ([], [], [])


def test_a_trainer_that_is_killed_after_it_has_gone_back_is_resumed_from_its_newest_checkpoint(folder):
    settings = ("mode=sync", "train.checkpoint_every=2", "train.keep_checkpoints=1000")
    config = make_config(folder, "name=back", "train.max_steps=12", *settings)
    train(config)
    run = RunFolder(config.run_folder)
    run.status.unlink()  # it names this process
    resumed = [str(run.checkpoints / "step-2"), "--resume", "train.max_steps=200", "observe.progress=false"]
    with Command([sys.executable, "-m", "tba", "train", *resumed]) as process:
        assert wait_for(lambda: max(steps_of(config), default=0) >= 16 and role(run, "trainer"))
        os.kill(role(run, "trainer")["pid"], signal.SIGKILL)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "the trainer was killed by signal 9" in errors
    assert errors.count("step-4 is dropped: the run goes on from step 2") == 1
    assert steps_of(config) == list(range(1, 201))


def test_a_trainer_that_is_killed_again_and_again_ends_the_run_with_advice(folder):
    config = make_config(folder, "name=not-again")
    run = RunFolder(config.run_folder)
    settings = ("train.max_steps=1000000", "mode=sync")
    with Command(command(folder, "not-again", *settings)) as process:
        killed = {0}
        for _ in range(1 + MAX_RESTARTS):
            assert wait_for(lambda: role(run, "trainer") and role(run, "trainer")["pid"] not in killed)
            killed.add(role(run, "trainer")["pid"])
            os.kill(role(run, "trainer")["pid"], signal.SIGKILL)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGKILL, errors
    assert "--resume" in errors
    for written in (run.summary, run.status):
        told = json.loads(written.read_text())
        assert (told["outcome"], "exit status 137" in told["error"]) == ("failed", True)


def test_a_run_saves_when_every_process_of_it_is_asked_to_end(folder):
    """As batch systems do; and it was started in the background of a script, where Ctrl-C is ignored."""
    config = make_config(folder, "name=asked")
    run = RunFolder(config.run_folder)
    with Command(
        command(folder, "asked", "train.max_steps=1000000"),
        prepare=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    ) as process:
        assert wait_for(lambda: steps_of(config) and role(run, "searcher-0"))
        for pid in (process.pid, role(run, "trainer")["pid"]):
            os.kill(pid, signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    summary = json.loads(run.summary.read_text())
    assert summary["outcome"] == "interrupted"
    assert run.newest_checkpoint().name == f"step-{summary['steps']}"


def test_a_run_whose_fork_server_hangs_tells_that_a_searcher_is_gone_and_ends_when_it_is_asked(folder, monkeypatch):
    """Both servers hang: that of the supervisor, so that nobody tells how the trainer ends, and that of the trainer, so that
    it cannot replace a searcher at once."""
    config = make_config(folder, "name=hangs", "train.max_steps=1000000")
    run, found = RunFolder(config.run_folder), {}
    monkeypatch.setattr(processes, "START_SECONDS", 1)
    prepare_roles()
    monkeypatch.setattr(ForkServer, "_shared", ForkServer._shared)  # it is the shared one again in the end
    monkeypatch.setattr(processes, "ROLE_MODULES", ())  # the run ends before another searcher has imported torch

    def attack() -> None:
        found["servers"] = [psutil.Process(role(run, name)["pid"]).parent() for name in ("trainer", "searcher-0")]
        for server in found["servers"]:
            server.suspend()
        os.kill(role(run, "searcher-0")["pid"], signal.SIGKILL)
        found["told"] = wait_for(lambda: "searcher-0   starts again" in describe(read_status(run.path)))
        stop_run(run.path)

    attacker = when(lambda: steps_of(config) and role(run, "searcher-0"), attack)
    try:
        assert supervise(config, resume=False, target="tba.cli.training:run_trainer") == 130
    finally:
        attacker.join(60.0)
        for server in found.get("servers", ()):
            with suppress(psutil.NoSuchProcess):  # that of the trainer has ended with it
                server.resume()
    assert len(set(found["servers"])) == 2
    assert found["told"]
    summary = json.loads(run.summary.read_text())
    assert summary["outcome"] == "interrupted"
    assert run.newest_checkpoint().name == f"step-{summary['steps']}"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_trainer_whose_gpu_fails_is_started_again(folder, mode):
    """It has saved and let its searchers go; nothing of the run is replaced, although that was allowed."""
    config = make_config(folder, f"name=again-{mode}", f"mode={mode}", "overwrite=true")
    run = RunFolder(config.run_folder)
    assert supervise(config, resume=False, target="failing_trainer:run_trainer") == 0
    assert steps_of(config) == [1, 2, 3, 4, 5, 6]
    assert json.loads(run.status.read_text())["trainer_restarts"] == 1
    assert json.loads(run.summary.read_text())["outcome"] == "finished"
