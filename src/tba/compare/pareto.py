"""Two metrics that pull against each other: every run as a point, means with error bars, and who is not beaten in both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tba.compare.plot import new_figure, style
from tba.compare.results import Results
from tba.compare.study import Pareto
from tba.compare.table import scale_for, seeds_text, titled

Point = tuple[float, float]


def frontier(points: Sequence[Point], *, less_x: bool) -> list[Point]:
    """The points that no other beats in both, from left to right; more y is better, and less x or more x.

    frontier([(1, 5), (2, 4), (3, 7)], less_x=True) == [(1, 5), (3, 7)]
    """
    best: list[Point] = []
    for x, y in sorted(set(points), key=lambda point: (point[0] if less_x else -point[0], -point[1])):
        if not best or y > best[-1][1]:
            best.append((x, y))
    return sorted(best)


def save_pareto(results: Results, pareto: Pareto, path: Path) -> None:
    """Write the PNG in one move."""
    with new_figure(path, width=8) as figure:
        axes = figure.subplots()
        means = _draw_points(axes, results, pareto)
        line = frontier(means, less_x=pareto.x_better == "less")
        axes.plot(
            [x for x, _ in line], [y for _, y in line], color="0.4", linewidth=1, linestyle="--", label="frontier"
        )
        axes.set(xlabel=_title(pareto.x), ylabel=_title(pareto.y))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, frameon=False)
        figure.suptitle(f"{results.study.name}: runs, and means ± standard error over {seeds_text(results)}")


def _draw_points(axes: Any, results: Results, pareto: Pareto) -> list[Point]:
    """Draws every cell; returns the means."""
    several, means = len(results.study.columns) > 1, []
    named: set[str] = set()
    x_scale, y_scale = scale_for(pareto.x), scale_for(pareto.y)
    for index, row in enumerate(results.study.rows):
        for column in results.study.columns:
            cell = results.cells[row, column]
            x, y = cell.final(pareto.x), cell.final(pareto.y)
            if x.mean is None or y.mean is None:
                continue
            finals = [final for final in cell.finals.values() if pareto.x in final and pareto.y in final]
            runs = [(final[pareto.x], final[pareto.y]) for final in finals]
            xs, ys = [x_scale * a for a, _ in runs], [y_scale * b for _, b in runs]
            axes.scatter(xs, ys, color=f"C{index % 10}", s=14, alpha=0.4)
            mean = (x_scale * x.mean, y_scale * y.mean)
            axes.errorbar(
                *mean,
                xerr=x_scale * (x.error or 0.0),
                yerr=y_scale * (y.error or 0.0),
                label=None if row in named else row,
                **style(index),
            )
            if several:
                axes.annotate(column, mean, xytext=(5, 4), textcoords="offset points", fontsize=8, alpha=0.8)
            means.append(mean)
            named.add(row)
    return means


def _title(metric: str) -> str:
    return titled(metric, scale_for(metric))
