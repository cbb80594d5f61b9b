"""What asynchrony gives on the embedded task, two cores: three tables, all seeds shown.

    python benchmarks/asynchrony.py quickstart     # 3 seeds of `make quickstart`: accuracy within 3 minutes of training
    python benchmarks/asynchrony.py sync           # async against sync, 200 steps, 3 seeds each
    python benchmarks/asynchrony.py searchers      # seconds to 60, 70 and 80% with 1, 2 and 3 searchers, 200 steps, 3 seeds

Every run is `tba train configs/quickstart.yaml` with the overrides shown, in processes of its own, one after the other.
Accuracy is greedy on the 500 held-out problems. Seconds count from the first optimizer step; searchers evaluate between
groups, so evaluation is part of an asynchronous run's seconds and, fairly, of a synchronous one's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from end_to_end import seconds_to

ROOT = Path(__file__).parents[1]
SEEDS = (0, 1, 2)
TARGETS = (0.6, 0.7, 0.8)


def run(seed: int, *overrides: str) -> dict:
    """One training; its summary and its curve of (seconds, accuracy)."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"seed={seed}", f"output={folder}", "name=run", "observe.progress=false", *overrides]
        command = [sys.executable, "-m", "tba", "train", str(ROOT / "configs" / "quickstart.yaml"), *settings]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            raise RuntimeError(f"training failed:\n{done.stderr[-3000:]}")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    curve = [(r["seconds"], r["eval/arithmetic/accuracy"]) for r in records if "eval/arithmetic/accuracy" in r]
    return {**json.loads(done.stdout.strip().splitlines()[-1]), "curve": curve}


def mean_and_error(values: Sequence[float]) -> str:
    """mean +- standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):.3f} +- {error:.3f}"


def quickstart() -> None:
    print(
        f"{'seed':>4} {'start':>6} {'final':>6} {'seconds':>8} {'s to 70%':>9} {'responses/s':>12} {'lag':>5}  last five",
        flush=True,
    )
    for seed in SEEDS:
        found = run(seed)
        last_five = " ".join(f"{accuracy:.1%}" for _, accuracy in found["curve"][-5:])
        reached = seconds_to(found["curve"], 0.7)
        print(
            f"{seed:>4} {found['start']['accuracy']:>6.1%} {found['final']['accuracy']:>6.1%} {found['seconds']:>8.0f} "
            f"{'never' if reached is None else f'{reached:.0f}':>9} "
            f"{found['responses_trained'] / found['seconds']:>12.0f} {found['lag']['mean']:>5.1f}  {last_five}",
            flush=True,
        )


def against_sync(steps: int) -> None:
    accuracies: dict[str, list[float]] = {"async": [], "sync": []}
    seconds: dict[str, list[float]] = {"async": [], "sync": []}
    print(f"{'mode':>6} {'seed':>4} {'final':>6} {'mean of last 4':>15} {'seconds':>8} {'trained':>8}", flush=True)
    for seed in SEEDS:
        for mode in accuracies:
            # Both train every response once: asynchrony alone is measured.
            found = run(seed, f"mode={mode}", f"train.max_steps={steps}", "train.second_update_after=0")
            last = statistics.mean(accuracy for _, accuracy in found["curve"][-4:])
            accuracies[mode].append(last)
            seconds[mode].append(found["seconds"])
            print(
                f"{mode:>6} {seed:>4} {found['final']['accuracy']:>6.1%} {last:>15.1%} {found['seconds']:>8.0f} "
                f"{found['responses_trained']:>8}",
                flush=True,
            )
    differences = [a - s for a, s in zip(accuracies["async"], accuracies["sync"])]
    ratios = [s / a for a, s in zip(seconds["async"], seconds["sync"])]
    print(f"accuracy (mean of the last 4 evaluations), async - sync: {mean_and_error(differences)}")
    print(f"wall clock, sync / async: {mean_and_error(ratios)}")


def searchers(steps: int) -> None:
    header = "".join(f"{f's to {target:.0%}':>10}" for target in TARGETS)
    print(f"{'searchers':>9} {'seed':>4} {header} {'final':>6} {'lag':>5} {'trained/s':>10}", flush=True)
    for count in (1, 2, 3):
        for seed in SEEDS:
            found = run(seed, f"search.num_searchers={count}", f"train.max_steps={steps}")
            times = [seconds_to(found["curve"], target) for target in TARGETS]
            cells = "".join(f"{'never' if t is None else f'{t:.0f}':>10}" for t in times)
            rate = found["responses_trained"] / found["seconds"]
            print(
                f"{count:>9} {seed:>4} {cells} {found['final']['accuracy']:>6.1%} {found['lag']['mean']:>5.1f} "
                f"{rate:>10.0f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["quickstart", "sync", "searchers"])
    parser.add_argument("--steps", type=int, default=200, help="of `sync` and `searchers`; quickstart runs as it is")
    arguments = parser.parse_args()
    if arguments.what == "quickstart":
        quickstart()
    elif arguments.what == "sync":
        against_sync(arguments.steps)
    else:
        searchers(arguments.steps)


if __name__ == "__main__":
    main()
