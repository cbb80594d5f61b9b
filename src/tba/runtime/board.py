"""Numbers that all roles see at once, in shared memory: who is where, and who waits for whom.

Each number has one writer. Reading never waits; a reader may see one number newer than another.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from tba.observe.display import RoleStatus
from tba.runtime.channels import WAITS, Wait


@dataclass(frozen=True, kw_only=True)
class MemoryHandle:
    """How another process finds shared memory while the one that made it lives.

    MemoryHandle(path="/proc/4711/fd/9", num_bytes=4096)
    """

    path: str
    num_bytes: int


class SharedMemory:
    """Bytes that several processes see alike. They have no name in the file system where there is /proc, so nothing is left
    of them when all are gone, however they ended."""

    def __init__(self, fd: int, num_bytes: int, *, path: str | None = None) -> None:
        """`path` is the file to remove at the end, where it has a name."""
        self.fd = fd
        self.num_bytes = num_bytes
        self._path = path
        self._map = mmap.mmap(fd, num_bytes)

    @classmethod
    def create(cls, num_bytes: int) -> SharedMemory:
        """New zeroed memory, in RAM where the system has /dev/shm with room for it."""
        folder = Path("/dev/shm")
        room = os.statvfs(folder) if folder.is_dir() else None
        in_ram = room is not None and room.f_bavail * room.f_frsize > 2 * num_bytes
        fd, path = tempfile.mkstemp(prefix="tba-", dir=folder if in_ram else None)
        os.ftruncate(fd, num_bytes)
        if sys.platform == "linux":  # others reach it through /proc, so it needs no name
            os.unlink(path)
            return cls(fd, num_bytes)
        return cls(fd, num_bytes, path=path)

    @classmethod
    def attach(cls, handle: MemoryHandle) -> SharedMemory:
        """The memory that another process has made."""
        return cls(os.open(handle.path, os.O_RDWR), handle.num_bytes)

    def handle(self) -> MemoryHandle:
        return MemoryHandle(path=self._path or f"/proc/{os.getpid()}/fd/{self.fd}", num_bytes=self.num_bytes)

    def array(self, dtype: np.dtype | type, *, offset: int = 0, count: int = -1) -> np.ndarray:
        """A view of part of the memory."""
        return np.frombuffer(self._map, dtype=dtype, offset=offset, count=count)

    def close(self) -> None:
        """Give up the descriptor, once; views that are still in use keep the mapping alive."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            if self._path is not None:
                Path(self._path).unlink(missing_ok=True)


MAX_SEARCHERS = 64
"""Searchers that there is room for on the board of a run."""
SUPERVISOR_FIELDS = ("beats", "replaced", "trainer_restarts")
"""`beats` rises while the supervisor looks after the others."""
TRAINER_FIELDS = ("wait", "wait_seconds", "beats", "step", "pid", "started_at")
"""`beats` rises whenever the trainer looks for groups or publishes weights, 0 = it is not that far yet."""
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
    "pid",
    "place",
)
"""`heartbeat` rises while the process lives, `work` only while it decodes or evaluates, not while it waits. The supervisor
writes `pid` and `place`, the searcher the others."""

Place = Literal["none", "empty", "filled", "given_up"]
PLACES: tuple[Place, ...] = ("none", "empty", "filled", "given_up")
"""Whether a searcher with this number is wanted, and whether there is a process for it."""

WAITS_FOR: dict[Wait, str] = {
    "none": "works",
    "first_fill": "waits for groups that fill a batch",
    "replay_ratio": "waits for new responses from the searchers",
    "pace": "is ahead: waits for newer weights from the trainer, or for rewards",
    "channel_full": "waits for the trainer to take in groups",
    "durable_replay": "waits for groups to be written to the durable replay",
}


class Board:
    """`board.trainer["wait_seconds"]`, `board.searcher(0)["responses"]`: views that read and write shared memory."""

    def __init__(self, memory: SharedMemory) -> None:
        self.memory = memory
        values = memory.array(np.float64)
        widths = [len(SUPERVISOR_FIELDS), len(TRAINER_FIELDS), *[len(SEARCHER_FIELDS)] * MAX_SEARCHERS]
        parts = np.split(values, np.cumsum(widths)[:-1])
        self.supervisor = Row(parts[0], SUPERVISOR_FIELDS)
        self.trainer = Row(parts[1], TRAINER_FIELDS)
        self._searchers = [Row(part, SEARCHER_FIELDS) for part in parts[2:]]

    @classmethod
    def create(cls) -> Board:
        count = len(SUPERVISOR_FIELDS) + len(TRAINER_FIELDS) + MAX_SEARCHERS * len(SEARCHER_FIELDS)
        return cls(SharedMemory.create(8 * count))

    def searcher(self, index: int) -> Row:
        return self._searchers[index]

    def places(self) -> dict[int, Place]:
        """Searchers that are wanted, by their number."""
        found = {index: PLACES[int(row["place"])] for index, row in enumerate(self._searchers)}
        return {index: place for index, place in found.items() if place != "none"}

    def searchers_progress(self) -> float:
        """A number that changes while any searcher works, and when one is replaced."""
        rows = [self._searchers[index] for index, place in self.places().items() if place == "filled"]
        # A process that loads its model shows nothing yet; runtime.start_seconds bounds that, not the deadlines of others.
        loading = time.monotonic() if any(row["heartbeat"] == 0 for row in rows) else 0.0
        return 1e9 * self.supervisor["replaced"] + loading + sum(row["work"] for row in rows)

    def trainer_progress(self) -> float:
        """A number that changes while the trainer works, and while another one starts."""
        return self.trainer["beats"] or time.monotonic()

    def statuses(self) -> list[RoleStatus]:
        """Who does what, for people."""
        trainer = self.trainer
        seconds = max(1e-9, time.time() - trainer["started_at"]) if trainer["started_at"] else math.inf
        doing = WAITS_FOR[trainer.wait] if trainer["beats"] else "starts"
        found = [_status("trainer", doing, trainer, seconds)]
        for index, place in self.places().items():
            row = self._searchers[index]
            if place == "filled":
                doing = WAITS_FOR[row.wait] if row["heartbeat"] else "loads the model"
            else:
                doing = "has been given up" if place == "given_up" else "starts again"
            found.append(_status(f"searcher-{index}", doing, row, seconds, responses=row["responses"]))
        return found

    def metrics(self) -> dict[str, float]:
        """What the searchers have done so far, by searcher."""
        places = self.places()
        return {
            "searchers/alive": float(sum(place == "filled" for place in places.values())),
            "searchers/replaced": self.supervisor["replaced"],
            "trainer/restarts": self.supervisor["trainer_restarts"],
            **{
                f"searcher/{index}/{name}": self._searchers[index][name]
                for index in places
                for name in ("version", "groups", "responses", "tokens", "wait_seconds", "failures")
            },
        }


def _status(name: str, doing: str, row: Row, seconds: float, *, responses: float = 0.0) -> RoleStatus:
    return RoleStatus(
        name=name,
        doing=doing,
        waited_share=row["wait_seconds"] / seconds,
        responses_per_second=responses / seconds,
        pid=int(row["pid"]) or None,
    )


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
