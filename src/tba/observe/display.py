"""What a run shows. While it runs: evaluations, reward, lag, speed, and who waits for whom. At its end: a before/after
table, how steady it was, what to change first if it went badly, its curve.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from tba.config import Config
from tba.observe.metrics import Evaluation
from tba.observe.streams import lasting

REFRESH_PER_SECOND = 4
LINE_SECONDS = 10.0
"""Time between two lines where there is no terminal."""
PLOT_WIDTH, PLOT_HEIGHT = 60, 10
SHARES = ("accuracy", "solved", "pass@", "avg@", "win_rate", "success", "cut_off", "distinct")
"""Beginnings of the names of metrics that are shares, which are shown in percent."""
MEANS = {"drift_nats": "off_policy/kl", "held_back": "tb/held_back"}
"""Metrics whose mean over the steps goes into the summary, by their name there."""
LASTS = {"trained_per_generated": "buffer/replay_ratio", "learning_rate": "learning_rate"}
"""Metrics whose last value goes into the summary, by their name there."""
MUCH_HELD_BACK = 0.4
"""Share of the gradient held back above which most responses are too old when they are trained."""
MUCH_WAITED = 0.3
"""Share of its time that a trainer waits for responses above which it could train those it has once more."""
FELL_ERRORS = 2.0
"""Number of standard errors by which the final score lies below the best one before it counts as lost."""


@dataclass(frozen=True, kw_only=True)
class RoleStatus:
    """What a role does now, for the display.

    RoleStatus(name="searcher-0", doing="waits: pace", waited_share=0.12, responses_per_second=410.0)
    """

    name: str
    doing: str
    waited_share: float
    """Share of the time since the roles were made that this one waited."""
    responses_per_second: float
    pid: int | None = None
    """Its process; None where it has none at the moment."""
    kind: str | None = None
    """Kind of a searcher (search.kinds); None where all are alike."""


class Progress:
    """The live display: a table on a terminal, a line now and then elsewhere, nothing with observe.progress=false."""

    def __init__(self, config: Config, roles: Callable[[], Sequence[RoleStatus]] = list) -> None:
        self._config = config
        self._roles = roles
        self._console = Console(file=lasting(sys.stderr))
        self._enabled = config.observe.progress
        self._metrics: Mapping[str, float] = {}
        self._step = 0
        self._evaluations: list[tuple[int, Mapping[str, float]]] = []
        self._shown_at = time.monotonic()
        self._live: Live | None = None
        if self._enabled and sys.stderr.isatty():
            # Its own thread draws it, so that it also shows a trainer that waits.
            self._live = Live(
                get_renderable=self._table, console=self._console, refresh_per_second=REFRESH_PER_SECOND, transient=True
            )
            self._live.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step, self._metrics = step, metrics
        now = time.monotonic()
        if self._live is None and self._enabled and now - self._shown_at > LINE_SECONDS:
            self._shown_at = now
            self._console.print(self._line(), highlight=False)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._evaluations.append((step, metrics))
        if self._enabled and self._live is None:
            found = Evaluation.of(metrics)
            names = table_names(found.values, found.values)
            figures = "  ".join(f"{name} {shown(name, found.values[name], found.errors.get(name))}" for name in names)
            self._console.print(f"evaluation at step {step}: {figures}", highlight=False)

    def note(self, words: str) -> None:
        """A line that stays on the screen."""
        if self._enabled:
            self._console.print(words, markup=False, highlight=False, soft_wrap=True)

    def resume(self, step: int, evaluations: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Show what an earlier process of the run has done."""
        self._step, self._evaluations = step, list(evaluations)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _line(self) -> str:
        return f"step {self._step}/{self._config.train.max_steps}  " + "  ".join(f"{k} {v}" for k, v in self._figures())

    def _figures(self) -> list[tuple[str, str]]:
        value = self._metrics.get
        return [
            ("reward", f"{value('reward', 0):.3f}"),
            ("KL", f"{value('kl', 0):.2f}"),
            ("length", f"{value('completions/mean_length', 0):.1f}"),
            ("lag", f"{value('off_policy/lag_mean', 0):.1f} (max {value('off_policy/lag_max', 0):.0f})"),
            ("trained/s", f"{value('perf/responses_per_second', 0):.0f}"),
        ]

    def _table(self) -> Table:
        table = Table(title=f"tba {self._config.run_name}", title_justify="left", show_header=False, min_width=60)
        table.add_row("step", f"{self._step} / {self._config.train.max_steps}")
        table.add_row(*self._headline())
        for name, figure in self._figures():
            table.add_row(name, figure)
        if self._metrics.get("guard/alarm"):
            table.add_row("guard", "the run is collapsing: see the warning")
        for role in self._roles():
            name = role.name if role.kind is None else f"{role.name} ({role.kind})"
            table.add_row(
                name, f"{role.doing}; waited {role.waited_share:.0%}; {role.responses_per_second:.0f} responses/s"
            )
        return table

    def _headline(self) -> tuple[str, str]:
        """Name of the evaluations' first metric, and its values at the start and in the last three."""
        name = next(iter(self._evaluations[0][1]), "evaluation") if self._evaluations else "evaluation"
        found = [(step, metrics[name]) for step, metrics in self._evaluations if name in metrics]
        words = [f"{shown(name, value)} (step {step})" for step, value in [*found[:1], *found[1:][-3:]]]
        return name, "  ".join(words) or "..."


def show_line(words: str) -> None:
    """One line on the screen, as it stands."""
    Console(file=lasting(sys.stderr)).print(words, markup=False, highlight=False, soft_wrap=True)


def show_summary(summary: Mapping[str, Any], curve: Curve, folder: Path, *, config: Config) -> None:
    """Print the results of a finished run, and save the curve as a picture in its folder."""
    console = Console(file=lasting(sys.stdout))
    table = Table(title=f"{summary['task']}, {summary['objective']}, seed {summary['seed']}", title_justify="left")
    for column in ("", "before", "after"):
        table.add_column(column)
    for name in table_names(summary["start"], summary["final"]):
        before = shown(name, summary["start"].get(name, float("nan")), summary["start_standard_error"].get(name))
        table.add_row(name, before, shown(name, summary["final"][name], summary["final_standard_error"].get(name)))
    console.print(table if table.row_count else f"{table.title}: not evaluated", highlight=False)
    if summary["evaluated"]:
        counted = {name.removeprefix("num_").replace("_", " "): count for name, count in summary["evaluated"].items()}
        counts = ", ".join(f"{count} {name}" for name, count in counted.items())
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
    if summary["lost"] is not None:
        console.print(
            f"{summary['lost']['responses']} responses ({summary['lost']['share']:.0%}) had no reward and were not trained "
            f"on; the last: {summary['lost']['last']}",
            style="bold red",
            markup=False,
        )
    if summary["collapse"] is not None:
        console.print(
            f"step {summary['collapse']['step']}: {summary['collapse']['words']}", style="bold red", markup=False
        )
    console.print(stability_line(summary), highlight=False)
    if summary["target"] is not None and summary["target"]["words"] is not None:
        console.print(f"beta: {summary['target']['words']}", style="bold", highlight=False)
    if went_badly(summary):
        words = advice(summary, auto_rate=config.train.learning_rate is None, movement=config.train.movement)
        console.print(words, style="bold", highlight=False)
    elif config.mode == "async" and (spare_time := waiting_advice(summary)) is not None:
        console.print(spare_time, highlight=False)
    if summary["best"] is not None and 0 < summary["best"]["step"] < summary["steps"]:
        best, name = summary["best"], next(iter(summary["final"]))
        kept = (folder / "checkpoints" / f"best-step-{best['step']}").is_dir()
        where = f"kept in checkpoints/best-step-{best['step']}" if kept else "whose weights were not kept"
        console.print(
            f"best {name}: {shown(name, best['score'])} at step {best['step']}, {where} (the table is of the last weights)",
            highlight=False,
        )
    if len(curve.points) > 2:
        console.print(text_plot(curve), highlight=False)
        with suppress(OSError):  # a full disk must not hide the figures, which are also in summary.json
            save_plot(curve, folder / f"{curve.name}.png", title=f"{summary['task']}: {curve.name}")
    console.print(f"run folder: {folder}", highlight=False)


def table_names(start: Mapping[str, float], final: Mapping[str, float]) -> list[str]:
    """The metrics to show. A user's rewards that are 0 or 1 now and were something else before, or the other way round, have
    no `accuracy` on both sides: then it is `solved`, which is the same number."""
    repeated = "solved" if "accuracy" in start and "accuracy" in final else "accuracy"
    return [name for name in final if name != repeated or "solved" not in final]


def shown(name: str, value: float, error: float | None = None) -> str:
    """A metric's value for reading, with its standard error where that is given: shares in percent."""
    is_share = name.startswith(SHARES)
    spread = "" if error is None else f" ± {100 * error:.1f}" if is_share else f" ± {error:.2g}"
    return (f"{value:.1%}" if is_share else f"{value:.3g}") + spread


@dataclass
class Stability:
    """How steady a run is: means and last values of a few metrics, gathered step by step."""

    _sums: dict[str, float] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)
    _lasts: dict[str, float] = field(default_factory=dict)
    _steps: int = 0
    _waited_seconds: float = 0.0
    _worked_seconds: float = 0.0
    """Of all steps but the first, which waits until searchers have started."""

    def step(self, metrics: Mapping[str, float]) -> None:
        self._steps += 1
        if self._steps > 1:
            self._waited_seconds += metrics.get("time/wait_for_batch", 0.0)
            self._worked_seconds += sum(
                metrics.get(f"time/{part}", 0.0) for part in ("step", "receive", "second_update")
            )
        for name, metric in MEANS.items():
            if metric in metrics:
                self._sums[name] = self._sums.get(name, 0.0) + metrics[metric]
                self._counts[name] = self._counts.get(name, 0) + 1
        self._lasts |= {name: metrics[metric] for name, metric in LASTS.items() if metric in metrics}

    def summary(self) -> dict[str, float]:
        """{"drift_nats": 0.02, "held_back": 0.1, "trained_per_generated": 1.0, "learning_rate": 3e-06, "waited": 0.3}"""
        means = {name: self._sums[name] / self._counts[name] for name in self._sums}
        if self._worked_seconds:
            means["waited"] = self._waited_seconds / (self._waited_seconds + self._worked_seconds)
        return {name: float(f"{value:.4g}") for name, value in (means | self._lasts).items()}


def stability_line(summary: Mapping[str, Any]) -> str:
    """One line about a run from its summary.json."""
    found, collapse, rollbacks = summary["stability"], summary["collapse"], summary.get("rollbacks", [])
    parts = [f"collapse alarm at step {r['step']}, rolled back to step {r['to']}" for r in rollbacks]
    if collapse is not None:
        recovered = f", recovered by step {collapse['recovered']}" if collapse.get("recovered") else ""
        parts.append(f"collapse alarm at step {collapse['step']}{recovered}")
    parts = parts or ["no alarm"]
    if "drift_nats" in found:
        parts.append(f"the policy moved {found['drift_nats']:.2g} nats between generating and training a response")
    if "held_back" in found:
        parts.append(f"{found['held_back']:.0%} of the gradient was held back")
    if "trained_per_generated" in found:
        parts.append(f"each response was trained {found['trained_per_generated']:.2g} times")
    if found.get("waited"):
        parts.append(f"the trainer waited {found['waited']:.0%} of its time for responses")
    return f"stability: {'; '.join(parts)}"


def went_badly(summary: Mapping[str, Any]) -> bool:
    """Whether a run ended in a collapse that lasts, or with a final score clearly below its best one."""
    collapse, best = summary["collapse"], summary["best"]
    if collapse is not None and not collapse.get("recovered"):
        return True
    name = next(iter(summary["final"]), None)
    if best is None or name is None:
        return False
    return summary["final"][name] < best["score"] - FELL_ERRORS * summary["final_standard_error"].get(name, 0.0)


def advice(summary: Mapping[str, Any], *, auto_rate: bool, movement: float) -> str:
    """The setting to change first after a run that went badly; the summary says which."""
    found = summary["stability"]
    if found.get("held_back", 0.0) > MUCH_HELD_BACK and found.get("trained_per_generated", 1.0) > 1.5:
        return (
            "change first: train.second_update_after=0, or a lower replay.max_trained_per_generated where one was given: "
            "responses are too old when they are trained."
        )
    if found.get("held_back", 0.0) > MUCH_HELD_BACK:
        return (
            "change first: replay.lag=pace replay.max_lag=1 (or fewer searchers), responses are too old when trained."
        )
    if not auto_rate:
        return "change first: leave train.learning_rate unset (auto), or divide it by 3."
    return f"change first: train.movement={movement / 2:g} (half of what it was), then a higher objective.beta."


def waiting_advice(summary: Mapping[str, Any]) -> str | None:
    """How a run that went well would learn more in the same time, where its trainer waited for responses; None = it did
    not. Measured in docs/results.md, "Asynchrony, time to accuracy"."""
    found = summary["stability"]
    if found.get("waited", 0.0) < MUCH_WAITED or found.get("trained_per_generated", 1.0) > 1.5:
        return None
    return (
        "the trainer has time to spare: more searchers, or replay.max_trained_per_generated=2 with twice the "
        "train.max_steps, which trains every response twice."
    )


@dataclass(frozen=True)
class Curve:
    """An evaluation metric over steps: Curve("accuracy", [(0, 0.37), (50, 0.61)])"""

    name: str
    points: Sequence[tuple[int, float]]


def text_plot(curve: Curve) -> str:
    """The curve drawn in characters, steps to the right, the metric upwards."""
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
    """Write the curve as a PNG."""
    from matplotlib.figure import Figure  # slow to import, needed once, at the end

    figure = Figure(figsize=(6, 3.5))
    axes = figure.subplots()
    steps, values = zip(*curve.points)
    axes.plot(steps, values, marker="o", markersize=3)
    axes.set(xlabel="optimizer steps", ylabel=curve.name, title=title)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
