"""How soon a run is at work: from the command to its first optimizer step, and after a searcher or the trainer was killed.

    python benchmarks/recovery.py --kills 5

The quickstart task with an endless number of steps on this machine's cores. A searcher is killed with SIGKILL; the clock
stops when a group of its successor has arrived at the trainer. The trainer is killed likewise; the clock stops at the next
optimizer step.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

DEADLINE_SECONDS = 120.0


def wait_for(ready: Callable[[], bool], what: str) -> None:
    started = time.monotonic()
    while not ready():
        if time.monotonic() - started > DEADLINE_SECONDS:
            raise SystemExit(f"{what}: not within {DEADLINE_SECONDS:g} s.")
        time.sleep(0.01)


def newest(path: Path) -> dict[str, float]:
    """The newest record of an optimizer step; empty before the first."""
    lines = (
        path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    )  # the last one may be half written
    return next((record for line in reversed(lines) if "loss" in (record := json.loads(line))), {})


def kill(run: subprocess.Popen, role: str) -> float:
    """Kill the process of a role; returns when that was."""
    found = [p for p in psutil.Process(run.pid).children(recursive=True) if p.name().startswith(role)]
    found[0].send_signal(signal.SIGKILL)
    return time.monotonic()


def came_back(record: dict[str, float], metric: str, number: int) -> bool:
    """Whether the newest step is one after so many kills, with groups of the searcher there is."""
    return record.get(metric, 0) >= number and record["searcher/0/groups"] > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    kills = parser.parse_args().kills
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            "train.max_steps=1000000",
            "train.learning_rate=1e-5",
            f"output={folder}",
            "name=run",
            "evaluate.every=0",
            "train.checkpoint_every=20",
        ]
        started = time.monotonic()
        command = [sys.executable, "-m", "tba", "train", "configs/quickstart.yaml", *settings]
        run = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            metrics = Path(folder) / "run" / "metrics.jsonl"
            wait_for(lambda: bool(newest(metrics)), "the first step")
            print(f"from the command to the first step: {time.monotonic() - started:.1f} s", flush=True)
            for role, metric in (("searcher-0", "searchers/replaced"), ("trainer", "trainer/restarts")):
                seconds = []
                for number in range(1, kills + 1):
                    wait_for(lambda: newest(metrics)["searcher/0/groups"] > 100, "groups of the searcher")
                    killed = kill(run, role)
                    wait_for(lambda number=number, metric=metric: came_back(newest(metrics), metric, number), role)
                    seconds.append(time.monotonic() - killed)
                    print(f"{role}, kill {number}: at work again after {seconds[-1]:.2f} s", flush=True)
                print(f"{role}: median {statistics.median(seconds):.2f} s, longest {max(seconds):.2f} s")
        finally:
            run.send_signal(signal.SIGINT)
            run.wait()


if __name__ == "__main__":
    main()
