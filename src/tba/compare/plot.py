"""The picture of a study: its metric by column, and against what it is paid with (off-policy KL, or KL to the reference)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tba.compare.results import Results, scale_of, titled

MARKERS = "osD^vP*Xh<>p"
DODGE = 0.04
"""Distance between rows, in columns: error bars that lie on each other cannot be read."""
KL_NOISE = 1e-4
"""KL in nats per response below which the axis is linear: without lag it is 0 but for rounding."""


def save_plot(results: Results, path: Path) -> None:
    """Draw the metric by column, and against `study.against`, and write the PNG in one move."""
    study = results.study
    with new_figure(path, width=12) as figure:
        by_column, against = figure.subplots(1, 2, sharey=True)
        for index, row in enumerate(study.rows):
            style = {"color": f"C{index % 10}", "marker": MARKERS[index % len(MARKERS)], "capsize": 3}
            _draw_columns(by_column, results, row, DODGE * (index - (len(study.rows) - 1) / 2), style)
            _draw_against(against, results, row, study.against or "off_policy_kl", style)
        by_column.set_xticks(range(len(study.columns)), list(study.columns))
        by_column.set(xlabel="column", ylabel=titled(study.metric))
        if study.against is None:
            against.set_xscale("symlog", linthresh=KL_NOISE)
        against.set(xlabel=f"{titled(study.against or 'off_policy_kl')} (label: column)")
        for axes in (by_column, against):
            axes.grid(alpha=0.3)
        handles, labels = by_column.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)), frameon=False)
        figure.suptitle(f"{study.name}: mean ± standard error over seeds")


def _draw_columns(axes: Any, results: Results, row: str, shift: float, style: dict[str, Any]) -> None:
    """The metric by column; a line joins columns that are numbers, others have no place on it."""
    study = results.study
    found = [(x + shift, c, results.over_seeds(row, c, study.metric)) for x, c in enumerate(study.columns)]
    scale, points = scale_of(study.metric), [point for point in found if point[2].mean is not None]
    xs, means = [x for x, _, _ in points], [scale * (value.mean or 0.0) for _, _, value in points]
    errors = [scale * (value.error or 0.0) for _, _, value in points]
    axes.errorbar(xs, means, yerr=errors, label=row, linestyle="none", **style)
    joined = [(x, y) for (x, column, _), y in zip(points, means) if column.replace(".", "", 1).isdigit()]
    axes.plot([x for x, _ in joined], [y for _, y in joined], color=style["color"])


def _draw_against(axes: Any, results: Results, row: str, name: str, style: dict[str, Any]) -> None:
    """Every run as a small point, and the means over seeds, against another of its numbers."""
    metric = results.study.metric
    x_scale, y_scale = scale_of(name), scale_of(metric)
    for column in results.study.columns:
        runs = [run for run in results.runs[row][column].values() if name in run and metric in run]
        x, y = results.over_seeds(row, column, name), results.over_seeds(row, column, metric)
        if x.mean is None or y.mean is None:
            continue
        xs, ys = [x_scale * run[name] for run in runs], [y_scale * run[metric] for run in runs]
        axes.scatter(xs, ys, color=style["color"], s=14, alpha=0.4)
        mean = (x_scale * x.mean, y_scale * y.mean)
        axes.errorbar(*mean, xerr=x_scale * (x.error or 0.0), yerr=y_scale * (y.error or 0.0), **style)
        if len(results.study.columns) > 1:
            axes.annotate(column, mean, xytext=(5, 4), textcoords="offset points", fontsize=8, alpha=0.8)


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
