"""Results for reading: the grid on the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from tba.compare.results import CellResult, Estimate, Results
from tba.observe.summary import SHARES

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


def _also_title(results: Results, name: str) -> str:
    """Title of the table of one of `also`; a name that no run has is likely a typo, so it then says what there is."""
    finals = [final for cell in results.cells.values() for final in cell.finals.values()]
    known = sorted({key for final in finals for key in final})
    if known and name not in known:
        return f"{name}: not in `final` of any run (there are {', '.join(known)})"
    return titled(name, scale_for(name))


def as_markdown(results: Results, *, command: str, commit: str | None, cpu_count: int) -> str:
    """The content of results.md."""
    made = f"Made by `{command}`, commit {commit or 'unknown'}, {cpu_count} cores."
    parts = [f"# {results.study.name}", made]
    for title, grid in tables_of(results, measures=True):
        parts += [f"## {title}", markdown_table(grid)]
    return "\n\n".join(parts) + "\n"


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
