"""Searchers under the supervisor: what becomes of the visits of those that are gone. Searchers are real processes here."""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import targets
import torch

from tba.config import Config, RuntimeConfig
from tba.observe.run_folder import Holder
from tba.runtime.board import Board
from tba.runtime.leases import VisitLedger
from tba.runtime.links import (
    Link,
)
from tba.runtime.local import LocalRuntime
from tba.runtime.processes import RoleDied
from tba.runtime.supervisor import MAX_EARLY_ENDS, Host, LocalRoles, Supervisor
from tba.types import TrajectoryGroup

DEADLINE_SECONDS = 60.0
TENSORS = {"w": torch.zeros(4)}


@pytest.fixture(autouse=True)
def little_time_to_stop(monkeypatch):
    monkeypatch.setattr("tba.runtime.supervisor.STOP_SECONDS", 1.0)


class Run:
    """A trainer in this process, with its supervisor in a thread."""

    def __init__(self, logs, **options) -> None:
        config = RuntimeConfig()
        start = LocalRoles(config=Config(runtime=config), logs=logs)
        self.supervisor = Supervisor(config, Board.create(), logs=logs, start_searcher=start.searcher, **options)
        self.groups: list[TrajectoryGroup] = []
        self.thread = threading.Thread(target=self.supervisor.run)
        self.thread.start()
        self.runtime = LocalRuntime(
            config,
            Host(
                link=Link(self.supervisor.trainer_connection),
                board=self.supervisor.board,
                owner=Holder.of_this_process(),
            ),
            num_searchers=2,
            tensors=TENSORS,
            dtype=torch.float32,
            canary=lambda weights: np.zeros(64),
            ledger=VisitLedger(10, seed=0, shuffle=False),
        )

    def start(self, target, *, num_searchers: int) -> LocalRuntime:
        self.runtime._num_searchers = num_searchers
        self.runtime.start_searchers(target, {})
        return self.runtime

    def drain_until(self, condition) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            self.groups += self.runtime.drain()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def close(self) -> None:
        self.runtime.stop()
        self.thread.join()
        self.supervisor.close()


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr("tba.runtime.supervisor.FIRST_BACK_OFF_SECONDS", 0.01)
    run = Run(tmp_path / "logs")  # a folder that somebody has deleted
    yield run
    run.close()


def test_visits_of_a_place_that_is_given_up_go_to_the_others(run):
    """Its last process may have held none: all that were ever handed back are given to searcher 0."""
    runtime = run.start(targets.takes_visits_and_dies, num_searchers=2)
    first, second = "searcher-0", "searcher-1"
    run.drain_until(lambda: runtime.board.places().get(1) == "given_up")
    run.drain_until(lambda: not any(name.startswith(second) for name in runtime._searchers))
    assert runtime.ledger.num_handed_back == 0
    (holder,) = runtime._searchers
    assert holder.startswith(first)
    assert runtime.ledger.hand_back(holder) == 4


def test_a_group_that_arrived_is_not_made_again_although_its_searcher_is_lost(run):
    """The group and the failure arrive together: only the other visit is handed back."""
    runtime = run.start(targets.sends_a_group_and_dies, num_searchers=1)
    run.drain_until(lambda: run.groups and runtime.ledger.num_handed_back == 1)
    assert run.groups[0].visit == 0
    assert [visit.number for visit in runtime.ledger.lease("another", 1)] == [1]


def test_a_searcher_that_loads_its_model_counts_as_progress(run):
    runtime = run.start(targets.takes_visits_and_dies, num_searchers=1)
    run.drain_until(lambda: runtime.board.places().get(0) == "filled")
    first = runtime.progress()
    assert runtime.progress() != first


def test_a_searcher_that_sends_nonsense_is_replaced_and_in_the_end_given_up(run):
    runtime = run.start(targets.sends_nonsense, num_searchers=1)
    with pytest.raises(RoleDied, match="cannot be read"):
        run.drain_until(lambda: False)
    assert runtime.board.supervisor["replaced"] == MAX_EARLY_ENDS


def test_a_machine_that_has_no_process_left_is_an_error_in_the_end(run, monkeypatch):
    def refuses(*_, **__):
        raise OSError("Resource temporarily unavailable")

    monkeypatch.setattr("tba.runtime.supervisor.RoleProcess", refuses)
    run.start(targets.sends_nonsense, num_searchers=1)
    with pytest.raises(RoleDied, match="searcher-0 could not be started: Resource temporarily unavailable"):
        run.drain_until(lambda: False)


def test_searchers_that_are_replaced_are_new_and_what_they_sent_is_dropped(run):
    runtime = run.start(targets.sends_its_incarnation, num_searchers=2)
    run.drain_until(lambda: len(runtime._searchers) == 2)
    before = set(runtime._searchers)
    runtime.ledger.lease(min(before), 3)
    runtime.evaluate(7)
    runtime.replace_searchers({})
    assert runtime.ledger.num_handed_back == 3
    run.groups.clear()
    run.drain_until(lambda: len(run.groups) == 2)
    assert {group.id.partition("/")[0] for group in run.groups} == set(runtime._searchers)
    assert not before & set(runtime._searchers)


def test_the_supervisor_needs_no_torch():
    """Or it would not be there before everything else, and importing would take twice as long."""
    code = "import sys, tba.launch.supervise; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
