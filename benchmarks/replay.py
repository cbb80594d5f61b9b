"""Speed and memory of the replay buffer, in one process and one thread.

    OMP_NUM_THREADS=1 python benchmarks/replay.py            # about two minutes, 1.5 GB
    OMP_NUM_THREADS=1 python benchmarks/replay.py --quick    # a tenth of the size

Each size is measured in turns with a buffer of 10k trajectories. `add` is a group of 24 responses of 40 to 60 tokens:
while the buffer fills, and when every group evicts another. `sample` is 128 responses (16 x 8, or 1 x 128 of the one
prompt) with m = .5 and inverse temperature 1. Times are CPU time of the one thread: nothing here waits.

Memory is what the process grew by against the payload, which is int32 ids and three float32 log-probs, 16 bytes a token,
and nothing else: when the buffer is full, and after a fifth of it was replaced, with dead tokens between the live ones.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tba.config import ReplayConfig
from tba.replay import ReplayBuffer
from tba.types import Completion, Prompt, Trajectory, TrajectoryGroup

GROUP_SIZE = 24
BYTES_PER_TOKEN = 16
NUM_BLOCKS, BLOCK = 40, 25
LIMIT_MS, LIMIT_SLOWDOWN, LIMIT_MEMORY = 1.0, 1.5, 1.5


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Scenario(name="10k prompts", num_rows=1_000_000, num_prompts=10_000, capacity_per_prompt=100, P=16, K=8)"""

    name: str
    num_rows: int
    num_prompts: int
    capacity_per_prompt: int
    P: int
    K: int


@dataclass(frozen=True, kw_only=True)
class Pair:
    """CPU milliseconds of one call, at 10k trajectories and at full size."""

    small_ms: float
    full_ms: float
    slowest_ms: float
    """The slowest single call at full size."""

    @property
    def ratio(self) -> float:
        return self.full_ms / self.small_ms


def make_group(number: int, prompt: Prompt, rng: np.random.Generator) -> TrajectoryGroup:
    lengths = rng.integers(40, 61, GROUP_SIZE)
    ids = rng.integers(0, 32_000, (GROUP_SIZE, 60), dtype=np.int32)
    log_probs = -rng.random((3, GROUP_SIZE, 60), dtype=np.float32)
    trajectories = tuple(
        _trajectory(i, ids[i, :n], log_probs[:, i, :n], float(rng.random())) for i, n in enumerate(lengths)
    )
    return TrajectoryGroup(id=f"searcher-0.0/{number}", prompt=prompt, trajectories=trajectories)


def _trajectory(index: int, ids: np.ndarray, log_probs: np.ndarray, reward: float) -> Trajectory:
    completion = Completion(
        prompt_id="",
        sample_index=index,
        token_ids=ids,
        behaviour_log_probs=log_probs[0],
        policy_log_probs=log_probs[1],
        version_spans=((0, 0),),
        finish="stop",
    )
    mask = np.ones(len(ids), np.bool_)
    return Trajectory(
        completion=completion,
        rewards={"exact_match": reward},
        log_ref=log_probs[2],
        reference_version=0,
        loss_mask=mask,
    )


def groups(scenario: Scenario) -> Iterator[TrajectoryGroup]:
    """Visits to the prompts in a random order, again and again."""
    rng = np.random.default_rng(0)
    prompts = [
        Prompt(id=f"train-{i}", token_ids=rng.integers(0, 32_000, 30, dtype=np.int32), text="")
        for i in range(scenario.num_prompts)
    ]
    number = 0
    while True:
        for i in rng.permutation(len(prompts)):
            yield make_group(number, prompts[i], rng)
            number += 1


class Bench:
    """A buffer and an endless supply of groups; every method returns the milliseconds of one call."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.source = groups(scenario)
        self.num_added = 0
        self.empty()

    def empty(self) -> None:
        config = ReplayConfig(
            capacity=self.scenario.num_rows,
            capacity_per_prompt=self.scenario.capacity_per_prompt,
            deduplicate=True,
            on_policy_probability=0.5,
            inverse_temperature=1.0,
        )
        self.buffer = ReplayBuffer(config, fresh_steps=4, seed=0, reward_names=["exact_match"], reward_weights=[1.0])

    @property
    def fullness(self) -> float:
        return len(self.buffer) / self.scenario.num_rows

    @property
    def step(self) -> int:
        """Sixteen groups per optimizer step."""
        return self.num_added // 16

    def add(self) -> float:
        """Making the group is not counted."""
        group = next(self.source)
        start = time.thread_time()
        self.buffer.add(group, step=self.step)
        self.num_added += 1
        return 1e3 * (time.thread_time() - start)

    def fill(self, fullness: float) -> None:
        while self.fullness < fullness:
            self.add()

    def add_while_filling(self) -> float:
        """An add that evicts nothing, in the upper half: a full buffer starts anew."""
        if self.fullness > 0.95:
            self.empty()
            self.fill(0.5)
        return self.add()

    def sample(self) -> float:
        start = time.thread_time()
        self.buffer.sample(self.scenario.P, self.scenario.K, step=self.step)
        return 1e3 * (time.thread_time() - start)

    def memory(self, before: int) -> float:
        return (resident_bytes() - before) / (self.buffer.stats()["tokens"] * BYTES_PER_TOKEN)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def alternate(small: Callable[[], float], full: Callable[[], float]) -> Pair:
    """Time two calls in turns, so that both meet the same moments of a shared machine.

    The median over blocks of the block's mean: cheap and dear calls are averaged, bursts of other programs are not.
    """
    blocks = np.array([[[call() for _ in range(BLOCK)] for call in (small, full)] for _ in range(NUM_BLOCKS)])
    means = np.median(blocks.mean(axis=2), axis=0)
    return Pair(small_ms=float(means[0]), full_ms=float(means[1]), slowest_ms=float(blocks[:, 1].max()))


def measure(small_scenario: Scenario, full_scenario: Scenario) -> dict[str, Any]:
    small, full = Bench(small_scenario), Bench(full_scenario)
    small.fill(0.99)
    full.add()
    full.empty()
    gc.collect()
    before = resident_bytes()
    full.fill(0.9)
    filling = alternate(small.add_while_filling, full.add)
    full.fill(0.99)
    small.fill(0.99)
    memory = full.memory(before)
    for _ in range(full_scenario.num_rows // (5 * GROUP_SIZE)):
        full.add()
    steady = alternate(small.add, full.add)
    sample = alternate(small.sample, full.sample)
    pairs = {"add, filling": filling, "add, evicting": steady, "sample of 128": sample}
    return {"pairs": {name: asdict(pair) for name, pair in pairs.items()}, "memory": [memory, full.memory(before)]}


def measure_in_child(small: Scenario, full: Scenario) -> dict[str, Any]:
    """Memory is counted from a clean start."""
    command = [sys.executable, __file__, "--scenarios", json.dumps([asdict(small), asdict(full)])]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def scenarios(scale: float) -> list[tuple[Scenario, Scenario]]:
    """(at 10k trajectories, at full size)"""
    many, one = int(10_000 * scale), int(150_000 * scale)
    return [
        (
            Scenario(name="many prompts", num_rows=10_000, num_prompts=100, capacity_per_prompt=100, P=16, K=8),
            Scenario(name="many prompts", num_rows=many * 100, num_prompts=many, capacity_per_prompt=100, P=16, K=8),
        ),
        (
            Scenario(name="one prompt", num_rows=10_000, num_prompts=1, capacity_per_prompt=200_000, P=1, K=128),
            Scenario(name="one prompt", num_rows=one, num_prompts=1, capacity_per_prompt=200_000, P=1, K=128),
        ),
    ]


def report(full: Scenario, result: dict[str, Any]) -> None:
    print(f"\n{full.num_rows:,} responses of {full.num_prompts:,} prompt{'s'[: full.num_prompts - 1]}")
    print(f"    {'':<16}{'at 10k':>10}{'full':>10}{'ratio':>8}{'slowest':>10}")
    for name, values in result["pairs"].items():
        pair = Pair(**values)
        ok = pair.full_ms <= LIMIT_MS and pair.ratio <= LIMIT_SLOWDOWN
        times = f"{pair.small_ms:>7.3f} ms{pair.full_ms:>7.3f} ms{pair.ratio:>7.2f}x{pair.slowest_ms:>7.2f} ms"
        print(f"    {name:<16}{times}  {'ok' if ok else 'MISSED'}")
    full_memory, steady_memory = result["memory"]
    ok = max(full_memory, steady_memory) <= LIMIT_MEMORY
    print(f"    memory / payload: {full_memory:.2f} when full, {steady_memory:.2f} later  {'ok' if ok else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the size")
    parser.add_argument("--scenarios", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.scenarios:
        small, full = (Scenario(**values) for values in json.loads(arguments.scenarios))
        print(json.dumps(measure(small, full)))
        return
    print(f"limits: {LIMIT_MS} ms, {LIMIT_SLOWDOWN}x the time at 10k, {LIMIT_MEMORY}x the payload")
    for small, full in scenarios(0.1 if arguments.quick else 1.0):
        report(full, measure_in_child(small, full))


if __name__ == "__main__":
    main()
