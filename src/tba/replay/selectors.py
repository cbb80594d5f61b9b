"""Which responses are sampled: the rules of the paper, each a small class.

    MixedSelector      for each prompt slot: with probability m a fresh prompt, else any prompt; or (by_response) in each
                       slot a share m of fresh responses
      FreshSelector      K of the prompt's newest responses, uniformly
      SoftmaxSelector    K of all its responses, with probability ~ exp(inverse_temperature * score + log importance)
      UniformSelector    K of all its responses, uniformly

K responses are drawn without replacement; where there are fewer than K, all of them and no more: a response that came twice
would weigh twice, and the loss of a short group is exact without it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Protocol, get_args

import numpy as np

from tba.replay.decks import Deck, PromptDecks
from tba.replay.forest import SumForest
from tba.replay.shelf import HOLE, Shelf

Kind = Literal["fresh", "old", "uniform", "mixed"]
"""How the responses of a slot are drawn."""
KINDS: tuple[Kind, ...] = get_args(Kind)

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
        """`count` distinct rows of each shelf; all of them where there are fewer."""
        ...


def draw_uniformly(shelf: Shelf, first: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` distinct rows from position `first` on, uniformly; all of them where there are fewer."""
    if count == 0:
        return np.zeros(0, np.int64)
    width = shelf.tail - first
    if width > max(EXACT_WIDTH, 2 * count):
        positions = first + (rng.random(3 * count + 8) * width).astype(np.int64)
        rows = shelf.ring[positions & (shelf.size - 1)]
        distinct = _first_distinct(rows[rows != HOLE].tolist(), count)
        if len(distinct) == count:
            return np.array(distinct)
    return rng.permutation(shelf.rows(first))[:count]


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
        """From the rows stamped `since` or later; from all of the shelf where those are gone."""
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
        if shelf.live <= count:
            return np.flatnonzero(shelf.ring != HOLE).tolist()
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

    Prompts are not repeated inside a batch unless there are fewer prompts than slots; slots of a repeated prompt that are
    drawn by the same rule share one draw, in which no response comes twice while there are enough.
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
    ) -> list[tuple[Shelf, np.ndarray]]:
        """For each of the P slots its shelf and at most K rows of it."""
        slots = self._choose_prompts(decks, num_prompts, rng)
        places: dict[tuple[int, Kind], list[int]] = defaultdict(list)
        for place, (card, fresh) in enumerate(slots):
            places[card, self._kind(fresh, rng)].append(place)
        rows = [np.zeros(0, np.int64)] * num_prompts
        for kind in KINDS:
            once = [(shelves[card], own) for (card, other), own in places.items() if other == kind and len(own) == 1]
            drawn = self._draw(kind, [shelf for shelf, _ in once], count, decks.fresh_since, rng)
            for (_, (place,)), found in zip(once, drawn):
                rows[place] = found
        for (card, kind), own in places.items():
            if len(own) > 1:
                several = self._draw_several(kind, shelves[card], len(own), count, decks.fresh_since, rng)
                for place, found in zip(own, several):
                    rows[place] = found
        return [(shelves[card], found) for (card, _), found in zip(slots, rows)]

    def _kind(self, fresh: bool, rng: np.random.Generator) -> Kind:
        if self._by_response:
            return "mixed"
        if fresh:
            return "fresh"
        return "uniform" if self._uniform_share and rng.random() < self._uniform_share else "old"

    def _draw(
        self, kind: Kind, shelves: Sequence[Shelf], count: int, since: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        if kind == "old":
            return self._old.choose(shelves, count, rng)
        if kind == "uniform":
            return self._uniform.choose(shelves, count, rng)
        draw = self._fresh.choose if kind == "fresh" else self._mixed_rows
        return [draw(shelf, count, since=since, rng=rng) for shelf in shelves]

    def _draw_several(
        self, kind: Kind, shelf: Shelf, times: int, count: int, since: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        """Rows of one prompt for each of its slots: no row twice if there are so many, else no row twice in a slot."""
        (rows,) = self._draw(kind, [shelf], times * count, since, rng)
        if len(rows) == times * count:
            return list(rows.reshape(times, count))
        return [self._draw(kind, [shelf], count, since, rng)[0] for _ in range(times)]

    def _mixed_rows(self, shelf: Shelf, count: int, *, since: int, rng: np.random.Generator) -> np.ndarray:
        """Fresh ones as far as there are enough, then uniform ones, then others; none twice."""
        first = shelf.position_since(since)
        num_fresh = min(_rounded(self._on_policy_probability * count, rng), len(shelf.rows(first)))
        num_uniform = _rounded(self._uniform_share * (count - num_fresh), rng)
        rows = draw_uniformly(shelf, first, num_fresh, rng)
        for number, selector in ((num_uniform, self._uniform), (count - num_fresh - num_uniform, self._old)):
            if number:
                (drawn,) = selector.choose([shelf], min(count, shelf.live), rng)
                rows = np.concatenate([rows, drawn[~np.isin(drawn, rows)][:number]])
        return rows

    def _choose_prompts(self, decks: PromptDecks, num_prompts: int, rng: np.random.Generator) -> list[tuple[int, bool]]:
        """(prompt, whether it came from the fresh deck) for each slot."""
        slots: list[tuple[int, bool]] = []
        used: set[int] = set()
        for uniform in rng.random(num_prompts).tolist():
            wants_fresh = uniform < self._on_policy_probability
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
