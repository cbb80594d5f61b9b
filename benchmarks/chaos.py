"""Nothing lost: a run whose processes are killed and stopped, whose disk fills up and whose checkpoints rot.

    python benchmarks/chaos.py --minutes 10 --seed 0 --steps 680
    python benchmarks/chaos.py --minutes 1 --quick          # a smoke test: no quiet run, no accuracy

The quickstart run with two searchers and a checkpoint every 10 steps, in processes of its own. Faults come by a plan that
the seed decides (chaos_bench/plan.py). The groups that were acknowledged to searchers are compared with the durable replay,
by id and checksum. Then the run ends undisturbed. Its accuracy on 2,000 held-out problems is compared with that of a quiet
run of as many optimizer steps, which should be as many as fit into the minutes. The exit status is 1 where a group is lost,
changed or stored twice, a process is left running, or the accuracies differ. A full disk is a limit on file sizes. A run
whose supervisor was killed, or that ended with an error while its disk was full, is resumed with `--resume`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from chaos_bench.accounting import account, accuracies_agree, in_words, read_notes, read_rows, searcher_recoveries
from chaos_bench.drive import Chaos
from chaos_bench.inject import Injector
from chaos_bench.plan import make_plan, mix, shortfalls
from chaos_bench.target import StepWatch, Stuck, Target

SETTINGS = [
    *("search.num_searchers=2", "train.checkpoint_every=10", "train.keep_checkpoints=3", "replay.durability=process"),
    *("observe.progress=false", "evaluate.every=100"),
]
HELD_OUT = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long there are faults")
    parser.add_argument("--seed", type=int, default=0, help="of the plan; the runs have the seed 0")
    parser.add_argument("--steps", type=int, default=680, help="optimizer steps of both runs")
    parser.add_argument("--quick", action="store_true", help="end after the faults, without a quiet run")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of all that is started here
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` ends the runs
    with tempfile.TemporaryDirectory(prefix="tba-chaos-") as folder:
        sys.exit(run_all(arguments, Path(folder)))


def run_all(arguments: argparse.Namespace, folder: Path) -> int:
    """The exit status: 1 where something is wrong."""
    steps = 1_000_000 if arguments.quick else arguments.steps
    run, quiet = (make_target(name, steps, folder) for name in ("run", "quiet"))
    watch = StepWatch(run.folder / "metrics.jsonl")
    chaos = Chaos(target=run, injector=Injector(run, watch), watch=watch, steps=steps)
    wrong: list[str] = []
    print(f"{arguments.minutes:g} minutes, seed {arguments.seed}, {steps} steps, {os.cpu_count()} cores", flush=True)
    try:
        chaos.run(make_plan(seed=arguments.seed, minutes=arguments.minutes))
        chaos.finish(stop=arguments.quick)
        chaos.injector.end()
        wrong += report(chaos, minutes=arguments.minutes, quick=arguments.quick)
        if not arguments.quick and run.finished(steps):
            wrong += compare_with_quiet_run(run, quiet, steps=steps)
    except Stuck as error:
        wrong.append(str(error))
    finally:
        for target in (run, quiet):
            target.end()
    for line in wrong:
        print(f"WRONG: {line}")
    print("failed" if wrong else "nothing lost")
    return int(bool(wrong))


def make_target(name: str, steps: int, folder: Path) -> Target:
    notes = folder / f"{name}-acknowledged"
    notes.mkdir()
    settings = [*SETTINGS, f"train.max_steps={steps}"]
    return Target(folder / name, settings, acknowledged=notes, log=folder / f"{name}.log")


def report(chaos: Chaos, *, minutes: float, quick: bool) -> list[str]:
    """Print the account of a run; returns the errors."""
    injector, target = chaos.injector, chaos.target
    kinds = [done.fault.kind for done in injector.done]
    left_out = f"; left out: {mix(fault.kind for fault in injector.left_out)}" if injector.left_out else ""
    print(f"faults: {len(kinds)} in {chaos.seconds / 60:.1f} minutes ({mix(kinds)}{left_out})")
    rows, marks = read_rows(target.folder / "replay.sqlite")
    found = account(read_notes(target.acknowledged), rows, marks)
    print(
        f"groups: {found.acknowledged:,} acknowledged, {found.stored:,} stored ({found.unacknowledged:,} of them not "
        f"acknowledged), {len(found.evicted):,} evicted, {len(found.lost)} lost, {len(found.changed)} changed, "
        f"{len(found.twice)} stored twice; sent by {len(marks)} searcher processes"
    )
    kills = [(int(done.who[9:]), done.time) for done in injector.done if done.fault.kind == "kill_searcher"]
    searchers = searcher_recoveries(kills, rows)
    print(f"time to recover, searcher (to its first group): {in_words(searchers)}")
    for role in ("trainer", "supervisor"):
        recoveries = [recovery for recovery in injector.recoveries if recovery.who == role]
        print(f"time to recover, {role} (to the next optimizer step): {in_words(recoveries)}")
    aside = len(list(target.folder.glob("checkpoints/corrupt-*")))
    print(f"steps made again: {chaos.watch.made_again}; checkpoints set aside as corrupt: {aside}")
    for end in chaos.own_ends:
        print(f"  the run ended by itself: {end}")
    # A searcher killed in the last moments of a smoke test, which then ends, cannot come back.
    never = [] if quick else [one for one in [*searchers, *injector.recoveries] if one.seconds is None]
    return [
        *([f"the run was done {chaos.not_reached} faults too early: raise --steps"] if chaos.not_reached else []),
        *([] if quick else shortfalls(kinds, minutes=minutes)),
        *(f"group {group} lost" for group in found.lost),
        *(f"group {group} changed" for group in found.changed),
        *(f"group {group} stored twice" for group in found.twice),
        *([] if found.acknowledged else ["no group was acknowledged"]),
        *(f"left running: {process}" for process in target.left_running),
        *([f"{len(never)} kills without a recovery"] if never else []),
    ]


def compare_with_quiet_run(chaotic: Target, quiet: Target, *, steps: int) -> list[str]:
    """Train as many steps undisturbed and compare accuracies; returns the errors."""
    quiet.start()
    watch = StepWatch(quiet.folder / "metrics.jsonl")
    while quiet.exit_status is None:
        watch.look()
        if time.monotonic() - watch.moved > quiet.no_step_seconds:
            raise Stuck(f"the quiet run stands still\n{quiet.last_words()}")
        time.sleep(0.05)
    if quiet.exit_status or not quiet.finished(steps):
        raise Stuck(f"the quiet run ended with status {quiet.exit_status}\n{quiet.last_words()}")
    found, wanted = accuracy(chaotic.folder), accuracy(quiet.folder)
    agree, allowed = accuracies_agree(found, wanted, count=HELD_OUT)
    line = f"accuracy on {HELD_OUT:,} problems after {steps} steps: chaotic {found:.1%}, quiet {wanted:.1%}"
    print(f"{line}, {100 * allowed:.1f} points allowed")
    return [] if agree else [line]


def accuracy(run: Path) -> float:
    """Held-out accuracy of a run's newest checkpoint."""
    command = [sys.executable, "-m", "tba", "evaluate", str(run), f"evaluate.num_prompts={HELD_OUT}"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(json.loads(output.splitlines()[-1])["accuracy"])


if __name__ == "__main__":
    main()
