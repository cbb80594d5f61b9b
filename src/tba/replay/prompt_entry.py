"""The stored responses of one prompt under one reference version, oldest to newest.

They are listed in a ring of rows whose size is a power of two. A response that leaves the middle (a newer copy came) leaves
a free position behind; when the ring is full, or mostly free positions, it is compacted, and enlarged if need be. The same
structure serves 100 responses of each of 10,000 prompts and 150,000 of one.

Two numbers of a row are told apart. Its sequence number is one more than that of the row appended before it, and changes
only when the ring is compacted. Its position is where it lies in the ring: the sequence number modulo the ring's size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
    """PromptEntry(index=3, prompt_id="train-17", prompt_tokens=np.array([1, 40, 7], np.int32), reference_version=0)"""

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
        number, mask = self.head, self.size - 1
        while len(rows) < count:
            row = int(self.ring[number & mask])
            number += 1
            if row != FREE:
                rows.append(row)
        return rows

    def discard(self, position: int) -> None:
        """Remove the row at a position."""
        self.ring[position] = FREE
        self.num_rows -= 1
        # The head never rests on a free position: `head` is where uniform draws and the search for the oldest begin.
        mask = self.size - 1
        while self.head < self.tail and self.ring[self.head & mask] == FREE:
            self.head += 1

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
