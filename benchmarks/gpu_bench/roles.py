"""Trainer and searcher on one GPU: what each keeps of its speed alone."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Iterator
from typing import Any

from gpu_bench.decode import requests
from gpu_bench.models import make_engine, small
from gpu_bench.train import make_step, ragged_batch, step_seconds, useful_tokens
from gpu_bench.workloads import SHAPES, WORKLOADS, Row
from tba.config import load_config
from tba.runtime.mps import start_mps
from tba.types import Request, Sampling

WARM_SECONDS = 180.0
"""Most seconds until both roles have done something."""


def endless(vocabulary: int) -> Iterator[Request]:
    """Prompts of 128 tokens without end."""
    for repeat in itertools.count():
        yield from requests(WORKLOADS["shared"], vocabulary, repeat % 8)


def _search_role(tokens: Any, go: Any) -> None:
    """Decodes without end while `go` is set, counting tokens."""
    model = small()
    engine = make_engine(model, max_length=512)
    sampling = Sampling(max_new_tokens=128)
    for completion in engine.generate(endless(model.config.vocab_size), samples_per_prompt=8, sampling=sampling):
        tokens.value += len(completion.token_ids)
        go.wait()


def _train_role(tokens: Any, go: Any) -> None:
    model = small()
    batch = ragged_batch(model.config.vocab_size)
    step = make_step(model, share=True, max_tokens=16_384)
    while True:
        step_seconds(step, batch)
        tokens.value += useful_tokens(batch)
        go.wait()


def role_rows() -> Iterator[Row]:
    """Each alone, then both on the GPU, with MPS where it can be started. This process must not touch the GPU."""
    yield _measure_roles("without MPS")
    if start_mps(load_config(None, [])):
        yield _measure_roles("with MPS")
    else:
        yield Row(work="both roles on one GPU, MPS", figure="MPS could not be started")


def _measure_roles(label: str, seconds: float = 10.0) -> Row:
    context = multiprocessing.get_context("spawn")
    counts, gates = [context.Value("q", 0) for _ in range(2)], [context.Event() for _ in range(2)]
    targets = (_search_role, _train_role)
    processes = [context.Process(target=t, args=(c, g), daemon=True) for t, c, g in zip(targets, counts, gates)]
    for process, gate in zip(processes, gates):
        gate.set()
        process.start()
    deadline = time.monotonic() + WARM_SECONDS
    while not all(count.value for count in counts):  # both are warm
        if time.monotonic() > deadline or not all(process.is_alive() for process in processes):
            raise RuntimeError(f"searcher and trainer were not both at work within {WARM_SECONDS} s, or one died.")
        time.sleep(0.2)

    def rates(working: tuple[int, ...]) -> list[float]:
        for index, gate in enumerate(gates):
            gate.set() if index in working else gate.clear()
        time.sleep(2.0)
        before = [count.value for count in counts]
        time.sleep(seconds)
        return [(count.value - value) / seconds for count, value in zip(counts, before)]

    alone_search, alone_train, both = rates((0,))[0], rates((1,))[1], rates((0, 1))
    for process in processes:  # both at once: under MPS the end of one is a fault in the other
        process.kill()
    for process in processes:
        process.join()
    share = both[0] / alone_search + both[1] / alone_train
    rates_of = f"search {both[0]:,.0f} of {alone_search:,.0f}, train {both[1]:,.0f} of {alone_train:,.0f}"
    return Row(
        work=f"both roles on one GPU, {SHAPES['0.5B'].name}, {label}",
        figure=f"{share:.2f} (tok/s: {rates_of})",
        must="1.4, stretch 1.6",
    )
