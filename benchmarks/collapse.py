"""The collapse guard: runs that collapse on the embedded task and when the alarm came; healthy runs and that none came.

    python benchmarks/collapse.py                       # about 30 minutes of two cores: both kinds, seeds 0 and 1
    python benchmarks/collapse.py --seeds 1 --only collapsing --first-seed 2

`fell` is the first step at which the mean reward of the last 10 steps is below that of the first 10. A collapsing run is
caught when the alarm comes at least 10 steps before that; a healthy run is well when there is no alarm at all. Runs are
processes of their own, one after another.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

SMOOTH = 10
"""Steps in a mean of the reward."""
EARLY = 10
"""Steps that the alarm must be ahead of the fall."""
TOO_HIGH = "train.learning_rate={start: 2e-3, warmup_steps: 200}"
"""Ten times the usual rate, reached over the whole run: it learns first."""

COLLAPSING = {
    "tb, beta 0.01, equal groups dropped": [
        TOO_HIGH, "objective.name=tb", "objective.beta=0.01", "train.equal_reward_groups=drop", "train.max_steps=200",
    ],
    "tb, beta 0.05": [TOO_HIGH, "objective.name=tb", "objective.beta=0.05", "train.max_steps=200"],
    "reinforce, no baseline, beta 0": [
        TOO_HIGH, "objective.name=reinforce", "objective.baseline=none", "objective.beta=0", "train.max_steps=200",
    ],
    "grpo, 32 tokens": [TOO_HIGH, "objective.name=grpo", "generate.max_new_tokens=32", "train.max_steps=200"],
}  # fmt: skip
HEALTHY = {
    "tb, sync": ["objective.name=tb"],
    "grpo, sync": ["objective.name=grpo"],
    "ppo, sync": ["objective.name=ppo"],
    "rloo, sync": ["objective.name=rloo"],
    "tb, async": ["objective.name=tb", "mode=async"],
    "tb, fixed lag 4": ["objective.name=tb", "mode=fixed_lag", "lag_steps=4"],
}


def run(overrides: Sequence[str], seed: int) -> list[dict]:
    """The metrics of every step of one `tba train`."""
    with tempfile.TemporaryDirectory() as folder:
        settings = ["mode=sync", "train.learning_rate=2e-4", "train.max_steps=200", *overrides, f"seed={seed}"]
        settings = list({setting.partition("=")[0]: setting for setting in settings}.values())
        settings += [f"output={folder}", "name=run", "evaluate.num_prompts=20", "observe.progress=false"]
        command = [sys.executable, "-m", "tba", "train", *settings]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
        records = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "loss" in record]


def first_alarm(records: Sequence[dict]) -> int | None:
    return next((record["step"] for record in records if record["guard/alarm"]), None)


def fell_below_start(records: Sequence[dict]) -> int | None:
    rewards = [record["guard/reward"] for record in records]
    start = fmean(rewards[:SMOOTH])
    ends = range(2 * SMOOTH, len(rewards) + 1)
    return next((records[end - 1]["step"] for end in ends if fmean(rewards[end - SMOOTH : end]) < start), None)


def verdict(alarm: int | None, fell: int | None, *, collapsing: bool) -> str:
    if not collapsing:
        return "silent" if alarm is None else "FALSE ALARM"
    if fell is None:
        return "did not collapse" if alarm is None else "alarm, reward still above start"
    if alarm is None:
        return "MISSED"
    return f"caught {fell - alarm} steps before" if fell - alarm >= EARLY else f"LATE ({fell - alarm} steps before)"


def show(name: str, seed: int, records: Sequence[dict], *, collapsing: bool) -> None:
    rewards = [record["guard/reward"] for record in records]
    best = max(fmean(rewards[end - SMOOTH : end]) for end in range(SMOOTH, len(rewards) + 1))
    alarm, fell = first_alarm(records), fell_below_start(records)
    print(
        f"{name:<36} {seed:>4} {fmean(rewards[:SMOOTH]):>6.2f} {best:>6.2f} {fmean(rewards[-SMOOTH:]):>6.2f} "
        f"{'-' if alarm is None else alarm:>6} {'-' if fell is None else fell:>6}  "
        f"{verdict(alarm, fell, collapsing=collapsing)}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only", choices=["collapsing", "healthy"])
    arguments = parser.parse_args()
    print(f"{'run':<36} {'seed':>4} {'start':>6} {'best':>6} {'end':>6} {'alarm':>6} {'fell':>6}  verdict", flush=True)
    for kind, runs in (("collapsing", COLLAPSING), ("healthy", HEALTHY)):
        if arguments.only in (None, kind):
            for name, overrides in runs.items():
                for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
                    show(name, seed, run(overrides, seed), collapsing=kind == "collapsing")


if __name__ == "__main__":
    main()
