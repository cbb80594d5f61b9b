"""Results of a study, from the run folders alone: the metrics of every run, the tuned values, tables and JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from tba.observe.display import SHARES
from tba.observe.files import read_summary
from tba.observe.metrics import standard_error
from tba.observe.run_folder import RunFolder
from tba.run.compare.study import Study
from tba.run.memory import Machine

TITLES = {
    "seconds": "Seconds of training",
    "responses_generated": "Responses generated",
    "off_policy_kl": "Measured off-policy KL, nats per response, mean over steps",
    "lag": "Lag, optimizer steps, mean over steps",
}
"""Headings of the tables about how the runs went, by name."""

Scores = Mapping[float, Mapping[str, float | None]]
"""Metric of a row's tuning runs by tuned value and column; None = the run failed."""
Grid = list[list[str]]
"""A table as text: the header, then the rows."""


class Estimate(NamedTuple):
    """Mean over seeds and its standard error, sqrt(sum (x - mean)^2 / (n - 1) / n). Estimate(0.871, 0.004)"""

    mean: float | None
    """None = no run has a number."""
    error: float | None
    """None below two numbers."""


def estimate(values: Iterable[float | None]) -> Estimate:
    """Mean and standard error; missing and non-finite numbers are left out."""
    # A run may lack a metric (no prompt had a reward), or have NaN for it: the others still have a mean.
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    return Estimate(fmean(numbers) if numbers else None, standard_error(numbers))


@dataclass(frozen=True, kw_only=True)
class Results:
    """The whole grid, finished or not."""

    study: Study
    runs: Mapping[str, Mapping[str, Mapping[int, Mapping[str, float]]]]
    """By row, column and seed: the metrics of a finished run's last evaluation, and how it went (TITLES).

    {"tb": {"10": {0: {"accuracy": 0.87, "seconds": 31.0, ...}, 1: {...}}, ...}, ...}
    """
    failures: Mapping[str, str]
    """Error messages of the runs that failed, by row/column/seed-N; failed tuning runs are in `tuning`."""
    tuned: Mapping[str, float | None]
    """Tuned value by row, where it is known; None = nothing is tuned."""
    tuning: Mapping[str, Scores]
    """Everything that was tried, by row; empty where nothing is tuned."""
    commits: Sequence[str]
    """Commits of the code that made the runs."""

    def over_seeds(self, row: str, column: str, name: str) -> Estimate:
        return estimate(run.get(name) for run in self.runs[row][column].values())


def numbers_of(folder: RunFolder) -> dict[str, float]:
    """The metrics of a finished run's last evaluation, and how the run went."""
    summary = read_summary(folder) or {}
    drift = {"off_policy_kl": summary["stability"]["drift_nats"]} if "drift_nats" in summary["stability"] else {}
    lengths = {name: summary[name] for name in ("seconds", "responses_generated")}
    return {**summary["final"], **lengths, **drift, "lag": summary["lag"]["mean"]}


def as_json(results: Results, *, command: str) -> dict[str, Any]:
    """The content of results.json."""
    study = results.study
    means = {
        row: {column: results.over_seeds(row, column, study.metric)._asdict() for column in study.columns}
        for row in study.rows
    }
    made = {"command": command, "cpu_count": Machine.seen().cores, study.metric: means}
    return {**made, **vars(results), "study": study.model_dump(mode="json")}


def as_markdown(results: Results, *, command: str) -> str:
    """The content of results.md, which is also printed."""
    study, num_seeds = results.study, len(results.study.seeds)
    seeds = "one seed" if num_seeds == 1 else f"{num_seeds} seeds"
    commits = ", ".join(results.commits) or "unknown"
    parts = [f"# {study.name}", f"Made by `{command}`, commit {commits}, {Machine.seen().cores} cores."]
    parts += [
        f"## {titled(study.metric)}: mean ± standard error over {seeds}",
        as_table(grid_of(results, study.metric)),
    ]
    for name in (*study.also, *TITLES):
        parts += [f"## {titled(name)}", as_table(grid_of(results, name))]
    if study.tune is not None:
        title = f"## Tuned: mean {titled(study.tuning_metric)} over {', '.join(study.tune.columns)}"
        parts += [title, as_table(tuning_grid(results))]
    if results.failures:
        failures = [[label, error.splitlines()[0]] for label, error in results.failures.items()]
        parts += ["## Failed runs", as_table([["run", "error"], *failures])]
    return "\n\n".join(parts) + "\n"


def grid_of(results: Results, name: str) -> Grid:
    """Means of a metric by row and column: `87.1 ± 0.4 (2/3)`, without the count once all seeds are there."""
    columns, num_seeds = results.study.columns, len(results.study.seeds)
    grid = [["", *columns]]
    for row in results.study.rows:
        grid.append([row])
        for column in columns:
            num_done = len(results.runs[row][column])
            # By label, because a failed run has no numbers and so no place among `runs`.
            num_failed = sum(label.startswith(f"{row}/{column}/") for label in results.failures)
            notes = [f"{num_done}/{num_seeds}"] if num_done < num_seeds and num_done + num_failed else []
            notes += [f"{num_failed} failed"] if num_failed else []
            message = estimate_text(results.over_seeds(row, column, name), name)
            grid[-1].append(message + (f" ({', '.join(notes)})" if notes else ""))
    return grid


def tuning_grid(results: Results) -> Grid:
    """The tuning as a table: one column per value tried with its mean metric, the chosen value last."""
    tune, scale = results.study.tune, scale_of(results.study.tuning_metric)
    assert tune is not None
    grid = [[tune.key, *(f"{value:g}" for value in tune.values), "chosen"]]
    for row, scores in results.tuning.items():
        found = [list(scores[value].values()) for value in tune.values]
        means = ["failed" if None in own else f"{scale * (estimate(own).mean or 0.0):.4g}" for own in found]
        grid.append([row, *means, f"{results.tuned[row]:g}"])
    return grid


def estimate_text(value: Estimate, name: str) -> str:
    scale = scale_of(name)
    shown = [f"{scale * part:.1f}" if scale == 100.0 else f"{part:.4g}" for part in value if part is not None]
    return " ± ".join(shown) or "-"


def scale_of(name: str) -> float:
    """Factor for reading: 100 for metrics that are shares, else 1."""
    return 100.0 if name.startswith(SHARES) else 1.0


def titled(name: str) -> str:
    return TITLES.get(name, name) + (", %" if scale_of(name) == 100.0 else "")


def as_table(grid: Grid) -> str:
    """A table in Markdown, padded so that it can be read as it stands."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in grid]
    widths = [max(3, *map(len, column)) for column in zip(*cells)]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, row, widths))} |" for row in cells)
