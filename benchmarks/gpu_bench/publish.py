"""New weights: from the trainer's call to the searcher's engine computing with them, and where the time goes."""

from __future__ import annotations

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
from tba.models.policy import PolicyModel
from tba.runtime.links import Link
from tba.runtime.processes import RoleProcess, last_lines
from tba.runtime.slot_memory import SlotsHandle
from tba.runtime.weight_slots import WeightSlots
from tba.search.role import WeightLoader
from tba.types import Sampling


def _use_weights(link: Link, *, weights: SlotsHandle) -> None:
    """A searcher that decodes without end, and says when it has newer weights in use."""
    model = small()
    engine = make_engine(model, max_length=512)
    ends: Any = SimpleNamespace(weights=WeightSlots.attach(weights))  # all that a loader wants of a searcher's ends
    loader = WeightLoader(ends, engine)

    def tick() -> None:
        before = engine.version
        loader.load_newer()
        if engine.version != before:
            torch.cuda.synchronize()
            link.send((engine.version, time.monotonic()))

    prompts, sampling = endless(model.config.vocab_size), Sampling(max_new_tokens=128)
    for _ in engine.generate(prompts, samples_per_prompt=8, sampling=sampling, between_steps=tick):
        pass


def publish_rows(times: int = 30) -> Iterator[Row]:
    """From the trainer's call to the searcher's engine holding the weights, while it decodes 256 slots."""
    model = small()
    policy, tensors = PolicyModel(model), dict(model.named_parameters())
    slots = WeightSlots.create(tensors, model.dtype, device=device())
    log = Path(tempfile.mkdtemp()) / "searcher.log"
    process = RoleProcess("searcher", _use_weights, {"weights": slots.handle()}, log=log)
    latencies, writing = [], []
    for version in range(1, times + 6):
        started = time.monotonic()
        published = slots.publish(tensors, version=version)
        written = time.monotonic()
        slots.add_canary(policy.canary(published.tensors))
        found = process.link.receive(timeout_seconds=120.0)
        assert found is not None, f"the searcher said nothing; its end: {last_lines(log)}"
        assert found[0] == version, f"the searcher has version {found[0]} in use, not {version}"
        if version > 5:  # the first ones compile and capture
            latencies.append(1e3 * (found[1] - started))
            writing.append(1e3 * (written - started))
        time.sleep(0.05)
    process.kill()
    size = sum(tensor.numel() for tensor in tensors.values()) * model.dtype.itemsize
    yield Row(
        work=f"publish to in-use, {SHAPES['0.5B'].name}, same GPU, in flight, {times} times",
        figure=f"median {np.median(latencies):.1f} ms, longest {max(latencies):.1f} (writing {np.median(writing):.1f})",
        must="15 ms, stretch 10 ms",
        limit=f"three copies and two checksums of {size / 1e9:.1f} GB by bandwidth {8e3 * size / BYTES_PER_SECOND:.1f} ms, "
        "and at most 8 decode steps until the searcher looks",
    )
