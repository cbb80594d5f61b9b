"""The host's view of the slots: which response is where, and the few numbers that shape the next step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tba.generate.responses import Response
from tba.generate.sampling import Needs, needs_of

CHUNK = 64
"""Slots whose attention runs together, over as many keys as the longest of them has."""
SORT_EVERY = 16
"""Steps between two looks at whether sorting the slots by length is worth its copies."""
KEY_STEP = 16
"""Attention runs over a multiple of this many keys: few distinct shapes, and faster matrix kernels."""


class Chunk(NamedTuple):
    """Slots start to stop, attending to `num_keys` keys."""

    start: int
    stop: int
    num_keys: int


class Running:
    """The host's view of the slots: which response is where, and the few numbers that shape the next step."""

    def __init__(self, num_slots: int) -> None:
        self.responses: list[Response | None] = [None] * num_slots
        self.count = 0
        """Slots up to the last running one."""
        self.holes: list[int] = []
        self.positions = np.zeros(num_slots, dtype=np.int64)
        self.num_tokens = np.zeros(num_slots, dtype=np.int64)
        self.min_new_tokens = np.zeros(num_slots, dtype=np.int64)
        self.flags = np.zeros((num_slots, len(Needs._fields)), dtype=bool)
        self.steps = 0

    def any(self) -> bool:
        return self.count > len(self.holes)

    def items(self) -> Iterator[tuple[int, Response]]:
        return ((slot, response) for slot, response in enumerate(self.responses) if response is not None)

    def free_slots(self) -> list[int]:
        return [*self.holes, *range(self.count, len(self.responses))]

    def put(self, slot: int, response: Response) -> None:
        """Slots are taken in the order of `free_slots`."""
        if self.holes and self.holes[0] == slot:
            self.holes.pop(0)
        self.count = max(self.count, slot + 1)
        self.responses[slot] = response
        self.positions[slot] = response.start_position
        self.num_tokens[slot] = response.num_prefix_tokens
        self.min_new_tokens[slot] = response.sampling.min_new_tokens
        self.flags[slot] = needs_of(response.sampling)

    def remove(self, slot: int) -> Response:
        response, self.responses[slot] = self.responses[slot], None
        assert response is not None
        self.holes.append(slot)
        return response

    def clear(self) -> None:
        self.responses = [None] * len(self.responses)
        self.count, self.holes = 0, []

    def advance(self) -> None:
        self.steps += 1
        self.positions[: self.count] += 1
        self.num_tokens[: self.count] += 1

    def num_keys(self) -> int:
        """Keys the longest running response sees at its next step."""
        return int(self.positions[: self.count].max()) + 1

    def needs(self) -> Needs:
        found = np.any(self.flags[: self.count], axis=0).tolist()
        early = bool((self.num_tokens[: self.count] < self.min_new_tokens[: self.count]).any())
        return Needs(*found)._replace(forbidden=early)

    def chunks(self, size: int) -> list[Chunk]:
        """The running slots, cut into chunks; neighbours that need the same keys are one."""
        found: list[Chunk] = []
        for start in range(0, self.count, size):
            stop = min(start + size, self.count)
            num_keys = _round_up(int(self.positions[start:stop].max()) + 1)
            if found and found[-1].num_keys == num_keys:
                start = found.pop().start
            found.append(Chunk(start, stop, num_keys))
        return found

    def sort_if_worth_it(self) -> tuple[list[int], list[int]]:
        """Put slots in order of length when chunks would then read much fewer keys -> (from, to)."""
        if self.steps % SORT_EVERY or self.count <= CHUNK:
            return [], []
        order = np.argsort(-self.positions[: self.count], kind="stable")
        now, sorted_ = (_keys_read(positions) for positions in (self.positions[: self.count], self.positions[order]))
        # A move reads and writes a slot, with indices: as much as three or four steps of its attention.
        if (now - sorted_) * SORT_EVERY < 4 * int(self.positions[: self.count].sum()):
            return [], []
        targets = np.flatnonzero(order != np.arange(self.count)).tolist()
        sources = order[targets].tolist()
        self._rearrange(sources, targets)
        return sources, targets

    def close_holes(self) -> tuple[list[int], list[int]]:
        """Move the last running responses into holes -> (from, to)."""
        num_running = self.count - len(self.holes)
        targets = [slot for slot in self.holes if slot < num_running]
        sources = [slot for slot in range(num_running, self.count) if self.responses[slot] is not None]
        self._rearrange(sources, targets)
        for slot in range(num_running, self.count):
            self.responses[slot] = None
        self.count, self.holes = num_running, []
        return sources, targets

    def _rearrange(self, sources: list[int], targets: list[int]) -> None:
        moved = [self.responses[source] for source in sources]
        for target, response in zip(targets, moved):
            self.responses[target] = response
        for table in (self.positions, self.num_tokens, self.min_new_tokens, self.flags):
            table[targets] = table[sources]


def _keys_read(positions: np.ndarray) -> int:
    """By one step's attention, chunk by chunk."""
    parts = np.split(positions, range(CHUNK, len(positions), CHUNK))
    return sum(len(part) * _round_up(int(part.max()) + 1) for part in parts)


def _round_up(num_keys: int) -> int:
    return -(-num_keys // KEY_STEP) * KEY_STEP
