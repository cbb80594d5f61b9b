"""What a study shows while it runs: a live table on a terminal, a line per finished run elsewhere."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from statistics import fmean

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from tba.compare.results import gather
from tba.compare.runs import Cell, Plan, read_holder
from tba.compare.table import metric_grid, metric_title, rich_table
from tba.observe.files import RunFolder

TAIL_BYTES = 65_536
"""Number of bytes read from the end of metrics.jsonl, enough for its last lines."""


class Display:
    """The display of a study, used as a context: the live table is removed at its end."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._console = Console(stderr=True)
        self._started_at = time.monotonic()
        self._speed = Speed()
        self._left: Sequence[Cell] = ()
        self._results = gather(plan, measures=False)
        self._running: Cell | None = None
        self._doing = ""
        self._live: Live | None = None

    def __enter__(self) -> Display:
        if sys.stderr.isatty():
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=1, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, open_cells: Sequence[Cell]) -> None:
        """Read the results anew; called between runs, because it would slow a running one down."""
        self._left = [*open_cells, *not_yet_tuned(self._plan, open_cells)]
        if self._live is not None:
            self._results = gather(self._plan, measures=False)

    def starts(self, cell: Cell, changes: str) -> None:
        self._running, self._doing = cell, ""
        self._speed.start()
        if changes:
            self._print(f"{cell.label} was run with another config ({changes}): run again")

    def done(self, cell: Cell, metric: float) -> None:
        seconds = self._speed.add(cell)
        self._finish(f"{cell.label}: {self._plan.study.metric} {metric:.4g} in {seconds:.1f} s")

    def failed(self, cell: Cell, error: BaseException) -> None:
        self._finish(f"{cell.label}: failed, {type(error).__name__}: {error}")

    def waits_for(self, names: Sequence[str]) -> None:
        self._doing = f"waits for {', '.join(names)}"
        if self._live is None:
            self._print(self._doing)

    def _finish(self, line: str) -> None:
        self._running = None
        self._print(f"{line} ({max(0, len(self._left) - 1)} left)")

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _render(self) -> Group:
        title = f"{self._plan.study.name}: {metric_title(self._results)}"
        table = rich_table(metric_grid(self._results))
        doing = self._doing or running_text(self._running)
        return Group(Text(title), table, Text(doing), Text(self._time_text()))

    def _time_text(self) -> str:
        elapsed = f"{clock(time.monotonic() - self._started_at)} so far, {len(self._left)} runs left"
        others = {read_holder(cell.claim) for cell in self._left} - {None, os.getpid()}
        left = self._speed.seconds_for(self._left)
        return elapsed if left is None else f"{elapsed}, about {clock(left / (1 + len(others)))} to go"


class Speed:
    """Measures how long runs take, to say how long the rest will."""

    def __init__(self) -> None:
        self._started_at = 0.0
        self._seconds_per_step: dict[str, list[float]] = {}
        """Measured times by column: an asynchronous run is faster than one with a lag of 0."""

    def start(self) -> None:
        self._started_at = time.monotonic()

    def add(self, cell: Cell) -> float:
        """Note the end of a run, and return how many seconds it took."""
        seconds = time.monotonic() - self._started_at
        self._seconds_per_step.setdefault(cell.column, []).append(seconds / cell.config.train.max_steps)
        return seconds

    def seconds_for(self, cells: Sequence[Cell]) -> float | None:
        """Expected time for these runs; None = no run is finished yet."""
        known = self._seconds_per_step
        if not known:
            return None
        overall = fmean(seconds for column in known.values() for seconds in column)
        return sum(fmean(known.get(cell.column, [overall])) * cell.config.train.max_steps for cell in cells)


def not_yet_tuned(plan: Plan, open_cells: Sequence[Cell]) -> list[Cell]:
    """The runs that come after the tuning runs among `open_cells`; their config is not known yet, their number is."""
    value = next(iter(plan.runs))[1]
    rows = dict.fromkeys(cell.row for cell in open_cells if cell.tuning)
    return [cell for row in rows for cell in plan.runs[row, value]]


def running_text(cell: Cell | None) -> str:
    """How far a run is: `runs/tb/0/seed-1: step 120/500, reward 0.731`."""
    if cell is None:
        return ""
    step, reward = last_step(cell)
    shown = f", reward {reward:.3f}" if reward is not None else ""
    return f"{cell.label}: step {step}/{cell.config.train.max_steps}{shown}"


def last_step(cell: Cell) -> tuple[int, float | None]:
    """Step and mean reward at the end of metrics.jsonl."""
    try:
        with RunFolder(cell.folder).metrics.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return 0, None
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # cut off at either end
            continue
        if "loss" in record:
            return record["step"], record.get("reward")
    return 0, None


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes}:{rest:02d} min"
