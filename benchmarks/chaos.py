"""Nothing lost: a run whose processes are killed, stopped and slowed down, whose disk fills up and whose checkpoints rot.

    python benchmarks/chaos.py --minutes 10 --seed 0
    python benchmarks/chaos.py --minutes 1 --quick          # a smoke test: no quiet run, no accuracy

The quickstart run with two searchers and a checkpoint every 10 steps, in processes of its own. Faults come by a plan that
the seed decides (chaos_bench/plan.py). What searchers were told is stored is compared with the durable replay by id and
checksum; then the run comes to its end undisturbed, and its accuracy on 2,000 held-out problems is compared with that of a
quiet run of as many optimizer steps. The exit status is 1 where something must not be as it is. Figures are for two cores.

The run folder is on a small tmpfs that is filled; where none can be mounted (not root), file sizes are limited instead.
A run whose supervisor was killed, or that ended with an error while its disk was full, is resumed with `--resume`, as its
user would.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from chaos_bench.accounting import (
    Disturbance,
    Recovery,
    account,
    in_words,
    read_notes,
    read_rows,
    searcher_recoveries,
    undisturbed,
)
from chaos_bench.disk import make_disk
from chaos_bench.inject import Done, Injector
from chaos_bench.plan import Fault, make_plan, mix, shortfalls
from chaos_bench.quiet import calibrated_steps, compare_with_quiet_run
from chaos_bench.target import NO_STEP_SECONDS, StepWatch, Stuck, Target

SETTINGS = [
    *("search.num_searchers=2", "train.checkpoint_every=10", "train.keep_checkpoints=3", "replay.durability=process"),
    *("observe.progress=false", "evaluate.every=100", "observe.healthy_checkpoint_every=50"),
]
TICK_SECONDS, REMEMBER_SECONDS = 0.02, 1.0
MOST_OWN_ENDS = 20
"""How often the run may end by itself before it is not resumed any more."""


@dataclass
class Chaos:
    """Drives a run through a plan, and to its end."""

    target: Target
    injector: Injector
    watch: StepWatch
    steps: int
    seconds: float = 0.0
    """How long there were faults."""
    not_reached: int = 0
    """Faults that were still to come when the run was done."""
    own_ends: list[str] = field(default_factory=list)
    """How the run ended when nobody had killed it."""
    _tree: list[psutil.Process] = field(default_factory=list)
    """The run's processes, as they were a moment ago."""
    _remembered: float = 0.0

    def run(self, plan: Sequence[Fault]) -> None:
        """Do the faults of the plan."""
        self.target.start()
        checkpoints = self.target.folder / "checkpoints"
        self._wait(lambda: any(checkpoints.glob("step-*/manifest.json")))
        started, waiting = time.monotonic(), list(plan)
        while waiting and not self.target.finished(self.steps):
            now = time.monotonic() - started
            due = [fault for fault in waiting if fault.at <= now]
            settled = [fault for fault in due if self.injector.attempt(fault, late=now - fault.at)]
            waiting = [fault for fault in waiting if fault not in settled]
            self._tick()
        self._wait(lambda: not self.injector.busy or self.target.finished(self.steps))
        self.not_reached = len(waiting)
        self.seconds = time.monotonic() - started
        print(f"the faults are over after {self.seconds:.0f} s, at step {self.watch.step}", flush=True)

    def finish(self, *, stop: bool) -> None:
        """Let the run come to its end, or ask it to save and end now."""
        if stop and self.target.exit_status is None:
            self.target.stop(NO_STEP_SECONDS)
        if not stop:
            self._wait(lambda: self.target.exit_status is not None and self.target.finished(self.steps))
        self.target.wait_until_gone(self._tree)

    def _wait(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self._tick()

    def _tick(self) -> None:
        self.injector.tick()
        if self.target.exit_status is not None:
            self._resume()
        elif time.monotonic() - self._remembered > REMEMBER_SECONDS:
            self._tree, self._remembered = self.target.tree(), time.monotonic()
        if time.monotonic() - self.watch.moved > NO_STEP_SECONDS:
            raise Stuck(f"no optimizer step within {NO_STEP_SECONDS:g} s, the last one was {self.watch.step}")
        time.sleep(TICK_SECONDS)

    def _resume(self) -> None:
        """The run's first process is gone: go on, unless it is done; while the disk is full nobody would try."""
        if self.injector.full or self.target.finished(self.steps):
            return
        if not self.injector.killed:
            self.own_ends.append(f"exit status {self.target.exit_status}: {self.target.last_line()}")
            print(f"  the run ended by itself, {self.own_ends[-1]}", flush=True)
        if len(self.own_ends) > MOST_OWN_ENDS:
            raise Stuck(f"the run ended by itself {len(self.own_ends)} times")
        self.target.wait_until_gone(self.injector.killed or self._tree)
        self.injector.killed = []
        self.target.start(resume=True)


def disturbances(done: Sequence[Done], recoveries: Sequence[Recovery]) -> list[Disturbance]:
    """What else was the matter while a searcher came back."""
    found = []
    for one in done:
        who = one.who if one.who.startswith("searcher-") else "run"
        found.append(Disturbance(who=who, first=one.time, last=one.time + one.fault.seconds))
    for kill in recoveries:
        last = float("inf") if kill.seconds is None else kill.killed + kill.seconds
        found.append(Disturbance(who="run", first=kill.killed, last=last))
    return found


def write_events(path: Path, done: Sequence[Done], recoveries: Sequence[Recovery]) -> None:
    """What happened when, a line each in the order of time: whom a fault was done to, and from when on a role was back."""
    events = [(one.time, f"{one.fault.kind} {one.who} for {one.fault.seconds:.1f} s") for one in done]
    events += [(one.killed + one.seconds, f"{one.who} is back") for one in recoveries if one.seconds is not None]
    first = min((when for when, _ in events), default=0.0)
    path.write_text("".join(f"{when - first:8.2f} {what}\n" for when, what in sorted(events)))


def report(chaos: Chaos, folder: Path, *, minutes: float, quick: bool) -> list[str]:
    """Print what happened; returns what must not be."""
    injector, target = chaos.injector, chaos.target
    kinds = [one.fault.kind for one in injector.done]
    left_out = f"; left out: {mix(fault.kind for fault in injector.left_out)}" if injector.left_out else ""
    print(f"faults: {len(kinds)} in {chaos.seconds / 60:.1f} minutes ({mix(kinds)}{left_out})")
    print(f"what was filled: {injector.disk.name}")
    if not (target.folder / "replay.sqlite").exists():
        return ["there is no durable replay"]
    rows, marks = read_rows(target.folder / "replay.sqlite")
    found = account(read_notes(folder / "acknowledged"), rows, marks)
    print(
        f"groups: {found.acknowledged:,} acknowledged, {found.stored:,} stored ({found.unacknowledged:,} of them not "
        f"acknowledged), {len(found.evicted):,} evicted, {len(found.lost)} lost, {len(found.changed)} changed, "
        f"{len(found.twice)} stored twice; sent by {len(marks)} searcher processes"
    )
    kills = [(int(one.who[9:]), one.time) for one in injector.done if one.fault.kind == "kill_searcher"]
    searchers = searcher_recoveries(kills, rows)
    alone = undisturbed(searchers, disturbances(injector.done, injector.recoveries))
    print(f"time to recover, searcher (to its first group): {in_words(searchers)}; undisturbed: {in_words(alone)}")
    write_events(folder / "events.txt", injector.done, [*searchers, *injector.recoveries])
    by_role = {role: [one for one in injector.recoveries if one.who == role] for role in ("trainer", "supervisor")}
    for role, recoveries in by_role.items():
        print(f"time to recover, {role} (to the next optimizer step): {in_words(recoveries)}")
    aside = len(list(target.folder.glob("checkpoints/corrupt-*")))
    print(
        f"steps made again: {chaos.watch.made_again}; checkpoints set aside as corrupt: {aside}; "
        f"the run ended by itself: {len(chaos.own_ends)} times; processes left running: {len(target.left_running)}"
    )
    for how, count in Counter(chaos.own_ends).items():
        print(f"  {count} x {how}")
    wrong = [
        *([f"the run was done {chaos.not_reached} faults too early: raise --steps"] if chaos.not_reached else []),
        *([] if quick else shortfalls(kinds, minutes=minutes)),
        *([f"{len(found.lost)} groups lost, such as {found.lost[0]}"] if found.lost else []),
        *([f"{len(found.changed)} groups changed, such as {found.changed[0]}"] if found.changed else []),
        *([f"{len(found.twice)} groups stored twice, such as {found.twice[0]}"] if found.twice else []),
        *(["no group was acknowledged"] if not found.acknowledged else []),
        *([f"left running: {', '.join(target.left_running)}"] if target.left_running else []),
    ]
    # A searcher killed in the last moments of a smoke test, which then ends, cannot come back.
    never = [one for one in [*searchers, *injector.recoveries] if one.seconds is None]
    return wrong if quick or not never else [*wrong, f"{len(never)} kills without a recovery"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long there are faults")
    parser.add_argument("--seed", type=int, default=0, help="of the plan; the runs have the seed 0")
    parser.add_argument("--steps", type=int, help="optimizer steps of both runs; by default as many as fit the minutes")
    parser.add_argument("--quick", action="store_true", help="end after the faults, without a quiet run")
    parser.add_argument("--folder", type=Path, help="a new folder for everything, which stays")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of all that is started here
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was mounted and started is ended by `finally`
    if arguments.folder is None:
        with tempfile.TemporaryDirectory(prefix="tba-chaos-") as folder:
            sys.exit(run_all(arguments, Path(folder)))
    arguments.folder.mkdir(parents=True)
    sys.exit(run_all(arguments, arguments.folder))


def run_all(arguments: argparse.Namespace, folder: Path) -> int:
    """The exit status: 1 where something must not be as it is."""
    for name in ("disk", "acknowledged", "quiet_acknowledged"):
        (folder / name).mkdir()

    def make_target(name: str, steps: int, place: Path, notes: str) -> Target:
        settings = [*SETTINGS, f"train.max_steps={steps}"]
        return Target(place / name, settings, acknowledged=folder / notes, log=folder / f"{name}.log")

    disk = make_disk(folder / "disk")
    targets: list[Target] = []
    wrong: list[str] = []
    try:
        steps = arguments.steps or 1_000_000
        if not arguments.quick and arguments.steps is None:
            targets.append(make_target("calibration", 1_000_000, folder, "quiet_acknowledged"))
            steps = calibrated_steps(targets[-1], minutes=arguments.minutes)
        print(
            f"{arguments.minutes:g} minutes, seed {arguments.seed}, {steps} steps, {os.cpu_count()} cores", flush=True
        )
        target = make_target("run", steps, folder / "disk", "acknowledged")
        targets.append(target)
        watch = StepWatch(target.folder / "metrics.jsonl")
        chaos = Chaos(target=target, injector=Injector(target, watch, disk), watch=watch, steps=steps)
        try:
            chaos.run(make_plan(seed=arguments.seed, minutes=arguments.minutes))
            chaos.finish(stop=arguments.quick)
        except Stuck as error:
            wrong.append(f"{error}\n{target.last_words()}")
            target.end()
        chaos.injector.end()
        wrong += report(chaos, folder, minutes=arguments.minutes, quick=arguments.quick)
        if not arguments.quick and target.finished(steps):
            targets.append(make_target("quiet", steps, folder, "quiet_acknowledged"))
            wrong += compare_with_quiet_run(target, targets[-1], steps=steps)
    except Stuck as error:
        wrong.append(str(error))
    finally:
        for one in targets:
            one.end()
        if arguments.folder is not None:
            shutil.copytree(folder / "disk", folder / "copy", ignore=shutil.ignore_patterns("filler"))
        disk.close()
    for what in wrong:
        print(f"MUST NOT BE: {what}")
    print("failed" if wrong else "all as it must be")
    return int(bool(wrong))


if __name__ == "__main__":
    main()
