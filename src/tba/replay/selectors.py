"""Which responses are sampled: the rules of the paper, each a small class.

    MixedSelector      for each prompt slot: with probability m a fresh prompt, else any prompt
      FreshSelector      K of the prompt's newest responses, uniformly
      SoftmaxSelector    K of all its responses, with probability ~ exp(inverse_temperature * score)
      UniformSelector    K of all its responses, uniformly (inverse temperature 0)

K responses are drawn without replacement; with replacement only from fewer than K.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from tba.replay.decks import Deck, PromptDecks
from tba.replay.forest import SumForest
from tba.replay.shelf import HOLE, Shelf

MAX_LOG_WEIGHT = 200.0
"""Weights stay within exp(+-200) of 1, far from overflow and underflow; beyond, the shelf is scaled anew."""
SMALLEST_TOTAL = math.exp(-MAX_LOG_WEIGHT)
MAX_ROUNDS = 4
EXACT_WIDTH = 1024
"""Up to so many positions are looked at one by one; among more, holes are met and skipped."""


class Selector(Protocol):
    """Told of every change, so that it can keep sums; `slots` are places on the shelf's ring."""

    def insert(self, shelf: Shelf, slots: np.ndarray, rows: np.ndarray) -> None: ...

    def remove(self, shelves: Sequence[Shelf], slots: Sequence[int]) -> None:
        """Slot i of shelf i became a hole; shelves may repeat, pairs do not."""
        ...

    def rebuild(self, shelf: Shelf) -> None:
        """The shelf's slots were dealt out anew; it holds at least one row."""
        ...

    def choose(self, shelves: Sequence[Shelf], count: int, rng: np.random.Generator) -> list[np.ndarray]:
        """`count` rows of each shelf."""
        ...


def draw_uniformly(shelf: Shelf, first: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Rows from position `first` on, uniformly; without replacement unless there are fewer than `count`."""
    width = shelf.tail - first
    if width > max(EXACT_WIDTH, 2 * count):
        positions = first + (rng.random(3 * count + 8) * width).astype(np.int64)
        rows = shelf.ring[positions & (shelf.size - 1)]
        distinct = _first_distinct(rows[rows != HOLE].tolist(), count)
        if len(distinct) == count:
            return np.array(distinct)
    rows = shelf.rows(first)
    if len(rows) < count:
        return rows[rng.integers(len(rows), size=count)]
    return rng.permutation(rows)[:count]


def _first_distinct(values: Iterable[int], count: int) -> list[int]:
    """Drawing with replacement and skipping repeats is drawing without replacement, draw by draw."""
    return list(dict.fromkeys(values))[:count]


class UniformSelector:
    def insert(self, shelf: Shelf, slots: np.ndarray, rows: np.ndarray) -> None:
        pass

    def remove(self, shelves: Sequence[Shelf], slots: Sequence[int]) -> None:
        pass

    def rebuild(self, shelf: Shelf) -> None:
        pass

    def choose(self, shelves: Sequence[Shelf], count: int, rng: np.random.Generator) -> list[np.ndarray]:
        return [draw_uniformly(shelf, shelf.head, count, rng) for shelf in shelves]


class FreshSelector:
    def choose(self, shelf: Shelf, count: int, *, since: int, rng: np.random.Generator) -> np.ndarray:
        """From the rows stamped `since` or later; from all of the shelf where those have been used up."""
        first = shelf.position_since(since)
        return draw_uniformly(shelf, first if len(shelf.rows(first)) else shelf.head, count, rng)


class SoftmaxSelector:
    """A sum-tree per shelf over exp(logit - log_scale), logit = inverse_temperature * score + log_importance; log_scale
    follows the shelf's maximum."""

    def __init__(self, inverse_temperature: float, score: np.ndarray, log_importance: np.ndarray | None = None) -> None:
        """Columns of finite numbers by row; None = every response is as important."""
        self._inverse_temperature = inverse_temperature
        self._score = score
        self._log_importance = log_importance
        self._forest = SumForest()

    def insert(self, shelf: Shelf, slots: np.ndarray, rows: np.ndarray) -> None:
        logits = self._logits(rows)
        if shelf.tree < 0 or logits.max() > shelf.log_scale + MAX_LOG_WEIGHT:
            self.rebuild(shelf)
        else:
            self._set(shelf, slots, np.exp(logits - shelf.log_scale))

    def remove(self, shelves: Sequence[Shelf], slots: Sequence[int]) -> None:
        holes: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for shelf, slot in zip(shelves, slots):
            if shelf.live == 0:
                self._release(shelf)
            else:
                holes[shelf.tree_size].append((shelf.tree, slot))
        for size, places in holes.items():
            bases, empty_slots = np.array(places).T
            self._forest.set(bases, size, empty_slots, np.zeros(len(places)))

    def rebuild(self, shelf: Shelf) -> None:
        if shelf.tree_size != shelf.size:
            self._release(shelf)
            shelf.tree, shelf.tree_size = self._forest.allocate(shelf.size), shelf.size
        slots = np.flatnonzero(shelf.ring != HOLE)
        logits = self._logits(shelf.ring[slots])
        shelf.log_scale = float(logits.max())
        weights = np.zeros(shelf.size)
        weights[slots] = np.exp(logits - shelf.log_scale)
        self._forest.rebuild(shelf.tree, weights)

    def choose(self, shelves: Sequence[Shelf], count: int, rng: np.random.Generator) -> list[np.ndarray]:
        if not shelves:
            return []
        totals = self._forest.totals([shelf.tree for shelf in shelves], [shelf.tree_size for shelf in shelves])
        for shelf, total in zip(shelves, totals.tolist()):
            if total < SMALLEST_TOTAL:
                self.rebuild(shelf)
        draws = self._draw(shelves, count + count // 4 + 4, rng)
        return [shelf.ring[self._finish(shelf, slots, count, rng)] for shelf, slots in zip(shelves, draws)]

    def _finish(self, shelf: Shelf, slots: list[int], count: int, rng: np.random.Generator) -> list[int]:
        if shelf.live < count:
            return slots[:count]
        chosen = _first_distinct(slots, count)
        return chosen if len(chosen) == count else self._complete(shelf, chosen, count, rng)

    def _complete(self, shelf: Shelf, chosen: list[int], count: int, rng: np.random.Generator) -> list[int]:
        """Hide what was drawn and draw among the rest; when little weight is left, continue in log space."""
        rounds = 0
        while len(chosen) < count:
            self._set(shelf, np.array(chosen), np.zeros(len(chosen)))
            if rounds == MAX_ROUNDS or self._forest.totals([shelf.tree], [shelf.tree_size])[0] < SMALLEST_TOTAL:
                chosen = chosen + self._race(shelf, chosen, count - len(chosen), rng)
            else:
                chosen = _first_distinct(chosen + self._draw([shelf], count, rng)[0], count)
            rounds += 1
        slots = np.array(chosen)
        self._set(shelf, slots, np.exp(self._logits(shelf.ring[slots]) - shelf.log_scale))
        return chosen

    def _race(self, shelf: Shelf, chosen: list[int], count: int, rng: np.random.Generator) -> list[int]:
        """Gumbel top-k, the same law as drawing one after the other: O(n), but right for any scores.

        Where scores are too large for the noise to register it decides between equals.
        """
        slots = np.setdiff1d(np.flatnonzero(shelf.ring != HOLE), chosen)
        noise = rng.gumbel(size=len(slots))
        order = np.lexsort((noise, self._logits(shelf.ring[slots]) + noise))
        return slots[order[::-1][:count]].tolist()

    def _draw(self, shelves: Sequence[Shelf], count: int, rng: np.random.Generator) -> list[list[int]]:
        """Slots with replacement, `count` per shelf; trees of one size in one pass."""
        trees, sizes = np.array([(shelf.tree, shelf.tree_size) for shelf in shelves]).T
        uniforms, slots = rng.random((len(shelves), count)), np.empty((len(shelves), count), np.int64)
        for size in set(sizes.tolist()):
            same = sizes == size
            drawn = self._forest.descend(np.repeat(trees[same], count), size, uniforms[same].ravel())
            slots[same] = drawn.reshape(-1, count)
        return slots.tolist()

    def _set(self, shelf: Shelf, slots: np.ndarray, weights: np.ndarray) -> None:
        self._forest.set(shelf.tree, shelf.tree_size, slots, weights)

    def _logits(self, rows: np.ndarray) -> np.ndarray:
        logits = self._inverse_temperature * self._score[rows].astype(np.float64)
        return logits if self._log_importance is None else logits + self._log_importance[rows]

    def _release(self, shelf: Shelf) -> None:
        if shelf.tree >= 0:
            self._forest.release(shelf.tree, shelf.tree_size)
        shelf.tree, shelf.tree_size = -1, 0


class MixedSelector:
    """The paper's rule: a prompt's responses are fresh with probability m, else drawn from all that is stored. With
    `by_response` every prompt of the batch has a share m of fresh responses instead: for tasks of one or few prompts.

    Prompts are not repeated inside a batch unless there are fewer prompts than slots.
    """

    def __init__(
        self, on_policy_probability: float, old: Selector, *, uniform_share: float = 0.0, by_response: bool = False
    ) -> None:
        """`uniform_share` of what is not fresh is drawn uniformly, the rest by `old`."""
        self._on_policy_probability = on_policy_probability
        self._uniform_share = uniform_share
        self._by_response = by_response
        self._fresh = FreshSelector()
        self._uniform = UniformSelector()
        self._old = old

    def choose(
        self,
        shelves: Mapping[int, Shelf],
        decks: PromptDecks,
        num_prompts: int,
        count: int,
        rng: np.random.Generator,
    ) -> tuple[list[Shelf], np.ndarray]:
        """The shelves of the P slots, and rows [P, K]."""
        if self._by_response:
            chosen = [shelves[card] for card, _ in self._choose_prompts(decks, num_prompts, 1.0, rng)]
            rows = [self._mixed_rows(shelf, count, since=decks.fresh_since, rng=rng) for shelf in chosen]
            return chosen, np.stack(rows)
        slots = self._choose_prompts(decks, num_prompts, self._on_policy_probability, rng)
        chosen = [shelves[card] for card, _ in slots]
        kinds = ["fresh" if fresh else self._old_kind(rng) for _, fresh in slots]
        found = {
            kind: iter(selector.choose([shelf for shelf, own in zip(chosen, kinds) if own == kind], count, rng))
            for kind, selector in (("old", self._old), ("uniform", self._uniform))
        }
        rows_PK = np.empty((num_prompts, count), np.int64)
        for rows_K, shelf, kind in zip(rows_PK, chosen, kinds):
            fresh = kind == "fresh"
            rows_K[:] = (
                self._fresh.choose(shelf, count, since=decks.fresh_since, rng=rng) if fresh else next(found[kind])
            )
        return chosen, rows_PK

    def _old_kind(self, rng: np.random.Generator) -> str:
        return "uniform" if self._uniform_share and rng.random() < self._uniform_share else "old"

    def _mixed_rows(self, shelf: Shelf, count: int, *, since: int, rng: np.random.Generator) -> np.ndarray:
        """Fresh ones, then uniform ones, then others; none twice unless the shelf holds fewer than `count`."""
        num_fresh = _rounded(self._on_policy_probability * count, rng)
        num_uniform = _rounded(self._uniform_share * (count - num_fresh), rng)
        rows = self._fresh.choose(shelf, num_fresh, since=since, rng=rng)
        for number, selector in ((num_uniform, self._uniform), (count - num_fresh - num_uniform, self._old)):
            if number:
                (drawn,) = selector.choose([shelf], min(count, shelf.live), rng)
                others = drawn[~np.isin(drawn, rows)][:number]
                rows = np.concatenate([rows, others, drawn[: number - len(others)]])
        return np.resize(rows, count)

    def _choose_prompts(
        self, decks: PromptDecks, num_prompts: int, fresh_probability: float, rng: np.random.Generator
    ) -> list[tuple[int, bool]]:
        """(prompt, whether it came from the fresh deck) for each slot."""
        slots: list[tuple[int, bool]] = []
        used: set[int] = set()
        for uniform in rng.random(num_prompts).tolist():
            wants_fresh = uniform < fresh_probability
            order = [(decks.fresh, True), (decks.all, False)] if wants_fresh else [(decks.all, False)]
            slot = self._first(order, used, rng)
            if slot is None:  # every prompt is in the batch already
                used.clear()
                slot = self._first(order, used, rng)
            assert slot is not None, "the decks hold at least one prompt"
            used.add(slot[0])
            slots.append(slot)
        return slots

    @staticmethod
    def _first(order: list[tuple[Deck, bool]], used: set[int], rng: np.random.Generator) -> tuple[int, bool] | None:
        for deck, fresh in order:
            card = deck.draw(rng, exclude=used)
            if card is not None:
                return card, fresh
        return None


def _rounded(number: float, rng: np.random.Generator) -> int:
    """To a neighbouring whole number, right on average."""
    return int(number + rng.random()) if number % 1 else int(number)
