"""New weights: from the trainer's call to the searcher's engine computing with them, and where the time goes.

Trainer and searcher are processes, as in a run: in turns on the GPU, and side by side under MPS where that can be started.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from gpu_bench.models import device, make_engine, small
from gpu_bench.roles import endless
from gpu_bench.workloads import BYTES_PER_SECOND, SHAPES, Row
from tba.config import load_config
from tba.models.policy import PolicyModel
from tba.runtime.links import Link
from tba.runtime.mps import PIPES, start_mps
from tba.runtime.processes import RoleProcess, last_lines
from tba.runtime.slot_memory import SlotsHandle
from tba.runtime.weight_slots import WeightSlots
from tba.search.role import WeightLoader
from tba.types import Sampling, Weights

WARM = 5
"""Publications that are not counted: the first ones compile and capture."""
SECONDS = 240.0
"""Most seconds for one way of sharing the GPU."""


class TimedSlots(WeightSlots):
    """Slots that note when a version was seen and when it lay in the searcher's own memory."""

    seen = fetched = 0.0

    def fetch(self) -> Weights:
        self.seen = time.monotonic()
        found = super().fetch()
        self.fetched = time.monotonic()
        return found


def _use_weights(link: Link, *, weights: SlotsHandle) -> None:
    """A searcher that decodes without end, and says when it has newer weights in use."""
    model = small()
    engine = make_engine(model, max_length=512)
    slots = TimedSlots.attach(weights)
    assert isinstance(slots, TimedSlots)
    ends: Any = SimpleNamespace(weights=slots)  # all that a loader wants of a searcher's ends
    loader = WeightLoader(ends, engine)

    def tick() -> None:
        before = engine.version
        loader.load_newer()
        if engine.version != before:
            torch.cuda.synchronize()
            link.send((engine.version, slots.seen, slots.fetched, time.monotonic()))

    prompts, sampling = endless(model.config.vocab_size), Sampling(max_new_tokens=128)
    for _ in engine.generate(prompts, samples_per_prompt=8, sampling=sampling, between_steps=tick):
        pass


def _publish(found: Any, times: int) -> None:
    """The trainer's process: sends [times, 4] moments in milliseconds since the call: written, seen, fetched, in use."""
    model = small()
    policy, tensors = PolicyModel(model), dict(model.named_parameters())
    slots = WeightSlots.create(tensors, model.dtype, device=device())
    log = Path(tempfile.mkdtemp()) / "searcher.log"
    process = RoleProcess("searcher", _use_weights, {"weights": slots.handle()}, log=log)
    moments = []
    for version in range(1, times + 1 + WARM):
        started = time.monotonic()
        published = slots.publish(tensors, version=version)
        written = time.monotonic()
        slots.add_canary(policy.canary(published.tensors))
        told = process.link.receive(timeout_seconds=120.0)
        assert told is not None, f"the searcher said nothing; its end: {last_lines(log)}"
        assert told[0] == version, f"the searcher has version {told[0]} in use, not {version}"
        moments.append([1e3 * (moment - started) for moment in (written, *told[1:])])
        time.sleep(0.05)  # the canary is compared and decoding goes on, as between two optimizer steps
    process.kill()
    found.send(moments[WARM:])


def measure_publish(times: int) -> np.ndarray:
    """What `_publish` sends, from a process of its own: this one must not touch the GPU before MPS is there."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_publish, args=(theirs, times))
    process.start()
    theirs.close()
    try:
        if not ours.poll(SECONDS):
            raise TimeoutError(f"{times + WARM} publications took more than {SECONDS} s.")
        return np.array(ours.recv())
    finally:
        process.kill()
        process.join()


def publish_rows(times: int = 30) -> Iterator[Row]:
    """From the trainer's call to the searcher's engine holding the weights, while it decodes 256 slots."""
    ways = ["with MPS"] if PIPES in os.environ else ["without MPS", "with MPS"]
    size = 2 * SHAPES["0.5B"].matrix_parameters
    for way in ways:
        if way == "with MPS" and PIPES not in os.environ and not start_mps(load_config(None, [])):
            yield Row(work="publish to in-use, MPS", figure="MPS could not be started")
            continue
        moments = measure_publish(times)
        parts = np.diff(moments, axis=1, prepend=0.0)
        named = zip(("written", "seen", "copied and checked", "loaded"), np.median(parts, axis=0))
        yield Row(
            work=f"publish to in-use, {SHAPES['0.5B'].name}, same GPU, in flight, {times} times, {way}",
            figure=f"median {np.median(moments[:, -1]):.1f} ms, longest {moments[:, -1].max():.1f} "
            f"({', '.join(f'{name} {value:.1f}' for name, value in named)})",
            must="15 ms, stretch 10 ms",
            limit=f"three copies and two checksums of {size / 1e9:.1f} GB by bandwidth {8e3 * size / BYTES_PER_SECOND:.1f} "
            "ms, and the decode steps until the searcher looks and that are under way then",
        )
