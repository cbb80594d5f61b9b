"""Whether a run that is killed again and again is the same run.

    python benchmarks/resume.py --kills 5

A synchronous run of the embedded task is started in a process of its own, killed with SIGKILL after a random time, resumed,
and so on. Every logged number, the samples and the final weights are compared with those of a run that was never killed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CLOCKED = ("seconds", "time/", "perf/")
EXACT = [
    *("mode=sync", "train.max_steps=40", "train.checkpoint_every=2", "seed=7", "observe.progress=false"),
    *("evaluate.num_prompts=50", "evaluate.every=10", "replay.on_policy_probability=0.5", "replay.deduplicate=true"),
    "replay.inverse_temperature=1",
]


def newest(run: Path) -> int:
    """Step of the newest whole checkpoint, 0 = there is none."""
    from tba.observe.run_folder import RunFolder

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
    parser.add_argument("settings", nargs="*", help="section.key=value, for both runs")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    exact(arguments)


if __name__ == "__main__":
    main()
