"""The replica: a second copy of the groups that a trainer on another node stores, on the node of the supervisor. With
replay.durability=node a searcher is told that a group is stored only when it is here too, and a trainer whose disk is gone
gets the groups from here.

A row is a pickled group, in a file that only its owner can open; another one is refused. Nothing here imports torch.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
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
"""Name of the file in a replica's folder."""


class ReplicaFailed(RuntimeError):
    """The replica cannot be written or read; the message says why, where, and what to do."""


class Replica:
    """Keeps groups by their ids, each once, in the order in which they were added. Used by one thread.

    replica.add("searcher-0.5f3a91c2/41", 8, body)
    """

    def __init__(self, path: Path, *, capacity: int) -> None:
        """Opens the file, or makes it. Rows leave in the order of arrival once newer ones hold `capacity` responses, as
        those of the durable replay do."""
        self.path = path
        self._capacity = capacity
        try:
            self._refuse_others()
            os.close(
                os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            )  # pickles: nobody else may write them
            self._database = sqlite3.connect(path, isolation_level=None, timeout=30.0, check_same_thread=False)
            self._database.execute("PRAGMA journal_mode = WAL")
            # What is committed survives every process. It is lost with the machine, but the first copy is on another one.
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.execute(SCHEMA)
            (found,) = self._database.execute("SELECT SUM(responses) FROM groups").fetchone()
        except (sqlite3.Error, OSError) as error:
            raise self._failure("opened", error) from None
        self._num_responses: int = found or 0

    def add(self, group_id: str, responses: int, body: bytes) -> None:
        """Store a group, unless it is there already. Until this has returned no searcher may be told that it is stored."""
        source, _, number = group_id.rpartition("/")
        try:
            self._database.execute("BEGIN IMMEDIATE")
            if self._database.execute(INSERT, (source, int(number), responses, body)).rowcount:
                self._num_responses += responses
            self._remove_oldest()
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._failure("written", error) from None

    def rows(self, *, after: Mapping[str, int] | None = None) -> Iterator[bytes]:
        """The groups, in the order of their arrival; of each source in `after` only those with a higher number."""
        marks = after or {}
        arrival = self._first_after(marks)
        while True:  # no cursor stays open, or rows could not leave meanwhile
            query = "SELECT arrival, source, number, body FROM groups WHERE arrival >= ? ORDER BY arrival LIMIT 1"
            try:
                found = self._database.execute(query, (arrival,)).fetchone()
            except sqlite3.Error as error:
                raise self._failure("read", error) from None
            if found is None:
                return
            if found[2] > marks.get(found[1], -1):
                yield found[3]
            arrival = found[0] + 1

    def _first_after(self, marks: Mapping[str, int]) -> int:
        """Arrival of the first group with a higher number than its source has in `marks`; one that never comes where there
        is none."""
        sources = self._database.execute("SELECT DISTINCT source FROM groups").fetchall()
        query = "SELECT MIN(arrival) FROM groups WHERE source = ? AND number > ?"
        found = [self._database.execute(query, (source, marks.get(source, -1))).fetchone()[0] for (source,) in sources]
        return min((first for first in found if first is not None), default=2**62)

    def ids(self) -> list[str]:
        """Ids of the groups, in the order of their arrival."""
        found = self._database.execute("SELECT source, number FROM groups ORDER BY arrival").fetchall()
        return [f"{source}/{number}" for source, number in found]

    def return_to(self, marks: Mapping[str, int]) -> None:
        """Forget the groups after the highest number of each source: the trainer has gone back to where it had these."""
        try:
            self._database.execute("BEGIN IMMEDIATE")
            for (source,) in self._database.execute("SELECT DISTINCT source FROM groups").fetchall():
                last = (source, marks.get(source, -1))
                self._database.execute("DELETE FROM groups WHERE source = ? AND number > ?", last)
            self._database.execute("COMMIT")
            (found,) = self._database.execute("SELECT SUM(responses) FROM groups").fetchone()
        except sqlite3.Error as error:
            raise self._failure("written", error) from None
        self._num_responses = found or 0

    def close(self) -> None:
        with suppress(ReplicaFailed):  # what is left was not acknowledged
            self._database.close()

    def _refuse_others(self) -> None:
        """Refuse rows that another user may have written: a trainer unpickles them, which runs what they name."""
        files = self.path.parent.glob(f"{self.path.name}*")  # the write-ahead log holds rows too
        others = others_entry(self.path.parent) or others_entry(*files, writable=stat.S_IWGRP | stat.S_IWOTH)
        if others is not None:
            raise PermissionError(f"{others}, and it is read as this user's own")

    def _remove_oldest(self) -> None:
        last, excess = None, self._num_responses - self._capacity
        if excess <= 0:
            return
        for arrival, responses in self._database.execute("SELECT arrival, responses FROM groups ORDER BY arrival"):
            if excess <= 0 or responses > excess:
                break
            last, excess = arrival, excess - responses
            self._num_responses -= responses
        if last is not None:
            self._database.execute("DELETE FROM groups WHERE arrival <= ?", (last,))

    def _failure(self, what: str, error: Exception) -> ReplicaFailed:
        return ReplicaFailed(
            f"replay.durability=node: {self.path} could not be {what} ({type(error).__name__}: {error}). What was not "
            "stored here was not acknowledged. Free disk space, choose another folder (output=...), or use "
            "replay.durability=process."
        )


def replica_folder(run: Path) -> Path:
    """Where the replica of a run folder is. It is laid out like that one, with copies of its checkpoints."""
    return run.with_name(f"{run.name}.replica")
