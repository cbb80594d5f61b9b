"""The pictures of a study: its metric by column and by how far off-policy the data was measured to be, and the Pareto
picture of two metrics that pull against each other."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tba.compare.display import metric_title, scale_for, scale_of, seeds_text, titled
from tba.compare.results import CellResult, Results
from tba.compare.study import Pareto

MARKERS = "osD^vP*Xh<>p"
DODGE = 0.04
"""Distance between rows, in columns: error bars that lie on each other cannot be read."""

LABEL_WIDTH, LABEL_HEIGHT = 24.0, 18.0
"""Distance in pixels within which a second label of the same text is left out."""
KL_NOISE = 1e-5
"""KL in nats per response that rounding alone can make."""

Point = tuple[float, float]
"""x and y of a run or a mean in the Pareto picture."""


def save_plot(results: Results, path: Path) -> None:
    """Draw the metric by column and by measured off-policy KL, and write the PNG in one move."""
    with new_figure(path, width=12) as figure:
        by_column, by_kl = figure.subplots(1, 2, sharey=True)
        _draw_columns(by_column, results)
        _draw_kl(by_kl, results)
        handles, labels = by_column.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)), frameon=False)
        figure.suptitle(f"{results.study.name}: mean ± standard error over {seeds_text(results)}")


def save_pareto(results: Results, pareto: Pareto, path: Path) -> None:
    """Draw every run as a point, means with error bars and their frontier, and write the PNG in one move."""
    with new_figure(path, width=8) as figure:
        axes = figure.subplots()
        means = _draw_points(axes, results, pareto)
        line = frontier(means, less_x=pareto.x_better == "less")
        axes.plot(
            [x for x, _ in line], [y for _, y in line], color="0.4", linewidth=1, linestyle="--", label="frontier"
        )
        axes.set(xlabel=titled(pareto.x, scale_for(pareto.x)), ylabel=titled(pareto.y, scale_for(pareto.y)))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, frameon=False)
        figure.suptitle(f"{results.study.name}: runs, and means ± standard error over {seeds_text(results)}")


def frontier(points: Sequence[Point], *, less_x: bool) -> list[Point]:
    """The points that no other beats in both, from left to right; more y is better, and less x or more x.

    frontier([(1, 5), (2, 4), (3, 7)], less_x=True) == [(1, 5), (3, 7)]
    """
    best: list[Point] = []
    for x, y in sorted(set(points), key=lambda point: (point[0] if less_x else -point[0], -point[1])):
        if not best or y > best[-1][1]:
            best.append((x, y))
    return sorted(best)


def _draw_points(axes: Any, results: Results, pareto: Pareto) -> list[Point]:
    """Draw every cell, and return the means."""
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


def _draw_columns(axes: Any, results: Results) -> None:
    columns, rows, scale = list(results.study.columns), list(results.study.rows), scale_of(results)
    for index, row in enumerate(rows):
        shift = DODGE * (index - (len(rows) - 1) / 2)
        found = [(x + shift, column, results.cells[row, column]) for x, column in enumerate(columns)]
        points = [point for point in found if point[2].metric.mean is not None]
        cells = [cell for _, _, cell in points]
        axes.errorbar(
            [x for x, _, _ in points], _means(cells, scale), yerr=_errors(cells, scale), label=row, **style(index)
        )
        numbers = [(x, cell) for x, column, cell in points if _is_number(column)]  # others have no place on a line
        axes.plot([x for x, _ in numbers], _means([cell for _, cell in numbers], scale), color=style(index)["color"])
    axes.set_xticks(range(len(columns)), columns)
    axes.set(xlabel="column", ylabel=metric_title(results))
    axes.grid(alpha=0.3)


def _draw_kl(axes: Any, results: Results) -> None:
    scale, all_kl = scale_of(results), []
    labels: list[tuple[str, tuple[float, float]]] = []
    for index, row in enumerate(results.study.rows):
        for column in results.study.columns:
            cell = results.cells[row, column]
            kl = cell.measures["off_policy_kl"]
            if kl.mean is None or cell.metric.mean is None:
                continue
            all_kl.append(kl.mean)
            axes.errorbar(
                [kl.mean], _means([cell], scale), xerr=[kl.error or 0.0], yerr=_errors([cell], scale), **style(index)
            )
            labels.append((column, (kl.mean, scale * cell.metric.mean)))
    _scale_kl(axes, all_kl)
    _label(axes, labels)
    axes.set(xlabel="measured off-policy KL, nats per response (label: column)")
    axes.grid(alpha=0.3)


def _label(axes: Any, labels: Sequence[tuple[str, tuple[float, float]]]) -> None:
    """Write names beside their points; where equal names would lie on top of each other, only one is written."""
    placed: list[tuple[str, Any]] = []
    for name, point in labels:
        x, y = axes.transData.transform(point)
        if any(name == other and abs(x - a) < LABEL_WIDTH and abs(y - b) < LABEL_HEIGHT for other, (a, b) in placed):
            continue
        placed.append((name, (x, y)))
        axes.annotate(name, point, xytext=(5, 4), textcoords="offset points", fontsize=8, alpha=0.8)


def _is_number(column: str) -> bool:
    try:
        float(column)
    except ValueError:
        return False
    return True


def _scale_kl(axes: Any, all_kl: Sequence[float]) -> None:
    """Make the KL axis logarithmic; linear around 0 where some are 0 but for rounding (no lag)."""
    above_noise = [kl for kl in all_kl if kl > KL_NOISE]
    if all_kl and min(all_kl) > 0:
        axes.set_xscale("log")
    elif above_noise:
        low, high = math.floor(math.log10(min(above_noise))), math.ceil(math.log10(max(above_noise)))
        axes.set_xscale("symlog", linthresh=10.0**low)
        axes.set_xticks([0.0, *(10.0**decade for decade in range(low, high + 1))])


def style(index: int) -> dict[str, Any]:
    marker = MARKERS[index % len(MARKERS)]
    return {"color": f"C{index % 10}", "marker": marker, "markersize": 6, "capsize": 3, "linestyle": "none"}


def _means(cells: Sequence[CellResult], scale: float) -> list[float]:
    return [scale * cell.metric.mean for cell in cells if cell.metric.mean is not None]


def _errors(cells: Sequence[CellResult], scale: float) -> list[float]:
    return [scale * (cell.metric.error or 0.0) for cell in cells]


@contextmanager
def new_figure(path: Path, *, width: float) -> Iterator[Any]:
    """A figure to draw on, written as PNG in one move at the end."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(width, 5.2), layout="constrained")
        yield figure
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        figure.savefig(temporary, dpi=150, format="png")
        os.replace(temporary, path)
