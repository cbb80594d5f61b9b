"""The local runtime: what becomes of the visits of searchers that are gone. Searchers are real processes here."""

import time

import numpy as np
import pytest
import targets
import torch

from tba.config import RuntimeConfig
from tba.runtime.leases import VisitLedger
from tba.runtime.local import LocalRuntime

DEADLINE_SECONDS = 60.0


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setattr("tba.runtime.local.FIRST_BACK_OFF_SECONDS", 0.01)
    made = []

    def start(target, *, num_searchers: int) -> LocalRuntime:
        runtime = LocalRuntime(
            RuntimeConfig(stop_seconds=1.0),
            num_searchers=num_searchers,
            tensors={"w": torch.zeros(4)},
            dtype=torch.float32,
            canary=lambda weights: np.zeros(64),
            ledger=VisitLedger(10, seed=0, shuffle=False),
        )
        made.append(runtime)
        runtime.start_searchers(target, {}, logs=tmp_path / "logs")  # a folder that somebody has deleted
        return runtime

    yield start
    for runtime in made:
        runtime.stop()


def drain_until(runtime: LocalRuntime, condition) -> list:
    groups, deadline = [], time.monotonic() + DEADLINE_SECONDS
    while not condition():
        groups += runtime.drain()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return groups


def test_visits_of_a_place_that_is_given_up_go_to_the_others(start):
    """Its last process may have held none: all that were ever handed back are given to searcher 0."""
    runtime = start(targets.takes_visits_and_dies, num_searchers=2)
    drain_until(runtime, lambda: runtime.seats[1].given_up)
    assert runtime.ledger.num_handed_back == 0
    assert runtime.ledger.hand_back(runtime.seats[0].holder) == 4


def test_a_group_that_arrived_is_not_made_again_although_its_searcher_is_lost(start):
    """The group and the failure arrive together: only the other visit is handed back."""
    runtime = start(targets.sends_a_group_and_dies, num_searchers=1)
    (group,) = drain_until(runtime, lambda: runtime.replaced == 1)
    assert group.visit == 0
    assert [visit.number for visit in runtime.ledger.lease("another", 1)] == [1]


def test_a_searcher_that_loads_its_model_counts_as_progress(start):
    runtime = start(targets.takes_visits_and_dies, num_searchers=1)
    first = runtime.progress()
    assert runtime.progress() != first


def test_searchers_that_are_restarted_are_new_and_what_they_sent_is_dropped(start):
    runtime = start(targets.sends_its_incarnation, num_searchers=2)
    before = [(seat.process, seat.incarnation) for seat in runtime.seats]
    wait_for_messages(runtime)
    assert runtime.ledger.outstanding == 0, "their messages were not taken"
    runtime.ledger.lease(runtime.seats[0].holder, 3)
    runtime.evaluate(7)
    runtime.restart_searchers()
    assert not any(process.alive for process, _ in before)
    assert runtime.ledger.num_handed_back == 3
    groups = drain_until(runtime, lambda: sum(seat.groups for seat in runtime.seats) == 2)
    assert {group.id for group in groups} == {f"{seat.name}.{seat.incarnation}/0" for seat in runtime.seats}
    assert not {seat.incarnation for seat in runtime.seats} & {incarnation for _, incarnation in before}
    assert runtime.replaced == 0


def wait_for_messages(runtime: LocalRuntime) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while any(seat.process.link._inbox.empty() for seat in runtime.seats):
        assert time.monotonic() < deadline
        time.sleep(0.01)
