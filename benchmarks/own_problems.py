"""A bench of own problems: what a user brings to `tba train --model DIR --data FILE --reward FILE.py:function`.

    python benchmarks/own_problems.py make [NAMES] --folder runs/own_problems
    python benchmarks/own_problems.py list
    python benchmarks/own_problems.py run [NAMES] --seeds 0 1 2 --jobs 1 --out runs/own_problems.jsonl \\
        --settings defaults reuse1=replay.max_replay_ratio=1,replay.on_policy_probability=1
    python benchmarks/own_problems.py trl [NAMES] --rates default 1e-5 1e-4 1e-3 --iterations 1 2 --seeds 0 \\
        --out runs/own_problems.jsonl
    python benchmarks/own_problems.py run real_tuning real_reported --seconds 60 180 600 --seeds 0 1 2 --out runs/real.jsonl
    python benchmarks/own_problems.py trl real_tuning real_reported --seconds 60 180 600 --seeds 0 1 2 \\
        --rates 1e-5 3e-5 1e-4 3e-4 1e-3 --out runs/real.jsonl
    python benchmarks/own_problems.py table runs/own_problems.jsonl

NAMES are problems or the parts `tuning`, `reported`, `real_tuning` and `real_reported` (nothing = the thirteen of the first
two; the start models of the others are fetched). Settings are chosen on the tuning parts alone. Which problem is in which
part was fixed before the first RL run on it, but for `sparse`. Data is made on the spot and kept: `make` skips what is
there. The start models of eight problems come with the bench (`ship` writes them); the others are
trained on the spot and differ from one kind of CPU to another. A setting changes what concerns learning; what a problem
needs to be run at all stands in its problem.json. With --seconds or --steps runs are compared at equal wall clock, or after
equally many steps: each uses the cores as it would for its user, so nothing else may run beside it (--jobs 1), and the
trained model is evaluated afterwards.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from own_bench import added, real, reported, tuning
from own_bench.budgets import budgets_of
from own_bench.problem import CannotFetch, Problem, make_problem, ship_model
from own_bench.runs import parse_setting, read_lines, run_all, runs_to_do, table_of
from own_bench.trl_grpo import run_trl

FOLDER = Path("runs/own_problems")
BENCH = (*tuning.PROBLEMS, *added.PROBLEMS, *reported.PROBLEMS)
PROBLEMS = {problem.name: problem for problem in (*BENCH, *real.PROBLEMS)}


def chosen(names: Sequence[str]) -> list[Problem]:
    """Problems by name or part, in the order of the bench."""
    parts = {problem.part for problem in PROBLEMS.values()}
    unknown = [name for name in names if name not in PROBLEMS and name not in parts]
    if unknown:
        raise SystemExit(f"no problem {unknown[0]!r}: there are {', '.join([*PROBLEMS, *sorted(parts)])}.")
    if not names:
        return list(BENCH)
    return [problem for problem in PROBLEMS.values() if {problem.name, problem.part} & set(names)]


def made(problems: Sequence[Problem], folder: Path) -> Iterator[tuple[Problem, dict[str, Any]]]:
    """Problems with their descriptions, made where they are not there; those that cannot be had are skipped aloud."""
    for problem in problems:
        try:
            yield problem, make_problem(problem, folder)
        except CannotFetch as reason:
            print(f"{problem.name}: skipped, {reason}", flush=True)


def make(arguments: argparse.Namespace) -> None:
    for problem, found in made(chosen(arguments.names), arguments.folder):
        print(f"{problem.name}: {found['parameters']:,} parameters, {found['cpu_seconds_to_make']:.0f} s, "
              f"{problem.metric} {found['start'][problem.metric]:.3f}", flush=True)  # fmt: skip


def ship(arguments: argparse.Namespace) -> None:
    for problem, _ in made(chosen(arguments.names), arguments.folder):
        print(ship_model(problem, arguments.folder), flush=True)


def show_list(arguments: argparse.Namespace) -> None:
    print(f"{'name':<16} {'part':<9} {'parameters':>11} {'metric':<9} {'start':>6} {'true':>6} {'greedy':>6}  kind")
    for problem in PROBLEMS.values():
        file = arguments.folder / problem.name / "problem.json"
        if not file.is_file():
            print(f"{problem.name:<16} {problem.part:<9} {'not made':>11} {problem.metric:<9} {'':>20}  {problem.kind}")
            continue
        found = json.loads(file.read_text())
        start = found["start"]
        true = f"{start[problem.true_metric]:.3f}" if problem.true_metric else "-"
        print(f"{problem.name:<16} {problem.part:<9} {found['parameters']:>11,} {problem.metric:<9} "
              f"{start[problem.metric]:>6.3f} {true:>6} {start['reward']:>6.3f}  {problem.kind}")  # fmt: skip


def run(arguments: argparse.Namespace) -> None:
    settings = dict(map(parse_setting, arguments.settings))
    problems = [problem for problem, _ in made(chosen(arguments.names), arguments.folder)]
    budgets = budgets_of(arguments.seconds, arguments.steps)
    todo = list(runs_to_do(problems, settings, arguments.seeds, read_lines(arguments.out), budgets))
    print(f"{len(todo)} runs to do, {arguments.jobs} at a time", flush=True)
    failed = run_all(todo, folder=arguments.folder, out=arguments.out, jobs=arguments.jobs)
    print("\n".join(table_of(read_lines(arguments.out))))
    if failed:
        raise SystemExit(f"{failed} of {len(todo)} runs failed: the same command runs them again.")


def trl(arguments: argparse.Namespace) -> None:
    problems = [problem for problem, _ in made(chosen(arguments.names), arguments.folder)]
    run_trl(
        problems,
        arguments.rates,
        arguments.seeds,
        iterations=arguments.iterations,
        budgets=budgets_of(arguments.seconds, arguments.steps),
        folder=arguments.folder,
        out=arguments.out,
        jobs=arguments.jobs,
    )
    print("\n".join(table_of(read_lines(arguments.out))))


def show_table(arguments: argparse.Namespace) -> None:
    print("\n".join(table_of(line for file in arguments.files for line in read_lines(file))))


def end_runs(number: int, frame: FrameType | None) -> None:
    """End the bench with its runs. Runs that have not begun do not begin."""
    for run in psutil.Process().children():
        run.terminate()
    sys.exit(128 + number)


def main() -> None:
    signal.signal(signal.SIGTERM, end_runs)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, function in (("make", make), ("ship", ship), ("list", show_list), ("run", run), ("trl", trl)):
        command = commands.add_parser(name)
        command.set_defaults(function=function)
        command.add_argument("names", nargs="*", help="problems, or tuning or reported; nothing = all")
        command.add_argument("--folder", type=Path, default=FOLDER, help="where the problems are made")
        if name in ("run", "trl"):
            command.add_argument("--seeds", type=int, nargs="+", default=[0])
            command.add_argument(
                "--jobs", type=int, default=1, help="runs at a time; one of tba's keeps two cores busy"
            )
            command.add_argument(
                "--seconds", type=float, nargs="+", default=[], help="seconds of training, a run for each; TRL: one run"
            )
            command.add_argument("--steps", type=int, nargs="+", default=[], help="optimizer steps, likewise")
            command.add_argument("--out", type=Path, required=True, help="JSONL; runs that have a line are skipped")
        if name == "run":
            command.add_argument("--settings", nargs="+", default=["defaults"], metavar="NAME[=key=value,...]")
        if name == "trl":
            command.add_argument("--rates", nargs="+", default=["default"], help="learning rates; default = TRL's own")
            command.add_argument(
                "--iterations", type=int, nargs="+", default=[1], help="updates a batch (TRL's num_iterations)"
            )
    table = commands.add_parser("table")
    table.set_defaults(function=show_table)
    table.add_argument("files", type=Path, nargs="+")
    arguments = parser.parse_args()
    arguments.function(arguments)


if __name__ == "__main__":
    main()
