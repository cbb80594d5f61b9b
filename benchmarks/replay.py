"""Speed and memory of the replay buffer, in one process and one thread.

    OMP_NUM_THREADS=1 python benchmarks/replay.py            # about two minutes, 1.5 GB
    OMP_NUM_THREADS=1 python benchmarks/replay.py --quick    # a tenth of the size

Each scenario is measured at 10k trajectories and at full size, in a child process of its own so that memory is counted
from a clean start. `add` is a group of 24 responses of 40 to 60 tokens: while the buffer fills, and once every group
evicts another (steady). `sample` is 128 responses with m = .5 and inverse temperature 1. Memory is what the process grew
by when full, against the payload: int32 ids and three float32 log-probs, 16 bytes a token; and after 20% of the buffer
was replaced (steady), when dead tokens lie between the live ones.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tba.config import ReplayConfig
from tba.replay import ReplayBuffer
from tba.types import Completion, Prompt, Trajectory, TrajectoryGroup

GROUP_SIZE = 24
BYTES_PER_TOKEN = 16
NUM_SAMPLES = 500
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
class Result:
    add_ms: float
    steady_add_ms: float
    slowest_add_ms: float
    sample_ms: float
    memory: float
    steady_memory: float
    """Growth / payload."""


def make_group(number: int, prompt: Prompt, rng: np.random.Generator) -> TrajectoryGroup:
    lengths = rng.integers(40, 61, GROUP_SIZE)
    ids = rng.integers(0, 32_000, (GROUP_SIZE, 60), dtype=np.int32)
    log_probs = -rng.random((3, GROUP_SIZE, 60), dtype=np.float32)
    trajectories = tuple(
        _trajectory(i, ids[i, :n], log_probs[:, i, :n], float(rng.random())) for i, n in enumerate(lengths)
    )
    return TrajectoryGroup(id=f"searcher-0/{number}", prompt=prompt, trajectories=trajectories)


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


def time_adds(buffer: ReplayBuffer, source: Iterator[TrajectoryGroup], count: int, first_step: int) -> np.ndarray:
    """Milliseconds of each add; making the group is not counted. Sixteen groups per optimizer step."""
    times = []
    for number in range(count):
        group = next(source)
        start = time.thread_time()
        buffer.add(group, step=first_step + number // 16)
        times.append(time.thread_time() - start)
    return 1e3 * np.array(times)


def time_samples(buffer: ReplayBuffer, scenario: Scenario, step: int) -> float:
    """Mean milliseconds; the buffer is as warm as it would be between optimizer steps."""
    start = time.thread_time()
    for _ in range(NUM_SAMPLES):
        buffer.sample(scenario.P, scenario.K, step=step)
    return 1e3 * (time.thread_time() - start) / NUM_SAMPLES


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


def measure(scenario: Scenario) -> Result:
    config = ReplayConfig(
        capacity=scenario.num_rows,
        capacity_per_prompt=scenario.capacity_per_prompt,
        on_policy_probability=0.5,
        inverse_temperature=1.0,
    )
    source = groups(scenario)
    next(source)
    before = resident_bytes()
    buffer = ReplayBuffer(config, fresh_steps=4, seed=0, reward_names=["exact_match"], reward_weights=[1.0])
    num_groups = scenario.num_rows // GROUP_SIZE
    filling = time_adds(buffer, source, num_groups, first_step=0)
    while len(buffer) < scenario.num_rows * 0.98:  # per-prompt capacity evicts before all is full
        filling = np.append(filling, time_adds(buffer, source, max(1, num_groups // 20), first_step=num_groups // 16))
    memory = (resident_bytes() - before) / (buffer.stats()["tokens"] * BYTES_PER_TOKEN)
    steady = time_adds(buffer, source, max(1000, num_groups // 5), first_step=num_groups // 8)
    steady_memory = (resident_bytes() - before) / (buffer.stats()["tokens"] * BYTES_PER_TOKEN)
    last = max(400, num_groups // 2)
    return Result(
        add_ms=float(filling[-last:].mean()),
        steady_add_ms=float(steady.mean()),
        slowest_add_ms=float(steady.max()),
        sample_ms=time_samples(buffer, scenario, step=num_groups // 8 + len(steady) // 16),
        memory=memory,
        steady_memory=steady_memory,
    )


def measure_in_child(scenario: Scenario) -> Result:
    command = [sys.executable, __file__, "--scenario", json.dumps(asdict(scenario))]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Result(**json.loads(output))


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


def print_row(scenario: Scenario, result: Result) -> None:
    print(
        f"{scenario.name:<14}{scenario.num_rows:>11,}{result.add_ms:>10.3f}{result.steady_add_ms:>14.3f}"
        f"{result.slowest_add_ms:>14.2f}{result.sample_ms:>11.3f}{result.memory:>9.2f}{result.steady_memory:>15.2f}"
    )


def check(small: Result, full: Result) -> str:
    times = [(full.add_ms, small.add_ms), (full.steady_add_ms, small.steady_add_ms), (full.sample_ms, small.sample_ms)]
    slowdown = max(large / little for large, little in times)
    slowest, memory = max(large for large, _ in times), max(full.memory, full.steady_memory)
    ok = slowest <= LIMIT_MS and slowdown <= LIMIT_SLOWDOWN and memory <= LIMIT_MEMORY
    return (
        f"    {'ok' if ok else 'MISSED'}: slowest mean {slowest:.3f} ms (at most {LIMIT_MS}), "
        f"{slowdown:.2f}x its time at 10k (at most {LIMIT_SLOWDOWN}), memory {memory:.2f}x (at most {LIMIT_MEMORY})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the size")
    parser.add_argument("--scenario", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.scenario:
        print(json.dumps(asdict(measure(Scenario(**json.loads(arguments.scenario))))))
        return
    print(f"{'':<14}{'responses':>11}{'add ms':>10}{'steady add ms':>14}{'slowest ms':>14}{'sample ms':>11}"
          f"{'memory':>9}{'steady memory':>15}")  # fmt: skip
    for small, full in scenarios(0.1 if arguments.quick else 1.0):
        results = measure_in_child(small), measure_in_child(full)
        for scenario, result in zip((small, full), results):
            print_row(scenario, result)
        print(check(*results))


if __name__ == "__main__":
    main()
