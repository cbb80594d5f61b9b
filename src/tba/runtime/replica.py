"""A second copy of the groups that a trainer on another node stores, on the node of the supervisor. With
replay.durability=node a group is acknowledged only when it is here too. A row is a pickled group, in a file that only its
owner can open. Nothing here imports torch.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tba.observe.run_folder import others_entry

SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
    arrival INTEGER PRIMARY KEY,  -- in the order in which the trainer got them
    source TEXT NOT NULL,         -- searcher and incarnation
    number INTEGER NOT NULL,      -- of the group within it
    responses INTEGER NOT NULL,
    body BLOB NOT NULL,           -- the pickled group
    UNIQUE (source, number)
)"""
INSERT = "INSERT OR IGNORE INTO groups (source, number, responses, body) VALUES (?, ?, ?, ?)"
GROUPS = "groups.sqlite"


class ReplicaFailed(RuntimeError):
    """The replica cannot be written or read; the message says why, where, and what to do."""


class Replica:
    """Keeps each group once, in the order of arrival. Used by one thread. replica.add("searcher-0.5f3a91c2/41", 8, body)"""

    def __init__(self, path: Path, *, capacity: int) -> None:
        """Opens the file, or makes it. Rows leave in the order of arrival once newer ones hold `capacity` responses."""
        self.path, self._capacity = path, capacity
        with self._reported("opened"):
            # Rows that another user may have written are refused: a trainer unpickles them, which runs what they name. The
            # write-ahead log holds rows too.
            files = path.parent.glob(f"{path.name}*")
            others = others_entry(path.parent) or others_entry(*files, writable=stat.S_IWGRP | stat.S_IWOTH)
            if others is not None:
                raise PermissionError(f"{others}, and it is read as this user's own")
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
            self._database = sqlite3.connect(path, timeout=30.0, check_same_thread=False)
            self._database.execute("PRAGMA journal_mode = WAL")
            # What is committed survives every process. It is lost with the machine, but the first copy is on another one.
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.execute(SCHEMA)
        self._num_responses = self._count()

    def add(self, group_id: str, responses: int, body: bytes) -> None:
        """Store a group, unless it is there already. It may be acknowledged only after this has returned."""
        source, _, number = group_id.rpartition("/")
        with self._reported("written"), self._database:  # a transaction
            if self._database.execute(INSERT, (source, int(number), responses, body)).rowcount:
                self._num_responses += responses
            self._num_responses -= remove_oldest(self._database, self._num_responses - self._capacity)

    def rows(self, *, after: Mapping[str, int] | None = None) -> Iterator[bytes]:
        """The groups, in the order of their arrival; of each source in `after` only those with a higher number."""
        marks = after or {}
        with self._reported("read"):
            found = self._database.execute("SELECT arrival, source, number FROM groups ORDER BY arrival").fetchall()
            for arrival, source, number in found:
                # One by one, so that no cursor stays open: rows may leave meanwhile.
                query = "SELECT body FROM groups WHERE arrival = ?"
                if number > marks.get(source, -1) and (row := self._database.execute(query, (arrival,)).fetchone()):
                    yield row[0]

    def ids(self) -> list[str]:
        found = self._database.execute("SELECT source, number FROM groups ORDER BY arrival").fetchall()
        return [f"{source}/{number}" for source, number in found]

    def return_to(self, marks: Mapping[str, int]) -> None:
        """Forget the groups after the highest number of each source: the trainer has gone back to where it had these."""
        with self._reported("written"), self._database:
            for (source,) in self._database.execute("SELECT DISTINCT source FROM groups").fetchall():
                # A source that the trainer does not know loses all its groups: every number is larger than -1.
                last = (source, marks.get(source, -1))
                self._database.execute("DELETE FROM groups WHERE source = ? AND number > ?", last)
        self._num_responses = self._count()

    def close(self) -> None:
        self._database.close()

    def _count(self) -> int:
        (found,) = self._database.execute("SELECT SUM(responses) FROM groups").fetchone()
        return found or 0

    @contextmanager
    def _reported(self, what: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise ReplicaFailed(
                f"replay.durability=node: {self.path} could not be {what} ({type(error).__name__}: {error}). What was not "
                "stored here was not acknowledged. Free disk space, choose another folder (output=...), or use "
                "replay.durability=process."
            ) from None


def remove_oldest(database: sqlite3.Connection, excess: int) -> int:
    """Remove the oldest rows that hold no more than so many responses; returns the number of responses removed. A row
    stays whole while some of its responses are within the capacity: the buffer may have them."""
    last, removed = None, 0
    if excess > 0:
        for arrival, responses in database.execute("SELECT arrival, responses FROM groups ORDER BY arrival"):
            if removed >= excess or removed + responses > excess:
                break
            last, removed = arrival, removed + responses
    if last is not None:
        database.execute("DELETE FROM groups WHERE arrival <= ?", (last,))
    return removed


def replica_folder(run: Path) -> Path:
    """Where the replica of a run folder is. It is laid out like that one, with copies of its checkpoints."""
    return run.with_name(f"{run.name}.replica")
