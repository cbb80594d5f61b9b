"""The file of the durable replay: its schema, where it lies, how it is opened and read, and what becomes of lost
groups. Any SQLite client can open the file, also while a run writes it."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import sqlite3
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any, Literal

from tba.observe.files import sync, write_atomic
from tba.runtime.columns import decode
from tba.types import TrajectoryGroup

logger = logging.getLogger("tba.replay")

DAMAGED = (sqlite3.Error, UnicodeDecodeError)
"""Errors of a damaged file; the latter where SQLite names in its message what it could not read."""
SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE groups (
    arrival INTEGER PRIMARY KEY,     -- counts groups in the order in which they were received, from 1
    incarnation TEXT NOT NULL,       -- sender and incarnation: the group's id before the slash
    number INTEGER NOT NULL,         -- number within the incarnation: the group's id after the slash
    searcher INTEGER NOT NULL,
    prompt_id TEXT NOT NULL,
    step INTEGER NOT NULL,           -- optimizer steps done when it was received
    version INTEGER,                 -- oldest version of the weights behind a token; NULL = no responses
    reference_version INTEGER,       -- version of the reference that scored it; NULL = no responses
    responses INTEGER NOT NULL,
    lost INTEGER NOT NULL,           -- responses lost to failing rewards
    reward REAL,                     -- mean of the combined reward; NULL = no responses
    rewards TEXT NOT NULL,           -- JSON object: mean of each reward component over the responses that have it
    time REAL NOT NULL,              -- seconds since 1970 when it was received
    checksum INTEGER NOT NULL,       -- CRC-32 of the columns above as a JSON array, then of the payload
    payload BLOB NOT NULL            -- the group itself: tba/runtime/columns.py has the layout
);
CREATE TABLE incarnations (incarnation TEXT PRIMARY KEY, highest INTEGER NOT NULL) WITHOUT ROWID;
"""

INSERT = "INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
RAISE_MARK = "INSERT INTO incarnations VALUES (?, ?) ON CONFLICT DO UPDATE SET highest = excluded.highest"

SUFFIXES = ("", "-wal", "-shm", "-journal")
Durability = Literal["process", "power", "node"]

NETWORK_FILESYSTEMS = (
    *("9p", "afs", "beegfs", "ceph", "cifs", "fuse.", "gfs2", "gluster", "gpfs", "lustre", "ncpfs", "nfs", "ocfs2"),
    *("orangefs", "panfs", "pvfs2", "smb", "virtiofs", "wekafs"),
)
"""Beginnings of the types on which SQLite's locks and shared memory cannot be relied on."""


class DurableReplayError(RuntimeError):
    """The durable replay cannot be opened, read or written; the message says why, where, and what to do."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredGroup:
    """A group as it was stored: StoredGroup(arrival=12, step=3, time=1.79e9, group=group)"""

    arrival: int
    step: int
    time: float
    group: TrajectoryGroup


def load_groups(path: Path, *, after: int = 0, arrivals: list[int] | None = None) -> Iterator[StoredGroup]:
    """Groups in the order of their arrival: those after an arrival number, or the given ones. A row whose content does not
    match its checksum is named in a warning and left out."""
    corrupt = 0
    with reading(path) as database:
        if arrivals is None:
            found = database.execute("SELECT arrival FROM groups WHERE arrival > ? ORDER BY arrival", (after,))
            arrivals = [arrival for (arrival,) in found]
        # Each row has a query of its own: a cursor over all would stay open for as long as the caller takes.
        for arrival in arrivals:
            try:
                if (row := raw_row(database, arrival)) is None:
                    continue  # it has left since
                # Columns 5 and 12 of SCHEMA are step and time, the last one is the payload.
                stored = StoredGroup(arrival=arrival, step=row[5], time=row[12], group=decode(row[-1]))
            except Exception as error:  # damage shows in as many ways as a row has columns
                corrupt += 1
                logger.warning("%s: row %d is corrupt and left out: %s", path, arrival, error)
                continue
            yield stored
    if corrupt:
        logger.warning("%s: %d of %d rows were corrupt", path, corrupt, len(arrivals))


def raw_row(database: sqlite3.Connection, arrival: int) -> tuple[Any, ...] | None:
    """The columns of a row, checked; None where it has left since."""
    row: tuple[Any, ...] | None = database.execute("SELECT * FROM groups WHERE arrival = ?", (arrival,)).fetchone()
    if row is not None and checksum(row[:-2], row[-1]) != row[-2]:
        raise ValueError(f"the checksum of group {row[1]}/{row[2]} does not match")
    return row


def checksum(columns: tuple[Any, ...], payload: bytes) -> int:
    """CRC-32 of a row: of its other columns as a JSON array, then of its payload."""
    return zlib.crc32(payload, zlib.crc32(json.dumps(columns).encode("ascii")))


def copy_database(source: Path, target: Path) -> None:
    # A backup has the rows that are still in the -wal file too, which a copy of the file would lack.
    with closing(open_read_only(source)) as original, closing(sqlite3.connect(target)) as copy:
        original.backup(copy)
        copy.execute("PRAGMA journal_mode = DELETE")  # one file, which also opens where nothing can be written


def remove_database(path: Path) -> None:
    for suffix in SUFFIXES:
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def open_database(path: Path, durability: Durability) -> sqlite3.Connection:
    """The database to write to, made if it does not exist; it is used by one thread at a time."""
    try:
        database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30.0)
        # With a write-ahead log other processes can read while the run writes.
        database.execute("PRAGMA journal_mode = WAL")
        # FULL waits for the disk at each commit, for the loss of power; NORMAL holds against the death of the process.
        database.execute(f"PRAGMA synchronous = {'FULL' if durability == 'power' else 'NORMAL'}")
        database.execute(f"PRAGMA fullfsync = {durability == 'power'}")  # a flush on macOS reaches the disk only so
        database.execute("PRAGMA secure_delete = OFF")  # some builds would overwrite every row that leaves
        if not database.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]:
            # One transaction: the file has the whole schema with its version, or nothing.
            database.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
            sync(path.parent)
    except (sqlite3.Error, OSError) as error:
        raise DurableReplayError(failure("could not be opened", path, error)) from None
    check_schema(database, path)
    return database


def open_read_only(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=30.0)


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """The database to read from, for the length of a `with` block; a damaged file is one clear error."""
    if not path.is_file():
        raise DurableReplayError(f"there is no durable replay at {path}: the run was made with replay.durability=off.")
    try:
        with closing(open_read_only(path)) as database:
            check_schema(database, path)
            yield database
    except DAMAGED as error:
        raise DurableReplayError(
            f"durable replay: {path} could not be read ({type(error).__name__}: {error}). If it is damaged, "
            "`sqlite3 FILE .recover` may save what is left."
        ) from None


def check_schema(database: sqlite3.Connection, path: Path) -> None:
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version == 0:  # SQLite's default, which this package never writes
        database.close()
        what = "the database of another program" if path.stat().st_size else "empty"
        raise DurableReplayError(f"{path} is {what}: give a run folder or its replay.sqlite.")
    if version != SCHEMA_VERSION:
        database.close()
        raise DurableReplayError(
            f"{path} has schema version {version}, and this version of tba reads {SCHEMA_VERSION}: use the version of tba "
            "that wrote it (`tba replay RUN --export FILE.jsonl`, then replay.imports), or remove it to begin without it."
        )


def failure(what: str, path: Path, error: Exception) -> str:
    try:
        free = f"{shutil.disk_usage(path.parent).free:,} bytes are free there"
    except OSError as missing:
        free = str(missing)
    return (
        f"durable replay: {path} {what} ({type(error).__name__}: {error}); {free}. Groups that were not committed were not "
        "acknowledged. Free disk space, make the folder writable, choose another one (output=...), or train without durable "
        "replay (replay.durability=off)."
    )


def place_database(home: Path) -> Path:
    """Where the database of a run folder is written: at `home` or, on a network filesystem, in a folder for temporary files.
    The file replay.location beside `home` then has the path."""
    kind, found, local = network_filesystem(home.parent), find_database(home), home
    if kind is None and found == home:
        return home
    if kind is not None:
        # The name is of this run folder: one that was copied from another run must not write into the other's database.
        digest = blake2b(str(home.resolve()).encode(), digest_size=6).hexdigest()
        name, temporary = f"{home.parent.name}-{digest}.sqlite", Path(tempfile.gettempdir())
        if found.name == name and found.is_file():
            local = found
        elif network_filesystem(temporary) is None:
            local = Path(tempfile.mkdtemp(prefix="tba-")) / name  # in a folder that no other user can read
        else:
            raise DurableReplayError(
                f"durable replay: neither {home.parent} ({kind}) nor {temporary} is a local disk, which SQLite needs: set "
                "TMPDIR to a local folder, or train without durable replay (replay.durability=off)."
            )
    source = found if found.is_file() else home
    if source != local and source.is_file():
        remove_database(local)
        copy_database(source, local)
    if kind is None:
        location_file(home).unlink()
        return home
    write_atomic(location_file(home), f"{local}\n")
    logger.warning(
        "%s is on a network filesystem (%s), where SQLite is not safe: replay is written to %s and copied back at the end.",
        *(home.parent, kind, local),
    )
    return local


def find_database(home: Path) -> Path:
    noted = location_file(home)
    return Path(noted.read_text(encoding="utf-8").strip()) if noted.is_file() else home


def location_file(home: Path) -> Path:
    return home.with_name("replay.location")


def stored_file(home: Path) -> Path:
    """File with the number of the group that was committed last. A resume compares it with the database."""
    return home.with_suffix(".stored")


def read_stored(home: Path) -> int | None:
    try:
        return int(stored_file(home).read_text())
    except (OSError, ValueError):
        return None


def network_filesystem(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str | None:
    """The type of the network filesystem that a folder is on; None = a local one, or the system does not say."""
    if not mounts.is_file():
        return None
    place, found = path.resolve(), (-1, "")
    for line in mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        # The kernel writes a space in a name as \\040.
        mount = Path(before.split()[4].replace("\\040", " "))
        depth = len(mount.parts)
        if (mount == place or mount in place.parents) and depth >= found[0]:  # of two at one place the later is on top
            found = depth, after.split()[0]
    kind = found[1]
    return kind if kind == "fuse" or kind.startswith(NETWORK_FILESYSTEMS) else None


# A file that has lost groups. A run that resumes compares it with the number of the group that was committed last, looks for
# damage, and goes on without the lost groups only where its caller accepts that.


def check_stored(home: Path, *, last_row: int, gives_up: bool, accept_lost: bool) -> None:
    """Raise a DurableReplayError where groups are lost that a resumed run needs. With `accept_lost` that is a warning, and a
    damaged file is put aside and replaced by one with the readable groups.

    `last_row` is the last group that the checkpoint knows of; with `gives_up` later ones are not needed.
    """
    noted, path = read_stored(home), find_database(home)
    stored = last_row if noted is None else noted
    where = path if path.is_file() else home
    readable, unreadable, newest, damage = examine(where, last=stored)
    lost = unreadable + max(0, (min(stored, last_row) if gives_up else stored) - newest)
    if not lost and damage is None:
        return
    if damage is not None:
        what = f"{where} is damaged ({damage})"
    elif where == path and path.is_file():
        what = f"{path} lacks the newest groups"
    else:
        copy = f", and {where} is an older copy" if where.is_file() else ""
        what = f"{path} does not exist on {socket.gethostname()}{copy}"
    message = f"durable replay: {what}. {lost} of {max(stored, newest)} stored groups are lost"
    if not accept_lost:
        raise DurableReplayError(
            f"{message}. Restore the file from a copy, or go on with the groups that it and the checkpoint still have: `tba "
            f"train {home.parent} --resume --accept-lost-replay` (in Python accept_lost_replay=True)."
        )
    aside = f" The damaged file is now {salvage(where, readable)}." if damage is not None else ""
    logger.warning("%s, and the run goes on without them.%s", message, aside)


def examine(path: Path, *, last: int) -> tuple[list[int], int, int, str | None]:
    """Read every group of a file; `last` is the number up to which groups are looked for where the file cannot list
    them. Returns the arrival numbers of the readable groups, the number of the others, the newest of all, and the
    damage."""
    if not path.is_file():
        return [], 0, 0, None
    readable, unreadable, damage = [], 0, None
    with closing(_open_damaged(path)) as database:
        try:
            (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
            damage = None if verdict == "ok" else verdict.splitlines()[-1]
            (version,) = database.execute("PRAGMA user_version").fetchone()
            (tables,) = database.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
            if tables and version != SCHEMA_VERSION:  # an error when it is opened
                return [], 0, last, None
            listed = "SELECT arrival FROM groups ORDER BY arrival" if tables else "SELECT 0 WHERE FALSE"
            arrivals = [arrival for (arrival,) in database.execute(listed)]
        except sqlite3.DatabaseError as error:
            # The list itself is damaged, so every number that a group may have is tried.
            damage, arrivals = damage or str(error), list(range(1, last + 1))
        for arrival in arrivals:
            try:
                if raw_row(database, arrival) is not None:
                    readable.append(arrival)
            except (ValueError, sqlite3.DatabaseError):
                unreadable += 1
    damage = damage or ("checksums do not match" if unreadable else None)
    return readable, unreadable, max(arrivals, default=0), damage


def _open_damaged(path: Path) -> sqlite3.Connection:
    database = open_read_only(path)
    with suppress(sqlite3.DatabaseError):  # no database at all
        database.execute("PRAGMA writable_schema = ON")  # or no group of a truncated file could be read
    return database


def salvage(path: Path, readable: list[int]) -> Path:
    """Make a new file of the readable groups in the place of a damaged one; returns where that is now."""
    # The damaged file is read to the end before it is moved: a kill in between changes nothing.
    fresh = path.with_name(f"{path.name}.salvaged")
    remove_database(fresh)
    with closing(_open_damaged(path)) as damaged, closing(open_database(fresh, "process")) as database:
        database.execute("BEGIN")
        database.executemany(INSERT, (row for arrival in readable if (row := raw_row(damaged, arrival))))
        database.execute("INSERT INTO incarnations SELECT incarnation, MAX(number) FROM groups GROUP BY incarnation")
        with suppress(sqlite3.DatabaseError):  # numbers of groups that have left
            database.executemany(RAISE_MARK, damaged.execute("SELECT * FROM incarnations").fetchall())
        database.execute("COMMIT")
        # The new file must be complete without a -wal file: it alone is renamed below.
        database.execute("PRAGMA journal_mode = DELETE")
    aside = next(name for n in count(1) if not (name := path.with_name(f"{path.name}.damaged-{n}")).exists())
    # The -wal file goes with the damaged file: SQLite would apply one that stays to the new database.
    for suffix in SUFFIXES:
        with suppress(FileNotFoundError):
            os.replace(path.with_name(path.name + suffix), aside.with_name(aside.name + suffix))
    os.replace(fresh, path)
    return aside
