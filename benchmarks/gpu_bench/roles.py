"""Trainer and searcher on one GPU: what each keeps of its speed alone."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections.abc import Iterator
from typing import Any

from gpu_bench.decode import requests
from gpu_bench.models import make_engine, small
from gpu_bench.train import make_step, ragged_batch, step_seconds, useful_tokens
from gpu_bench.workloads import SHAPES, WORKLOADS, Row
from tba.config import load_config
from tba.models.load import compile_layers
from tba.runtime.placement import lower_mps_priority, start_mps
from tba.types import Request, Sampling

WARM_SECONDS = 180.0
"""Most seconds until both roles have done something."""
PRESENT_SEARCH, PRESENT_TRAIN = 166_000, 164_000
"""Tokens/s alone that issue 20 counts shares of, whatever a role alone makes of this sitting."""
SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


def endless(vocabulary: int) -> Iterator[Request]:
    """Prompts of 128 tokens without end."""
    for repeat in itertools.count():
        yield from requests(WORKLOADS["shared"], vocabulary, repeat % 8)


def _search_role(tokens: Any, go: Any, share: int) -> None:
    """Decodes without end while `go` is set, counting tokens."""
    os.environ[SHARE] = str(share)  # before the GPU is touched
    model = small()
    engine = make_engine(model, max_length=512)
    sampling = Sampling(max_new_tokens=128)
    for completion in engine.generate(endless(model.config.vocab_size), samples_per_prompt=8, sampling=sampling):
        tokens.value += len(completion.token_ids)
        go.wait()


def _train_role(tokens: Any, go: Any, share: int) -> None:
    """Trains without end while `go` is set, compiled as runs on one GPU are, counting useful tokens."""
    os.environ[SHARE] = str(share)
    lower_mps_priority(load_config(None, ["model.device=cuda"]))  # as in a run
    model = small()
    batch = ragged_batch(model.config.vocab_size)
    step = make_step(model, max_tokens=16_384)
    compile_layers(model)
    step_seconds(step, batch)  # compiles: it is not work yet
    while True:
        step_seconds(step, batch)
        tokens.value += useful_tokens(batch)
        go.wait()


def role_rows() -> Iterator[Row]:
    """Each alone, then both on the GPU, with MPS where it can be started. This process must not touch the GPU."""
    yield measure_roles("without MPS")
    if start_mps(load_config(None, [])):
        yield measure_roles("with MPS")
    else:
        yield Row(work="both roles on one GPU, MPS", figure="MPS could not be started")


def measure_roles(label: str, *, seconds: float = 10.0, shares: tuple[int, int] = (100, 100)) -> Row:
    """`shares` are the percentages of the GPU's multiprocessors that searcher and trainer may use under MPS."""
    context = multiprocessing.get_context("spawn")
    counts, gates = [context.Value("q", 0) for _ in range(2)], [context.Event() for _ in range(2)]
    processes = [
        context.Process(target=target, args=(count, gate, share), daemon=True)
        for target, count, gate, share in zip((_search_role, _train_role), counts, gates, shares)
    ]
    for process, gate in zip(processes, gates):
        gate.set()
        process.start()
    try:
        _wait_until_warm(processes, counts)

        def rates(working: tuple[int, ...]) -> list[float]:
            for index, gate in enumerate(gates):
                gate.set() if index in working else gate.clear()
            time.sleep(2.0)
            before = [count.value for count in counts]
            time.sleep(seconds)
            return [(count.value - value) / seconds for count, value in zip(counts, before)]

        alone_search, alone_train, both = rates((0,))[0], rates((1,))[1], rates((0, 1))
    finally:
        for process in processes:  # both at once: under MPS the end of one is a fault in the other
            process.kill()
        for process in processes:
            process.join()
    own = both[0] / alone_search + both[1] / alone_train
    present = both[0] / PRESENT_SEARCH + both[1] / PRESENT_TRAIN
    return Row(
        work=f"both roles on one GPU, {SHAPES['0.5B'].name}, {label}",
        figure=f"{present:.2f} of {PRESENT_SEARCH / 1e3:.0f}k and {PRESENT_TRAIN / 1e3:.0f}k alone, {own:.2f} of this "
        f"sitting's (tok/s: search {both[0]:,.0f} of {alone_search:,.0f}, train {both[1]:,.0f} of {alone_train:,.0f})",
    )


def _wait_until_warm(processes: list[Any], counts: list[Any]) -> None:
    deadline = time.monotonic() + WARM_SECONDS
    while not all(count.value for count in counts):
        if time.monotonic() > deadline or not all(process.is_alive() for process in processes):
            raise RuntimeError(f"searcher and trainer were not both at work within {WARM_SECONDS} s, or one died.")
        time.sleep(0.2)
