"""A prompt's stored responses, and which prompt is next: drawing without replacement across batches, and which prompts count
as fresh.

A prompt is named by the index of its entry, so that one prompt under two reference versions is two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(eq=False, slots=True)
class PromptEntry:
    """The stored responses of one prompt under one reference version, oldest to newest.

    PromptEntry(index=3, prompt_id="train-17", prompt_tokens=np.array([1, 40, 7], np.int32), reference_version=0)

    A response is named by its position in the columns. Its tokens are two bytes objects, which Python's allocator takes back
    one by one; a response that leaves keeps its position until the columns are full and are written anew without gaps.
    """

    index: int
    """Name of the entry in the buffer; never given to another."""
    prompt_id: str
    prompt_tokens: np.ndarray
    reference_version: int
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    """Facts about the responses by name, one array each: `arrival`, `version`, `truncated`, `rewards` [n, components],
    `score`, `log_importance`, and `logit` where old responses are drawn by weight. Arrays are longer than what is used."""
    alive: np.ndarray = field(default_factory=lambda: np.zeros(0, np.bool_))
    """Whether the response at each position is still stored."""
    ids: list[bytes] = field(default_factory=list)
    """Token ids of each response, int32, ~id where the policy did not choose the token; empty once it has left."""
    floats: list[bytes] = field(default_factory=list)
    """log_ref, behaviour and policy log-probs (and step values) of each token, float32 [T, 3 or 4]."""
    position_of: dict[bytes, int] | None = None
    """Position by token ids; None without deduplication."""
    num_responses: int = 0
    """Number of responses stored."""
    newest_group_arrival: int = 0
    """Arrival number of the first response of the newest group."""
    oldest_position: int = 0
    """No response before this position is stored."""

    def live(self, since: int = 0) -> np.ndarray:
        """Positions of the stored responses with arrival number `since` or larger, oldest first."""
        first = self.first_since(since)
        return first + np.flatnonzero(self.alive[first : len(self.ids)])

    def between(self, first_arrival: int, end_arrival: int) -> np.ndarray:
        """Positions of the responses with arrival numbers `first_arrival` to `end_arrival` - 1 that are still stored."""
        first, end = self.first_since(first_arrival), self.first_since(end_arrival)
        return first + np.flatnonzero(self.alive[first:end])

    def find(self, arrivals: Sequence[int]) -> np.ndarray:
        """Positions of the responses with these arrival numbers that are still stored."""
        arrival = self.columns["arrival"][: len(self.ids)]
        positions = arrival.searchsorted(arrivals)
        positions = positions[np.isin(arrivals, arrival)]
        return positions[self.alive[positions]]

    def oldest(self, count: int) -> np.ndarray:
        """Positions of the `count` oldest responses; there are at least so many."""
        first, width = self.oldest_position, count
        # Not `live()[:count]`: one prompt may have 100,000 responses, and every group that arrives then asks.
        while np.count_nonzero(self.alive[first : first + width]) < count:
            width *= 2
        found = first + np.flatnonzero(self.alive[first : first + width])
        return found[:count]

    def append(self, ids: Sequence[bytes], floats: Sequence[bytes], columns: Mapping[str, np.ndarray]) -> None:
        """Add the responses of a group as the newest."""
        if len(self.ids) + len(ids) > len(self.alive):
            self._make_room(len(ids), columns)
        own = slice(len(self.ids), len(self.ids) + len(ids))
        for name, values in columns.items():
            self.columns[name][own] = values
        self.alive[own] = True
        if self.position_of is not None:
            self.position_of.update(zip(ids, range(own.start, own.stop)))
        self.ids += ids
        self.floats += floats
        self.num_responses += len(ids)
        self.newest_group_arrival = int(self.columns["arrival"][own.start])

    def discard(self, positions: np.ndarray) -> int:
        """Remove the responses at these positions, none of which is named twice; returns their number of tokens."""
        num_tokens = 0
        for position in positions.tolist():
            num_tokens += len(self.ids[position]) // 4
            if self.position_of is not None:
                self.position_of.pop(self.ids[position], None)  # absent of a copy that came without deduplication
            self.ids[position] = self.floats[position] = b""
        self.alive[positions] = False
        self.num_responses -= len(positions)
        if len(positions) and positions.min() == self.oldest_position:
            self.oldest_position += int(self.alive[self.oldest_position : len(self.ids)].argmax())
        return num_tokens

    def _make_room(self, count: int, columns: Mapping[str, np.ndarray]) -> None:
        """Write the columns anew without gaps, for `count` more responses and at least twice those that there are."""
        live = self.live()
        size = len(live) + max(count, len(live))
        for name, like in columns.items():
            column = np.empty((size, *like.shape[1:]), like.dtype)
            if len(live):
                column[: len(live)] = self.columns[name][live]
            self.columns[name] = column
        self.alive = np.arange(size) < len(live)
        self.ids, self.floats = [self.ids[p] for p in live], [self.floats[p] for p in live]
        self.oldest_position = 0
        if self.position_of is not None:
            self.position_of = {tokens: position for position, tokens in enumerate(self.ids)}

    def first_since(self, arrival: int) -> int:
        """Smallest position whose arrival number is `arrival` or larger."""
        first = int(self.columns["arrival"][: len(self.ids)].searchsorted(arrival)) if arrival else 0
        return max(first, self.oldest_position)


class PromptDraws:
    """The prompts under one reference version: a draw without replacement of all, and one of the fresh ones.

    Fresh are the groups that arrived since `window_start`, topped up with the newest groups to at least P prompts, or to
    all there are. That is a suffix of all groups by arrival, so one number describes it: every response whose arrival number
    is `fresh_since` or larger.
    """

    def __init__(self) -> None:
        self.all = DrawWithoutReplacement()
        self.fresh = DrawWithoutReplacement()
        self.fresh_since = 0

    def visit(self, prompt: int) -> None:
        """Take note that a group of this prompt arrived: it is fresh, and can be drawn as a fresh one again at once."""
        # Only the fresh draw gives the prompt another turn: in the draw of all, a prompt that is visited often would
        # otherwise come more often than the others.
        if prompt not in self.all:
            self.all.put(prompt)
        self.fresh.put(prompt)

    def remove(self, prompt: int) -> None:
        """Never draw a prompt again: its last response has left."""
        self.all.remove(prompt)
        if prompt in self.fresh:
            self.fresh.remove(prompt)

    def refresh(
        self, entries: Mapping[int, PromptEntry], newest_first: Iterable[int], *, window_start: int, at_least: int
    ) -> None:
        """Bring up to date which prompts are fresh; `newest_first` are the prompts of all groups."""
        fresh: dict[int, int] = {}
        for prompt in newest_first:
            if prompt in fresh or prompt not in self.all:
                continue
            arrival = entries[prompt].newest_group_arrival
            if arrival < window_start and len(fresh) >= at_least:
                break
            fresh[prompt] = arrival
            if len(fresh) == len(self.all):
                break
        for prompt in sorted(set(self.fresh) - set(fresh), key=lambda prompt: entries[prompt].newest_group_arrival):
            self.fresh.remove(prompt)
        for prompt in fresh:
            if prompt not in self.fresh:
                self.fresh.put(prompt)
        self.fresh_since = min(window_start, *fresh.values())


class DrawWithoutReplacement:
    """Prompts drawn uniformly without replacement; when all have been drawn, all can be drawn again. Every operation is
    O(1)."""

    def __init__(self) -> None:
        self._prompts: list[int] = []
        """Prompts; the first `_num_undrawn` can still be drawn in this round, the others have been."""
        self._index: dict[int, int] = {}
        """Where each prompt stands in `_prompts`."""
        self._num_undrawn = 0

    def __len__(self) -> int:
        """Number of prompts, drawn or not."""
        return len(self._prompts)

    def __iter__(self) -> Iterator[int]:
        return iter(self._prompts)

    def __contains__(self, prompt: object) -> bool:
        return prompt in self._index

    def put(self, prompt: int) -> None:
        """Add a prompt, or return it if it was drawn: from now on it can be drawn again."""
        if prompt not in self._index:
            self._index[prompt] = len(self._prompts)
            self._prompts.append(prompt)
        if self._index[prompt] >= self._num_undrawn:
            self._swap(self._index[prompt], self._num_undrawn)
            self._num_undrawn += 1

    def remove(self, prompt: int) -> None:
        """Forget a prompt."""
        # First out of the undrawn part, then to the end: swapping an undrawn prompt with the last one directly would put a
        # drawn prompt among the undrawn.
        if self._index[prompt] < self._num_undrawn:
            self._num_undrawn -= 1
            self._swap(self._index[prompt], self._num_undrawn)
        self._swap(self._index[prompt], len(self._prompts) - 1)
        self._prompts.pop()
        del self._index[prompt]

    def draw(self, rng: np.random.Generator, *, exclude: set[int]) -> int | None:
        """A prompt outside `exclude`, uniformly among the undrawn; None when every prompt is excluded."""
        if len(exclude) >= len(self) and sum(prompt in self._index for prompt in exclude) == len(self):
            return None
        skipped = []
        while (prompt := self._take(rng)) in exclude:
            skipped.append(prompt)
        for met in skipped:  # they were met, not drawn: they keep their turn
            self.put(met)
        return prompt

    def _take(self, rng: np.random.Generator) -> int:
        if not self._num_undrawn:
            self._num_undrawn = len(self._prompts)
        self._num_undrawn -= 1
        self._swap(int(rng.random() * (self._num_undrawn + 1)), self._num_undrawn)
        return self._prompts[self._num_undrawn]

    def _swap(self, a: int, b: int) -> None:
        prompts = self._prompts
        prompts[a], prompts[b] = prompts[b], prompts[a]
        self._index[prompts[a]], self._index[prompts[b]] = a, b
