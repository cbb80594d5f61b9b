"""What a study shows: its results as tables, on the terminal and as Markdown, and the display while it runs: a live table on
a terminal, a line per finished run elsewhere.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tba.compare.results import CellResult, Estimate, Results, gather
from tba.compare.runs import Cell, Plan, read_holder
from tba.config import Config
from tba.observe.display import SHARES, duration
from tba.observe.files import RunFolder

TITLES = {
    "seconds": "Seconds of training",
    "responses_generated": "Responses generated",
    "off_policy_kl": "Measured off-policy KL, nats per response, mean over steps",
    "lag": "Lag, optimizer steps, mean over steps",
    "kl": "KL to the reference at the end, nats per response",
    "response_length": "Response length at the end, tokens",
}
"""Headings of the tables that follow the metric's, by measure."""

Grid = list[list[str]]
"""A table as text: the header, then the rows."""


class Display:
    """The display of a study, used as a context: the live table is removed at its end."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._console = Console(stderr=True)
        self._started_at = time.monotonic()
        self._speed = Speed()
        self._left: Sequence[Cell] = ()
        self._results = gather(plan, measures=False)
        self._running: Cell | None = None
        self._doing = ""
        self._live: Live | None = None

    def __enter__(self) -> Display:
        if sys.stderr.isatty():
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=1, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, open_cells: Sequence[Cell]) -> None:
        """Read the results anew; called between runs, because it would slow a running one down."""
        self._left = [*open_cells, *not_yet_tuned(self._plan, open_cells)]
        if self._live is not None:
            self._results = gather(self._plan, measures=False)

    def starts(self, cell: Cell, changes: str) -> None:
        self._running, self._doing = cell, ""
        self._speed.start()
        if changes:
            self._print(f"{cell.label} was run with another config ({changes}): run again")

    def done(self, cell: Cell, metric: float) -> None:
        seconds = self._speed.add(cell)
        self._finish(f"{cell.label}: {self._plan.study.metric} {metric:.4g} in {seconds:.1f} s")

    def failed(self, cell: Cell, error: BaseException) -> None:
        self._finish(f"{cell.label}: failed, {type(error).__name__}: {error}")

    def waits_for(self, names: Sequence[str]) -> None:
        self._doing = f"waits for {', '.join(names)}"
        if self._live is None:
            self._print(self._doing)

    def _finish(self, line: str) -> None:
        self._running = None
        self._print(f"{line} ({max(0, len(self._left) - 1)} left)")

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _render(self) -> Group:
        title = f"{self._plan.study.name}: {metric_title(self._results)}"
        table = rich_table(metric_grid(self._results))
        doing = self._doing or running_text(self._running)
        return Group(Text(title), table, Text(doing), Text(self._time_text()))

    def _time_text(self) -> str:
        elapsed = f"{duration(time.monotonic() - self._started_at)} so far, {len(self._left)} runs left"
        others = {read_holder(cell.claim) for cell in self._left} - {None, os.getpid()}
        left = self._speed.seconds_for(self._left)
        return elapsed if left is None else f"{elapsed}, about {duration(left / (1 + len(others)))} to go"


class Speed:
    """Measures how long runs take, to say how long the rest will."""

    def __init__(self) -> None:
        self._started_at = 0.0
        self._seconds_per_length: dict[str, list[float]] = {}
        """Measured times by column: an asynchronous run is faster than one with a lag of 0."""

    def start(self) -> None:
        self._started_at = time.monotonic()

    def add(self, cell: Cell) -> float:
        """Note the end of a run, and return how many seconds it took."""
        seconds = time.monotonic() - self._started_at
        self._seconds_per_length.setdefault(cell.column, []).append(seconds / length(cell.config))
        return seconds

    def seconds_for(self, cells: Sequence[Cell]) -> float | None:
        """Expected time for these runs; None = no run is finished yet."""
        known = self._seconds_per_length
        if not known:
            return None
        overall = fmean(seconds for column in known.values() for seconds in column)
        return sum(fmean(known.get(cell.column, [overall])) * length(cell.config) for cell in cells)


def length(config: Config) -> float:
    """How long a run is, in units that runs of a study share: its steps, or where these are open its seconds."""
    return config.train.max_steps or config.train.max_seconds or 1.0


def not_yet_tuned(plan: Plan, open_cells: Sequence[Cell]) -> list[Cell]:
    """The runs that come after the tuning runs among `open_cells`; their config is not known yet, their number is."""
    value = next(iter(plan.runs))[1]
    rows = dict.fromkeys(cell.row for cell in open_cells if cell.tuning)
    return [cell for row in rows for cell in plan.runs[row, value]]


def running_text(cell: Cell | None) -> str:
    """How far a run is: `runs/tb/0/seed-1: step 120/500, reward 0.731`."""
    if cell is None:
        return ""
    record = RunFolder(cell.folder).last_step()
    shown = f", reward {record['reward']:.3f}" if record.get("reward") is not None else ""
    of = "" if cell.config.train.max_steps is None else f"/{cell.config.train.max_steps}"
    return f"{cell.label}: step {record['step']}{of}{shown}"


def tables_of(results: Results, *, measures: bool) -> list[tuple[str, Grid]]:
    """Titles and grids of all there is to report, the metric first; `measures` adds all that was measured besides."""
    tables = [(f"{metric_title(results)}: mean ± standard error over {seeds_text(results)}", metric_grid(results))]
    tables += [(_also_title(results, name), final_grid(results, name)) for name in results.study.also]
    tables += [(title, measure_grid(results, name)) for name, title in TITLES.items() if measures]
    if results.tuning:
        tuned_by = results.study.tuning_metric
        tables.append(
            (f"Tuned: mean {titled(tuned_by, scale_for(tuned_by))} over the tuning columns", tuning_grid(results))
        )
    failures = failure_grid(results)
    return tables + ([("Failed runs", failures)] if len(failures) > 1 else [])


def as_markdown(results: Results, *, command: str, commit: str | None, cpu_count: int) -> str:
    """The content of results.md."""
    made = f"Made by `{command}`, commit {commit or 'unknown'}, {cpu_count} cores."
    parts = [f"# {results.study.name}", made]
    for title, grid in tables_of(results, measures=True):
        parts += [f"## {title}", markdown_table(grid)]
    return "\n\n".join(parts) + "\n"


def _also_title(results: Results, name: str) -> str:
    """Title of the table of one of `also`; a name that no run has is likely a typo, so it then says what there is."""
    finals = [final for cell in results.cells.values() for final in cell.finals.values()]
    known = sorted({key for final in finals for key in final})
    if known and name not in known:
        return f"{name}: not in `final` of any run (there are {', '.join(known)})"
    return titled(name, scale_for(name))


def scale_of(results: Results) -> float:
    """Factor for reading of the study's metric."""
    return scale_for(results.study.metric)


def scale_for(metric: str) -> float:
    """Factor for reading: 100 for metrics that are shares, else 1."""
    return 100.0 if metric.startswith(SHARES) else 1.0


def metric_title(results: Results) -> str:
    return titled(results.study.metric, scale_of(results))


def titled(metric: str, scale: float) -> str:
    return metric + (", %" if scale == 100.0 else "")


def metric_text(cell: CellResult, *, num_seeds: int, scale: float) -> str:
    """A cell of the table: `87.1 ± 0.4 (2/3)`, without the count once all seeds are there."""
    notes = [f"{len(cell.values)}/{num_seeds}"] if len(cell.values) < num_seeds else []
    notes += [f"{len(cell.failures)} failed"] if cell.failures else []
    number = estimate_text(cell.metric, digits="{:.1f}" if scale == 100.0 else "{:.4g}", scale=scale)
    return number + (f" ({', '.join(notes)})" if notes and (cell.values or cell.failures) else "")


def estimate_text(value: Estimate, *, digits: str = "{:.4g}", scale: float = 1.0) -> str:
    if value.mean is None:
        return "-"
    error = f" ± {digits.format(scale * value.error)}" if value.error is not None else ""
    return digits.format(scale * value.mean) + error


def metric_grid(results: Results) -> Grid:
    num_seeds, scale = len(results.study.seeds), scale_of(results)
    return _grid(results, lambda cell: metric_text(cell, num_seeds=num_seeds, scale=scale))


def measure_grid(results: Results, name: str) -> Grid:
    return _grid(results, lambda cell: estimate_text(cell.measures[name]))


def final_grid(results: Results, name: str) -> Grid:
    scale = scale_for(name)
    return _grid(results, lambda cell: estimate_text(cell.final(name), scale=scale))


def tuning_grid(results: Results) -> Grid:
    """The tuning as a table: one column per value tried with its mean metric, the chosen value last."""
    rows: Mapping[str, dict] = results.tuning.get("rows", {})
    scale = scale_for(results.study.tuning_metric)
    values = dict.fromkeys(tried["value"] for row in rows.values() for tried in row["tried"])
    grid = [[results.tuning.get("key", ""), *(f"{value:g}" for value in values), "chosen"]]
    for label, row in rows.items():
        means = ["failed" if tried["mean"] is None else f"{scale * tried['mean']:.4g}" for tried in row["tried"]]
        grid.append([label, *means, f"{row['chosen']:g}"])
    return grid


def failure_grid(results: Results) -> Grid:
    rows = [
        [row, column, str(seed), error.splitlines()[0]]
        for (row, column), cell in results.cells.items()
        for seed, error in cell.failures.items()
    ]
    return [["row", "column", "seed", "error"], *rows]


def rich_table(grid: Grid) -> Table:
    table = Table()
    for name in grid[0]:
        table.add_column(Text(name))  # Text, because labels and errors may hold [brackets]
    for row in grid[1:]:
        table.add_row(*map(Text, row))
    return table


def markdown_table(grid: Sequence[Sequence[str]]) -> str:
    lines = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in grid]
    lines.insert(1, ["---"] * len(grid[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _grid(results: Results, text: Callable[[CellResult], str]) -> Grid:
    rows, columns = results.study.rows, results.study.columns
    return [["", *columns], *([row, *(text(results.cells[row, column]) for column in columns)] for row in rows)]


def seeds_text(results: Results) -> str:
    number = len(results.study.seeds)
    return "one seed" if number == 1 else f"{number} seeds"
