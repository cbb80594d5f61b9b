"""What is known of each stored response besides its tokens: one NumPy column per fact, one row per response.

The columns of a table are fields of one array of records, so that the facts of a row share a cache line: rows are read at
random, and in a large buffer every line touched is a wait for memory. They are allocated at full capacity; the operating
system hands out pages only when they are first written, so an unfilled buffer costs nothing. Single numbers go through
memoryviews, three times as fast as through the arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

NONE = -1
"""In links: no row."""
ROW_FIELDS = [
    ("shelf", np.int32),
    ("slot", np.int32),
    ("version", np.int32),
    ("score", np.float32),
    ("log_importance", np.float32),
    ("received", np.int32),
    ("times_sampled", np.int32),
    ("truncated", np.bool_),
]


class RowTable:
    """Columns by row, and which rows are free."""

    def __init__(self, capacity: int, *, num_rewards: int) -> None:
        records = np.zeros(capacity, [*ROW_FIELDS, ("rewards", np.float32, (num_rewards,))])
        self.shelf = records["shelf"]
        """Which shelf (prompt and reference version) the row stands on."""
        self.slot = records["slot"]
        """Where on the shelf."""
        self.version = records["version"]
        self.truncated = records["truncated"]
        self.rewards = records["rewards"]
        """[capacity, components]"""
        self.score = records["score"]
        """Weighted sum of the reward components when stored: what the reward softmax looks at. Always finite."""
        self.log_importance = records["log_importance"]
        """Clipped log of reference / behaviour probability when stored: what importance-weighted draws look at."""
        self.received = records["received"]
        """Optimizer step at which it arrived."""
        self.times_sampled = records["times_sampled"]
        self._free = np.zeros(capacity, np.int32)
        self._num_free = 0
        self._num_touched = 0

    def __len__(self) -> int:
        return self._num_touched - self._num_free

    def allocate(self, count: int) -> np.ndarray:
        """Free rows, used ones first; the caller sees to it that there are enough."""
        reused = min(count, self._num_free)
        self._num_free -= reused
        old = self._free[self._num_free : self._num_free + reused]
        new = np.arange(self._num_touched, self._num_touched + count - reused, dtype=np.int32)
        self._num_touched += count - reused
        return np.concatenate([old, new])

    def release(self, rows: np.ndarray) -> None:
        self._free[self._num_free : self._num_free + len(rows)] = rows
        self._num_free += len(rows)


class AgeOrder:
    """All rows from oldest to newest: a linked list, so that a row leaves the middle in constant time."""

    def __init__(self, capacity: int) -> None:
        self._older, self._newer = np.zeros(capacity, np.int32), np.zeros(capacity, np.int32)
        self._older_of, self._newer_of = self._older.data, self._newer.data
        self.oldest = NONE
        self.newest = NONE

    def append(self, rows: np.ndarray) -> None:
        """Rows become the newest, in the order given; there is at least one."""
        first, last = int(rows[0]), int(rows[-1])
        self._newer[rows[:-1]], self._older[rows[1:]] = rows[1:], rows[:-1]
        self._older_of[first], self._newer_of[last] = self.newest, NONE
        if self.newest == NONE:
            self.oldest = first
        else:
            self._newer_of[self.newest] = first
        self.newest = last

    def remove(self, rows: Iterable[int]) -> None:
        for row in rows:
            older, newer = self._older_of[row], self._newer_of[row]
            if older == NONE:
                self.oldest = newer
            else:
                self._newer_of[older] = newer
            if newer == NONE:
                self.newest = older
            else:
                self._older_of[newer] = older

    def __iter__(self) -> Iterator[int]:
        """From the oldest on."""
        row = self.oldest
        while row != NONE:
            yield row
            row = self._newer_of[row]


class TokenIndex:
    """Finds rows by a 64-bit key of their shelf and tokens: chains in two int32 columns, a tenth of a dict's memory.

    Equal keys do not prove equal tokens; the caller compares.
    """

    def __init__(self, capacity: int) -> None:
        num_buckets = 1 << max(0, capacity - 1).bit_length()
        self._keys = np.zeros(capacity, np.uint64).data
        self._first = np.zeros(num_buckets, np.int32).data
        """By bucket: the first row + 1; 0 = empty, so that untouched pages mean what they should."""
        self._next = np.zeros(capacity, np.int32).data
        self._bucket_mask = num_buckets - 1

    def insert(self, rows: Iterable[int], keys: Iterable[int]) -> None:
        for row, key in zip(rows, keys):
            bucket = key & self._bucket_mask
            self._keys[row] = key
            self._next[row] = self._first[bucket]
            self._first[bucket] = row + 1

    def find(self, key: int) -> Iterator[int]:
        """Rows with this key; do not change the index while iterating."""
        link = self._first[key & self._bucket_mask]
        while link:
            if self._keys[link - 1] == key:
                yield link - 1
            link = self._next[link - 1]

    def remove(self, rows: Iterable[int]) -> None:
        for row in rows:
            bucket = self._keys[row] & self._bucket_mask
            link = self._first[bucket]
            if link == row + 1:
                self._first[bucket] = self._next[row]
                continue
            while self._next[link - 1] != row + 1:
                link = self._next[link - 1]
            self._next[link - 1] = self._next[row]
