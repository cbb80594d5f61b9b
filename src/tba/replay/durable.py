"""The durable replay: every group that the trainer accepts, in a SQLite file (database.py).

A background thread writes groups in batches. A group is acknowledged to its searcher only when it is committed. The highest
group number of each incarnation of a sender is written in the same transaction: no group id is stored twice. Rows leave in
the order of their arrival when newer ones hold replay.capacity responses; SQLite uses their pages again.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from tba.config import Config
from tba.observe.files import sync
from tba.observe.run_folder import RunFolder
from tba.replay.database import (
    INSERT,
    RAISE_MARK,
    Durability,
    DurableReplayError,
    StoredGroup,
    checksum,
    copy_database,
    failure,
    load_groups,
    location_file,
    open_database,
    place_database,
    remove_database,
    stored_file,
)
from tba.runtime.channels import wait_until
from tba.runtime.columns import columns_of, encode
from tba.runtime.counters import TRAINER_FIELDS, RoleCounters
from tba.runtime.replica import remove_oldest
from tba.types import GroupId, HighWaterMarks, TrajectoryGroup

GATHER_GROUPS, GATHER_SECONDS = 16, 0.1
"""Groups that the writer gathers before a commit, and the longest time that it does so: committed one by one, they
would cost three times as much."""
MAX_PENDING_BYTES = 256 * 2**20
BYTES_PER_TOKEN, BYTES_PER_GROUP = 17, 2_048


@dataclass(frozen=True, kw_only=True, eq=False)
class _Pending:
    group: TrajectoryGroup | None
    """None = it came before, and only its acknowledgement waits for a commit."""
    id: GroupId
    arrival: int
    step: int
    time: float
    num_bytes: int


@dataclass
class GroupStore:
    """Appends groups, says which are committed, copies and reads them. Used by one thread, `snapshot` by any."""

    path: Path
    durability: Durability
    capacity: int
    reward_weights: Mapping[str, float]
    row: RoleCounters = field(default_factory=lambda: RoleCounters(np.zeros(len(TRAINER_FIELDS)), TRAINER_FIELDS))
    wait_seconds: float = 300.0
    clock: Callable[[], float] = time.time
    final_copy: Path | None = None
    """Where the file moves at the end; None = it stays. For a file that could not be made in the run folder."""

    def __post_init__(self) -> None:
        self._database = open_database(self.path, self.durability)
        # The marks have a table of their own: a group whose row has left is still known as one that came.
        self._marks = HighWaterMarks(dict(self._database.execute("SELECT incarnation, highest FROM incarnations")))
        arrival, responses = self._database.execute("SELECT MAX(arrival), SUM(responses) FROM groups").fetchone()
        self.last_arrival = arrival or 0
        """Arrival number of the group that was appended last, committed or not."""
        self._num_responses = responses or 0
        self._stored = os.open(stored_file(self.final_copy or self.path), os.O_WRONLY | os.O_CREAT, 0o644)
        self._note_stored(self.last_arrival)
        self._inbox: SimpleQueue[_Pending | threading.Event | None] = SimpleQueue()
        """For the writer: groups, events to set once all groups before are committed, and None at the end."""
        # Each of these has one thread that changes it, so that none needs a lock.
        self._num_appended, self._appended_bytes, self._closed = 0, 0, False
        self._num_committed, self._committed_bytes = 0, 0
        self._committed: deque[str] = deque()
        self._error: DurableReplayError | None = None
        """Set by the writer, which commits nothing from then on."""
        self._told = False
        self._writer = threading.Thread(target=self._write, daemon=True, name="durable-replay")
        self._writer.start()

    @property
    def marks(self) -> dict[str, int]:
        return self._marks.by_source

    def append(self, group: TrajectoryGroup, *, step: int) -> bool:
        """Have a group written. False where it came before: it is not written again, but `committed` names it, because its
        sender did not learn that it was."""
        assert not self._closed, "append after close"
        group_id = GroupId.parse(group.id)
        new = not self._marks.passed(group_id)
        num_bytes = BYTES_PER_GROUP + BYTES_PER_TOKEN * len(columns_of(group).token_ids) if new else 0
        wait_until(
            lambda: self._has_room(num_bytes),
            name="durable_replay",
            row=self.row,
            deadline_seconds=self.wait_seconds,
            waiter="the trainer",
            awaited="the durable replay's writer",
            progress=lambda: float(self._num_committed),
            explain=lambda: (
                f"the trainer waited for {self._num_appended - self._num_committed} groups to be written to {self.path}: "
                "the disk does not keep up. Use a faster one (output=...), or replay.durability=process or off"
            ),
        )
        # Here and not in the writer: a copy that comes before the commit must be known as one.
        if new:
            self._marks.raise_to(group_id)
            self.last_arrival += 1
        self._num_appended += 1
        self._appended_bytes += num_bytes
        own, arrival = group if new else None, self.last_arrival
        # A copy takes the same queue, so it is acknowledged after the commit of the group that it repeats.
        self._inbox.put(
            _Pending(group=own, id=group_id, arrival=arrival, step=step, time=self.clock(), num_bytes=num_bytes)
        )
        return new

    def committed(self) -> list[str]:
        self._raise_error()
        # The length is taken first: ids that the writer adds meanwhile come with the next call.
        return [self._committed.popleft() for _ in range(len(self._committed))]

    def flush(self) -> None:
        """Wait until everything that was appended before is committed."""
        if not self._closed:
            done = threading.Event()
            self._inbox.put(done)
            done.wait()
        self._raise_error()

    def snapshot(self, path: Path) -> None:
        """Copy everything that was appended so far into one file, which is there whole or not at all."""
        self.flush()
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            copy_database(self.path, temporary)
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)
        except (sqlite3.Error, OSError) as error:
            raise DurableReplayError(failure("could not be written", path, error)) from None
        finally:
            temporary.unlink(missing_ok=True)

    def load(self, *, after: int = 0) -> Iterator[StoredGroup]:
        """`load_groups` of all that was appended."""
        self.flush()
        return load_groups(self.path, after=after)

    def go_on_after(self, arrival: int) -> None:
        """Number the next groups after this one: that of a checkpoint, which may hold groups that were never committed."""
        self.last_arrival = max(self.last_arrival, arrival)

    def return_to(self, arrival: int, marks: HighWaterMarks) -> int:
        """Forget the groups that arrived after this one; returns their number. `marks` then says which have come."""
        self.flush()  # the writer has nothing to do from here on
        database, by_source = self._database, marks.by_source
        try:
            (newest,) = database.execute("SELECT MAX(arrival) FROM groups WHERE arrival <= ?", (arrival,)).fetchone()
            self._note_stored(newest or 0)  # first: a process that is killed in between has lost nothing
            database.execute("BEGIN IMMEDIATE")
            removed = database.execute("DELETE FROM groups WHERE arrival > ?", (arrival,)).rowcount
            database.execute("DELETE FROM incarnations")
            database.executemany(RAISE_MARK, by_source.items())
            database.execute("COMMIT")
            (responses,) = database.execute("SELECT SUM(responses) FROM groups").fetchone()
        except sqlite3.Error as error:
            raise DurableReplayError(failure("could not be written", self.path, error)) from None
        self._marks, self.last_arrival, self._num_responses = HighWaterMarks(by_source), arrival, responses or 0
        return removed

    def close(self) -> None:
        """Commit everything and end the writer; may be called more than once."""
        self._closed = True
        self._inbox.put(None)
        self._writer.join()
        if not self._told:  # a second time it would hide what the first one led to
            self._raise_error()
        # The writer has ended, so the file is complete and may move to the run folder.
        if self.final_copy is not None and self._error is None and self.path.exists():
            self.snapshot(self.final_copy)
            remove_database(self.path)
            location_file(self.final_copy).unlink(missing_ok=True)
            with suppress(OSError):  # its folder, which was made for it alone
                self.path.parent.rmdir()

    def _has_room(self, num_bytes: int) -> bool:
        self._raise_error()
        waiting = self._appended_bytes - self._committed_bytes
        # A group larger than the bound passes when nothing else waits, or it would wait for ever.
        return not waiting or waiting + num_bytes <= MAX_PENDING_BYTES

    def _raise_error(self) -> None:
        if self._error is not None:
            self._told = True
            raise self._error

    def _write(self) -> None:
        """The writer's thread. After an error it goes on without writing, or a `flush` would wait for ever."""
        ended = False
        while not ended:
            batch, flushed, ended = self._take()
            try:
                if batch and self._error is None:
                    self._commit(batch)
                    # Groups are named only after the COMMIT: their acknowledgement lets the searchers forget them.
                    self._committed.extend(str(pending.id) for pending in batch)
                    self._num_committed += len(batch)
                    self._committed_bytes += sum(pending.num_bytes for pending in batch)
            except Exception as error:
                self._error = DurableReplayError(failure("could not be written", self.path, error))
            if flushed is not None:
                flushed.set()
        if self._error is None:
            with suppress(sqlite3.OperationalError):  # another process reads it, so the -wal file stays
                # Without write-ahead log the database is one file, which also opens where nothing can be written.
                self._database.execute("PRAGMA busy_timeout = 0")
                self._database.execute("PRAGMA journal_mode = DELETE")
        self._database.close()
        os.close(self._stored)

    def _take(self) -> tuple[list[_Pending], threading.Event | None, bool]:
        """The groups to commit next, with the event of a `flush` that waits for them; and whether they are the last."""
        batch: list[_Pending] = []
        item, until = self._inbox.get(), time.monotonic() + GATHER_SECONDS
        while isinstance(item, _Pending):
            batch.append(item)
            # A full batch takes what is there already, and waits no longer.
            left = until - time.monotonic() if len(batch) < GATHER_GROUPS else 0.0
            try:
                item = self._inbox.get(timeout=max(0.0, left))
            except Empty:
                return batch, None, False
        return batch, item, item is None

    def _commit(self, batch: list[_Pending]) -> None:
        database = self._database
        highest: dict[str, int] = {}
        database.execute("BEGIN IMMEDIATE")
        for pending in batch:
            if pending.group is not None:
                database.execute(INSERT, self._make_row(pending, pending.group))
                # Numbers of a source rise in the order of arrival, so the last one is the highest.
                highest[pending.id.source] = pending.id.number
                self._num_responses += len(pending.group.trajectories)
        # In the same transaction as the rows: a group is stored and known, or neither.
        database.executemany(RAISE_MARK, highest.items())
        self._num_responses -= remove_oldest(database, self._num_responses - self.capacity)
        database.execute("COMMIT")
        if highest:
            # This follows the COMMIT: a number ahead of the file would make a resume report lost groups.
            self._note_stored(max(pending.arrival for pending in batch if pending.group is not None))

    def _note_stored(self, arrival: int) -> None:
        """Write down, outside of the database, up to which group it has them all."""
        # Always 21 bytes, so that no digit of an earlier number is left behind a shorter one.
        os.pwrite(self._stored, f"{arrival:020d}\n".encode(), 0)

    def _make_row(self, pending: _Pending, group: TrajectoryGroup) -> tuple[Any, ...]:
        responses = columns_of(group)
        reward, rewards = mean_rewards(group, self.reward_weights)
        columns = (
            pending.arrival,
            pending.id.source,
            pending.id.number,
            group.searcher,
            # Data may hold half a surrogate pair, which is no text to SQLite; the payload has it as it is.
            group.prompt.id.encode("utf-8", "backslashreplace").decode(),
            pending.step,
            int(responses.versions.min()) if responses else None,
            max(responses.reference_versions) if responses else None,
            len(responses),
            group.num_lost,
            reward,
            json.dumps(rewards),
            pending.time,
        )
        payload = encode(group)
        return (*columns, checksum(columns, payload), payload)


def mean_rewards(group: TrajectoryGroup, weights: Mapping[str, float]) -> tuple[float | None, dict[str, float | None]]:
    """The mean combined reward of the responses, and the mean of each component; None where there is no number."""

    def mean(values: Iterable[float]) -> float | None:
        given = [value for value in values if not math.isnan(value)]
        found = sum(given) / len(given) if given else math.nan
        return found if math.isfinite(found) else None

    if not group.trajectories:
        return None, dict.fromkeys(weights)
    columns = columns_of(group)
    means = {name: mean(own) for name, own in zip(weights, columns.components(list(weights)).T.tolist())}
    return mean(columns.combined_rewards(weights)), means


def make_store(
    config: Config, folder: RunFolder, *, reward_weights: Mapping[str, float], row: RoleCounters | None = None
) -> GroupStore | None:
    """The durable replay of a run, where its trainer's wait shows in `row`; None with replay.durability=off."""
    durability = config.replay.durability
    if durability == "off":
        return None
    path = place_database(folder.replay)
    return GroupStore(
        path,
        durability=durability,
        capacity=config.replay.capacity,
        reward_weights=reward_weights,
        row=row or RoleCounters(np.zeros(len(TRAINER_FIELDS)), TRAINER_FIELDS),
        wait_seconds=config.runtime.wait_seconds,
        final_copy=None if path == folder.replay else folder.replay,
    )
