"""Evaluations that a searcher is asked for: of the version asked for or a newer one, and none forgotten."""

import time
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest
import torch
from builders import tiny_llama

from tba.config import RuntimeConfig
from tba.engine.native.engine import NativeEngine
from tba.models.weights import make_weights
from tba.runtime.connection import TrainerConnection
from tba.runtime.counters import SharedCounters
from tba.runtime.links import ConnectionHandle, Link
from tba.runtime.shared_weights import SharedWeights
from tba.searcher.loop import SearchCounts
from tba.searcher.process import SearcherRole, WeightLoader


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
    return SharedWeights.create(make_weights(model, version=0).tensors, torch.float32)


@pytest.fixture
def connected(slots):
    """The trainer's link, and a searcher's ends."""
    connections, counters = Pipe(), SharedCounters.create()
    trainer, searcher = (Link(connection) for connection in connections)
    handle = ConnectionHandle(counters=counters.memory.handle, weights=slots.handle(), references=None)
    yield trainer, TrainerConnection(searcher, handle, RuntimeConfig(), index=0, stock=1)
    for connection in connections:
        connection.close()


def make_role(connection, engine):
    """A searcher whose share of a step is four groups; what it generates is set by the test."""
    searcher = SimpleNamespace(
        engine=engine,
        counts=SearchCounts(),
        prompts=SimpleNamespace(peek=lambda: None),
        reference_version=0,
        send_ready=lambda at_least=1: None,
    )
    loader = WeightLoader(connection, engine, report=lambda gap: None)
    return SearcherRole(
        connection=connection, searcher=searcher, loader=loader, make_evaluator=Versions, first_groups=4
    )


def ask(trainer, connection, *versions):
    """Ask for evaluations, and wait until that has arrived."""
    for version in versions:
        trainer.send(("evaluate", version))
    deadline = time.monotonic() + 30.0
    while len(connection._asked) < len(versions) and time.monotonic() < deadline:
        connection.handle_messages()
    assert len(connection._asked) == len(versions)


def test_a_late_searcher_evaluates_the_start_although_more_was_asked_for_since(model, engine, connected):
    """Its process came up when the trainer had passed version 10 and asked again: the start must not be lost."""
    trainer, connection = connected
    role = make_role(connection, engine)
    ask(trainer, connection, 0, 5, 10)
    role.evaluate_if_asked()
    role.evaluate_if_asked()
    assert trainer.receive(30.0) == ("evaluated", (0, {"version": 0.0}))
    engine.load(make_weights(model, version=12))
    role.evaluate_if_asked()
    role.evaluate_if_asked()
    assert trainer.receive(30.0) == ("evaluated", (12, {"version": 12.0}))
    assert connection._asked == []


@pytest.fixture
def role(slots, engine, model, connected):
    """With version 0 published."""
    _, connection = connected
    publish(slots, model, version=0)
    return make_role(connection, engine)


def publish(slots, model, *, version):
    slots.publish(make_weights(model, version=version).tensors, version=version)


def test_a_steps_groups_come_before_the_evaluation_of_the_start(role, connected):
    trainer, connection = connected
    ask(trainer, connection, 0)
    role.start()
    role.searcher.counts.sent = 3
    role.tick()
    role.idle_tick()
    assert connection._asked == [0]
    role.searcher.counts.sent = 4
    role.tick()
    assert trainer.receive(30.0) == ("evaluated", (0, {"version": 0.0}))


def test_the_start_is_evaluated_before_newer_weights_are_loaded(role, connected, slots, model, engine):
    trainer, connection = connected
    ask(trainer, connection, 0)
    role.start()
    publish(slots, model, version=1)
    role.tick()
    assert trainer.receive(30.0) == ("evaluated", (0, {"version": 0.0}))
    assert engine.version == 1


def test_a_searcher_that_must_wait_evaluates_meanwhile(role, connected):
    trainer, connection = connected
    ask(trainer, connection, 0)
    role.start()
    role.searcher.prompts.peek = lambda: "a rollout that may not start yet"
    role.idle_tick()
    assert trainer.receive(30.0) == ("evaluated", (0, {"version": 0.0}))
