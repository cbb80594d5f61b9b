"""Which prompt is visited next, and by whom: visits are handed out as leases, and those of a searcher that is gone are
handed out again.

There is one ledger in a run, with the trainer, so that a checkpoint holds where every visit stands. All prompts are visited
once an epoch, in an order drawn from (seed, epoch).
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, order=True)
class Visit:
    """One visit to one prompt. Visit(number=17, prompt=4, epoch=2)"""

    number: int
    """Place among all visits of the run, in the order in which they were first handed out."""
    prompt: int
    """Index of the prompt in the task's train split."""
    epoch: int
    """Number of earlier visits to the prompt: sample indices follow from it, so that no randomness is used
    twice."""


class VisitLedger:
    """Hands out visits, and knows who has which. Used by several threads."""

    def __init__(self, num_prompts: int, *, seed: int, shuffle: bool = True) -> None:
        if num_prompts < 1:
            raise ValueError("there are no prompts to visit.")
        self.num_prompts = num_prompts
        self._seed = seed
        self._shuffle = shuffle
        self._order: tuple[int, list[int]] | None = None
        self._handed_out = 0
        """Number of the next new visit."""
        self._leased: dict[str, dict[int, Visit]] = {}
        """By holder and number: visits whose group has not arrived."""
        self._handed_back: list[Visit] = []
        self.num_lost = 0
        """Number of visits of which every response was lost to its reward: what comes after them fills their batches."""
        self._lock = threading.Lock()

    def lease(self, holder: str, count: int) -> list[Visit]:
        """The next visits for a searcher: first those that others did not finish."""
        with self._lock:
            self._handed_back.sort()
            visits, self._handed_back = self._handed_back[:count], self._handed_back[count:]
            visits += [self._next() for _ in range(count - len(visits))]
            self._leased.setdefault(holder, {}).update((visit.number, visit) for visit in visits)
            return visits

    def complete(self, number: int, *, is_lost: bool = False) -> None:
        """The group of a visit has arrived, whoever made it; `is_lost` tells that it has no response."""
        with self._lock:
            # A ledger from an older checkpoint learns here of visits that were handed out after it, from stored groups. No
            # such number may be handed out as a new one; those before it are open.
            while self._handed_out <= number:
                self._handed_back.append(self._next())
            if self._take_back(number):
                self.num_lost += is_lost

    def hand_back(self, holder: str) -> int:
        """A searcher is gone: others take its visits. Returns their number."""
        with self._lock:
            visits = self._leased.pop(holder, {})
            self._handed_back += visits.values()
            return len(visits)

    @property
    def num_handed_back(self) -> int:
        """Visits that nobody has at the moment, because whoever had them is gone."""
        return len(self._handed_back)

    @property
    def outstanding(self) -> int:
        """Visits that somebody has and whose group has not arrived."""
        return sum(map(len, self._leased.values()))

    def state(self) -> dict[str, Any]:
        """For a checkpoint: whoever holds a visit then will be gone when it is read."""
        with self._lock:
            open_visits = [visit for visits in self._leased.values() for visit in visits.values()]
            return {
                "handed_out": self._handed_out,
                "lost": self.num_lost,
                "open": [asdict(visit) for visit in sorted(open_visits + self._handed_back)],
            }

    def load_state(self, state: Mapping[str, Any]) -> None:
        with self._lock:
            self._handed_out, self.num_lost = state["handed_out"], state["lost"]
            self._leased, self._handed_back = {}, [Visit(**visit) for visit in state["open"]]

    def _take_back(self, number: int) -> bool:
        """Nobody has the visit of a number from now on; False = its group arrived before, or it is none of ours."""
        found = [visit for visit in self._handed_back if visit.number == number]
        if found:
            self._handed_back.remove(found[0])
        found += [visits.pop(number) for visits in self._leased.values() if number in visits]
        return bool(found)

    def _next(self) -> Visit:
        epoch, place = divmod(self._handed_out, self.num_prompts)
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self._draw_order(epoch))
        visit = Visit(number=self._handed_out, prompt=self._order[1][place], epoch=epoch)
        self._handed_out += 1
        return visit

    def _draw_order(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(self.num_prompts))
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        return torch.randperm(self.num_prompts, generator=generator).tolist()


class VisitSource:
    """Visits at hand for a searcher, the earliest first: more are asked for before they run out."""

    def __init__(self, ask: Callable[[int], object], *, size: int) -> None:
        """`ask` asks the trainer for so many visits; they arrive by `add`. `size` visits are kept at hand: as many as are
        begun while the trainer is busy with a step."""
        self._ask = ask
        self._size = size
        self._visits: list[Visit] = []
        """A heap."""
        self._coming = 0

    @classmethod
    def of(cls, ledger: VisitLedger) -> VisitSource:
        """Visits straight from the ledger, one at a time, where searcher and trainer take turns in one process."""
        source = cls(lambda count: source.add(ledger.lease("searcher-0", count)), size=1)
        return source

    def add(self, visits: Sequence[Visit]) -> None:
        """Visits that were asked for, or that another searcher left behind."""
        for visit in visits:
            heapq.heappush(self._visits, visit)
        self._coming = max(0, self._coming - len(visits))

    def peek(self) -> Visit | None:
        """The next visit; None = none is at hand, but one was asked for."""
        lacking = self._size - len(self._visits) - self._coming
        if lacking > self._size // 2:
            self._coming += lacking
            self._ask(lacking)
        return self._visits[0] if self._visits else None

    def take(self) -> Visit:
        """The visit that peek shows."""
        self.peek()
        return heapq.heappop(self._visits)
