"""Which prompt comes next: drawing without replacement across calls, and the prompts that count as fresh.

Prompts are named by the index of their shelf.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

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
