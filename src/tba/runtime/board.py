"""Numbers that all roles see at once, in shared memory: who is where, and who waits for whom.

Each number has one writer. Reading never waits; a reader may see one number newer than another.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import numpy as np

from tba.runtime.channels import WAITS, Wait


class SharedMemory:
    """Bytes that a process and the children it hands `fd` to see alike."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd = fd
        self.num_bytes = num_bytes
        self._map = mmap.mmap(fd, num_bytes)

    @classmethod
    def create(cls, num_bytes: int) -> SharedMemory:
        """New zeroed memory, in RAM where the system has /dev/shm with room for it."""
        folder = Path("/dev/shm")
        room = os.statvfs(folder) if folder.is_dir() else None
        in_ram = room is not None and room.f_bavail * room.f_frsize > 2 * num_bytes
        with tempfile.TemporaryFile(dir=folder if in_ram else None) as file:
            file.truncate(num_bytes)
            return cls(os.dup(file.fileno()), num_bytes)

    def array(self, dtype: np.dtype | type, *, offset: int = 0, count: int = -1) -> np.ndarray:
        """A view of part of the memory."""
        return np.frombuffer(self._map, dtype=dtype, offset=offset, count=count)

    def close(self) -> None:
        """Give up the descriptor, once; views that are still in use keep the mapping alive."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


MAX_SEARCHERS = 64
"""Searchers that there is room for on the board of a run."""
TRAINER_FIELDS = ("wait", "wait_seconds", "beats")
"""`beats` rises whenever the trainer looks for groups or publishes weights."""
SEARCHER_FIELDS = (
    "heartbeat",
    "version",
    "groups",
    "responses",
    "tokens",
    "wait",
    "wait_seconds",
    "failures",
    "work",
)
"""`heartbeat` rises while the process lives, `work` only while it decodes or evaluates, not while it waits."""


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

    def clear(self) -> None:
        """Set all to zero, for a new process in the role."""
        self._values[:] = 0.0

    @property
    def wait(self) -> Wait:
        return WAITS[int(self["wait"])]
