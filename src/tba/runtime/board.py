"""Numbers that all roles see at once, in shared memory: who is where, who waits for whom.

Each number has one writer. Reading never waits; a reader may see one number newer than another.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from tba.runtime.memory import SharedMemory

Wait = Literal["none", "first_fill", "replay_ratio", "pace", "channel_full"]
WAITS: tuple[Wait, ...] = ("none", "first_fill", "replay_ratio", "pace", "channel_full")
"""The named places where a role may wait, and no others."""

TRAINER_FIELDS = ("wait", "wait_seconds")
SEARCHER_FIELDS = (
    "heartbeat",
    "version",
    "groups",
    "responses",
    "tokens",
    "wait",
    "wait_seconds",
    "failures",
    "skipped",
    "cursor",
)


class Board:
    """`board.trainer["wait_seconds"]`, `board.searcher(0)["responses"]`: views that read and write shared memory."""

    def __init__(self, memory: SharedMemory, num_searchers: int) -> None:
        self.memory = memory
        self.num_searchers = num_searchers
        values = memory.array(np.float64)
        self.trainer = Row(values[: len(TRAINER_FIELDS)], TRAINER_FIELDS)
        width = len(SEARCHER_FIELDS)
        start = len(TRAINER_FIELDS)
        self._searchers = [
            Row(values[start + i * width : start + (i + 1) * width], SEARCHER_FIELDS) for i in range(num_searchers)
        ]

    @classmethod
    def create(cls, num_searchers: int) -> Board:
        count = len(TRAINER_FIELDS) + num_searchers * len(SEARCHER_FIELDS)
        return cls(SharedMemory.create(8 * count), num_searchers)

    def searcher(self, index: int) -> Row:
        return self._searchers[index]


class Row:
    """Named float64 numbers of one role."""

    def __init__(self, values: np.ndarray, fields: tuple[str, ...]) -> None:
        self._values = values
        self._index = {name: place for place, name in enumerate(fields)}

    def __getitem__(self, name: str) -> float:
        return float(self._values[self._index[name]])

    def __setitem__(self, name: str, value: float) -> None:
        self._values[self._index[name]] = value

    @property
    def wait(self) -> Wait:
        return WAITS[int(self["wait"])]
