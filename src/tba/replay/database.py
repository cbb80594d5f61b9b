"""The file of the durable replay: its schema, where it lies, and how it is opened and read.

Table `groups` has a row for each group, table `incarnations` the highest group number of each incarnation of a sender. Any
SQLite client can open the file, also while a run writes it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sqlite3
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from tba.observe.files import sync, write_atomic
from tba.replay.payload import decode
from tba.types import TrajectoryGroup

logger = logging.getLogger("tba.replay")

DAMAGED = (sqlite3.Error, UnicodeDecodeError)
"""Errors of a damaged file; the latter where SQLite names in its message what it could not read."""
SCHEMA_VERSION = 1
"""Number in PRAGMA user_version."""
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
    payload BLOB NOT NULL            -- the group itself: tba/replay/payload.py has the layout
);
CREATE TABLE incarnations (incarnation TEXT PRIMARY KEY, highest INTEGER NOT NULL) WITHOUT ROWID;
"""

SUFFIXES = ("", "-wal", "-shm", "-journal")
"""Endings of the names of the files that a database is made of."""
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
    """Optimizer steps done when it was received."""
    time: float
    group: TrajectoryGroup


def load_groups(path: Path, *, after: int = 0, arrivals: list[int] | None = None) -> Iterator[StoredGroup]:
    """Groups of a file in the order of their arrival: those after an arrival number, or the given ones. A row whose content
    does not match its checksum is named in a warning and left out; at the end a warning gives their number."""
    corrupt = 0
    with reading(path) as database:
        if arrivals is None:
            found = database.execute("SELECT arrival FROM groups WHERE arrival > ? ORDER BY arrival", (after,))
            arrivals = [arrival for (arrival,) in found]
        for arrival in arrivals:
            try:
                stored = read_row(database, arrival)
            except Exception as error:  # damage shows in as many ways as a row has columns
                corrupt += 1
                logger.warning("%s: row %d is corrupt and left out: %s", path, arrival, error)
                continue
            if stored is not None:
                yield stored
    if corrupt:
        logger.warning("%s: %d of %d rows were corrupt", path, corrupt, len(arrivals))


def read_row(database: sqlite3.Connection, arrival: int) -> StoredGroup | None:
    """One row, checked; None where it has left since."""
    row = raw_row(database, arrival)
    if row is None:
        return None
    return StoredGroup(arrival=arrival, step=row[5], time=row[12], group=decode(row[-1]))


def raw_row(database: sqlite3.Connection, arrival: int) -> tuple[Any, ...] | None:
    """The columns of a row, checked; None where it has left since."""
    row: tuple[Any, ...] | None = database.execute("SELECT * FROM groups WHERE arrival = ?", (arrival,)).fetchone()
    if row is not None and checksum(row[:-2], row[-1]) != row[-2]:
        raise ValueError(f"the checksum of group {row[1]}/{row[2]} does not match")
    return row


def checksum(columns: tuple[Any, ...], payload: bytes) -> int:
    """CRC-32 of a row: of its other columns as a JSON array, then of its payload."""
    return zlib.crc32(payload, zlib.crc32(json.dumps(columns).encode("ascii")))


def remove_database(path: Path) -> None:
    for suffix in SUFFIXES:
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def open_database(path: Path, durability: Durability) -> sqlite3.Connection:
    """The database to write to, made if it does not exist; it is used by one thread at a time."""
    try:
        database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30.0)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute(f"PRAGMA synchronous = {'FULL' if durability == 'power' else 'NORMAL'}")
        database.execute(f"PRAGMA fullfsync = {durability == 'power'}")  # a flush on macOS reaches the disk only so
        database.execute("PRAGMA secure_delete = OFF")  # some builds would overwrite every row that leaves
        if not database.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]:
            database.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
            sync(path.parent)
    except (sqlite3.Error, OSError) as error:
        raise DurableReplayError(failure("could not be opened", path, error)) from None
    check_schema(database, path)
    return database


def connect(path: Path) -> sqlite3.Connection:
    """The database to read from."""
    if not path.is_file():
        raise DurableReplayError(f"there is no durable replay at {path}: the run was made with replay.durability=off.")
    try:
        database = open_read_only(path)
        check_schema(database, path)
    except DAMAGED as error:
        raise unreadable(path, error) from None
    return database


def open_read_only(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=30.0)


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """The database to read from, for the length of a `with` block; a damaged file is one clear error."""
    database = connect(path)
    try:
        yield database
    except DAMAGED as error:
        raise unreadable(path, error) from None
    finally:
        database.close()


def unreadable(path: Path, error: Exception) -> DurableReplayError:
    return DurableReplayError(
        f"durable replay: {path} could not be read ({type(error).__name__}: {error}). If it is damaged, "
        "`sqlite3 FILE .recover` may save what is left."
    )


def check_schema(database: sqlite3.Connection, path: Path) -> None:
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version == 0:  # SQLite's own, where nobody has set one
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
    """Where the database of a run folder is written, `home` being where it belongs: there or, where the run folder is on a
    network filesystem, in the folder for temporary files. The file replay.location beside `home` then has the path, which
    holds also where that folder is another one now."""
    kind, found = network_filesystem(home.parent), find_database(home)
    if kind is None and found == home:
        return home
    digest = blake2b(str(home.resolve()).encode(), digest_size=6).hexdigest()
    name = f"{home.parent.name}-{digest}.sqlite"
    if found.name == name and found.is_file():
        local = found
    else:  # a new run, one that was copied back, or a folder that was moved, or copied from that of another run
        local = home if kind is None else _temporary_folder(home, kind) / name
        source = found if found.is_file() else home
        if source != local:
            remove_database(local)  # of an earlier run in a folder of this name
            if source.is_file():
                with closing(open_read_only(source)) as original, closing(sqlite3.connect(local)) as copy:
                    original.backup(copy)
        if local == home:
            location_file(home).unlink()
            return home
        write_atomic(location_file(home), f"{local}\n")
    logger.warning(
        "%s is on a network filesystem (%s), where SQLite is not safe: replay is written to %s and copied back at the end.",
        *(home.parent, kind, local),
    )
    return local


def _temporary_folder(home: Path, kind: str) -> Path:
    temporary = Path(tempfile.gettempdir())
    if network_filesystem(temporary) is not None:
        raise DurableReplayError(
            f"durable replay: neither {home.parent} ({kind}) nor {temporary} is a local disk, which SQLite needs: set "
            "TMPDIR to a local folder, or train without durable replay (replay.durability=off)."
        )
    folder = temporary / f"tba-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise DurableReplayError(f"durable replay: {folder} belongs to another user: set TMPDIR to another folder.")
    return folder


def find_database(home: Path) -> Path:
    """The database of a run folder, wherever it is now."""
    noted = location_file(home)
    return Path(noted.read_text(encoding="utf-8").strip()) if noted.is_file() else home


def location_file(home: Path) -> Path:
    return home.with_name("replay.location")


def stored_file(home: Path) -> Path:
    """File beside a database with the number of the group that was committed last: it tells of groups that the database has
    lost."""
    return home.with_suffix(".stored")


def read_stored(home: Path) -> int | None:
    """Number of the group that was committed last; None = nothing says."""
    try:
        return int(stored_file(home).read_text())
    except (OSError, ValueError):
        return None


def network_filesystem(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str | None:
    """The type of the network filesystem that a folder is on; None = a local one, or a system that does not tell."""
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
