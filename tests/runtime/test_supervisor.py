"""Searchers under the supervisor: what becomes of the visits of those that are gone, and of a searcher whose trainer is.
Searchers are real processes here."""

import subprocess
import sys
import threading
import time
from multiprocessing import Pipe

import numpy as np
import pytest
import targets
import torch

from tba.config import Config, RuntimeConfig
from tba.observe.claim import Holder
from tba.runtime.board import Board
from tba.runtime.ends import LocalSearcherEnds
from tba.runtime.leases import Visit, VisitLedger
from tba.runtime.links import (
    Acknowledge,
    AskVisits,
    EndsHandle,
    Evaluate,
    Holding,
    LeaseVisits,
    Link,
    NewTrainer,
    SearcherEnded,
    SearcherStarted,
)
from tba.runtime.local import LocalRuntime
from tba.runtime.processes import RoleDied
from tba.runtime.searcher_seats import MAX_EARLY_ENDS
from tba.runtime.seats import Host, LocalRoles
from tba.runtime.supervisor import Supervisor
from tba.runtime.weight_slots import WeightSlots
from tba.types import Prompt, TrajectoryGroup

DEADLINE_SECONDS = 60.0
TENSORS = {"w": torch.zeros(4)}


@pytest.fixture(autouse=True)
def little_time_to_stop(monkeypatch):
    monkeypatch.setattr("tba.runtime.searcher_seats.STOP_SECONDS", 1.0)


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
    monkeypatch.setattr("tba.runtime.searcher_seats.FIRST_BACK_OFF_SECONDS", 0.01)
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

    monkeypatch.setattr("tba.runtime.seats.RoleProcess", refuses)
    run.start(targets.sends_nonsense, num_searchers=1)
    with pytest.raises(RoleDied, match="searcher-0 could not be started: Resource temporarily unavailable"):
        run.drain_until(lambda: False)


def test_searchers_that_are_replaced_are_new_and_what_they_sent_is_dropped(run):
    runtime = run.start(targets.sends_its_incarnation, num_searchers=2)
    run.drain_until(lambda: len(runtime._searchers) == 2)
    before = set(runtime._searchers)
    runtime.ledger.lease(min(before), 3)
    runtime.evaluate(7)
    runtime.replace_searchers("of a test")
    assert runtime.ledger.num_handed_back == 3
    run.groups.clear()
    run.drain_until(lambda: len(run.groups) == 2)
    assert {group.id.partition("/")[0] for group in run.groups} == set(runtime._searchers)
    assert not before & set(runtime._searchers)


def test_the_supervisor_needs_no_torch():
    """Or it would not be there before everything else, and importing would take twice as long."""
    code = "import sys, tba.launch.supervise; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def group(number: int, visit: int) -> TrajectoryGroup:
    prompt = Prompt(id="p", token_ids=np.array([1], np.int32), text="")
    return TrajectoryGroup(id=f"searcher-0.a/{number}", prompt=prompt, trajectories=(), visit=visit)


def test_a_searcher_tells_a_new_trainer_what_it_has_and_sends_again_what_was_not_stored():
    """Of visits 0 to 4 it has begun 0, 1 and 2; the groups of 0 and 1 are sent, that of 0 is stored."""
    ours, theirs = Pipe()
    trainer, link = Link(ours), Link(theirs)
    board, slots = Board.create(), [WeightSlots.create(TENSORS, torch.float32) for _ in range(2)]
    handle = EndsHandle(board=board.memory.handle(), weights=slots[0].handle(), references=None)
    noted: list[TrajectoryGroup] = []
    ends = LocalSearcherEnds(link, handle, RuntimeConfig(), index=0, stock=5, note=noted.append)
    visits = [Visit(number=number, prompt=number, epoch=0) for number in range(5)]
    ends.visits.peek()  # asks for five

    def handle_until(condition) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            ends.handle_messages()
            assert time.monotonic() < deadline

    trainer.send(LeaseVisits(visits=tuple(visits)))
    handle_until(lambda: ends.visits.peek() is not None)
    for _ in range(3):
        ends.visits.take()
    for number in range(2):
        ends.sender.send(group(number, visit=number))
    trainer.send(Acknowledge(group_ids=("searcher-0.a/0",)))
    trainer.send(NewTrainer(weights=slots[1].handle(), references=None))
    old = ends.weights
    handle_until(lambda: ends.weights is not old)
    sent = [trainer.receive(DEADLINE_SECONDS) for _ in range(5)]
    assert sent[0] == AskVisits(count=5)
    assert [message.id for message in sent[1:3]] == ["searcher-0.a/0", "searcher-0.a/1"]
    assert sent[3] == Holding(visits=tuple(visits[1:]))
    assert sent[4].id == "searcher-0.a/1"
    assert [one.id for one in noted] == ["searcher-0.a/0"]
    slots[1].publish(TENSORS, version=3)
    assert ends.weights.newest_version == 3
    for connection in (ours, theirs):
        connection.close()


def trainer_on(connection) -> LocalRuntime:
    """What a trainer has of a run whose supervisor is the other end of this connection."""
    return LocalRuntime(
        RuntimeConfig(),
        Host(link=Link(connection), board=Board.create(), owner=Holder.of_this_process()),
        num_searchers=1,
        tensors=TENSORS,
        dtype=torch.float32,
        canary=lambda weights: np.zeros(64),
        ledger=VisitLedger(10, seed=0, shuffle=False),
    )


def test_a_new_trainer_takes_no_group_before_those_that_are_sent_again():
    """A searcher that outlived the trainer before may send a group before it learns of the new one. If that one were taken,
    the earlier ones, which are sent again after it, would count as stored already: numbers rise in the order of arrival."""
    ours, theirs = Pipe()
    supervisor, searcher, runtime = Link(ours), "searcher-0.a", trainer_on(theirs)
    visits = tuple(Visit(number=number, prompt=number, epoch=0) for number in range(2))
    supervisor.send(SearcherStarted(holder=searcher, survived=True))
    for message in (
        group(1, visit=1),
        Holding(visits=visits),
        group(0, visit=0),
        group(1, visit=1),
        AskVisits(count=1),
    ):
        supervisor.send(message, to=searcher)
    taken, deadline = [], time.monotonic() + DEADLINE_SECONDS
    while supervisor.receive() is None:  # the answer to the last message
        taken += [one.id for one in runtime.drain()]
        assert time.monotonic() < deadline
    assert taken == ["searcher-0.a/0", "searcher-0.a/1"]
    for connection in (ours, theirs):
        connection.close()


def test_a_new_trainer_asks_only_searchers_that_know_of_it_for_an_evaluation():
    """Any other one forgets the request when it learns of the new trainer: it may be one of the trainer before."""
    ours, theirs = Pipe()
    supervisor, survivor, other, runtime = Link(ours), "searcher-0.a", "searcher-1.b", trainer_on(theirs)
    told: list[tuple[str, object]] = []

    def drain_until(count: int) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(told) < count:
            runtime.drain()
            told.extend(supervisor.drain_addressed())
            assert time.monotonic() < deadline

    runtime.evaluate(7)
    supervisor.send(SearcherStarted(holder=survivor, survived=True))
    supervisor.send(SearcherStarted(holder=other, survived=False))
    drain_until(1)
    supervisor.send(SearcherEnded(holder=other, replaced=True))
    supervisor.send(Holding(visits=()), to=survivor)
    drain_until(2)
    assert told == [(other, Evaluate(version=7)), (survivor, Evaluate(version=7))]
    for connection in (ours, theirs):
        connection.close()
