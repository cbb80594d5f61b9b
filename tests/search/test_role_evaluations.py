"""Evaluations that a searcher is asked for: of the version asked for or a newer one, and none forgotten."""

import time
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest
import torch
from builders import tiny_llama

from tba.config import RuntimeConfig
from tba.generate.native.engine import NativeEngine
from tba.models.weights import make_weights
from tba.runtime.board import Board
from tba.runtime.ends import SearcherEnds
from tba.runtime.links import EndsHandle, Link
from tba.runtime.weight_slots import WeightSlots
from tba.search.loop import SearchCounts
from tba.search.role import SearcherRole, WeightLoader


class Versions:
    """An evaluator that tells the version it was given."""

    prompts = ()

    def __call__(self, engine, between_steps=None):
        return {"version": float(engine.version)}


@pytest.fixture
def model():
    return tiny_llama(max_position_embeddings=128)


@pytest.fixture
def engine(model):
    return NativeEngine(model, stop_ids=[2], seed=0, slots=4, max_length=128, dtype=torch.float32)


@pytest.fixture
def slots(model):
    return WeightSlots.create(make_weights(model, version=0).tensors, torch.float32)


@pytest.fixture
def both_ends(slots):
    """The trainer's link, and a searcher's ends."""
    connections, board = Pipe(), Board.create()
    trainer, searcher = (Link(connection) for connection in connections)
    handle = EndsHandle(board=board.memory.handle, weights=slots.handle(), references=None)
    yield trainer, SearcherEnds(searcher, handle, RuntimeConfig(), index=0, stock=1)
    for connection in connections:
        connection.close()


def make_role(ends, engine):
    """A searcher whose share of a step is four groups; what it generates is set by the test."""
    searcher = SimpleNamespace(
        engine=engine,
        counts=SearchCounts(),
        prompts=SimpleNamespace(peek=lambda: None),
        scorer=SimpleNamespace(reference_version=0),
        send_ready=lambda at_least=1: None,
    )
    loader = WeightLoader(ends, engine, report=lambda gap: None)
    return SearcherRole(ends=ends, searcher=searcher, loader=loader, make_evaluator=Versions, first_groups=4)


def ask(trainer, ends, *versions):
    """Ask for evaluations, and wait until that has arrived."""
    for version in versions:
        trainer.send(("evaluate", version))
    deadline = time.monotonic() + 30.0
    while len(ends._asked) < len(versions) and time.monotonic() < deadline:
        ends.handle_messages()
    assert len(ends._asked) == len(versions)


def test_a_late_searcher_evaluates_the_start_although_more_was_asked_for_since(model, engine, both_ends):
    """Its process came up when the trainer had passed version 10 and asked again: the start must not be lost."""
    trainer, ends = both_ends
    role = make_role(ends, engine)
    ask(trainer, ends, 0, 5, 10)
    role.evaluate_if_asked()
    role.evaluate_if_asked()
    assert trainer.receive(30.0) == ("evaluated", (0, {"version": 0.0}))
    engine.load(make_weights(model, version=12))
    role.evaluate_if_asked()
    role.evaluate_if_asked()
    assert trainer.receive(30.0) == ("evaluated", (12, {"version": 12.0}))
    assert ends._asked == []


@pytest.fixture
def role(slots, engine, model, both_ends):
    """With version 0 published."""
    _, ends = both_ends
    publish(slots, model, version=0)
    return make_role(ends, engine)


def publish(slots, model, *, version):
    slots.publish(make_weights(model, version=version).tensors, version=version)


def test_a_steps_groups_come_before_the_evaluation_of_the_start(role, both_ends):
    trainer, ends = both_ends
    ask(trainer, ends, 0)
    role.start()
    role.searcher.counts.sent = 3
    role.tick()
    role.idle_tick()
    assert ends._asked == [0]
    role.searcher.counts.sent = 4
    role.tick()
    assert trainer.receive(30.0) == ("evaluated", (0, {"version": 0.0}))


def test_the_start_is_evaluated_before_newer_weights_are_loaded(role, both_ends, slots, model, engine):
    trainer, ends = both_ends
    ask(trainer, ends, 0)
    role.start()
    publish(slots, model, version=1)
    role.tick()
    assert trainer.receive(30.0) == ("evaluated", (0, {"version": 0.0}))
    assert engine.version == 1


def test_a_searcher_that_must_wait_evaluates_meanwhile(role, both_ends):
    trainer, ends = both_ends
    ask(trainer, ends, 0)
    role.start()
    role.searcher.prompts.peek = lambda: "a visit that may not start yet"
    role.idle_tick()
    assert trainer.receive(30.0) == ("evaluated", (0, {"version": 0.0}))
