"""Runs of `tba train` to a target, one line of a JSONL file each.

A line: {"scenario": "judge", "arm": "async 4", "seed": 0, "overrides": [...], "cores": 2, "commit": "a3f54fe", "launch": 6.1,
"curve": [[0.0, 0.367], [5.2, 0.41]], "seconds": 37.1, "steps": 60, "finished": true, "lag": 2.1, "trained": 7680,
"generated": 7936, "step_seconds": 0.41, "waited": 0.52}

Seconds of the curve count from the beginning of the search: of a synchronous run from its first generation, of an asynchronous one
from when its trainer was ready and waited for the first responses. A synchronous run stops while it evaluates: that time is
taken off its clock. An asynchronous one has a searcher evaluate, which delays its responses and stays on the clock.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from own_bench.runs import CHECKOUT, FAILED_TAIL, commit_of_checkout, environment, read_lines
from target_bench.scenarios import Arm, Scenario

STOP_SECONDS = 20.0
"""Time that a run which is stopped early has to end by itself."""


def run(
    scenario: Scenario,
    arm: Arm,
    seed: int,
    *,
    folder: Path,
    output: Path,
    steps: int,
    cores: Sequence[int],
    seconds: float | None = None,
) -> dict[str, Any]:
    """One training on the given cores; it is stopped after `seconds`, and what it has reached until then counts."""
    shutil.rmtree(output, ignore_errors=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "tba", "train", *scenario.overrides(folder), *arm.overrides, f"seed={seed}"),
        *(f"train.max_steps={steps}", f"evaluate.every={scenario.evaluate_every}", "train.keep_checkpoints=0"),
        *(f"output={output.parent.resolve()}", f"name={output.name}", "observe.progress=false", "observe.log_every=1"),
    ]
    log, began = output.with_suffix(".log"), time.monotonic()
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=stream, env=environment(), cwd=CHECKOUT,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )  # fmt: skip
        metrics, first = output / "metrics.jsonl", None
        while process.poll() is None and (seconds is None or time.monotonic() - began < seconds):
            if first is None and first_step(metrics) is not None:
                first = time.monotonic() - began
            time.sleep(0.05)
        finished = process.poll() == 0
        if process.poll() is None:
            end(process)
    lines = read_lines(metrics)
    if first_step(metrics) is None or (process.returncode and seconds is None):
        raise RuntimeError(f"{scenario.name} {arm.name} seed {seed} failed:\n{log.read_text()[-FAILED_TAIL:]}")
    found = line_of(scenario, arm, lines) | {"finished": finished, "launch": first, "wall": time.monotonic() - began}
    shutil.rmtree(output)
    return {
        "scenario": scenario.name, "arm": arm.name, "seed": seed, "overrides": list(arm.overrides), "max_steps": steps,
        "cores": len(cores), "commit": commit_of_checkout(), **found,
    }  # fmt: skip


def end(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()  # its roles end with it
        process.wait()


def first_step(metrics: Path) -> Mapping[str, Any] | None:
    """The first optimizer step's line; None = it is not there yet."""
    if not metrics.is_file():
        return None
    whole = metrics.read_text().rpartition("\n")[0]
    return next((line for line in map(json.loads, whole.splitlines()) if "loss" in line or "reward" in line), None)


def line_of(scenario: Scenario, arm: Arm, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a run's metrics say, on the clock above."""
    steps = [line for line in lines if scenario.metric not in line]
    at = {line["step"]: line["seconds"] for line in steps} | {0: 0.0}
    evaluated = {line["step"]: line[scenario.metric] for line in lines if scenario.metric in line}
    intervals = {after: at[after] - at[before] for before, after in pairwise(sorted(at))}
    usual = statistics.median(intervals.values())
    waits = "mode=async" in arm.overrides
    first_wait = steps[0].get("time/wait_for_batch", 0.0) if waits else 0.0

    def clock(step: int) -> float:
        paused = 0.0 if waits else sum(max(0.0, intervals.get(own + 1, usual) - usual) for own in evaluated if 0 < own < step)
        return at[step] + (first_wait if step else 0.0) - paused

    last = max(at)
    return {
        "curve": [[round(clock(step), 2), value] for step, value in sorted(evaluated.items()) if step in at],
        "seconds": clock(last),
        "steps": last,
        "step_seconds": usual,
        "first_wait": first_wait,
        "lag": statistics.fmean(line.get("off_policy/lag_mean", 0.0) for line in steps),
    }
