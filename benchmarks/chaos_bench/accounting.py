"""The audit of a run with faults: acknowledged groups against stored rows, and the seconds that recoveries took.

A searcher notes the id and the CRC-32 of each group whose acknowledgement arrives (TBA_ACKNOWLEDGED_LOG); the durable replay
has the group, the highest number of each incarnation, and the time at which each group arrived.
"""

from __future__ import annotations

import json
import sqlite3
import statistics
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Note:
    """An acknowledged group: Note(id="searcher-0.5f3a91c2/41", checksum=0x9a3b11ff)"""

    id: str
    checksum: int
    """CRC-32 of the group's payload."""


@dataclass(frozen=True, kw_only=True)
class StoredRow:
    """A row of the durable replay: StoredRow(arrival=7, source="searcher-0.5f3a91c2", number=41, searcher=0, time=1.79e9,
    checksum=0x9a3b11ff, sound=True)"""

    arrival: int
    source: str
    """Sender and incarnation."""
    number: int
    searcher: int
    time: float
    """Seconds since 1970 when it was received."""
    checksum: int
    """CRC-32 of its payload."""
    sound: bool
    """Whether the row matches its own checksum."""

    @property
    def id(self) -> str:
        return f"{self.source}/{self.number}"


@dataclass(frozen=True, kw_only=True)
class Account:
    """Result of the audit. The lists hold ids."""

    acknowledged: int
    stored: int
    unacknowledged: int
    """Stored groups without a note: their searcher was killed before the acknowledgement arrived."""
    evicted: list[str]
    """Acknowledged groups whose row has left, in its turn."""
    lost: list[str]
    """Acknowledged groups that are not there and cannot have left in their turn. Must be empty."""
    changed: list[str]
    """Acknowledged groups whose row holds something else, or damaged rows. Must be empty."""
    twice: list[str]
    """Groups with more than one row. Must be empty."""


def account(notes: Iterable[Note], rows: Sequence[StoredRow], marks: Mapping[str, int]) -> Account:
    """Compare notes with rows; `marks` has the highest number of each source that was ever stored."""
    notes = set(notes)
    checksums = {row.id: row.checksum for row in rows}
    unsound = {row.id for row in rows if not row.sound}
    missing = sorted(note.id for note in notes if note.id not in checksums)
    lowest: dict[str, int] = {}
    for row in rows:
        lowest[row.source] = min(row.number, lowest.get(row.source, row.number))
    evicted = [group for group in missing if _may_have_left(group, lowest, marks)]
    # Rows leave from the front, and arrivals count without a gap: more cannot have left.
    left = min((row.arrival for row in rows), default=1) - 1
    lost = sorted(set(missing) - set(evicted)) if len(evicted) <= left else missing
    return Account(
        acknowledged=len(notes),
        stored=len(rows),
        unacknowledged=len(checksums.keys() - {note.id for note in notes}),
        evicted=evicted if lost is not missing else [],
        lost=lost,
        changed=sorted(unsound | {n.id for n in notes if checksums.get(n.id, n.checksum) != n.checksum}),
        twice=sorted(group for group, count in Counter(row.id for row in rows).items() if count > 1),
    )


def _may_have_left(group: str, lowest: Mapping[str, int], marks: Mapping[str, int]) -> bool:
    """Whether a group that is not there was stored and has left: numbers of a source rise in the order of arrival, in which
    rows leave, so that none of a lower number may be left."""
    source, _, text = group.rpartition("/")
    number = int(text)
    return number <= marks.get(source, -1) and lowest.get(source, number) >= number


def read_notes(folder: Path) -> list[Note]:
    """All notes of a run's searchers."""
    lines = [line for path in sorted(folder.glob("*.log")) for line in path.read_text().splitlines(keepends=True)]
    parts = [line.split() for line in lines if line.endswith("\n")]  # a last line may be cut off by a kill
    return [Note(id=group, checksum=int(checksum, 16)) for group, checksum in parts]


def read_rows(path: Path) -> tuple[list[StoredRow], dict[str, int]]:
    """The rows of a durable replay and its marks. Read here and not by tba: the audit does not lean on what it audits."""
    database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=30.0)
    try:
        rows = [
            StoredRow(
                arrival=columns[0],
                source=columns[1],
                number=columns[2],
                searcher=columns[3],
                time=columns[12],
                checksum=zlib.crc32(payload),
                sound=zlib.crc32(payload, zlib.crc32(json.dumps(columns).encode("ascii"))) == stored,
            )
            for *columns, stored, payload in database.execute("SELECT * FROM groups ORDER BY arrival")
        ]
        return rows, dict(database.execute("SELECT incarnation, highest FROM incarnations"))
    finally:
        database.close()


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Recovery(who="searcher-0", killed=1.79e9, seconds=4.1)"""

    who: str
    killed: float
    """Seconds since 1970."""
    seconds: float | None
    """Until it worked again; None = it never did."""


def searcher_recoveries(kills: Iterable[tuple[int, float]], rows: Sequence[StoredRow]) -> list[Recovery]:
    """For each kill (searcher, time) the seconds until the first group of a process that had sent none before arrived."""
    first: dict[tuple[int, str], float] = {}
    for row in sorted(rows, key=lambda row: row.time):
        first.setdefault((row.searcher, row.source), row.time)
    found = []
    for searcher, killed in kills:
        later = [time - killed for (index, _), time in first.items() if index == searcher and time > killed]
        found.append(Recovery(who=f"searcher-{searcher}", killed=killed, seconds=min(later, default=None)))
    return found


def in_words(recoveries: Sequence[Recovery]) -> str:
    """For people: "30 kills, median 4.1 s, worst 9.0 s" """
    seconds = [recovery.seconds for recovery in recoveries if recovery.seconds is not None]
    never = len(recoveries) - len(seconds)
    times = f", median {statistics.median(seconds):.1f} s, worst {max(seconds):.1f} s" if seconds else ""
    return f"{len(recoveries)} kills{times}" + (f", {never} never" if never else "")


def accuracies_agree(chaotic: float, quiet: float, *, count: int) -> tuple[bool, float]:
    """Whether two accuracies on `count` problems agree, and the largest difference that passes: 3 points or two standard
    errors of the difference, whichever is larger."""
    variance = sum(accuracy * (1.0 - accuracy) / count for accuracy in (chaotic, quiet))
    allowed = max(0.03, 2.0 * variance**0.5)
    return abs(chaotic - quiet) <= allowed, allowed
