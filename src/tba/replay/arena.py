"""Token data of all stored responses, packed: 16 bytes a token (20 with step values) and no object per response.

A log of segments. Writing bumps a pointer in the open segment; freeing only counts dead tokens. When too much is dead,
the deadest segment's live rows are copied to the end of the log and the segment is given back. One copy moves at most
one segment, so pauses are bounded, and memory stays near the payload however responses die.

A token is one record of four 32-bit numbers, side by side because a response is always read whole: one copy instead of
four. The loss mask costs nothing: a token the policy did not choose is stored as ~id, which is negative.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

ID, LOG_REF, BEHAVIOUR, POLICY, STEP_VALUE = range(5)
"""Columns of a token record, int32 [tokens, width]; all but the first hold float32 bits. The last is there only for
objectives with Monte-Carlo values."""
WIDTH = 4
"""Columns without step values."""
SEGMENT_TOKENS = 1 << 16
"""1 MiB: copying one out takes well under a millisecond."""
MAX_DEAD_SHARE = 0.15


def pack_tokens(
    ids: np.ndarray,
    loss_mask: np.ndarray,
    log_ref: np.ndarray,
    behaviour: np.ndarray,
    policy: np.ndarray,
    step_values: np.ndarray | None = None,
) -> np.ndarray:
    """Arrays of N tokens -> records, int32 [N, 4 or 5]."""
    records = np.empty((len(ids), WIDTH + (step_values is not None)), np.int32)
    floats = records.view(np.float32)
    records[:, ID] = np.where(loss_mask, ids, ~ids)
    floats[:, LOG_REF], floats[:, BEHAVIOUR], floats[:, POLICY] = log_ref, behaviour, policy
    if step_values is not None:
        floats[:, STEP_VALUE] = step_values
    return records


def unpack_ids(records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Records -> ids int64 [N], loss mask bool [N]."""
    stored = records[:, ID].astype(np.int64)
    chosen = stored >= 0
    return np.where(chosen, stored, ~stored), chosen


@dataclass(eq=False)
class Segment:
    records: np.ndarray
    """int32 [size, width]"""
    bytes: memoryview
    """The same memory."""
    used: int = 0
    """Tokens written; the next write starts here."""
    rows: array[int] = field(default_factory=lambda: array("i"))
    """Rows ever written here; those that moved or were freed are recognised by `Arena.segment`."""


class Arena:
    """Where each row's tokens lie, and the tokens. Rows are numbers below `capacity`, chosen by the caller."""

    def __init__(self, capacity: int, *, segment_tokens: int = SEGMENT_TOKENS, width: int = WIDTH) -> None:
        self._width = width
        places = np.zeros(capacity, [("segment", np.int32), ("offset", np.int32), ("length", np.int32)])
        self.segment, self.offset, self.length = places["segment"], places["offset"], places["length"]
        """By row, as columns of one table (see rows.py). Segment 0 = the row is free."""
        self.used_tokens = 0
        self.dead_tokens = 0
        self.num_compactions = 0
        self._segment_tokens = segment_tokens
        self._segments: dict[int, Segment] = {}
        self._dead = np.zeros(16, np.int64)
        self._free_numbers: list[int] = []
        self._open = 0
        """Number of the segment that is written to; 0 = none."""

    @property
    def live_tokens(self) -> int:
        return self.used_tokens - self.dead_tokens

    def write(self, rows: np.ndarray, records: np.ndarray, lengths: np.ndarray) -> None:
        """Store rows whose records lie end to end."""
        self.length[rows] = lengths
        ends = np.cumsum(lengths)
        first = 0
        while first < len(rows):
            start = int(ends[first] - lengths[first])
            last = int(np.searchsorted(ends, start + self._room(), side="right"))
            if last == first or not self._open:
                self._open_segment(at_least=int(lengths[first]))
                continue
            self._append(
                rows[first:last], records[start : ends[last - 1]], ends[first:last] - lengths[first:last] - start
            )
            first = last

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Records of the rows, end to end: int32 [N, width]. Joining bytes is three times as fast as np.concatenate."""
        record_bytes = 4 * self._width
        offsets = record_bytes * self.offset[rows].astype(np.int64)
        ends = offsets + record_bytes * self.length[rows]
        places = zip(self.segment[rows].tolist(), offsets.tolist(), ends.tolist())
        joined = bytearray().join([self._segments[number].bytes[start:end] for number, start, end in places])
        return np.frombuffer(joined, np.int32).reshape(-1, self._width)

    def holds(self, row: int) -> bool:
        return bool(self.segment[row] != 0)

    def set_log_ref(self, row: int, log_ref: np.ndarray) -> None:
        """Overwrite a row's reference log-probs (a reference reset)."""
        start = int(self.offset[row])
        records = self._segments[int(self.segment[row])].records[start : start + int(self.length[row])]
        records.view(np.float32)[:, LOG_REF] = log_ref

    def stored_ids(self, row: int) -> np.ndarray:
        """int32 [T] as stored (~id where not chosen): enough to tell whether two responses are the same."""
        start = int(self.offset[row])
        return self._segments[int(self.segment[row])].records[start : start + int(self.length[row]), ID]

    def free(self, rows: np.ndarray) -> None:
        np.add.at(self._dead, self.segment[rows], self.length[rows])
        self.dead_tokens += int(self.length[rows].sum())
        self.segment[rows] = 0
        while self.dead_tokens > max(self._segment_tokens, MAX_DEAD_SHARE * self.used_tokens):
            self._compact()

    def _room(self) -> int:
        if not self._open:
            return 0
        segment = self._segments[self._open]
        return len(segment.records) - segment.used

    def _open_segment(self, *, at_least: int) -> None:
        """A response longer than 1/16 segment gets a larger one, so that what is left over at the end stays small."""
        number = self._free_numbers.pop() if self._free_numbers else len(self._segments) + 1
        if number >= len(self._dead):
            self._dead = np.concatenate([self._dead, np.zeros_like(self._dead)])
        records = np.empty((max(self._segment_tokens, 16 * at_least), self._width), np.int32)
        self._segments[number] = Segment(records, records.data.cast("B"))
        self._open = number

    def _append(self, rows: np.ndarray, records: np.ndarray, offsets: np.ndarray) -> None:
        segment = self._segments[self._open]
        segment.records[segment.used : segment.used + len(records)] = records
        segment.rows.frombytes(rows.astype(np.int32).tobytes())
        self.segment[rows] = self._open
        self.offset[rows] = segment.used + offsets
        segment.used += len(records)
        self.used_tokens += len(records)

    def _compact(self) -> None:
        """Copy the live rows of the deadest segment to the end of the log and give the segment back."""
        number = int(self._dead.argmax())
        if number == self._open:
            self._open = 0
        candidates = np.unique(np.frombuffer(self._segments[number].rows, np.int32))
        rows = candidates[self.segment[candidates] == number]
        lengths = self.length[rows]
        tokens = np.repeat(self.offset[rows] - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())
        records = self._segments[number].records[tokens]
        self.used_tokens -= self._segments.pop(number).used
        self._free_numbers.append(number)
        self.dead_tokens -= int(self._dead[number])
        self._dead[number] = 0
        self.write(rows, records, lengths)
        self.num_compactions += 1
