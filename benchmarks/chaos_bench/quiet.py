"""The quiet run beside the chaotic one: how many steps both make, and whether they learn the same."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from chaos_bench.accounting import accuracies_agree
from chaos_bench.target import NO_STEP_SECONDS, StepWatch, Stuck, Target

HELD_OUT = 2000
CALIBRATION_STEPS = (5, 25)
SHARE_OF_QUIET_SPEED = 0.8
"""Steps of the chaotic run, as a share of what a quiet one does in its minutes: it is slower, and should not be done before
the faults are."""
LOOK_SECONDS = 0.05


def accuracy(run: Path) -> float:
    """Held-out accuracy of a run's newest checkpoint."""
    command = [sys.executable, "-m", "tba", "evaluate", str(run), f"evaluate.num_prompts={HELD_OUT}"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(json.loads(output.splitlines()[-1])["accuracy"])


def compare_with_quiet_run(chaotic: Target, quiet: Target, *, steps: int, stop: bool = False) -> list[str]:
    """Train as many steps undisturbed and compare accuracies; returns what must not be. `stop`: the run would go on, and is
    asked to save and end then."""
    started = time.monotonic()
    quiet.start()
    watch = StepWatch(quiet.folder / "metrics.jsonl")
    while quiet.exit_status is None:
        watch.look()
        if stop and watch.step >= steps:
            quiet.stop(NO_STEP_SECONDS)
        elif time.monotonic() - watch.moved > NO_STEP_SECONDS:
            raise Stuck(f"the quiet run made no optimizer step within {NO_STEP_SECONDS:g} s\n{quiet.last_words()}")
        time.sleep(LOOK_SECONDS)
    if (quiet.exit_status and not stop) or not quiet.finished(steps):
        raise Stuck(f"the quiet run ended with status {quiet.exit_status}\n{quiet.last_words()}")
    print(f"the quiet run took {time.monotonic() - started:.0f} s", flush=True)
    found, wanted = accuracy(chaotic.folder), accuracy(quiet.folder)
    agree, allowed = accuracies_agree(found, wanted, count=HELD_OUT)
    words = (
        f"accuracy on {HELD_OUT:,} held-out problems after {steps} steps: chaotic {found:.1%}, quiet {wanted:.1%}, "
        f"difference {100 * (found - wanted):+.1f} points of {100 * allowed:.1f} allowed"
    )
    print(words)
    return [] if agree else [words]


def calibrated_steps(target: Target, *, minutes: float) -> int:
    """A number of steps that a run under faults needs about so many minutes for, by the speed of a quiet one."""
    watch, times = StepWatch(target.folder / "metrics.jsonl"), []
    target.start()
    try:
        for step in CALIBRATION_STEPS:
            while watch.step < step:
                watch.look()
                if time.monotonic() - watch.moved > NO_STEP_SECONDS or target.exit_status is not None:
                    raise Stuck(f"the run does not start\n{target.last_words()}")
                time.sleep(LOOK_SECONDS)
            times.append(time.monotonic())
    finally:
        target.end()
    rate = (CALIBRATION_STEPS[1] - CALIBRATION_STEPS[0]) / (times[1] - times[0])
    return max(50, 10 * round(SHARE_OF_QUIET_SPEED * rate * 6.0 * minutes))
