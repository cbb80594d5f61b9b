"""Which value of the tuned setting a row is run with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from tba.compare.plan import Cell, Plan
from tba.compare.records import read_metric, state_of

Scores = Mapping[float, Sequence[float | None]]
"""Metric by value, one per tuning column; None = the run failed."""


def choose_value(scores: Scores) -> float:
    """The best mean; a failed run is worse than any number, of equal values the smaller one is taken."""

    def rank(value: float) -> tuple[int, float, float]:
        found = [score for score in scores[value] if score is not None]
        return len(scores[value]) - len(found), -fmean(found) if found else 0.0, value

    return min(scores, key=rank)


def read_scores(plan: Plan, row: str) -> Scores:
    """Of a row whose tuning runs are all settled."""
    scores: dict[float, list[float | None]] = {}
    for cell in plan.tuning[row]:
        assert cell.value is not None
        done = state_of(cell) == "done"
        scores.setdefault(cell.value, []).append(read_metric(cell, plan.study.tuning_metric) if done else None)
    return scores


def tuned_values(plan: Plan, is_settled: Callable[[Cell], bool]) -> dict[str, float | None]:
    """Value by row, for the rows whose tuning is finished; None = nothing is tuned."""
    return {
        row: choose_value(read_scores(plan, row)) if plan.study.tune is not None else None
        for row, cells in plan.tuning.items()
        if all(is_settled(cell) for cell in cells)
    }


def tuning_table(plan: Plan, tuned: Mapping[str, float | None]) -> dict[str, Any]:
    """All that was tried, for results.json; empty where nothing is tuned."""
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
