"""How many searchers a run should have: the fewest that keep the trainer fed.

Looked at in windows of half a minute, while all searchers work: a trainer that waits for responses a noticeable part of its
time gets one more searcher; where the searchers together wait for more than the time of one of them, and the trainer does
not, one of them is too many. A number that has turned out too small is not tried again for a while, or the run would go
back and forth between two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

WINDOW_SECONDS = 30.0
"""Time over which waits are summed up before the number changes."""
STARVED = 0.1
"""Share of its time that the trainer may wait for responses."""
FED = 0.02
"""Share of its time that a trainer may wait which does not miss a searcher."""
IDLE_SEARCHERS = 1.25
"""Searchers' worth of waiting from which on one of them can go."""
REMEMBERED_WINDOWS = 20
"""Windows for which a number that was too small is not tried again."""


@dataclass(frozen=True, kw_only=True)
class Waits:
    """What is seen of a run at a moment: Waits(trainer=12.5, searchers=(3.0, 41.2), all_at_work=True)"""

    trainer: float
    """Seconds that the trainer has waited so far."""
    searchers: Sequence[float]
    """Seconds that each searcher has waited so far."""
    all_at_work: bool
    """Whether every searcher that is wanted has loaded its model."""


@dataclass
class SearcherRule:
    """Says when the number of searchers should change, between `least` and `most`."""

    least: int
    most: int
    _begun: tuple[float, Waits] | None = field(default=None, init=False)
    """When the present window began, and what had been waited until then."""
    _too_few: dict[int, int] = field(default_factory=dict, init=False)
    """Numbers of searchers that have starved the trainer, and windows for which that is remembered."""

    def look(self, now: float, waits: Waits) -> int | None:
        """The number of searchers to go on with; None = as many as there are. `now` is any clock that only rises."""
        count = len(waits.searchers)
        begun = self._begun
        if not waits.all_at_work or begun is None or len(begun[1].searchers) != count:
            self._begun = (now, waits) if waits.all_at_work else None
            return None
        seconds = now - begun[0]
        if seconds < WINDOW_SECONDS:
            return None
        starved = (waits.trainer - begun[1].trainer) / seconds
        idle = sum(later - before for before, later in zip(begun[1].searchers, waits.searchers)) / seconds
        self._begun = (now, waits)
        self._too_few = {number: left - 1 for number, left in self._too_few.items() if left > 1}
        if starved > STARVED and count < self.most:
            self._too_few[count] = REMEMBERED_WINDOWS
            return count + 1
        if starved < FED and idle > IDLE_SEARCHERS and count > self.least and count - 1 not in self._too_few:
            return count - 1
        return None
