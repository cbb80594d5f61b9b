"""Evaluations that a searcher is asked for: of the version asked for or a newer one, and none forgotten."""

import time
from multiprocessing import Pipe

import torch
from builders import tiny_llama

from tba.config import RuntimeConfig
from tba.generate.native.engine import NativeEngine
from tba.models.weights import make_weights
from tba.runtime.board import Board
from tba.runtime.ends import EndsHandle, LocalSearcherEnds
from tba.runtime.links import Evaluate, Evaluated, Link
from tba.runtime.weight_slots import WeightSlots
from tba.search.loop import FailureCount, SearchState
from tba.search.role import Evaluations, Heartbeat


class Versions:
    """An evaluator that tells the version it was given."""

    prompts = ()

    def __call__(self, engine, between_steps=None):
        return {"version": float(engine.version)}


def test_a_late_searcher_evaluates_the_start_although_more_was_asked_for_since():
    """Its process came up when the trainer had passed version 10 and asked again: the start must not be lost."""
    model = tiny_llama(max_position_embeddings=128)
    engine = NativeEngine(model, stop_ids=[2], seed=0, slots=4, max_length=128, dtype=torch.float32)
    connections = Pipe()
    trainer, searcher = (Link(connection) for connection in connections)
    slots, board = WeightSlots.create(make_weights(model, version=0).tensors, torch.float32), Board.create()
    handle = EndsHandle(board=board.memory.handle(), weights=slots.handle(), references=None)
    ends = LocalSearcherEnds(searcher, handle, RuntimeConfig(), index=0, stock=1)
    heartbeat = Heartbeat(ends.row, engine, SearchState(failures=FailureCount(max_in_a_row=1)))
    evaluations = Evaluations(ends, heartbeat, engine=engine, make=Versions)
    for version in (0, 5, 10):
        trainer.send(Evaluate(version=version))
    deadline = time.monotonic() + 30.0
    while len(ends._asked) < 3 and time.monotonic() < deadline:
        ends.handle_messages()
    evaluations.evaluate_if_asked()
    evaluations.evaluate_if_asked()
    assert trainer.receive(30.0) == Evaluated(version=0, metrics={"version": 0.0})
    engine.load(make_weights(model, version=12))
    evaluations.evaluate_if_asked()
    evaluations.evaluate_if_asked()
    assert trainer.receive(30.0) == Evaluated(version=12, metrics={"version": 12.0})
    assert ends._asked == []
    for connection in connections:
        connection.close()
