"""What a finished run shows: a before/after table, a curve in the terminal and as a picture, the folder's path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tba.config import Config
from tba.observe.stability import advice, stability_words, went_badly

PLOT_WIDTH, PLOT_HEIGHT = 60, 10
SHARES = ("accuracy", "pass@", "avg@", "win_rate", "success", "cut_off", "distinct")
"""What metrics that are shares begin with."""


@dataclass(frozen=True)
class Curve:
    """An evaluation metric over steps: Curve("accuracy", [(0, 0.37), (50, 0.61)])"""

    name: str
    points: Sequence[tuple[int, float]]


def shown(name: str, value: float, error: float | None = None) -> str:
    """A metric's value for reading, with its standard error where that is given: shares in percent."""
    is_share = name.startswith(SHARES)
    spread = "" if error is None else f" ± {100 * error:.1f}" if is_share else f" ± {error:.2g}"
    return (f"{value:.1%}" if is_share else f"{value:.3g}") + spread


def show_summary(summary: Mapping[str, Any], curve: Curve, folder: Path, *, config: Config) -> None:
    """Print the closing words of a run."""
    console = Console()
    table = Table(title=f"{summary['task']}, {summary['objective']}, seed {summary['seed']}", title_justify="left")
    for column in ("", "before", "after"):
        table.add_column(column)
    for name, after in summary["final"].items():
        before = shown(name, summary["start"].get(name, float("nan")), summary["start_standard_error"].get(name))
        table.add_row(name, before, shown(name, after, summary["final_standard_error"].get(name)))
    console.print(table)
    if summary["evaluated"]:
        counts = ", ".join(f"{count} {name.removeprefix('num_')}" for name, count in summary["evaluated"].items())
        console.print(f"means over {counts}, with their standard errors", highlight=False)
    console.print(
        f"{summary['steps']} steps in {summary['seconds']:.0f} s; {summary['responses_trained']} responses trained of "
        f"{summary['responses_generated']} generated; lag mean {summary['lag']['mean']:.1f}, max {summary['lag']['max']}",
        highlight=False,
    )
    if summary["empty_steps"]:
        console.print(
            f"{summary['empty_steps']} steps moved no weights: train.truncated or train.equal_reward_groups left nothing of "
            "their batches",
            style="bold red",
            highlight=False,
        )
    if summary["collapse"] is not None:
        console.print(
            f"step {summary['collapse']['step']}: {summary['collapse']['words']}", style="bold red", markup=False
        )
    console.print(stability_words(summary), highlight=False)
    if went_badly(summary):
        words = advice(summary, auto_rate=config.train.learning_rate is None, movement=config.train.movement)
        console.print(words, style="bold", highlight=False)
    if summary["best"] is not None and 0 < summary["best"]["step"] < summary["steps"]:
        best, name = summary["best"], next(iter(summary["final"]))
        console.print(
            f"best {name}: {shown(name, best['score'])} at step {best['step']}, kept in "
            f"checkpoints/best-step-{best['step']} (the table is of the last weights)",
            highlight=False,
        )
    if len(curve.points) > 2:
        console.print(text_plot(curve), highlight=False)
        save_plot(curve, folder / f"{curve.name}.png", title=f"{summary['task']}: {curve.name}")
    console.print(f"run folder: {folder}", highlight=False)


def text_plot(curve: Curve) -> str:
    """The curve in characters, step to the right, the metric upwards."""
    last = max(step for step, _ in curve.points) or 1
    low, high = min(value for _, value in curve.points), max(value for _, value in curve.points)
    grid = [[" "] * PLOT_WIDTH for _ in range(PLOT_HEIGHT)]
    for step, value in curve.points:
        column = round((PLOT_WIDTH - 1) * step / last)
        row = round((PLOT_HEIGHT - 1) * (value - low) / max(high - low, 1e-9))
        grid[PLOT_HEIGHT - 1 - row][column] = "*"
    top, bottom = (f"{shown(curve.name, value):>7} |" for value in (high, low))
    labels = [top, *["        |"] * (PLOT_HEIGHT - 2), bottom]
    lines = [label + "".join(row) for label, row in zip(labels, grid)]
    return "\n".join([*lines, "        +" + "-" * PLOT_WIDTH, f"         0{'steps ':>{PLOT_WIDTH - 8}}{last:>6}"])


def save_plot(curve: Curve, path: Path, *, title: str) -> None:
    from matplotlib.figure import Figure  # slow to import, needed once, at the end

    figure = Figure(figsize=(6, 3.5))
    axes = figure.subplots()
    steps, values = zip(*curve.points)
    axes.plot(steps, values, marker="o", markersize=3)
    axes.set(xlabel="optimizer steps", ylabel=curve.name, title=title)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
