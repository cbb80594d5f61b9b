"""Evaluations that a searcher is asked for: of the version asked for or a newer one, and none forgotten."""

import time
from multiprocessing import Pipe

import torch
from builders import tiny_llama

from tba.config import RuntimeConfig
from tba.generate.native.engine import NativeEngine
from tba.models.weights import make_weights
from tba.runtime.board import Board
from tba.runtime.channels import Evaluate, Evaluated, Link
from tba.search.loop import FailureCount, SearchState
from tba.search.role import Evaluations, Heartbeat, Inbox


class Versions:
    """An evaluator that tells the version it was given."""

    prompts = ()

    def __call__(self, engine, between_steps=None):
        return {"version": float(engine.version)}


def test_a_late_searcher_evaluates_the_start_although_more_was_asked_for_since():
    """Its process came up when the trainer had passed version 10 and asked again: the start must not be lost."""
    model = tiny_llama(max_position_embeddings=128)
    engine = NativeEngine(model, stop_ids=[2], seed=0, slots=4, max_length=128, dtype=torch.float32)
    ends = Pipe()
    trainer, searcher = (Link(end, on_close=lambda: None) for end in ends)
    row = Board.create(1).searcher(0)
    heartbeat = Heartbeat(row, engine, SearchState(failures=FailureCount(max_in_a_row=1)))
    inbox = Inbox(searcher, row, heartbeat, RuntimeConfig(), progress=lambda: 0.0, stock=1)
    evaluations = Evaluations(searcher, inbox, heartbeat, engine=engine, make=Versions)
    for version in (0, 5, 10):
        trainer.send(Evaluate(version=version))
    deadline = time.monotonic() + 30.0
    while len(inbox.asked) < 3 and time.monotonic() < deadline:
        inbox.handle_messages()
    evaluations.evaluate_if_asked()
    evaluations.evaluate_if_asked()
    assert trainer.receive(30.0) == Evaluated(version=0, metrics={"version": 0.0})
    engine.load(make_weights(model, version=12))
    evaluations.evaluate_if_asked()
    evaluations.evaluate_if_asked()
    assert trainer.receive(30.0) == Evaluated(version=12, metrics={"version": 12.0})
    assert list(inbox.asked) == []
    for end in ends:
        end.close()
