"""A prompt's stored responses, and which prompt is next: drawing without replacement across batches, which prompts count as
fresh, and groups in the order of their arrival.

A prompt is named by the index of its entry, so that one prompt under two reference versions is two.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

FREE = -1
"""Value of a ring's position that holds no row."""
SMALLEST_RING = 16
MAX_FILL = 7 / 8
"""Share of a ring that may be filled after it was compacted. A fuller ring grows instead: it would have to be compacted
again after a few more rows, and each time costs as much as the ring is long."""


def _free_ring(dtype: type, size: int = SMALLEST_RING) -> np.ndarray:
    return np.full(size, FREE, dtype)


@dataclass(eq=False, slots=True)
class PromptEntry:
    """The stored responses of one prompt under one reference version, oldest to newest, listed in a ring of rows.

    PromptEntry(index=3, prompt_id="train-17", prompt_tokens=np.array([1, 40, 7], np.int32), reference_version=0)

    The ring's size is a power of two. A response that leaves the middle (a newer copy came) leaves a free position behind;
    when the ring is full, or mostly free positions, it is compacted, and enlarged if need be. The same structure serves 100
    responses of each of 10,000 prompts and 150,000 of one.

    Two numbers of a row are told apart. Its sequence number is one more than that of the row appended before it, and changes
    only when the ring is compacted. Its position is where it lies in the ring: the sequence number modulo the ring's size.
    """

    index: int
    """Name of the entry in the buffer; never given to another while this one is stored."""
    prompt_id: str
    prompt_tokens: np.ndarray
    reference_version: int
    ring: np.ndarray = field(default_factory=lambda: _free_ring(np.int32))
    """Rows by position, FREE where there is none."""
    arrivals: np.ndarray = field(default_factory=lambda: _free_ring(np.int64))
    """Arrival numbers by position. A position that became free keeps its own, so that the sequence stays sorted and can be
    searched by bisection."""
    head: int = 0
    """Sequence number of the oldest row."""
    tail: int = 0
    """Sequence number that the next row will have."""
    num_rows: int = 0
    """Number of rows listed, free positions not counted."""
    newest_group_arrival: int = 0
    """Arrival number of the first row of the newest group."""
    tree: int = -1
    """Where the softmax selector keeps the entry's sums; -1 = nowhere."""
    tree_size: int = 0
    """Number of leaves of that tree."""
    log_scale: float = 0.0
    """Logit whose softmax weight is 1: weights are exp(logit - log_scale)."""

    @property
    def size(self) -> int:
        """Number of positions of the ring."""
        return len(self.ring)

    def positions(self, first: int, last: int) -> np.ndarray:
        """Positions of the sequence numbers `first` to `last` - 1."""
        return np.arange(first, last) & (self.size - 1)  # the remainder, because the size is a power of two

    def rows(self, first: int | None = None) -> np.ndarray:
        """Rows from a sequence number on (default: all), oldest first."""
        rows = self.ring[self.positions(self.head if first is None else first, self.tail)]
        # Mostly no position in between is free, and nothing has to be searched for.
        return rows if self.num_rows == self.tail - self.head else rows[rows != FREE]

    def first_since(self, arrival: int) -> int:
        """Smallest sequence number that arrived at `arrival` or later."""
        # Bisection by hand: np.searchsorted would need the ring unrolled, which costs as much as the ring is long.
        low, high, mask, arrivals = self.head, self.tail, self.size - 1, self.arrivals.data
        while low < high:
            middle = (low + high) // 2
            if arrivals[middle & mask] < arrival:
                low = middle + 1
            else:
                high = middle
        return low

    def rows_between(self, first_arrival: int, end_arrival: int) -> np.ndarray:
        """Rows that arrived at `first_arrival` to `end_arrival` - 1 and are still listed, oldest first."""
        rows = self.ring[self.positions(self.first_since(first_arrival), self.first_since(end_arrival))]
        return rows[rows != FREE]

    def oldest(self, count: int) -> list[int]:
        """The `count` oldest rows; there are at least so many."""
        rows: list[int] = []
        ring, number, mask = self.ring.data, self.head, self.size - 1
        while len(rows) < count:
            row = ring[number & mask]
            number += 1
            if row != FREE:
                rows.append(row)
        return rows

    def discard(self, positions: Sequence[int]) -> None:
        """Remove the rows at these positions, none of which is named twice."""
        ring, mask, head = self.ring.data, self.size - 1, self.head
        for position in positions:
            ring[position] = FREE
        self.num_rows -= len(positions)
        # The head never rests on a free position: `head` is where uniform draws and the search for the oldest begin.
        while head < self.tail and ring[head & mask] == FREE:
            head += 1
        self.head = head

    def needs_compacting(self, count: int) -> bool:
        """Whether `count` more rows do not fit, or free positions, which uniform draws would keep hitting, prevail."""
        span = self.tail - self.head
        return span + count > self.size or span > 2 * (self.num_rows + count) + SMALLEST_RING

    def compact(self, count: int) -> np.ndarray:
        """Write the ring anew without free positions between rows, sized for `count` more; returns the rows, which now lie
        at positions 0, 1, ... in order."""
        positions = self.positions(self.head, self.tail)
        positions = positions[self.ring[positions] != FREE]
        rows, arrivals = self.ring[positions], self.arrivals[positions]
        # From the smallest size on: a prompt that has lost most of its rows gives memory back.
        size = SMALLEST_RING
        while self.num_rows + count > MAX_FILL * size:
            size *= 2
        self.ring, self.arrivals = _free_ring(np.int32, size), _free_ring(np.int64, size)
        self.ring[: self.num_rows], self.arrivals[: self.num_rows] = rows, arrivals
        self.head, self.tail = 0, self.num_rows
        return rows

    def append(self, rows: np.ndarray, first_arrival: int) -> np.ndarray:
        """Add the rows of a group as the newest, which must fit; returns their positions."""
        positions = self.positions(self.tail, self.tail + len(rows))
        self.ring[positions] = rows
        self.arrivals[positions] = np.arange(first_arrival, first_arrival + len(rows))
        self.tail += len(rows)
        self.num_rows += len(rows)
        self.newest_group_arrival = first_arrival
        return positions


class PromptDraws:
    """The prompts under one reference version: a draw without replacement of all, and one of the fresh ones.

    Fresh are the groups that arrived since `window_start`, topped up with the newest groups to at least P prompts, or to
    all there are. That is a suffix of all groups by arrival, so one number describes it: every row whose arrival number is
    `fresh_since` or larger.
    """

    def __init__(self) -> None:
        self.all = DrawWithoutReplacement()
        self.fresh = DrawWithoutReplacement()
        self.fresh_since = 0
        self._recent: OrderedDict[int, None] = OrderedDict()
        """Fresh prompts by the arrival of their newest group, oldest first."""
        self._stale: OrderedDict[int, None] = OrderedDict()
        """Prompts that are not fresh, in the same order. All of them come before all of `_recent`."""

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self.all)

    def visit(self, prompt: int) -> None:
        """Take note that a group of this prompt arrived: it is fresh, and can be drawn as a fresh one again at once."""
        if prompt not in self.all:
            self.all.put(prompt)
        self._stale.pop(prompt, None)
        self._recent[prompt] = None
        self._recent.move_to_end(prompt)
        # Only the fresh draw gives the prompt another turn: in the draw of all, a prompt that is visited often would
        # otherwise come more often than the others.
        self.fresh.put(prompt)

    def remove(self, prompt: int) -> None:
        """Never draw a prompt again: its last response has left."""
        self.all.remove(prompt)
        if prompt in self.fresh:
            self.fresh.remove(prompt)
        self._recent.pop(prompt, None)
        self._stale.pop(prompt, None)

    def refresh(self, entries: Mapping[int, PromptEntry], *, window_start: int, at_least: int) -> None:
        """Bring up to date which prompts are fresh; amortised O(1) per visit."""
        while len(self.fresh) > at_least:
            oldest = next(iter(self._recent))
            if entries[oldest].newest_group_arrival >= window_start:
                break
            del self._recent[oldest]
            self._stale[oldest] = None
            self.fresh.remove(oldest)
        while len(self.fresh) < at_least and self._stale:
            newest, _ = self._stale.popitem()
            self._recent[newest] = None
            self._recent.move_to_end(newest, last=False)
            self.fresh.put(newest)
        self.fresh_since = min(window_start, entries[next(iter(self._recent))].newest_group_arrival)


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


class GroupQueue:
    """Groups in the order of their arrival, each drawn `max_uses` times (replay.max_uses).

    A drawn group counts as used whole, also where it holds more than K responses: leftovers would make batches of what was
    passed over. A group that may be drawn again goes to the end.
    """

    def __init__(self, max_uses: int, *, max_waiting: int | None = None) -> None:
        """Where more than `max_waiting` groups wait, the oldest leave; None = any number may wait."""
        self._max_uses = max_uses
        self._max_waiting = max_waiting
        self._groups: deque[QueuedGroup] = deque()

    def __len__(self) -> int:
        """Number of groups that wait, those included whose rows have all left."""
        return len(self._groups)

    def append(self, entry: int, first_arrival: int, end_arrival: int) -> list[QueuedGroup]:
        """Add a group at the end; returns the groups that had to leave."""
        self._groups.append(QueuedGroup(entry, first_arrival, end_arrival))
        most = len(self._groups) if self._max_waiting is None else self._max_waiting
        return [self._groups.popleft() for _ in range(len(self._groups) - most)]

    def holds(self, num_groups: int, entries: Mapping[int, PromptEntry], *, reference_version: int) -> bool:
        """Whether so many groups can be drawn."""
        ready = self._ready(entries, reference_version)
        return sum(1 for _ in islice(ready, num_groups)) == num_groups

    def draw(
        self, num_prompts: int, entries: Mapping[int, PromptEntry], *, reference_version: int
    ) -> list[tuple[PromptEntry, np.ndarray, bool]]:
        """The oldest groups, at most `num_prompts`: (entry, its rows, whether this was their last use). A second group of a
        prompt is passed over, and keeps its place, while there are other prompts to fill the batch with."""
        firsts: dict[int, QueuedGroup] = {}
        passed_over: list[QueuedGroup] = []
        for group in self._ready(entries, reference_version):
            if group.entry in firsts:
                passed_over.append(group)
            else:
                firsts[group.entry] = group
            if len(firsts) == num_prompts:
                break
        chosen = [*firsts.values(), *passed_over][:num_prompts]
        return [(entries[group.entry], group.rows(entries), self._use(group)) for group in chosen]

    def _ready(self, entries: Mapping[int, PromptEntry], reference_version: int) -> Iterator[QueuedGroup]:
        """Groups that can be drawn, oldest first; those at the front whose rows have all left are forgotten."""
        while self._groups and not len(self._groups[0].rows(entries)):
            self._groups.popleft()
        for group in self._groups:
            if len(group.rows(entries)) and entries[group.entry].reference_version == reference_version:
                yield group

    def _use(self, group: QueuedGroup) -> bool:
        """Count a use; returns whether it was the last."""
        self._groups.remove(group)
        group.uses += 1
        if group.uses < self._max_uses:
            self._groups.append(group)
        return group.uses >= self._max_uses


@dataclass(eq=False, slots=True)
class QueuedGroup:
    """The rows that arrived together: those of the entry whose arrival numbers are `first_arrival` to `end_arrival` - 1 and
    that are still stored."""

    entry: int
    first_arrival: int
    end_arrival: int
    uses: int = 0
    """Number of times that the group was drawn."""

    def rows(self, entries: Mapping[int, PromptEntry]) -> np.ndarray:
        """Stored rows, oldest first; none where the entry is gone."""
        entry = entries.get(self.entry)
        return np.zeros(0, np.int64) if entry is None else entry.rows_between(self.first_arrival, self.end_arrival)
