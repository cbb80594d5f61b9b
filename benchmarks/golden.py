"""Golden runs: what a change of the code's shape must not change.

    python benchmarks/golden.py record runs/golden.json     # before the first edit, on this machine
    python benchmarks/golden.py check runs/golden.json      # after the last one: bitwise the same, or the first difference

Twenty synchronous steps of three objectives and twenty with a fixed lag of one step, on the embedded task: a digest of every
generated token in order, and loss, gradient norm, entropy and KL of each step as they are logged. Numbers depend on the
machine and on torch's version, so the file is made where it is used and not committed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RUNS = {
    "tb": ["mode=sync", "objective.name=tb"],
    "grpo": ["mode=sync", "objective.name=grpo", "train.learning_rate=2e-4"],
    "ppo": ["mode=sync", "objective.name=ppo", "train.learning_rate=2e-4"],
    "tb, lag 1": ["mode=fixed_lag", "replay.max_lag=1", "objective.name=tb"],
}
COMMON = ["train.max_steps=20", "evaluate.num_prompts=20", "evaluate.every=10", "observe.progress=false", "seed=7"]
LOGGED = ("loss", "grad_norm", "entropy", "kl", "reward")


def run_here(overrides: list[str]) -> dict[str, Any]:
    """One run in this process."""
    from tba.config import load_config
    from tba.run import train
    from tba.types import TrajectoryGroup

    digest, groups, make = hashlib.sha256(), 0, TrajectoryGroup.__init__

    def noting(self: TrajectoryGroup, *arguments: Any, **fields: Any) -> None:
        nonlocal groups
        make(self, *arguments, **fields)
        groups += 1
        for trajectory in self.trajectories:
            digest.update(repr([int(token) for token in trajectory.completion.token_ids]).encode())

    TrajectoryGroup.__init__ = noting  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        train(load_config(None, [*COMMON, *overrides, f"output={folder}", "name=run"]))
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [{name: line[name] for name in LOGGED} for line in lines if "loss" in line]
    return {"tokens": digest.hexdigest(), "groups": groups, "steps": steps}


def run_all() -> dict[str, Any]:
    """Every run in a process of its own, one thread each."""
    found = {}
    for name, overrides in RUNS.items():
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, __file__, "one", *overrides]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
        found[name] = json.loads(done.stdout.splitlines()[-1])
        print(f"{name}: {found[name]['groups']} groups, {len(found[name]['steps'])} steps", flush=True)
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The first difference of every run."""
    found = []
    for name, old in before.items():
        new = after[name]
        if old == new:
            continue
        step = next((i for i, (a, b) in enumerate(zip(old["steps"], new["steps"])) if a != b), None)
        where = f"step {step}: {old['steps'][step]} became {new['steps'][step]}" if step is not None else "the tokens"
        found.append(f"{name}: {where}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["record", "check", "one"])
    parser.add_argument("rest", nargs="+", help="the file; for `one` the settings of a run")
    arguments = parser.parse_args()
    if arguments.command == "one":
        print(json.dumps(run_here(arguments.rest)))
        return
    file, found = Path(arguments.rest[0]), run_all()
    if arguments.command == "record":
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found))
        return
    changed = differences(json.loads(file.read_text()), found)
    print("\n".join(changed) or "bitwise the same")
    raise SystemExit(bool(changed))


if __name__ == "__main__":
    main()
