"""Which visits may start now: the pace limit that keeps lag within replay.max_lag."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tba.runtime.board import Row
from tba.runtime.waiting import wait_until
from tba.search.prompts import PromptStream
from tba.types import Request


@dataclass
class PacedVisits:
    """Prompts in order, each as soon as the weights are new enough for it.

    Visit n of all searchers together is trained at step U (n // P) or later, where U steps train on the same groups, so its
    weights must be of version U (n // P) - max_lag at least. Without a limit every visit may start at once.
    """

    prompts: PromptStream
    index: int
    num_searchers: int
    prompts_per_step: int
    steps_per_batch: int
    max_lag: int | None
    """None = no pace limit."""
    max_unscored: int
    """Visits that may wait for their rewards: a slow reward slows the searcher down instead of filling its memory."""
    version: Callable[[], int]
    """Of the weights in use."""
    generated: Callable[[], int]
    """Visits of this searcher whose responses are complete."""
    unscored: Callable[[], int]
    """Visits that wait for their rewards."""
    tick: Callable[[], None]
    """Handles messages and loads newer weights."""
    row: Row
    deadline_seconds: float
    started: int = 0

    def __iter__(self) -> Iterator[Request | None]:
        return self

    def __next__(self) -> Request | None:
        """None = nothing may start now, but responses are still running."""
        if not self._may_start():
            if self.started > self.generated():
                return None
            wait_until(
                self._may_start_after_tick,
                name="pace",
                row=self.row,
                deadline_seconds=self.deadline_seconds,
                explain=lambda: (
                    f"searcher {self.index} has weights of version {self.version()}, waited for version "
                    f"{self._needed()} from the trainer, and has {self.unscored()} groups without rewards yet"
                ),
            )
        self.started += 1
        return next(self.prompts)

    def _needed(self) -> int:
        visit = self.started * self.num_searchers + self.index
        return 0 if self.max_lag is None else self.steps_per_batch * (visit // self.prompts_per_step) - self.max_lag

    def _may_start(self) -> bool:
        return self.version() >= self._needed() and self.unscored() < self.max_unscored

    def _may_start_after_tick(self) -> bool:
        self.tick()
        return self._may_start()
