"""Which prompt comes next: drawing without replacement across calls, the prompts that count as fresh, and groups in the
order of their arrival.

Prompts are named by the index of their shelf.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np

from tba.replay.shelf import Shelf


class Deck:
    """Cards drawn uniformly without replacement; the drawn ones return when none is left. Every operation is O(1).

    `_cards[:undrawn]` are still in the deck, the rest have been drawn.
    """

    def __init__(self) -> None:
        self._cards: list[int] = []
        self._place: dict[int, int] = {}
        self.undrawn = 0

    def __len__(self) -> int:
        """Cards, drawn or not."""
        return len(self._cards)

    def __contains__(self, card: object) -> bool:
        return card in self._place

    def put(self, card: int) -> None:
        """Add a card, or return it if it was drawn: from now on it can be drawn again."""
        if card not in self._place:
            self._place[card] = len(self._cards)
            self._cards.append(card)
        if self._place[card] >= self.undrawn:
            self._swap(self._place[card], self.undrawn)
            self.undrawn += 1

    def remove(self, card: int) -> None:
        if self._place[card] < self.undrawn:
            self.undrawn -= 1
            self._swap(self._place[card], self.undrawn)
        self._swap(self._place[card], len(self._cards) - 1)
        self._cards.pop()
        del self._place[card]

    def draw(self, rng: np.random.Generator, *, exclude: set[int]) -> int | None:
        """A card outside `exclude`, uniformly among the undrawn; None when every card is excluded."""
        if len(exclude) >= len(self) and sum(card in self._place for card in exclude) == len(self):
            return None
        skipped = []
        while (card := self._take(rng)) in exclude:
            skipped.append(card)
        for card_again in skipped:  # met, not drawn: they keep their turn
            self.put(card_again)
        return card

    def _take(self, rng: np.random.Generator) -> int:
        if not self.undrawn:
            self.undrawn = len(self._cards)
        self.undrawn -= 1
        self._swap(int(rng.random() * (self.undrawn + 1)), self.undrawn)
        return self._cards[self.undrawn]

    def _swap(self, a: int, b: int) -> None:
        cards = self._cards
        cards[a], cards[b] = cards[b], cards[a]
        self._place[cards[a]], self._place[cards[b]] = a, b


class PromptDecks:
    """The prompts under one reference version: a deck of all, and a deck of the fresh ones.

    Fresh are the groups that arrived since `window_start`, topped up with the newest groups to at least P prompts, or to
    all there are. That is a suffix of all groups by arrival, so one stamp describes it: every row that arrived at
    `fresh_since` or later.
    """

    def __init__(self) -> None:
        self.all = Deck()
        self.fresh = Deck()
        self.fresh_since = 0
        self._recent: OrderedDict[int, None] = OrderedDict()
        """Fresh prompts by their newest group, oldest first."""
        self._stale: OrderedDict[int, None] = OrderedDict()
        """The others, in the same order."""

    def __len__(self) -> int:
        return len(self.all)

    def visit(self, card: int) -> None:
        """A group of this prompt arrived: it is fresh, and can be drawn from the fresh deck again."""
        if card not in self.all:
            self.all.put(card)
        self._stale.pop(card, None)
        self._recent[card] = None
        self._recent.move_to_end(card)
        self.fresh.put(card)

    def remove(self, card: int) -> None:
        """Its last response is gone: never drawn again."""
        self.all.remove(card)
        if card in self.fresh:
            self.fresh.remove(card)
        self._recent.pop(card, None)
        self._stale.pop(card, None)

    def refresh(self, shelves: Mapping[int, Shelf], *, window_start: int, at_least: int) -> None:
        """Bring the fresh deck up to date; amortised O(1) per visit."""
        while len(self.fresh) > at_least and shelves[oldest := next(iter(self._recent))].newest_group < window_start:
            del self._recent[oldest]
            self._stale[oldest] = None
            self.fresh.remove(oldest)
        while len(self.fresh) < at_least and self._stale:
            newest, _ = self._stale.popitem()
            self._recent[newest] = None
            self._recent.move_to_end(newest, last=False)
            self.fresh.put(newest)
        self.fresh_since = min(window_start, shelves[next(iter(self._recent))].newest_group)


@dataclass(eq=False, slots=True)
class QueuedGroup:
    """The rows of one visit: those of the shelf whose stamps are `first_stamp` to `end_stamp` - 1 and that still live."""

    shelf: int
    first_stamp: int
    end_stamp: int
    uses: int = 0
    """How often it was drawn."""

    def rows(self, shelves: Mapping[int, Shelf]) -> np.ndarray:
        """Live rows, oldest first; none where the shelf is gone."""
        shelf = shelves.get(self.shelf)
        return np.zeros(0, np.int64) if shelf is None else shelf.rows_between(self.first_stamp, self.end_stamp)


class GroupQueue:
    """Groups in the order of their arrival, each drawn `max_uses` times (replay.max_uses).

    A drawn group counts as used whole, also where it holds more than K responses: leftovers would make batches of what was
    passed over. A group that may be drawn again goes to the end.
    """

    def __init__(self, max_uses: int, *, max_waiting: int | None = None) -> None:
        """Where more than `max_waiting` groups wait, the oldest leave; None = as many as come may wait."""
        self._max_uses = max_uses
        self._max_waiting = max_waiting
        self._groups: deque[QueuedGroup] = deque()

    def append(self, shelf: int, first_stamp: int, end_stamp: int) -> list[QueuedGroup]:
        """Returns the groups that had to leave."""
        self._groups.append(QueuedGroup(shelf, first_stamp, end_stamp))
        most = len(self._groups) if self._max_waiting is None else self._max_waiting
        return [self._groups.popleft() for _ in range(len(self._groups) - most)]

    def holds(self, num_groups: int, shelves: Mapping[int, Shelf], *, reference_version: int) -> bool:
        """Whether so many groups can be drawn."""
        ready = self._ready(shelves, reference_version)
        return sum(1 for _ in islice(ready, num_groups)) == num_groups

    def draw(
        self, num_prompts: int, shelves: Mapping[int, Shelf], *, reference_version: int
    ) -> list[tuple[Shelf, np.ndarray, bool]]:
        """The oldest groups, at most `num_prompts`: (shelf, its rows, whether this was their last use). A second group of a
        prompt is passed over, and keeps its place, while there are other prompts to fill the batch with."""
        firsts: dict[int, QueuedGroup] = {}
        passed_over: list[QueuedGroup] = []
        for group in self._ready(shelves, reference_version):
            if group.shelf in firsts:
                passed_over.append(group)
            else:
                firsts[group.shelf] = group
            if len(firsts) == num_prompts:
                break
        chosen = [*firsts.values(), *passed_over][:num_prompts]
        return [(shelves[group.shelf], group.rows(shelves), self._use(group)) for group in chosen]

    def _ready(self, shelves: Mapping[int, Shelf], reference_version: int) -> Iterator[QueuedGroup]:
        """Groups that can be drawn, oldest first; those at the front whose rows are all gone are forgotten."""
        while self._groups and not len(self._groups[0].rows(shelves)):
            self._groups.popleft()
        for group in self._groups:
            if len(group.rows(shelves)) and shelves[group.shelf].reference_version == reference_version:
                yield group

    def _use(self, group: QueuedGroup) -> bool:
        self._groups.remove(group)
        group.uses += 1
        if group.uses < self._max_uses:
            self._groups.append(group)
        return group.uses >= self._max_uses
