"""How an old response is chosen for a batch: the rules of the paper, each a small class.

    MixedSelector      for each prompt of the batch: with probability m a fresh prompt, else any prompt; or (by_response) for
                       each prompt a share m of fresh responses
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

from tba.replay.prompts import FREE, DrawWithoutReplacement, PromptDraws, PromptEntry
from tba.replay.sum_trees import SumTrees

Rule = Literal["fresh", "old", "uniform", "mixed"]
"""How the responses of one place in the batch are drawn."""
RULES: tuple[Rule, ...] = get_args(Rule)

MAX_LOG_WEIGHT = 200.0
"""Largest log of a softmax weight. Weights stay within exp(+-200) of 1, far from overflow and underflow; beyond, the entry
is scaled anew."""
SMALLEST_TOTAL = math.exp(-MAX_LOG_WEIGHT)
MAX_ROUNDS = 4
"""Number of times that a softmax draw which met the same rows again is completed from the tree, before Gumbel top-k."""
EXACT_WIDTH = 1024
"""Largest number of ring positions that a uniform draw looks at one by one; among more, it draws positions and skips the
free ones."""


class MixedSelector:
    """The paper's rule: a prompt's responses are fresh with probability m, else drawn from all that is stored. With
    `by_response` every prompt of the batch has a share m of fresh responses instead: for tasks of one or few prompts.

    Prompts are not repeated inside a batch unless there are fewer prompts than places; places of a repeated prompt that are
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
        entries: Mapping[int, PromptEntry],
        draws: PromptDraws,
        num_prompts: int,
        count: int,
        rng: np.random.Generator,
    ) -> list[tuple[PromptEntry, np.ndarray]]:
        """For each of the P places in the batch its entry and at most K rows of it."""
        prompts = self._choose_prompts(draws, num_prompts, rng)
        places: dict[tuple[int, Rule], list[int]] = defaultdict(list)
        for place, (prompt, fresh) in enumerate(prompts):
            places[prompt, self._rule(fresh, rng)].append(place)
        rows = [np.zeros(0, np.int64)] * num_prompts
        # Prompts that come once are drawn together, rule by rule: the softmax descends all their trees in one pass.
        for rule in RULES:
            once = [
                (entries[prompt], own) for (prompt, other), own in places.items() if other == rule and len(own) == 1
            ]
            drawn = self._draw(rule, [entry for entry, _ in once], count, draws.fresh_since, rng)
            for (_, (place,)), found in zip(once, drawn):
                rows[place] = found
        for (prompt, rule), own in places.items():
            if len(own) > 1:
                several = self._draw_several(rule, entries[prompt], len(own), count, draws.fresh_since, rng)
                for place, found in zip(own, several):
                    rows[place] = found
        return [(entries[prompt], found) for (prompt, _), found in zip(prompts, rows)]

    def _choose_prompts(self, draws: PromptDraws, num_prompts: int, rng: np.random.Generator) -> list[tuple[int, bool]]:
        """(prompt, whether it was drawn as a fresh one) for each place in the batch."""
        prompts: list[tuple[int, bool]] = []
        used: set[int] = set()
        for uniform in rng.random(num_prompts).tolist():
            wants_fresh = uniform < self._on_policy_probability
            # Where the fresh prompts are all in the batch already, any other takes the place: a batch stays full.
            order = [(draws.fresh, True), (draws.all, False)] if wants_fresh else [(draws.all, False)]
            found = self._first(order, used, rng)
            if found is None:
                # Every prompt is in the batch equally often: from here on each may come once more.
                used.clear()
                found = self._first(order, used, rng)
            assert found is not None, "there is at least one prompt to draw"
            used.add(found[0])
            prompts.append(found)
        return prompts

    @staticmethod
    def _first(
        order: list[tuple[DrawWithoutReplacement, bool]], used: set[int], rng: np.random.Generator
    ) -> tuple[int, bool] | None:
        for draw, fresh in order:
            prompt = draw.draw(rng, exclude=used)
            if prompt is not None:
                return prompt, fresh
        return None

    def _rule(self, fresh: bool, rng: np.random.Generator) -> Rule:
        if self._by_response:
            return "mixed"
        if fresh:
            return "fresh"
        return "uniform" if self._uniform_share and rng.random() < self._uniform_share else "old"

    def _draw(
        self, rule: Rule, entries: Sequence[PromptEntry], count: int, since: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        if rule == "old":
            return self._old.choose(entries, count, rng)
        if rule == "uniform":
            return self._uniform.choose(entries, count, rng)
        draw = self._fresh.choose if rule == "fresh" else self._mixed_rows
        return [draw(entry, count, since=since, rng=rng) for entry in entries]

    def _draw_several(
        self, rule: Rule, entry: PromptEntry, times: int, count: int, since: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        """Rows of one prompt for each of its places: no row twice if there are so many, else no row twice in a place."""
        (rows,) = self._draw(rule, [entry], times * count, since, rng)
        if len(rows) == times * count:
            return list(rows.reshape(times, count))
        return [self._draw(rule, [entry], count, since, rng)[0] for _ in range(times)]

    def _mixed_rows(self, entry: PromptEntry, count: int, *, since: int, rng: np.random.Generator) -> np.ndarray:
        """Fresh rows as far as there are enough, then uniform ones, then others; none twice."""
        first = entry.first_since(since)
        # Few fresh ones are not repeated: old ones take their places.
        num_fresh = min(_rounded(self._on_policy_probability * count, rng), len(entry.rows(first)))
        num_uniform = _rounded(self._uniform_share * (count - num_fresh), rng)
        rows = draw_uniformly(entry, first, num_fresh, rng)
        for number, selector in ((num_uniform, self._uniform), (count - num_fresh - num_uniform, self._old)):
            if number:
                # As many as K are drawn, because some of them may be among the rows found before.
                (drawn,) = selector.choose([entry], min(count, entry.num_rows), rng)
                rows = np.concatenate([rows, drawn[~np.isin(drawn, rows)][:number]])
        return rows


def _rounded(number: float, rng: np.random.Generator) -> int:
    """A neighbouring whole number, drawn so that it is right on average."""
    return int(number + rng.random()) if number % 1 else int(number)


class Selector(Protocol):
    """A rule that draws from all responses of an entry. It is told of every change, so that it can keep sums; `positions`
    are those of the entry's ring."""

    def insert(self, entry: PromptEntry, positions: np.ndarray, rows: np.ndarray) -> None:
        """Rows were appended at these positions."""
        ...

    def remove(self, freed: Sequence[tuple[PromptEntry, Sequence[int]]]) -> None:
        """These positions of each entry became free; no entry comes twice."""
        ...

    def rebuild(self, entry: PromptEntry) -> None:
        """The entry's ring was compacted, so that rows lie at other positions; it holds at least one row."""
        ...

    def choose(self, entries: Sequence[PromptEntry], count: int, rng: np.random.Generator) -> list[np.ndarray]:
        """`count` distinct rows of each entry; all of them where there are fewer."""
        ...


class FreshSelector:
    """K of a prompt's newest responses, uniformly."""

    def choose(self, entry: PromptEntry, count: int, *, since: int, rng: np.random.Generator) -> np.ndarray:
        """`count` rows whose arrival number is `since` or larger; rows of the whole entry where those have left."""
        # A fresh prompt may have lost its fresh rows again, by expiry.
        first = entry.first_since(since)
        return draw_uniformly(entry, first if len(entry.rows(first)) else entry.head, count, rng)


class UniformSelector:
    """K of all responses of a prompt, uniformly."""

    def insert(self, entry: PromptEntry, positions: np.ndarray, rows: np.ndarray) -> None:
        pass

    def remove(self, freed: Sequence[tuple[PromptEntry, Sequence[int]]]) -> None:
        pass

    def rebuild(self, entry: PromptEntry) -> None:
        pass

    def choose(self, entries: Sequence[PromptEntry], count: int, rng: np.random.Generator) -> list[np.ndarray]:
        return [draw_uniformly(entry, entry.head, count, rng) for entry in entries]


def draw_uniformly(entry: PromptEntry, first: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` distinct rows from sequence number `first` on, uniformly; all of them where there are fewer."""
    if count == 0:
        return np.zeros(0, np.int64)
    width = entry.tail - first
    # Of many rows few are wanted: drawing positions and skipping the free ones costs O(count), a permutation O(width).
    if width > max(EXACT_WIDTH, 2 * count):
        numbers = first + (rng.random(3 * count + 8) * width).astype(np.int64)
        rows = entry.ring[numbers & (entry.size - 1)]
        distinct = _first_distinct(rows[rows != FREE].tolist(), count)
        if len(distinct) == count:
            return np.array(distinct)
    return rng.permutation(entry.rows(first))[:count]


def _first_distinct(values: Iterable[int], count: int) -> list[int]:
    """Drawing with replacement and skipping repeats is drawing without replacement, draw by draw."""
    return list(dict.fromkeys(values))[:count]


class SoftmaxSelector:
    """K of all responses of a prompt, by a sum tree per entry over exp(logit - log_scale), where
    logit = inverse_temperature * score + log_importance. The scale follows the entry's largest logit."""

    def __init__(self, inverse_temperature: float, score: np.ndarray, log_importance: np.ndarray | None = None) -> None:
        """Columns of finite numbers by row; None = every response is equally important."""
        self._inverse_temperature = inverse_temperature
        self._score = score
        self._log_importance = log_importance
        self._trees = SumTrees()

    def insert(self, entry: PromptEntry, positions: np.ndarray, rows: np.ndarray) -> None:
        logits = self._logits(rows)
        # A new entry has no tree yet. A weight far above the scale would overflow; scaled anew, it is 1 and others shrink.
        if entry.tree < 0 or logits.max() > entry.log_scale + MAX_LOG_WEIGHT:
            self.rebuild(entry)
        else:
            self._set(entry, positions, np.exp(logits - entry.log_scale))

    def remove(self, freed: Sequence[tuple[PromptEntry, Sequence[int]]]) -> None:
        # Trees of one size change in one pass: an eviction takes rows from many entries at once.
        trees: dict[int, list[int]] = defaultdict(list)
        leaves: dict[int, list[int]] = defaultdict(list)
        for entry, positions in freed:
            if entry.num_rows == 0:
                self._release(entry)
            else:
                trees[entry.tree_size] += [entry.tree] * len(positions)
                leaves[entry.tree_size] += positions
        for size, own in leaves.items():
            self._trees.set(np.array(trees[size]), size, np.array(own), np.zeros(len(own)))

    def rebuild(self, entry: PromptEntry) -> None:
        if entry.tree_size != entry.size:
            self._release(entry)
            entry.tree, entry.tree_size = self._trees.allocate(entry.size), entry.size
        # Free positions keep weight 0 and are never drawn.
        positions = np.flatnonzero(entry.ring != FREE)
        logits = self._logits(entry.ring[positions])
        entry.log_scale = float(logits.max())
        weights = np.zeros(entry.size)
        weights[positions] = np.exp(logits - entry.log_scale)
        self._trees.rebuild(entry.tree, weights)

    def choose(self, entries: Sequence[PromptEntry], count: int, rng: np.random.Generator) -> list[np.ndarray]:
        if not entries:
            return []
        totals = self._trees.totals([entry.tree for entry in entries], [entry.tree_size for entry in entries])
        for entry, total in zip(entries, totals.tolist()):
            if total < SMALLEST_TOTAL:  # the row that set the scale has left, and the others vanish beside it
                self.rebuild(entry)
        # A quarter more than K in one pass: repeats are mostly made up for without another.
        draws = self._draw(entries, count + count // 4 + 4, rng)
        return [entry.ring[self._distinct(entry, drawn, count, rng)] for entry, drawn in zip(entries, draws)]

    def _distinct(self, entry: PromptEntry, drawn: list[int], count: int, rng: np.random.Generator) -> list[int]:
        """`count` distinct positions, the drawn ones first; all that hold a row where there are fewer."""
        if entry.num_rows <= count:  # also ends draws that could never find `count` distinct rows
            return np.flatnonzero(entry.ring != FREE).tolist()
        chosen = _first_distinct(drawn, count)
        return chosen if len(chosen) == count else self._complete(entry, chosen, count, rng)

    def _complete(self, entry: PromptEntry, chosen: list[int], count: int, rng: np.random.Generator) -> list[int]:
        """Hide what was drawn and draw among the rest; when little weight is left, continue in log space."""
        rounds = 0
        while len(chosen) < count:
            self._set(entry, np.array(chosen), np.zeros(len(chosen)))
            if rounds == MAX_ROUNDS or self._trees.totals([entry.tree], [entry.tree_size])[0] < SMALLEST_TOTAL:
                chosen = chosen + self._gumbel_top_k(entry, chosen, count - len(chosen), rng)
            else:
                chosen = _first_distinct(chosen + self._draw([entry], count, rng)[0], count)
            rounds += 1
        # What was hidden gets back its weight, or it would never be drawn again.
        positions = np.array(chosen)
        self._set(entry, positions, np.exp(self._logits(entry.ring[positions]) - entry.log_scale))
        return chosen

    def _gumbel_top_k(self, entry: PromptEntry, chosen: list[int], count: int, rng: np.random.Generator) -> list[int]:
        """`count` positions outside `chosen`, by the same law as drawing one after the other: O(n), but right for any
        scores, because nothing is exponentiated. Where scores are too large for the noise to change them, it decides
        between equals."""
        positions = np.setdiff1d(np.flatnonzero(entry.ring != FREE), chosen)
        noise = rng.gumbel(size=len(positions))
        order = np.lexsort((noise, self._logits(entry.ring[positions]) + noise))
        return positions[order[::-1][:count]].tolist()

    def _draw(self, entries: Sequence[PromptEntry], count: int, rng: np.random.Generator) -> list[list[int]]:
        """Positions with replacement, `count` per entry; trees of one size in one pass."""
        # Uniforms come in one call, in the order of the entries: how trees are grouped by size does not change the draws.
        trees, sizes = np.array([(entry.tree, entry.tree_size) for entry in entries]).T
        uniforms, positions = rng.random((len(entries), count)), np.empty((len(entries), count), np.int64)
        for size in set(sizes.tolist()):
            same = sizes == size
            drawn = self._trees.descend(np.repeat(trees[same], count), size, uniforms[same].ravel())
            positions[same] = drawn.reshape(-1, count)
        return positions.tolist()

    def _set(self, entry: PromptEntry, positions: np.ndarray, weights: np.ndarray) -> None:
        self._trees.set(entry.tree, entry.tree_size, positions, weights)

    def _logits(self, rows: np.ndarray) -> np.ndarray:
        logits = self._inverse_temperature * self._score[rows].astype(np.float64)
        return logits if self._log_importance is None else logits + self._log_importance[rows]

    def _release(self, entry: PromptEntry) -> None:
        if entry.tree >= 0:
            self._trees.release(entry.tree, entry.tree_size)
        entry.tree, entry.tree_size = -1, 0
