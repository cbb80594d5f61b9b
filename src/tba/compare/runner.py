"""`tba compare STUDY.yaml`: do what is left of a study, then show and write its results."""

from __future__ import annotations

import copy
import shlex
import time
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from tba.compare.display import Display, as_markdown, rich_table, tables_of
from tba.compare.plot import save_pareto, save_plot
from tba.compare.results import Results, as_json, commit_hash, cpu_count, gather, tuned_values
from tba.compare.runs import (
    Cell,
    Claims,
    Plan,
    changes,
    clear,
    is_result,
    make_plan,
    read_holder,
    read_metric,
    state_of,
    write_done,
    write_failed,
)
from tba.compare.study import load_study
from tba.config import Config
from tba.observe.files import check_new_folder, write_atomic, write_json

if TYPE_CHECKING:
    from tba.launch.run import RunInputs

OUTPUT = Path("runs/studies")
"""Folder of study folders, where none is given."""
WAIT_SECONDS = 3600.0
"""Longest wait for other processes in which none of them finishes a run."""
POLL_SECONDS = 1.0
"""Time between two looks at what other processes have done."""
FAILURES = (RuntimeError, ValueError, FloatingPointError)
"""Errors that a run may raise without stopping the study."""


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
    from tba.launch.defaults import with_objective_defaults  # loads torch, which `--list` does not need

    plan = make_plan(load_study(path, quick=quick), output, check=with_objective_defaults)
    check_new_folder(plan.root, may_hold="*")
    with Display(plan) as display:
        Runner(plan, display, retry_failed=retry_failed, wait_seconds=wait_seconds).run()
    results = gather(plan)
    save_results(plan, results, command=command_of(path, output=output, quick=quick))
    show_results(plan, results)
    raise_if_nothing_came(plan, results)
    return results


def list_runs(path: Path, *, output: Path = OUTPUT, quick: bool = False) -> list[tuple[str, str]]:
    """Every run of a study with its state, in the study's order."""
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
    """Write results.json, results.md and the pictures into the study's folder."""
    plan.root.mkdir(parents=True, exist_ok=True)
    write_json(plan.root / "results.json", as_json(results, command=command))
    text = as_markdown(results, command=command, commit=commit_hash(), cpu_count=cpu_count())
    write_atomic(plan.root / "results.md", text)
    save_plot(results, plan.root / "plot.png")
    if plan.study.pareto is not None:
        save_pareto(results, plan.study.pareto, plan.root / "pareto.png")


def show_results(plan: Plan, results: Results) -> None:
    """Print the tables of a study, and where they were written."""
    console = Console()
    for title, grid in tables_of(results, measures=False):
        console.print(Text(title), rich_table(grid), sep="\n")
    written = ["results.md", "results.json", "plot.png", *(["pareto.png"] if plan.study.pareto is not None else [])]
    console.print(Text(f"{plan.root}/{', '.join(written)}"), soft_wrap=True)


def raise_if_nothing_came(plan: Plan, results: Results) -> None:
    """Raise where no run of a study has a result: its table is empty, and a script must see that."""
    failures = list(results.failures.values())
    if failures and not any(cell.values for cell in results.cells.values()):
        raise RuntimeError(
            f"no run of {plan.study.name} has a result, all {len(failures)} failed; the first: {failures[0]} Correct what "
            "it names, then run the same command with --retry-failed."
        )


def command_of(path: Path, *, output: Path, quick: bool) -> str:
    """The command that makes these results again."""
    options = ["--output", str(output)] if output != OUTPUT else []
    return shlex.join(["tba", "compare", str(path), *options, *(["--quick"] if quick else [])])


class Runner:
    """Does the runs of a study, together with other processes that do the same.

    Consumes: the plan, and what is on disk about its runs.
    Waits for: other processes, when they have all the runs that are left.
    Produces: run folders with cell.json or failed.json.
    Unblocked by: the other processes' results, or their end.
    """

    def __init__(self, plan: Plan, display: Display, *, retry_failed: bool, wait_seconds: float) -> None:
        self.plan = plan
        self.display = display
        self.claims = Claims(plan.root / "claims.lock")
        self.inputs = WarmInputs()
        self.retry_before = time.time() if retry_failed else 0.0
        """Time before which failures are tried again; later ones are not, or a study would never end."""
        self.wait_seconds = wait_seconds
        self.commit = commit_hash()
        self._waits_for: list[str] = []
        self._waits_since = 0.0

    def run(self) -> None:
        """Do runs until every one is done or has failed."""
        while open_cells := self.open_cells():
            self.display.update(open_cells)
            cell = self.claim_one(open_cells)
            if cell is None:
                self.wait(open_cells)
            else:
                self.step(cell)

    def step(self, cell: Cell) -> None:
        """Do one claimed run."""
        try:
            self.display.starts(cell, changes(cell))
            self.train(cell)
        finally:
            self.claims.release(cell.claim)

    def train(self, cell: Cell) -> None:
        """Train, and write down how it ended."""
        from tba.launch import train

        started = time.monotonic()
        clear(cell)
        try:
            summary = train(cell.config, inputs=self.inputs.make(cell.config))
            if not is_result(summary):
                raise RuntimeError(f"its last evaluation is of step {summary['final_step']}, see the warning above.")
        except FAILURES as error:
            write_failed(cell, error)
            self.display.failed(cell, error)
            return
        write_done(cell, seconds=time.monotonic() - started, commit=self.commit)
        self.display.done(cell, read_metric(cell, self.plan.study.metric))

    def open_cells(self) -> list[Cell]:
        """Runs left to do that can be started: tuning first, then seed by seed, so that every cell soon has a number."""
        tuned = tuned_values(self.plan, self.is_settled)
        tuning = [cell for row, cells in self.plan.tuning.items() if row not in tuned for cell in cells]
        runs = [cell for row, value in tuned.items() for cell in self.plan.runs[row, value]]
        runs.sort(key=lambda cell: self.plan.study.seeds.index(cell.seed))
        return [cell for cell in [*tuning, *runs] if not self.is_settled(cell)]

    def is_settled(self, cell: Cell) -> bool:
        """Whether a run is done, or has failed and is not tried again."""
        return state_of(cell, retry_before=self.retry_before) in ("done", "failed")

    def claim_one(self, cells: list[Cell]) -> Cell | None:
        """Claim the first run that no process has; None = others have all of them."""
        for cell in cells:
            if self.claims.take(cell.claim):
                if not self.is_settled(cell):
                    return cell
                self.claims.release(cell.claim)  # its holder finished it since we looked
        return None

    def wait(self, cells: list[Cell]) -> None:
        """Wait for other processes, at most wait_seconds without any of them finishing a run."""
        holders = {cell.label: read_holder(cell.claim) for cell in cells}
        names = [f"{label} (process {pid})" for label, pid in holders.items() if pid is not None]
        if not names:
            return  # they were finished since we looked
        if names != self._waits_for:
            self._waits_for, self._waits_since = names, time.monotonic()
            self.display.waits_for(names)
        if time.monotonic() - self._waits_since >= self.wait_seconds:
            raise RuntimeError(
                f"waited {self.wait_seconds:g} s for runs that other processes have: {', '.join(names)}. Run the same "
                "command again for the table, or raise --wait-seconds."
            )
        time.sleep(POLL_SECONDS)


class WarmInputs:
    """Model and task of runs, loaded once for all that share them: on a small model, loading is most of a short run. Each
    run gets its own copy of the start model, which training changes."""

    def __init__(self) -> None:
        self._pristine: dict[Hashable, RunInputs] = {}

    def make(self, config: Config) -> RunInputs:
        """The inputs of one run."""
        from tba.launch.run import load_inputs

        key = (config.trainer_model, config.task, config.generate.max_new_tokens)  # all that load_inputs reads
        if key not in self._pristine:
            self._pristine[key] = load_inputs(config)
        pristine = self._pristine[key]
        pristine.task.prompts(config.evaluate.split)  # a split that the task lacks is an error before the run starts
        return replace(pristine, loaded=replace(pristine.loaded, model=copy.deepcopy(pristine.loaded.model)))
