"""Checkpoints and resuming: what a checkpoint costs the trainer, and whether a run that is killed again and again is the
same run.

    python benchmarks/resume.py cost                     # the quickstart run with a checkpoint every 10 steps
    python benchmarks/resume.py exact --kills 5          # the embedded task, synchronous, killed at random moments

`cost` prints the pause of the trainer (everything is copied), the seconds that the background thread then writes, syncs and
checks, and the size. `exact` starts a run in a process of its own, kills it with SIGKILL after a random time, resumes it
and so on, and compares every logged number, the samples and the final weights with those of a run that nobody disturbed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CLOCKED = ("seconds", "time/", "perf/")
EXACT = [
    *("mode=sync", "train.max_steps=40", "train.checkpoint_every=2", "seed=7", "observe.progress=false"),
    *("evaluate.num_prompts=50", "evaluate.every=10", "replay.on_policy_probability=0.5", "replay.deduplicate=true"),
    *("replay.inverse_temperature=1", "search.skip_solved_after=2"),
]


def cost(arguments: argparse.Namespace) -> None:
    from tba.config import load_config
    from tba.launch import train
    from tba.train.checkpoint import Checkpoints

    pauses: list[float] = []
    writes: list[float] = []

    def timed(method: Any, seconds: list[float]) -> Any:
        def call(*given: Any, **named: Any) -> None:
            started = time.perf_counter()
            method(*given, **named)
            seconds.append(time.perf_counter() - started)

        return call

    Checkpoints._write = timed(Checkpoints._write, pauses)  # type: ignore[method-assign]
    Checkpoints._write_folder = timed(Checkpoints._write_folder, writes)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"train.max_steps={arguments.steps}", "train.checkpoint_every=10", "evaluate.every=0"]
        settings += ["observe.progress=false", "observe.on_collapse=off", f"output={folder}", "name=run"]
        train(load_config("configs/quickstart.yaml", [*settings, *arguments.settings]))
        run = Path(folder) / "run"
        newest = max(run.glob("checkpoints/step-*"), key=lambda path: int(path.name.split("-")[1]))
        size = sum(path.stat().st_size for path in newest.iterdir())
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["time/step"] for line in lines if "time/step" in line]
    print(
        f"{len(pauses)} checkpoints of {size / 2**20:.1f} MiB: the trainer pauses {1e3 * statistics.median(pauses):.0f} ms "
        f"(longest {1e3 * max(pauses):.0f}); the writer takes {1e3 * statistics.median(writes):.0f} ms; "
        f"an optimizer step takes {1e3 * statistics.median(steps):.0f} ms"
    )


def newest(run: Path) -> int:
    """Step of the newest whole checkpoint, 0 = there is none."""
    from tba.observe.files import RunFolder

    return max(RunFolder(run).checkpoints_by_step(), default=0)


def exact(arguments: argparse.Namespace) -> None:
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        settings = {setting.partition("=")[0]: setting for setting in (*EXACT, *arguments.settings)}
        command = [sys.executable, "-m", "tba", "train", *settings.values(), f"output={folder}"]
        subprocess.run([*command, "name=whole"], check=True, capture_output=True)
        killed, reached = 0, 0
        while True:
            resume = ["--resume"] if reached else []
            process = subprocess.Popen(
                [*command, "name=killed", *resume], start_new_session=True, stdout=subprocess.PIPE
            )
            # A new checkpoint makes sure that the run comes to its end however often it is killed.
            while process.poll() is None and (killed == arguments.kills or newest(Path(folder) / "killed") <= reached):
                time.sleep(0.01)
            time.sleep(rng.uniform(0.0, 1.5))
            if process.poll() is not None:
                break
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            killed, reached = killed + 1, newest(Path(folder) / "killed")
        if process.returncode:
            raise SystemExit(f"the run ended with status {process.returncode}")
        runs = [Path(folder) / name for name in ("whole", "killed")]
        whole, other = (
            [
                {name: value for name, value in json.loads(line).items() if not name.startswith(CLOCKED)}
                for line in (run / "metrics.jsonl").read_text().splitlines()
            ]
            for run in runs
        )
        different = [left["step"] for left, right in zip(whole, other) if left != right]
        same = whole == other and all(
            (runs[0] / file).read_bytes() == (runs[1] / file).read_bytes()
            for file in ("samples.jsonl", "checkpoints/step-40/optimizer.safetensors")
        )
        where = f" from step {different[0]} on" if different else ""
        print(f"killed {killed} times in 40 steps: {'bitwise the same' if same else 'different' + where}")
        raise SystemExit(not same)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["cost", "exact"])
    parser.add_argument("settings", nargs="*", help="section.key=value, for both runs")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    {"cost": cost, "exact": exact}[arguments.command](arguments)


if __name__ == "__main__":
    main()
