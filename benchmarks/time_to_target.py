"""Asynchrony, time to accuracy: wall clock to a target where generation is the bottleneck, sync against 1 to 12 searchers.

    python benchmarks/time_to_target.py run judge --seeds 0 1 2 --out docs/time_to_target.jsonl     # two cores do
    python benchmarks/time_to_target.py run vineppo long --seeds 0 1 2 --cores 0-15 --at-once 3 --until-reached \\
        --seconds 420 --out FILE                                                                    # wants 16 cores
    python benchmarks/time_to_target.py table FILE
    python benchmarks/time_to_target.py plot FILE PICTURE.png

Every arm has the same cores, one after the other; with --at-once N, N seeds of an arm that could not keep more than an Nth
of them busy run side by side. Every run is a line of the file, and one that has a line is not run again. Accuracy is of
validation prompts. What the scenarios are: target_bench/scenarios.py; what the clock counts: target_bench/runs.py. `long`
needs `python benchmarks/own_problems.py make long_sums` once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from end_to_end import seconds_to
from own_bench.runs import mean_and_error, read_lines
from target_bench.runs import run
from target_bench.scenarios import SCENARIOS, Arm, Scenario

FOLDER = Path("runs/own_problems")
SHORTEST_SECONDS = 20.0
"""Time that must be left for another run to be begun."""

Line = Mapping[str, Any]


def measure(arguments: argparse.Namespace) -> None:
    """All runs that have no line yet until the time is over."""
    began, out, lock = time.monotonic(), arguments.out, Lock()
    out.parent.mkdir(parents=True, exist_ok=True)

    def do(planned: Planned) -> None:
        scenario, arm, seed, cores = planned
        left = None if arguments.seconds is None else arguments.seconds - (time.monotonic() - began)
        if left is not None and left < SHORTEST_SECONDS:
            print(
                f"{scenario.name} {arm.name} seed {seed}: no time is left, the same command goes on with it.",
                flush=True,
            )
            return
        try:
            found = run(
                scenario, arm, seed, folder=arguments.folder, output=out.with_suffix(".runs") / f"cores-from-{cores[0]}",
                steps=arguments.steps or scenario.steps, cores=cores, seconds=left, until_reached=arguments.until_reached,
            )  # fmt: skip
        except RuntimeError as error:  # the other arms are worth having
            print(error, flush=True)
            return
        with lock:
            with out.open("a") as file:
                file.write(json.dumps(found) + "\n")
            print(shown(scenario, found), flush=True)

    for batch in batches(arguments):
        with ThreadPoolExecutor(len(batch)) as pool:
            list(pool.map(do, batch))


Planned = tuple[Scenario, Arm, int, Sequence[int]]
"""A run: scenario, arm, seed and the cores that it has."""


def batches(arguments: argparse.Namespace) -> Iterator[list[Planned]]:
    """Runs without a line, in parts that run at the same time: seeds of an arm, each on cores of its own, where it could
    not keep more of them busy; otherwise one run on all cores."""
    cores, done = (
        cores_of(arguments.cores),
        {(line["scenario"], line["arm"], line["seed"]) for line in read_lines(arguments.out)},
    )
    for scenario in map(SCENARIOS.__getitem__, arguments.scenarios):
        scenario.make(arguments.folder)
    for first in range(0, len(arguments.seeds), arguments.at_once):
        seeds = arguments.seeds[first : first + arguments.at_once]
        for scenario in map(SCENARIOS.__getitem__, arguments.scenarios):
            for arm in scenario.arms:
                todo = [seed for seed in seeds if (scenario.name, arm.name, seed) not in done]
                if not todo or (arguments.arms and arm.name not in arguments.arms):
                    continue
                share = len(cores) // arguments.at_once
                if arm.busy_cores > share:
                    yield from ([(scenario, arm, seed, cores)] for seed in todo)
                else:
                    yield [
                        (scenario, arm, seed, cores[lane * share : (lane + 1) * share])
                        for lane, seed in enumerate(todo)
                    ]


def cores_of(text: str | None) -> list[int]:
    """`0-15` or `0,1`; nothing = those of this process."""
    if text is None:
        return sorted(os.sched_getaffinity(0))
    parts = [part.partition("-") for part in text.split(",")]
    return [core for low, _, high in parts for core in range(int(low), int(high or low) + 1)]


def shown(scenario: Scenario, line: Line) -> str:
    times = [f"{target:.0%} {seconds_words(seconds_to(line['curve'], target))}" for target in scenario.targets]
    cut = "" if line["finished"] else ", cut off"
    return (
        f"{line['scenario']} {line['arm']} seed {line['seed']}: {', '.join(times)}; {line['steps']} steps in "
        f"{line['seconds']:.0f} s, {line['curve'][-1][1]:.1%}, lag {line['lag']:.1f}{cut}"
    )


def seconds_words(seconds: float | None) -> str:
    return "not reached" if seconds is None else f"{seconds:.1f} s"


def by_arm(lines: Iterable[Line]) -> dict[str, dict[str, list[Line]]]:
    """Scenario -> arm -> runs: synchronous arms first, then by the number of searchers."""
    found: dict[str, dict[str, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in sorted(lines, key=lambda line: (line["arm"].startswith("async"), len(line["arm"]), line["arm"])):
        found[line["scenario"]][line["arm"]].append(line)
    return found


def show_table(arguments: argparse.Namespace) -> None:
    for name, own in by_arm(read_lines(arguments.file)).items():
        scenario = SCENARIOS[name]
        first = next(iter(own.values()))[0]
        commits = sorted({line["commit"] for lines in own.values() for line in lines})
        print(f"{name}: {scenario.words}; {first['cores']} cores, commit {', '.join(commits)}\n")
        targets = "".join(f" s to {target:.0%} | times as fast as sync |" for target in scenario.targets)
        last = f"s a step | accuracy, % after {first['max_steps']} steps | lag, steps | trained / generated |"
        print(f"| | seeds | s from the command to the first step |{targets} {last}")
        print("|---|---|---|" + "---|---|" * len(scenario.targets) + "---|---|---|---|")
        for arm, lines in own.items():
            print(row(scenario, arm, lines, own.get("sync", [])))
        print()


def row(scenario: Scenario, arm: str, lines: Sequence[Line], sync: Sequence[Line]) -> str:
    """Means over the seeds; ratios are of runs of the same seed."""
    cells = [mean_and_error([line["startup"] for line in lines], 0)]
    baseline = {line["seed"]: line for line in sync}
    for target in scenario.targets:
        times = {line["seed"]: seconds_to(line["curve"], target) for line in lines}
        reached = {seed: seconds for seed, seconds in times.items() if seconds is not None}
        missed = f" ({len(times) - len(reached)} of {len(times)} never)" if len(reached) < len(times) else ""
        cells.append((mean_and_error(list(reached.values()), 1) if reached else "-") + missed)
        pairs = [
            (seconds_to(baseline[seed]["curve"], target), own) for seed, own in reached.items() if seed in baseline
        ]
        ratios = [slow / fast for slow, fast in pairs if slow is not None]
        cells.append(mean_and_error(ratios, 2) if ratios and arm != "sync" else "")
    finished = [100 * line["curve"][-1][1] for line in lines if line["finished"]]
    cells += [
        mean_and_error([line["step_seconds"] for line in lines], 2),
        mean_and_error(finished, 1) if finished else "-",
        f"{statistics.mean(line['lag'] for line in lines):.1f}",
        f"{sum(line['trained'] for line in lines) / sum(line['generated'] for line in lines):.2f}",
    ]
    return f"| {arm} | {', '.join(str(line['seed']) for line in lines)} | {' | '.join(cells)} |"


def draw(arguments: argparse.Namespace) -> None:
    """Validation accuracy against seconds, a picture for each scenario side by side, a line for each run."""
    from tba.compare.plot import new_figure

    found = by_arm(read_lines(arguments.file))
    with new_figure(arguments.picture, width=max(8, 6 * len(found))) as figure:
        for axes, (name, own) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items()):
            for index, (arm, lines) in enumerate(own.items()):
                for line in lines:
                    axes.plot(
                        [seconds for seconds, _ in line["curve"]], [100 * accuracy for _, accuracy in line["curve"]],
                        color=f"C{index}", marker="o", markersize=3, linewidth=1.2, label=arm if line is lines[0] else None,
                    )  # fmt: skip
            for target in SCENARIOS[name].targets:
                axes.axhline(100 * target, color="0.6", linewidth=0.8, linestyle="--")
            axes.set(xlabel="seconds", ylabel="validation accuracy, %", title=SCENARIOS[name].words)
            axes.grid(alpha=0.3)
            axes.legend(loc="lower right", frameon=False)
    print(arguments.picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run")
    running.set_defaults(function=measure)
    running.add_argument("scenarios", nargs="+", choices=SCENARIOS)
    running.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    running.add_argument("--arms", nargs="+", default=[], help="names of arms; nothing = all of a scenario")
    running.add_argument("--steps", type=int, help="optimizer steps; nothing = the scenario's")
    running.add_argument("--cores", help="such as 0-15, the same for every arm; nothing = all that there are")
    running.add_argument(
        "--seconds", type=float, help="when to stop, a run that is under way included; nothing = never"
    )
    running.add_argument(
        "--at-once", type=int, default=1, help="seeds of an arm at a time, where an arm cannot keep more cores busy"
    )
    running.add_argument(
        "--until-reached", action="store_true", help="end a run that was at its last target in two evaluations"
    )
    running.add_argument("--folder", type=Path, default=FOLDER, help="where the own problems are made")
    running.add_argument("--out", type=Path, required=True, help="JSONL; runs that have a line are skipped")
    table = commands.add_parser("table")
    table.set_defaults(function=show_table)
    table.add_argument("file", type=Path)
    plot = commands.add_parser("plot")
    plot.set_defaults(function=draw)
    plot.add_argument("file", type=Path)
    plot.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    arguments.function(arguments)


if __name__ == "__main__":
    main()
