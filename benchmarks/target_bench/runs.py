"""Runs of `tba train` to a target, one line of a JSONL file each.

A line: {"scenario": "judge", "arm": "async 4", "seed": 0, "overrides": [...], "max_steps": 40, "cores": 2, "commit":
"a3f54fe", "curve": [[0.0, 0.367], [5.2, 0.41]], "startup": 24.1, "seconds": 37.1, "steps": 40, "step_seconds": 0.86, "lag":
3.6, "train_seconds": 0.31, "generated": 4096, "trained": 3840, "finished": true, "wall": 80.2}

Seconds of the curve count from the end of the first optimizer step, in every arm: then models are loaded, the reward's
workers are there and the first batch is generated. What comes before, from the command on, is `startup`. A synchronous run
stops while it evaluates: that time is taken off its clock. An asynchronous one has a searcher evaluate, which delays its
responses and stays on the clock.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from own_bench.runs import CHECKOUT, FAILED_TAIL, commit_of_checkout, environment

from target_bench.scenarios import Arm, Scenario

STOP_SECONDS = 10.0
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
    until_reached: bool = False,
) -> dict[str, Any]:
    """One training on the given cores. It is stopped once the last target was reached in two evaluations in a row
    (`until_reached`), and after `seconds`; where neither that nor its end came before, it is an error: it says nothing."""
    shutil.rmtree(output, ignore_errors=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    command = [
        *("taskset", "-c", ",".join(map(str, cores)), sys.executable, "-m", "tba", "train", *scenario.make(folder)),
        *(*arm.overrides, f"seed={seed}", f"train.max_steps={arm.times * steps}", "train.second_update_after=0"),
        f"evaluate.every={arm.times * scenario.evaluate_every}",
        *(f"output={output.parent.resolve()}", f"name={output.name}", "observe.progress=false", "observe.log_every=1"),
        "train.keep_checkpoints=0",
        "model.device=cpu",  # the cores are what the arms share, also on a machine with a GPU
    ]
    log, began, first = output.with_suffix(".log"), time.monotonic(), None
    metrics = output / "metrics.jsonl"
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, env=environment(), cwd=CHECKOUT)
        while process.poll() is None and (seconds is None or time.monotonic() - began < seconds):
            if first is None and first_step(metrics) is not None:
                first = time.monotonic() - began
            if until_reached and reached_last(scenario, whole_lines(metrics)):
                break
            time.sleep(0.1)
        finished = process.poll() == 0
        if process.poll() is None:
            end(process)
    lines = whole_lines(metrics)
    if seconds is not None and time.monotonic() - began >= seconds and not (finished or reached_last(scenario, lines)):
        raise RuntimeError(f"{scenario.name} {arm.name} seed {seed}: cut off, the same command begins it anew.")
    if first_step(metrics) is None or (process.returncode and not until_reached):
        raise RuntimeError(f"{scenario.name} {arm.name} seed {seed} failed:\n{log.read_text()[-FAILED_TAIL:]}")
    found = line_of(scenario, arm, lines) | {"finished": finished, "startup": first, "wall": time.monotonic() - began}
    shutil.rmtree(output)
    return {
        "scenario": scenario.name, "arm": arm.name, "seed": seed, "overrides": list(arm.overrides),
        "max_steps": arm.times * steps, "cores": len(cores), "commit": commit_of_checkout(), **found,
    }  # fmt: skip


def end(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()  # its roles end with it
        process.wait()


def whole_lines(metrics: Path) -> list[dict[str, Any]]:
    """The lines that are there; the last one may just be written."""
    text = metrics.read_text() if metrics.is_file() else ""
    return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]


def first_step(metrics: Path) -> Mapping[str, Any] | None:
    """The first optimizer step's line; None = it is not there yet."""
    return next((line for line in whole_lines(metrics) if "time/step" in line), None)


def reached_last(scenario: Scenario, lines: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last two evaluations are at the highest target."""
    scores = [line[scenario.metric] for line in lines if scenario.metric in line]
    return len(scores) > 1 and min(scores[-2:]) >= max(scenario.targets)


def line_of(scenario: Scenario, arm: Arm, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a run's metrics say, on the clock above."""
    steps = [line for line in lines if "time/step" in line]
    at = {line["step"]: line["seconds"] for line in steps}
    evaluated = {line["step"]: line[scenario.metric] for line in lines if scenario.metric in line}
    first, last = min(at), max(at)
    intervals = {after: at[after] - at[before] for before, after in pairwise(sorted(at))}
    usual = statistics.median(intervals.values())

    def clock(step: int) -> float:
        stops = [] if "mode=async" in arm.overrides else [own + 1 for own in evaluated if first <= own < step]
        paused = sum(max(0.0, intervals.get(own, usual) - usual) for own in stops)
        return max(0.0, at.get(step, 0.0) - at[first] - paused)

    return {
        "curve": [
            [round(clock(step), 2), value] for step, value in sorted(evaluated.items()) if step in at or step == 0
        ],
        "seconds": clock(last),
        "steps": last,
        "step_seconds": usual,
        "lag": statistics.fmean(line.get("off_policy/lag_mean", 0.0) for line in steps),
        "train_seconds": statistics.median(line["time/step"] for line in steps),
        "generated": steps[-1]["buffer/generated"],
        "trained": steps[-1]["buffer/trained"],
    }
