"""Searchers under their trainer: what becomes of the rollouts of those that are gone. Searchers are real processes here."""

import time
from functools import partial

import numpy as np
import pytest
import targets
import torch

from tba.config import Config, RuntimeConfig
from tba.runtime.connection import LocalRuntime
from tba.runtime.counters import SharedCounters
from tba.runtime.placement import BELOW_NORMAL, PRIORITY
from tba.runtime.processes import RoleDied
from tba.runtime.prompt_queue import PromptQueue
from tba.runtime.searcher_pool import MAX_EARLY_ENDS, start_local
from tba.types import TrajectoryGroup

DEADLINE_SECONDS = 60.0
TENSORS = {"w": torch.zeros(4)}


@pytest.fixture(autouse=True)
def little_time_to_stop(monkeypatch):
    monkeypatch.setattr("tba.runtime.searcher_pool.STOP_SECONDS", 1.0)


class Run:
    """A trainer in this process, with its searchers."""

    def __init__(self, logs, *, num_searchers: int = 2, **options) -> None:
        config = RuntimeConfig()
        self.groups: list[TrajectoryGroup] = []
        self.runtime = LocalRuntime(
            config,
            SharedCounters.create(),
            partial(start_local, Config(runtime=config), logs),
            num_searchers=num_searchers,
            tensors=TENSORS,
            dtype=torch.float32,
            canary=lambda weights: np.zeros(64),
            prompt_queue=PromptQueue(10, seed=0, shuffle=False),
            **options,
        )

    @property
    def holders(self) -> list[str]:
        """The searchers there are."""
        return [each.holder for each in self.runtime.pool.incarnations() if not each.gone]

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


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr("tba.runtime.searcher_pool.FIRST_BACK_OFF_SECONDS", 0.01)
    run = Run(tmp_path / "logs")  # a folder that somebody has deleted
    yield run
    run.close()


def test_rollouts_of_a_place_that_is_given_up_go_to_the_others(run):
    """Its last process may have held none: all that were ever handed back are given to searcher 0."""
    runtime = run.start(targets.takes_rollouts_and_dies, num_searchers=2)
    run.drain_until(lambda: runtime.counters.places().get(1) == "given_up")
    run.drain_until(lambda: len(runtime.pool.incarnations()) == 1)
    assert runtime.prompt_queue.num_handed_back == 0
    (holder,) = run.holders
    assert holder.startswith("searcher-0")
    assert runtime.prompt_queue.hand_back(holder) == 4


def test_a_group_that_arrived_is_not_made_again_although_its_searcher_is_lost(run):
    """The group and the failure arrive together: only the other rollout is handed back."""
    runtime = run.start(targets.sends_a_group_and_dies, num_searchers=1)
    run.drain_until(lambda: run.groups and runtime.prompt_queue.num_handed_back == 1)
    assert run.groups[0].rollout == 0
    assert [rollout.number for rollout in runtime.prompt_queue.lease("another", 1)] == [1]


def test_a_searcher_that_loads_its_model_counts_as_progress(run):
    runtime = run.start(targets.takes_rollouts_and_dies, num_searchers=1)
    run.drain_until(lambda: runtime.counters.places().get(0) == "filled")
    first = runtime.counters.searchers_progress()
    assert runtime.counters.searchers_progress() != first


def test_a_searcher_that_sends_nonsense_is_replaced_and_in_the_end_given_up(run):
    runtime = run.start(targets.sends_nonsense, num_searchers=1)
    with pytest.raises(RoleDied, match="cannot be read"):
        run.drain_until(lambda: False)
    assert runtime.counters.replaced == MAX_EARLY_ENDS


def test_a_machine_that_has_no_process_left_is_an_error_in_the_end(run, monkeypatch):
    def refuses(*_, **__):
        raise OSError("Resource temporarily unavailable")

    monkeypatch.setattr("tba.runtime.searcher_pool.RoleProcess", refuses)
    run.start(targets.sends_nonsense, num_searchers=1)
    with pytest.raises(RoleDied, match="searcher-0 could not be started: Resource temporarily unavailable"):
        run.drain_until(lambda: False)


def test_searchers_that_are_replaced_are_new_and_what_they_sent_is_dropped(run):
    runtime = run.start(targets.sends_its_incarnation, num_searchers=2)
    run.drain_until(lambda: len(run.holders) == 2)
    before = set(run.holders)
    runtime.prompt_queue.lease(min(before), 3)
    runtime.evaluate(7)
    runtime.replace_searchers({})
    assert runtime.prompt_queue.num_handed_back == 3
    run.groups.clear()
    run.drain_until(lambda: len(run.groups) == 2)
    assert {group.id.partition("/")[0] for group in run.groups} == set(run.holders)
    assert not before & set(run.holders)


def test_a_searcher_that_dies_is_replaced_while_the_trainer_is_in_the_middle_of_a_step(run):
    """Nobody looks for messages meanwhile."""
    runtime = run.start(targets.takes_rollouts_and_dies, num_searchers=1)
    run.drain_until(lambda: run.holders)
    (first,) = runtime.pool.incarnations()
    first.process.kill()
    deadline = time.monotonic() + DEADLINE_SECONDS
    while runtime.counters.replaced == 0 or not run.holders:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert run.holders != [first.holder]


def test_the_number_of_searchers_follows_what_is_asked_for_from_outside(run):
    runtime = run.start(targets.waits, num_searchers=1)
    for count in (3, 2):
        runtime.counters.supervisor["searchers_wanted"] = count
        run.drain_until(lambda count=count: len(run.holders) == count)
    assert sorted(holder.partition(".")[0] for holder in run.holders) == ["searcher-0", "searcher-1"]
    assert runtime.counters.replaced == 0


def test_a_searcher_does_not_give_way_on_a_gpu_as_its_trainer_does(tmp_path, monkeypatch):
    monkeypatch.setenv(PRIORITY, BELOW_NORMAL)
    process = start_local(Config(), tmp_path, targets.tells_a_variable, {"name": PRIORITY}, None, 0, "a")
    assert process.link.receive(timeout_seconds=DEADLINE_SECONDS) == ("not set",)
    assert process.wait(DEADLINE_SECONDS)


def test_a_thread_that_could_not_start_does_not_hide_why(tmp_path, monkeypatch):
    def no_thread(thread):
        raise RuntimeError("can't start new thread")  # as beyond `ulimit -v`

    run = Run(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", no_thread)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            run.start(targets.takes_rollouts_and_dies, num_searchers=1)
    run.runtime.stop()
