"""The stored responses of one prompt under one reference version, oldest to newest.

A ring of rows whose size is a power of two. A response that leaves the middle (a newer copy came) leaves a hole; when
the ring is full or mostly holes it is written anew without them, larger if need be. The same structure serves 100
responses of each of 10,000 prompts and 150,000 of one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

HOLE = -1
SMALLEST_RING = 16
MAX_FILL = 7 / 8
"""A ring fuller than this grows instead of being tidied: tidying must pay for itself."""


def _empty(dtype: type) -> np.ndarray:
    return np.full(SMALLEST_RING, HOLE, dtype)


@dataclass(eq=False, slots=True)
class Shelf:
    """Shelf(index=3, prompt_id="train-17", prompt_tokens=np.array([1, 40, 7], np.int32), reference_version=0)"""

    index: int
    prompt_id: str
    prompt_tokens: np.ndarray
    reference_version: int
    ring: np.ndarray = field(default_factory=lambda: _empty(np.int32))
    """Rows by slot; position p of the sequence lies in slot p % size."""
    stamps: np.ndarray = field(default_factory=lambda: _empty(np.int64))
    """By slot: the order of arrival. A hole keeps its stamp, so the sequence stays sorted."""
    head: int = 0
    """Position of the oldest row."""
    tail: int = 0
    """Position after the newest row."""
    live: int = 0
    newest_group: int = 0
    """Stamp of the first row of the newest group."""
    tree: int = -1
    """Where the softmax selector keeps the shelf's sums; -1 = nowhere."""
    tree_size: int = 0
    log_scale: float = 0.0
    """Softmax weights are exp(logit - log_scale)."""

    @property
    def size(self) -> int:
        return len(self.ring)

    def slots(self, first: int, last: int) -> np.ndarray:
        """Of positions first to last."""
        return np.arange(first, last) & (self.size - 1)

    def rows(self, first: int | None = None) -> np.ndarray:
        """Live rows from a position on (default: all), oldest first."""
        rows = self.ring[self.slots(self.head if first is None else first, self.tail)]
        return rows if self.live == self.tail - self.head else rows[rows != HOLE]

    def position_since(self, stamp: int) -> int:
        """The first position that arrived at this stamp or later (bisection; holes keep their stamps)."""
        low, high, mask, stamps = self.head, self.tail, self.size - 1, self.stamps.data
        while low < high:
            middle = (low + high) // 2
            if stamps[middle & mask] < stamp:
                low = middle + 1
            else:
                high = middle
        return low

    def rows_between(self, first_stamp: int, end_stamp: int) -> np.ndarray:
        """Live rows that arrived at `first_stamp` to `end_stamp` - 1, oldest first."""
        rows = self.ring[self.slots(self.position_since(first_stamp), self.position_since(end_stamp))]
        return rows[rows != HOLE]

    def oldest(self, count: int) -> list[int]:
        """The oldest live rows; there are at least `count`."""
        rows: list[int] = []
        position, mask = self.head, self.size - 1
        while len(rows) < count:
            row = int(self.ring[position & mask])
            position += 1
            if row != HOLE:
                rows.append(row)
        return rows

    def discard(self, slot: int) -> None:
        self.ring[slot] = HOLE
        self.live -= 1
        mask = self.size - 1
        while self.head < self.tail and self.ring[self.head & mask] == HOLE:
            self.head += 1

    def needs_tidying(self, count: int) -> bool:
        """No room for `count` more, or mostly holes (which uniform draws would keep hitting)."""
        span = self.tail - self.head
        return span + count > self.size or span > 2 * (self.live + count) + SMALLEST_RING

    def tidy(self, count: int) -> np.ndarray:
        """Write the ring anew without holes, sized for `count` more; returns the rows, now in slots 0, 1, ..."""
        slots = self.slots(self.head, self.tail)
        slots = slots[self.ring[slots] != HOLE]
        rows, stamps = self.ring[slots], self.stamps[slots]
        size = SMALLEST_RING
        while self.live + count > MAX_FILL * size:
            size *= 2
        self.ring, self.stamps = np.full(size, HOLE, np.int32), np.full(size, HOLE, np.int64)
        self.ring[: self.live], self.stamps[: self.live] = rows, stamps
        self.head, self.tail = 0, self.live
        return rows

    def append(self, rows: np.ndarray, first_stamp: int) -> np.ndarray:
        """Put rows at the end, where there is room; returns their slots."""
        slots = self.slots(self.tail, self.tail + len(rows))
        self.ring[slots] = rows
        self.stamps[slots] = np.arange(first_stamp, first_stamp + len(rows))
        self.tail += len(rows)
        self.live += len(rows)
        self.newest_group = first_stamp
        return slots
