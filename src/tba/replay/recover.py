"""A durable replay that has lost groups. A run that resumes compares the file with the number of the group that was
committed last (replay.stored), looks for damage, and goes on without the lost groups only where its caller accepts that."""

from __future__ import annotations

import logging
import os
import socket
import sqlite3
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from tba.replay.database import (
    SCHEMA_VERSION,
    SUFFIXES,
    DurableReplayError,
    find_database,
    open_database,
    open_read_only,
    raw_row,
    read_stored,
    remove_database,
)
from tba.replay.durable import INSERT, RAISE_MARK

logger = logging.getLogger("tba.replay")


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a file holds: Found(readable=[1, 2, 4], unreadable=1, newest=4, damage="database disk image is malformed")"""

    readable: list[int]
    """Arrival numbers of the groups that match their checksums."""
    unreadable: int
    """Number of the other groups."""
    newest: int
    """Arrival number of the newest group, readable or not."""
    damage: str | None
    """What SQLite finds wrong; None = nothing."""


def check_stored(home: Path, *, last_row: int, gives_up: bool, accept_lost: bool) -> None:
    """Raise a DurableReplayError where groups are lost that a resumed run needs; `home` is where its file belongs. With
    `accept_lost` that is a warning, and a damaged file is put aside and replaced by one with the readable groups.

    `last_row` is the last group that the checkpoint knows of; with `gives_up` later ones are not needed.
    """
    noted, path = read_stored(home), find_database(home)
    stored = last_row if noted is None else noted  # None: the run is of an older version, or the note was deleted
    where = path if path.is_file() else home
    found = examine(where, last=stored)
    lost = found.unreadable + max(0, (min(stored, last_row) if gives_up else stored) - found.newest)
    if not lost and found.damage is None:
        return
    if not where.is_file():
        what = f"{path} does not exist on {socket.gethostname()}"
    elif found.damage is not None or found.unreadable:
        what = f"{where} is damaged ({found.damage or 'checksums do not match'})"
    elif where != path:
        what = f"{path} does not exist on {socket.gethostname()}, and {where} is an older copy"
    else:
        what = f"{path} lacks the newest groups"
    words = f"durable replay: {what}. {lost} of {max(stored, found.newest)} stored groups are lost"
    if not accept_lost:
        raise DurableReplayError(
            f"{words}. Restore the file from a copy, or go on with the groups that it and the checkpoint still have: `tba "
            f"train {home.parent} --resume --accept-lost-replay` (in Python accept_lost_replay=True)."
        )
    is_damaged = found.damage is not None or found.unreadable > 0
    aside = f" The damaged file is now {salvage(where, found.readable)}." if is_damaged else ""
    logger.warning("%s, and the run goes on without them.%s", words, aside)


def examine(path: Path, *, last: int) -> Found:
    """Read every group of a file; `last` is the number up to which groups are looked for where the file cannot list them."""
    if not path.is_file():
        return Found(readable=[], unreadable=0, newest=0, damage=None)
    readable, unreadable, damage = [], 0, None
    with closing(_open_damaged(path)) as database:
        try:
            (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
            damage = None if verdict == "ok" else verdict.splitlines()[-1]
            (version,) = database.execute("PRAGMA user_version").fetchone()
            (tables,) = database.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
            if tables and version != SCHEMA_VERSION:  # an error when it is opened
                return Found(readable=[], unreadable=0, newest=last, damage=None)
            listed = "SELECT arrival FROM groups ORDER BY arrival" if tables else "SELECT 0 WHERE FALSE"
            arrivals = [arrival for (arrival,) in database.execute(listed)]
        except sqlite3.DatabaseError as error:
            damage, arrivals = damage or str(error), list(range(1, last + 1))
        for arrival in arrivals:
            try:
                if raw_row(database, arrival) is not None:
                    readable.append(arrival)
            except (ValueError, sqlite3.DatabaseError):
                unreadable += 1
    return Found(readable=readable, unreadable=unreadable, newest=max(arrivals, default=0), damage=damage)


def _open_damaged(path: Path) -> sqlite3.Connection:
    database = open_read_only(path)
    with suppress(sqlite3.DatabaseError):  # no database at all
        database.execute("PRAGMA writable_schema = ON")  # or no group of a truncated file could be read
    return database


def salvage(path: Path, readable: list[int]) -> Path:
    """Make a new file of the readable groups in the place of a damaged one; returns where that is now."""
    fresh = path.with_name(f"{path.name}.salvaged")
    remove_database(fresh)
    with closing(_open_damaged(path)) as damaged, closing(open_database(fresh, "process")) as database:
        database.execute("BEGIN")
        database.executemany(INSERT, (row for arrival in readable if (row := raw_row(damaged, arrival))))
        database.execute("INSERT INTO incarnations SELECT incarnation, MAX(number) FROM groups GROUP BY incarnation")
        with suppress(sqlite3.DatabaseError):  # numbers of groups that have left
            database.executemany(RAISE_MARK, damaged.execute("SELECT * FROM incarnations").fetchall())
        database.execute("COMMIT")
        database.execute("PRAGMA journal_mode = DELETE")
    aside = next(name for n in count(1) if not (name := path.with_name(f"{path.name}.damaged-{n}")).exists())
    for suffix in SUFFIXES:
        with suppress(FileNotFoundError):
            os.replace(path.with_name(path.name + suffix), aside.with_name(aside.name + suffix))
    os.replace(fresh, path)
    return aside
