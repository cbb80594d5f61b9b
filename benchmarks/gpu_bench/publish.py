"""New weights: from the trainer's call to the searcher's engine computing with them, and where the time goes.

Trainer and searcher are processes, as in a run: in turns on the GPU, and side by side under MPS where that can be started.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from gpu_bench.models import device, make_engine, small
from gpu_bench.roles import endless
from gpu_bench.workloads import BYTES_PER_SECOND, SHAPES, Row
from tba.config import load_config
from tba.models.policy import PolicyModel
from tba.runtime.links import Link
from tba.runtime.placement import PIPES, start_mps
from tba.runtime.processes import RoleProcess, last_lines
from tba.runtime.shared_weights import SharedWeights
from tba.runtime.weight_memory import SharedWeightsHandle
from tba.searcher.process import WeightLoader
from tba.types import Sampling, Weights

WARM = 5
"""Publications that are not counted: the first ones compile and capture."""
START_SECONDS, VERSION_SECONDS = 60.0, 20.0
"""Most seconds until the searcher decodes, and until it has one version in use."""


class TimedWeights(SharedWeights):
    """Slots that note when a version was seen and when it lay in the searcher's own memory."""

    seen = fetched = 0.0

    def fetch(self) -> Weights:
        self.seen = time.monotonic()
        found = super().fetch()
        self.fetched = time.monotonic()
        return found


def search(slots: TimedWeights, model: PreTrainedModel, tell: Callable[[Any], None]) -> None:
    """Decode without end. Report each stage, and the times at which newer weights were seen, fetched and in use."""
    engine = make_engine(model, max_length=512)
    tell("has its engine")
    ends: Any = SimpleNamespace(weights=slots)  # all that a loader uses of a searcher's connection
    loader = WeightLoader(ends, engine)
    loader.check_first()
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        before, ticks = engine.version, ticks + 1
        if ticks == WARM_TICKS:
            tell("decodes")
        loader.load_newer()
        if engine.version != before:
            if engine.device.type == "cuda":
                torch.cuda.synchronize()
            tell((engine.version, slots.seen, slots.fetched, time.monotonic()))

    prompts, sampling = endless(model.config.vocab_size), Sampling(max_new_tokens=128)
    for _ in engine.generate(prompts, samples_per_prompt=8, sampling=sampling, between_steps=tick):
        pass


def _search_role(link: Link, *, weights: SharedWeightsHandle) -> None:
    """The searcher's process."""
    slots = TimedWeights.attach(weights)
    assert isinstance(slots, TimedWeights)
    link.send("runs")
    search(slots, small(), link.send)


WARM_TICKS = 20
"""Turns of the searcher's loop after which its graphs are captured."""


def publish_times(times: int, say: Callable[[str], None] = lambda text: None) -> np.ndarray:
    """[times, 4]: milliseconds since the trainer's call until a version was written, seen, fetched and in use."""
    model = small()
    tensors = dict(model.named_parameters())
    slots = SharedWeights.create(tensors, model.dtype, device=device())
    first = slots.publish(tensors, version=0)
    log = Path(tempfile.mkdtemp()) / "searcher.log"
    process = RoleProcess("searcher", _search_role, {"weights": slots.handle()}, log=log)
    say("the trainer has its model and buffers")

    def told(seconds: float, what: str) -> Any:
        found = process.link.receive(timeout_seconds=seconds)
        if found is None:
            alive = "lives" if process.alive else f"ended with status {process.status}"
            raise RuntimeError(
                f"nothing from the searcher, which {alive}, within {seconds} s: {what}. {last_lines(log)}"
            )
        return found

    try:
        policy = PolicyModel(model)
        slots.add_canary(policy.canary(first.tensors))
        say("the trainer has its canary")
        for stage in ("runs", "has its engine", "decodes"):
            assert told(START_SECONDS, f"it {stage}") == stage
            say(f"the searcher {stage}")
        moments = []
        for version in range(1, times + 1 + WARM):
            started = time.monotonic()
            published = slots.publish(tensors, version=version)
            written = time.monotonic()
            slots.add_canary(policy.canary(published.tensors))
            found = told(VERSION_SECONDS, f"version {version} is in use")
            assert found[0] == version, f"the searcher has version {found[0]} in use, not {version}"
            moments.append([1e3 * (moment - started) for moment in (written, *found[1:])])
            if version in (1, WARM, times + WARM):
                say(f"version {version} in use: {', '.join(f'{moment:.1f}' for moment in moments[-1])} ms")
            time.sleep(0.05)  # the canary is compared and decoding goes on, as between two optimizer steps
    finally:
        process.kill()
    return np.array(moments[WARM:])


def _publish_role(found: Any, times: int) -> None:
    """The trainer's process."""
    found.send(publish_times(times))


def measure_publish(times: int) -> np.ndarray:
    """`publish_times` in a process of its own: this one must not touch the GPU before MPS is there."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_publish_role, args=(theirs, times))
    process.start()
    theirs.close()  # so that its end is seen here
    try:
        return ours.recv()  # it ends by itself: every wait in it has a deadline
    except EOFError:
        raise RuntimeError("the trainer's process ended with an error; it is above.") from None
    finally:
        process.kill()
        process.join()


def publish_row(moments: np.ndarray, way: str) -> Row:
    parts = np.diff(moments, axis=1, prepend=0.0)
    named = zip(("written", "seen", "copied and checked", "loaded"), np.median(parts, axis=0))
    size = 2 * SHAPES["0.5B"].matrix_parameters
    return Row(
        work=f"publish to in-use, {SHAPES['0.5B'].name}, same GPU, in flight, {len(moments)} times, {way}",
        figure=f"median {np.median(moments[:, -1]):.1f} ms, longest {moments[:, -1].max():.1f} "
        f"({', '.join(f'{name} {value:.1f}' for name, value in named)})",
        limit=f"three copies and two checksums of {size / 1e9:.1f} GB by bandwidth {8e3 * size / BYTES_PER_SECOND:.1f} "
        "ms, and the decode steps until the searcher looks and that are under way then",
    )


def publish_rows(times: int = 30) -> Iterator[Row]:
    """From the trainer's call to the searcher's engine holding the weights, while it decodes 256 slots."""
    if PIPES not in os.environ:
        yield publish_row(measure_publish(times), "without MPS")
        if not start_mps(load_config(None, [])):
            yield Row(work="publish to in-use, MPS", figure="MPS could not be started")
            return
    yield publish_row(measure_publish(times), "with MPS")
