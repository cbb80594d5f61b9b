"""Numbers that all roles see at once, in shared memory: who is where, and who waits for whom.

Each number has one writer. Reading never waits; a reader may see one number newer than another.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tba.runtime.channels import WAITS, Wait

logger = logging.getLogger("tba")

RAM = Path("/dev/shm")
"""Where Linux has files in memory."""


class SharedMemory:
    """Bytes that a process and the children it hands `fd` to see alike."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd = fd
        self.num_bytes = num_bytes
        self._map = mmap.mmap(fd, num_bytes)

    @classmethod
    def create(cls, num_bytes: int, folders: Sequence[Path] | None = None) -> SharedMemory:
        """New zeroed memory: a file in RAM or, where there is no room for it, on disk; in the first folder that has room.

        All of it is reserved at once: a file that only claims its size ends a process with SIGBUS when it is written and
        there is no room any more.
        """
        on_disk = Path(tempfile.gettempdir())
        folders = folders or ([RAM, on_disk] if RAM.is_dir() else [on_disk])
        refusals: list[str] = []
        for folder in folders:
            if not folder.is_dir():
                refusals.append(f"{folder} is no folder")
                continue
            try:
                with tempfile.TemporaryFile(dir=folder) as file:
                    _reserve(file.fileno(), num_bytes)
                    memory = cls(os.dup(file.fileno()), num_bytes)
            except OSError as error:
                refusals.append(f"{folder} has {_free(folder)} free ({error.strerror or error})")
                continue
            if refusals:
                logger.warning(
                    "%s of shared memory lie in %s, which may be slower: %s.",
                    _size(num_bytes),
                    folder,
                    "; ".join(refusals),
                )
            return memory
        raise MemoryError(
            f"{_size(num_bytes)} of memory that roles share cannot be reserved: {'; '.join(refusals)}. Make room in one of "
            "them, give a container more (docker run --shm-size=...), or set TMPDIR to a folder with room."
        )

    def array(self, dtype: np.dtype | type, *, offset: int = 0, count: int = -1) -> np.ndarray:
        """A view of part of the memory."""
        return np.frombuffer(self._map, dtype=dtype, offset=offset, count=count)

    def close(self) -> None:
        """Give up the descriptor, once; views that are still in use keep the mapping alive."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _reserve(descriptor: int, num_bytes: int) -> None:
    """Give an empty file its size, with room for every byte; OSError where there is none."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, num_bytes)
        return
    for start in range(0, num_bytes, mmap.PAGESIZE):  # macOS: what is written is reserved
        os.pwrite(descriptor, bytes(min(mmap.PAGESIZE, num_bytes - start)), start)


def _free(folder: Path) -> str:
    room = os.statvfs(folder)
    return _size(room.f_bavail * room.f_frsize)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


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
    "mismatch_kl",
)
"""`heartbeat` rises while the process lives, `work` only while it decodes or evaluates, not while it waits. `mismatch_kl` is
how far engine and trainer were apart on the canary of the version that was compared last, NaN before the first."""
UNKNOWN_AT_FIRST = ("mismatch_kl",)


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
        """Set all to zero, or to NaN where that is a value, for a new process in the role."""
        self._values[:] = [math.nan if name in UNKNOWN_AT_FIRST else 0.0 for name in self._index]

    @property
    def wait(self) -> Wait:
        return WAITS[int(self["wait"])]
