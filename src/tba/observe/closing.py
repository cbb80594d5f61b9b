"""What a finished run shows: a before/after table, a curve in the terminal and as a picture, the folder's path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PLOT_WIDTH, PLOT_HEIGHT = 60, 10


def show_summary(summary: Mapping[str, Any], curve: Sequence[tuple[int, float]], folder: Path) -> None:
    """Print the closing words of a run; `curve` has (step, accuracy) points."""
    console = Console()
    table = Table(title=f"{summary['task']}, {summary['objective']}, seed {summary['seed']}", title_justify="left")
    for column in ("", "before", "after"):
        table.add_column(column)
    for name, after in summary["final"].items():
        table.add_row(name, f"{summary['start'].get(name, float('nan')):.1%}", f"{after:.1%}")
    console.print(table)
    console.print(
        f"{summary['steps']} steps in {summary['seconds']:.0f} s; {summary['responses_trained']} responses trained of "
        f"{summary['responses_generated']} generated; lag mean {summary['lag']['mean']:.1f}, max {summary['lag']['max']}",
        highlight=False,
    )
    if summary["collapse"] is not None:
        console.print(
            f"step {summary['collapse']['step']}: {summary['collapse']['words']}", style="bold red", markup=False
        )
    if len(curve) > 2:
        console.print(text_plot(curve), highlight=False)
        save_plot(curve, folder / "accuracy.png", title=f"{summary['task']}: greedy accuracy")
    console.print(f"run folder: {folder}", highlight=False)


def text_plot(curve: Sequence[tuple[int, float]]) -> str:
    """The curve in characters, step to the right, accuracy upwards."""
    last = max(step for step, _ in curve) or 1
    low, high = min(value for _, value in curve), max(value for _, value in curve)
    grid = [[" "] * PLOT_WIDTH for _ in range(PLOT_HEIGHT)]
    for step, value in curve:
        column = round((PLOT_WIDTH - 1) * step / last)
        row = round((PLOT_HEIGHT - 1) * (value - low) / max(high - low, 1e-9))
        grid[PLOT_HEIGHT - 1 - row][column] = "*"
    labels = [f"{high:7.1%} |", *["        |"] * (PLOT_HEIGHT - 2), f"{low:7.1%} |"]
    lines = [label + "".join(row) for label, row in zip(labels, grid)]
    return "\n".join([*lines, "        +" + "-" * PLOT_WIDTH, f"         0{'steps ':>{PLOT_WIDTH - 8}}{last:>6}"])


def save_plot(curve: Sequence[tuple[int, float]], path: Path, *, title: str) -> None:
    from matplotlib.figure import Figure  # slow to import, needed once, at the end

    figure = Figure(figsize=(6, 3.5))
    axes = figure.subplots()
    axes.plot([step for step, _ in curve], [value for _, value in curve], marker="o", markersize=3)
    axes.set(xlabel="optimizer steps", ylabel="accuracy", title=title)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
