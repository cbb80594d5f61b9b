"""What the durable replay costs (replay.durability).

    OMP_NUM_THREADS=1 python benchmarks/durability.py               # about ten minutes on two cores
    OMP_NUM_THREADS=1 python benchmarks/durability.py --pairs 1 --steps 20

First the store alone: groups of 8 responses of 64 tokens are appended as fast as it takes them. Then asynchronous runs of
configs/quickstart.yaml in turns, without and with the durable replay, with the same seed in a pair: trained responses per
second of wall time, and, because a busy machine makes that noisy, CPU seconds of the trainer's process and of its writer's
thread from the first optimizer step to the end. The cost is 1 - with / without of the rate, and with / without - 1 of the
CPU time per trained response; both must be at most 3%.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from tba.replay.durable import GroupStore
from tba.types import Completion, Prompt, Trajectory, TrajectoryGroup

RESPONSES, TOKENS = 8, 64
LIMIT = 0.03


def make_group(number: int, rng: np.random.Generator) -> TrajectoryGroup:
    def log_probs() -> np.ndarray:
        return -rng.random(TOKENS, dtype=np.float32)

    trajectories = tuple(
        Trajectory(
            completion=Completion(
                prompt_id="train-17",
                sample_index=sample,
                token_ids=rng.integers(0, 32_000, TOKENS, dtype=np.int32),
                behaviour_log_probs=log_probs(),
                policy_log_probs=log_probs(),
                version_spans=((0, 12), (40, 13)),
                finish="stop",
            ),
            rewards={"exact_match": float(rng.random() < 0.5)},
            log_ref=log_probs(),
            reference_version=0,
            loss_mask=np.ones(TOKENS, np.bool_),
        )
        for sample in range(RESPONSES)
    )
    prompt = Prompt(
        id="train-17",
        token_ids=rng.integers(0, 32_000, 60, dtype=np.int32),
        text="Tom has 3 apples and buys 4 more. How many apples has he now?" * 2,
        columns={"answer": "7", "solution": "3 + 4 = 7"},
    )
    return TrajectoryGroup(id=f"searcher-0.0/{number}", prompt=prompt, trajectories=trajectories)


def measure_store(durability: Any, *, count: int) -> dict[str, float]:
    """Groups per second and their cost, in the caller's thread and in the writer's."""
    rng = np.random.default_rng(0)
    groups = [make_group(number, rng) for number in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "replay.sqlite"
        store = GroupStore(path, durability=durability, capacity=10**9, reward_weights={"exact_match": 1.0})
        wall, process, thread = time.perf_counter(), time.process_time(), time.thread_time()
        for group in groups:
            store.append(group, step=0)
        appended = time.thread_time() - thread
        store.flush()
        seconds = time.perf_counter() - wall
        writer = time.process_time() - process - (time.thread_time() - thread)
        store.close()
        size = path.stat().st_size
    return {
        "groups_per_second": count / seconds,
        "bytes_per_group": size / count,
        "append_microseconds": 1e6 * appended / count,
        "writer_microseconds": 1e6 * writer / count,
    }


def run_here(overrides: list[str]) -> dict[str, float]:
    """One run in this process, with the CPU time of the trainer and of the writer's thread."""
    from tba.config import load_config
    from tba.launch import train
    from tba.observe.recorder import Recorder

    found, starts, close = {"started": 0.0, "writer": 0.0}, Recorder.training_starts, GroupStore.close

    def noting_start(self: Recorder) -> None:
        found["started"] = found["started"] or time.process_time()
        starts(self)

    def noting_writer(self: GroupStore) -> None:
        if self._writer.ident is not None and self._writer.is_alive():
            self.flush()
            found["writer"] = time.clock_gettime(time.pthread_getcpuclockid(self._writer.ident))
        close(self)

    Recorder.training_starts = noting_start  # type: ignore[method-assign]
    GroupStore.close = noting_writer  # type: ignore[method-assign]
    summary = train(load_config(Path("configs/quickstart.yaml"), overrides))
    cpu = time.process_time() - found["started"]
    return {
        "rate": summary["responses_trained"] / summary["seconds"],
        "cpu_per_response": cpu / summary["responses_trained"],
        "writer_share": found["writer"] / cpu,
        "writer_of_core": found["writer"] / summary["seconds"],
        "groups": summary["responses_generated"] / RESPONSES,
    }


def run_apart(durability: str, *, seed: int, steps: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"replay.durability={durability}", f"seed={seed}", f"train.max_steps={steps}", f"output={folder}"]
        settings += ["evaluate.num_prompts=8", "evaluate.every=0", "observe.progress=false", "train.keep_checkpoints=0"]
        command = [sys.executable, __file__, "--one", *settings]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"a run with {durability} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def report(name: str, costs: list[float]) -> None:
    error = statistics.stdev(costs) / math.sqrt(len(costs)) if len(costs) > 1 else math.nan
    verdict = "within" if statistics.mean(costs) <= LIMIT else "OVER"
    print(f"{name}: {statistics.mean(costs):+.2%} ± {error:.2%} of {len(costs)} pairs ({verdict} {LIMIT:.0%})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--groups", type=int, default=4000)
    parser.add_argument("--durability", default="process", choices=["process", "power"])
    parser.add_argument("--one", nargs="+", help="run once with these settings, and print the figures")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(run_here(arguments.one)))
        return
    for durability in ("process", "power"):
        figures = measure_store(durability, count=arguments.groups)
        print(f"store alone, {durability}:", ", ".join(f"{name} {value:.0f}" for name, value in figures.items()))
    slower: list[float] = []
    dearer: list[float] = []
    for pair in range(arguments.pairs):
        # In turns, and every other pair the other way round: the machine's speed drifts.
        order = ["off", arguments.durability][:: 1 if pair % 2 == 0 else -1]
        found = {kind: run_apart(kind, seed=pair, steps=arguments.steps) for kind in order}
        without, with_ = found["off"], found[arguments.durability]
        slower.append(1 - with_["rate"] / without["rate"])
        dearer.append(with_["cpu_per_response"] / without["cpu_per_response"] - 1)
        for kind, run in found.items():
            print(
                f"seed {pair}, {kind:>7}: {run['rate']:.0f} responses/s, {1e3 * run['cpu_per_response']:.2f} ms of CPU per "
                f"response, writer's thread {run['writer_share']:.2%} of it and {run['writer_of_core']:.2%} of a core, "
                f"{run['groups']:.0f} groups",
                flush=True,
            )
    if not slower:
        return
    report("fewer trained responses per second", slower)
    report("more CPU time of the trainer per trained response", dearer)


if __name__ == "__main__":
    main()
