"""What came out of a study, from the run folders alone: mean and standard error of every cell, and the tuned values."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tba.compare.runs import Cell, Plan, read_metric, read_record, read_steps, read_summary, state_of
from tba.compare.study import Study
from tba.observe.metrics import standard_error

LAST_SHARE = 0.1
"""Share of the steps at a run's end that its final KL and response length are means over."""
MEASURES = ("seconds", "responses_generated", "off_policy_kl", "lag", "kl", "response_length")
"""Measures reported of a run besides the metric."""
GIT_SECONDS = 10.0
"""Deadline for git to say the commit."""

Scores = Mapping[float, Sequence[float | None]]
"""Metric of the tuning runs by tuned value, one per tuning column; None = the run failed."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Mean over seeds and its standard error. Estimate(mean=0.871, error=0.004)"""

    mean: float | None
    """Mean of the runs that have a number; None = no run has one."""
    error: float | None
    """Standard error of the mean, sqrt(sum (x - mean)^2 / (n - 1) / n); None below two numbers."""


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """All seeds of a row in a column. CellResult(values={0: 0.87, 1: 0.88}, failures={2: "NonFiniteLoss: ..."}, ...)"""

    values: Mapping[int, float]
    """The study's metric by seed, of finished runs."""
    failures: Mapping[int, str]
    """Error messages by seed, of failed runs."""
    measures: Mapping[str, Estimate]
    """Means of the MEASURES over the finished runs, by name."""
    finals: Mapping[int, Mapping[str, float]]
    """All metrics of the last evaluation, by seed."""

    @property
    def metric(self) -> Estimate:
        return estimate(self.values.values())

    def final(self, name: str) -> Estimate:
        """Mean and standard error of any metric of the last evaluation."""
        return estimate(metrics.get(name) for metrics in self.finals.values())


@dataclass(frozen=True, kw_only=True)
class Results:
    """The whole grid, finished or not."""

    study: Study
    cells: Mapping[tuple[str, str], CellResult]
    """Results by row and column."""
    tuned: Mapping[str, float | None]
    """Tuned value by row, where it is known; None = nothing is tuned."""
    tuning: Mapping[str, Any]
    """Everything tried, as in results.json."""
    commits: Sequence[str]
    """Commits of the code that made the runs."""

    @property
    def failures(self) -> dict[str, str]:
        """Error messages of the runs that failed, by row, column and seed; failed tuning runs are in `tuning`."""
        return {
            f"{row}/{column}/seed-{seed}": error
            for (row, column), cell in self.cells.items()
            for seed, error in cell.failures.items()
        }


def gather(plan: Plan, *, measures: bool = True) -> Results:
    """Read the results there are; without `measures` only the metric, which is quick."""
    tuned = tuned_values(plan, lambda cell: state_of(cell) in ("done", "failed"))
    by_place: dict[tuple[str, str], list[Cell]] = {(r, c): [] for r in plan.study.rows for c in plan.study.columns}
    for row, value in tuned.items():
        for cell in plan.runs[row, value]:
            by_place[cell.row, cell.column].append(cell)
    return Results(
        study=plan.study,
        cells={place: _cell_result(cells, plan.study.metric, measures) for place, cells in by_place.items()},
        tuned=tuned,
        tuning=tuning_table(plan, tuned),
        commits=_commits(cell for cells in by_place.values() for cell in cells) if measures else (),
    )


def estimate(values: Iterable[float | None]) -> Estimate:
    """Mean and standard error; missing and non-finite numbers are left out."""
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    return Estimate(mean=fmean(numbers) if numbers else None, error=standard_error(numbers))


def measure(cell: Cell) -> dict[str, float | None]:
    """The MEASURES of one finished run."""
    summary, steps = read_summary(cell), read_steps(cell)
    last = steps[-math.ceil(LAST_SHARE * len(steps)) :]
    return {
        "seconds": summary["seconds"],
        "responses_generated": summary["responses_generated"],
        "off_policy_kl": _mean_of(steps, "off_policy/kl"),
        "lag": summary["lag"]["mean"],
        "kl": _mean_of(last, "kl"),
        "response_length": _mean_of(last, "completions/mean_length"),
    }


def as_json(results: Results, *, command: str) -> dict[str, Any]:
    """The content of results.json."""
    return {
        "study": results.study.name,
        "metric": results.study.metric,
        "command": command,
        "commit": commit_hash(),
        "run_commits": list(results.commits),
        "cpu_count": cpu_count(),
        "cells": [{"row": r, "column": c, **_cell_json(cell)} for (r, c), cell in results.cells.items()],
        "tuning": dict(results.tuning),
        "failures": [
            {"row": row, "column": column, "seed": seed, "error": error}
            for (row, column), cell in results.cells.items()
            for seed, error in cell.failures.items()
        ],
        "definition": results.study.model_dump(mode="json"),
    }


def _cell_json(cell: CellResult) -> dict[str, Any]:
    return {
        "values": {str(seed): value for seed, value in cell.values.items()},
        "mean": cell.metric.mean,
        "standard_error": cell.metric.error,
        "final": {str(seed): dict(metrics) for seed, metrics in cell.finals.items()},
        **{name: {"mean": e.mean, "standard_error": e.error} for name, e in cell.measures.items()},
    }


def _cell_result(cells: Sequence[Cell], metric: str, measures: bool) -> CellResult:
    states = {cell.seed: state_of(cell) for cell in cells}
    done = [cell for cell in cells if states[cell.seed] == "done"]
    measured = [measure(cell) for cell in done] if measures else []
    return CellResult(
        values={cell.seed: read_metric(cell, metric) for cell in done},
        failures={cell.seed: (read_record(cell) or {})["error"] for cell in cells if states[cell.seed] == "failed"},
        measures={name: estimate(run[name] for run in measured) for name in MEASURES},
        finals={cell.seed: read_summary(cell)["final"] for cell in done},
    )


def _commits(cells: Iterable[Cell]) -> list[str]:
    return sorted({(read_record(cell) or {}).get("commit") or "unknown" for cell in cells if state_of(cell) == "done"})


def _mean_of(steps: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return estimate(step.get(name) for step in steps).mean


def choose_value(scores: Scores) -> float:
    """The value with the best mean; a failed run is worse than any number, of equal values the smaller one is taken."""

    def rank(value: float) -> tuple[int, float, float]:
        found = [score for score in scores[value] if score is not None]
        return len(scores[value]) - len(found), -fmean(found) if found else 0.0, value

    return min(scores, key=rank)


def read_scores(plan: Plan, row: str) -> Scores:
    """Scores of a row whose tuning runs are all done or failed."""
    scores: dict[float, list[float | None]] = {}
    for cell in plan.tuning[row]:
        assert cell.value is not None
        done = state_of(cell) == "done"
        scores.setdefault(cell.value, []).append(read_metric(cell, plan.study.tuning_metric) if done else None)
    return scores


def tuned_values(plan: Plan, is_settled: Callable[[Cell], bool]) -> dict[str, float | None]:
    """Tuned value by row, for the rows whose tuning is finished; None = nothing is tuned."""
    return {
        row: choose_value(read_scores(plan, row)) if plan.study.tune is not None else None
        for row, cells in plan.tuning.items()
        if all(is_settled(cell) for cell in cells)
    }


def tuning_table(plan: Plan, tuned: Mapping[str, float | None]) -> dict[str, Any]:
    """All tuned values that were tried, for results.json; empty where nothing is tuned."""
    tune = plan.study.tune
    if tune is None:
        return {}
    rows = {
        row: {
            "chosen": value,
            "tried": [_tried(v, scores, tune.columns) for v, scores in read_scores(plan, row).items()],
        }
        for row, value in tuned.items()
    }
    return {
        "key": tune.key,
        "metric": plan.study.tuning_metric,
        "seed": tune.seed,
        "overrides": dict(tune.overrides),
        "rows": rows,
    }


def _tried(value: float, scores: Sequence[float | None], columns: Sequence[str]) -> dict[str, Any]:
    found = [score for score in scores if score is not None]
    mean = fmean(found) if len(found) == len(scores) else None
    return {"value": value, "mean": mean, "by_column": dict(zip(columns, scores))}


def commit_hash() -> str | None:
    """Commit of the package's own repository, with `-dirty` where files were changed since; None = no git, or not in one."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def cpu_count() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
