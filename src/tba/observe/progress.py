"""The live display: evaluations, reward, lag, speed, and who waits for whom."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.table import Table

from tba.config import Config
from tba.observe.metrics import Evaluation
from tba.observe.summary import shown

REFRESH_PER_SECOND = 4
LINE_SECONDS = 10.0
"""Time between two lines where there is no terminal."""


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


class Progress:
    """The live display: a table on a terminal, a line now and then elsewhere, nothing with observe.progress=false."""

    def __init__(self, config: Config, roles: Callable[[], Sequence[RoleStatus]] = list) -> None:
        self._config = config
        self._roles = roles
        self._console = Console(stderr=True)
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
            figures = "  ".join(f"{name} {shown(name, v, found.errors.get(name))}" for name, v in found.values.items())
            self._console.print(f"evaluation at step {step}: {figures}", highlight=False)

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
            table.add_row(
                role.name, f"{role.doing}; waited {role.waited_share:.0%}; {role.responses_per_second:.0f} responses/s"
            )
        return table

    def _headline(self) -> tuple[str, str]:
        """Name of the evaluations' first metric, and its values at the start and in the last three."""
        name = next(iter(self._evaluations[0][1]), "evaluation") if self._evaluations else "evaluation"
        found = [(step, metrics[name]) for step, metrics in self._evaluations if name in metrics]
        words = [f"{shown(name, value)} (step {step})" for step, value in [*found[:1], *found[1:][-3:]]]
        return name, "  ".join(words) or "..."
