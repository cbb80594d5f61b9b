"""`tba compare STUDY.yaml`: do what is left of a study, then show and write its results."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tba.compare.host import commit_hash, cpu_count
from tba.compare.pareto import save_pareto
from tba.compare.plan import Plan, make_plan
from tba.compare.plot import save_plot
from tba.compare.records import state_of
from tba.compare.results import Results, as_json, gather
from tba.compare.study import load_study
from tba.compare.table import as_markdown, rich_table, tables_of
from tba.compare.tuning import tuned_values
from tba.observe.files import write_atomic, write_json

OUTPUT = Path("runs/studies")
WAIT_SECONDS = 3600.0


def compare(
    path: Path,
    *,
    output: Path = OUTPUT,
    quick: bool = False,
    retry_failed: bool = False,
    wait_seconds: float = WAIT_SECONDS,
) -> Results:
    """Do the runs that are not done yet, together with other processes that do the same; write results.json, results.md
    and plot.png (and pareto.png, where the study asks for it) into the study's folder."""
    from tba.launch.defaults import with_objective_defaults  # torch loads only when it is needed

    plan = make_plan(load_study(path, quick=quick), output, check=with_objective_defaults)
    do_runs(plan, retry_failed=retry_failed, wait_seconds=wait_seconds)
    results = gather(plan)
    save_results(plan, results, command=command_of(path, output=output, quick=quick))
    show_results(plan, results)
    return results


def do_runs(plan: Plan, *, retry_failed: bool, wait_seconds: float) -> None:
    from tba.compare.display import Display
    from tba.compare.runner import Runner

    with Display(plan) as display:
        Runner(plan, display, retry_failed=retry_failed, wait_seconds=wait_seconds).run()


def list_runs(path: Path, *, output: Path = OUTPUT, quick: bool = False) -> list[tuple[str, str]]:
    """(run, state) of every run, in the study's order."""
    plan = make_plan(load_study(path, quick=quick), output)
    tuned = tuned_values(plan, lambda cell: state_of(cell) in ("done", "failed"))
    found = [(cell.label, str(state_of(cell))) for cells in plan.tuning.values() for cell in cells]
    for row in plan.study.rows:
        if row in tuned:
            found += [(cell.label, str(state_of(cell))) for cell in plan.runs[row, tuned[row]]]
        else:
            some_value = next(value for owner, value in plan.runs if owner == row)
            found += [(cell.label, "missing (its row is not tuned yet)") for cell in plan.runs[row, some_value]]
    return found


def save_results(plan: Plan, results: Results, *, command: str) -> None:
    plan.root.mkdir(parents=True, exist_ok=True)
    write_json(plan.root / "results.json", as_json(results, command=command))
    text = as_markdown(results, command=command, commit=commit_hash(), cpu_count=cpu_count())
    write_atomic(plan.root / "results.md", text)
    save_plot(results, plan.root / "plot.png")
    if plan.study.pareto is not None:
        save_pareto(results, plan.study.pareto, plan.root / "pareto.png")


def show_results(plan: Plan, results: Results) -> None:
    console = Console()
    for title, grid in tables_of(results, measures=False):
        console.print(Text(title), rich_table(grid), sep="\n")
    written = ["results.md", "results.json", "plot.png", *(["pareto.png"] if plan.study.pareto is not None else [])]
    console.print(Text(f"{plan.root}/{', '.join(written)}"), soft_wrap=True)


def command_of(path: Path, *, output: Path, quick: bool) -> str:
    """The command that makes these results again."""
    options = ["--output", str(output)] if output != OUTPUT else []
    return shlex.join(["tba", "compare", str(path), *options, *(["--quick"] if quick else [])])
