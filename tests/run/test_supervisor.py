"""The supervisor: a trainer that hangs is killed, and the next one is started. Trainers are real processes here."""

import subprocess
import sys

import targets

from tba.config import Config, RuntimeConfig
from tba.observe.run_folder import RunFolder
from tba.run.status import StatusWriter
from tba.run.supervise import Supervisor
from tba.runtime.counters import SharedCounters
from tba.runtime.processes import RoleProcess


def supervisor_of(counters, tmp_path, started: list, *targets_of_trainers, **settings) -> Supervisor:
    """Its trainers run these targets, one after the other."""

    def start() -> RoleProcess:
        target = targets_of_trainers[len(started)]
        arguments = {"counters": counters.memory.handle} if target is targets.beats_no_more else {}
        started.append(RoleProcess("trainer", target, arguments, log=tmp_path / "trainer.log", forked=True))
        return started[-1]

    config, folder = Config(runtime=RuntimeConfig(**settings)), RunFolder(tmp_path)
    return Supervisor(config, counters, folder, StatusWriter(folder, counters), start)


def test_a_trainer_that_does_not_look_for_groups_is_killed_and_another_one_begins(tmp_path, caplog):
    counters, started = SharedCounters.create(), []
    supervisor = supervisor_of(
        counters, tmp_path, started, targets.beats_no_more, targets.ends_at_once, wait_seconds=1.0
    )
    assert supervisor.run() == 0
    assert [trainer.status for trainer in started] == [-9, 0]
    assert "has not looked for groups for runtime.wait_seconds=1 s: it is killed" in caplog.text
    assert counters.supervisor["trainer_restarts"] == 1
    assert counters.replaced == 3, "those that the first one has replaced count on"


def test_a_trainer_that_dies_again_and_again_ends_the_run(tmp_path, caplog):
    counters, started = SharedCounters.create(), []
    dying = [targets.dies] * 4
    assert supervisor_of(counters, tmp_path, started, *dying).run() == 128 + 9
    assert "was killed by signal 9, 4 times in a row without a new checkpoint" in caplog.text


def test_the_supervisor_needs_no_torch():
    """Or it would not be there before everything else, and importing would take twice as long."""
    code = "import sys, tba.run.supervise; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
