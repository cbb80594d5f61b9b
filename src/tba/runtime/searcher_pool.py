"""The searchers of a run: they are started, replaced when they die or hang, and ended with the trainer. A thread looks
after them, for the trainer may be in the middle of a long step."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tba.config import Config, RuntimeConfig
from tba.runtime.channels import WaitedTooLong
from tba.runtime.counters import MAX_SEARCHERS, PLACES, Place, SharedCounters
from tba.runtime.deadlines import Idleness, dump_stacks
from tba.runtime.links import STOP, ConnectionHandle
from tba.runtime.placement import PRIORITY, threads_of
from tba.runtime.processes import STOP_SECONDS, Role, RoleProcess, ServerGone, last_lines, stop_all

logger = logging.getLogger("tba")

CHECK_SECONDS = 0.1
MAX_EARLY_ENDS, FEW_GROUPS = 4, 16
"""Processes in a row that may end before they have sent so many groups; a place in the pool is given up then."""
FIRST_BACK_OFF_SECONDS = 1.0
"""Before a place in the pool is filled again after the second process that ended early; doubled with each."""


@dataclass(kw_only=True, eq=False)
class Incarnation:
    """A process in a place of the pool, from its start until the trainer has its last message."""

    index: int
    id: str
    """Group ids and leases carry it."""
    process: Role
    idleness: Idleness = field(default_factory=Idleness)
    """Time since the last heartbeat."""
    gone: bool = False
    """Whether it has ended: what it sent and has not arrived by now is lost."""
    replaced: bool = False
    """Whether another incarnation takes its place in the pool."""

    @property
    def holder(self) -> str:
        """Holder of its rollouts in the prompt queue: searcher-0.5f3a91c2"""
        return f"searcher-{self.index}.{self.id}"


StartSearcher = Callable[[Callable[..., None], Mapping[str, Any], ConnectionHandle, int, str], Role]
"""Starts `target(link, index=..., incarnation=..., connection=..., **arguments)`, given target, arguments and the others."""


def start_local(
    config: Config,
    logs: Path,
    target: Callable[..., None],
    arguments: Mapping[str, Any],
    connection: ConnectionHandle,
    index: int,
    incarnation: str,
) -> Role:
    """Start a searcher as a process of this machine (on a cluster: cluster/roles.py)."""
    logs.mkdir(parents=True, exist_ok=True)  # the user may have deleted it
    return RoleProcess(
        f"searcher-{index}",
        target,
        {**arguments, "index": index, "incarnation": incarnation, "connection": connection},
        log=logs / f"searcher-{index}.log",
        threads=threads_of(config, num_searchers=index + 1).searcher,
        forked=True,
        without=(PRIORITY,),  # that of the trainer, which gives way to searchers
        queued=True,
    )


@dataclass
class Member:
    """A place in the pool: the process that fills it now, and how its predecessors fared."""

    index: int
    filled_by: Incarnation | None = None
    early_ends: int = 0
    """Processes in a row that ended before they had sent FEW_GROUPS groups."""
    starts_at: float = 0.0
    given_up: bool = False
    closed: bool = False
    """Whether the run goes on without it, as was asked."""

    @property
    def place(self) -> Place:
        if self.filled_by is not None:
            return "filled"
        if self.closed:
            return "none"
        return "given_up" if self.given_up else "empty"


class SearcherPool:
    """consumes: heartbeats and exit statuses of the searchers' processes
    waits for: nothing longer than CHECK_SECONDS
    produces: searchers that live
    unblocked by: nothing
    """

    def __init__(
        self, config: RuntimeConfig, counters: SharedCounters, *, may_start: Callable[[], bool] = lambda: True
    ) -> None:
        """`may_start` is False while none is to be replaced, because the run is about to end."""
        self.failure: str | None = None
        """Why there are no searchers any more, where starting others is of no use."""
        self._config = config
        self._counters = counters
        self._may_start = may_start
        self._start: Callable[[int, str], Role]
        self._count = 0
        self._wanted = -1
        """The number that was asked for when it was looked at last; 0 = none was."""
        self._members: list[Member] = []
        self._incarnations: list[Incarnation] = []
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, start: Callable[[int, str], Role], count: int) -> None:
        """Start searchers, and look after them until `stop`. `start` is given a place in the pool and an incarnation."""
        self._start, self._count, self._wanted = start, count, -1
        self._stopping.clear()
        self._counters.trainer["searchers"] = count
        thread = threading.Thread(target=self._run, daemon=True, name="searcher-pool")
        thread.start()
        self._thread = thread  # only now: one that could not start cannot be waited for by `stop`

    def incarnations(self) -> Sequence[Incarnation]:
        """Incarnations that run or whose last messages may still arrive, in the order of their places in the pool."""
        return sorted(self._incarnations, key=lambda each: each.index)

    def forget(self, incarnation: Incarnation) -> None:
        # The trainer's thread removes while the pool's may append: each is one operation on the list and needs no lock.
        self._incarnations.remove(incarnation)

    def show_stacks(self) -> None:
        for incarnation in self.incarnations():
            incarnation.process.show_stacks()
        dump_stacks([os.getpid()])

    def stop(self, *, timeout_seconds: float | None = None) -> None:
        """End all of them, by force after the time (None = STOP_SECONDS), and forget them."""
        # The thread ends first: it would replace the searchers that are stopped here.
        if self._thread is not None:
            self._stopping.set()
            self._thread.join()
        self._counters.trainer["searchers"] = 0
        processes = [incarnation.process for incarnation in self._incarnations]
        stop_all(processes, STOP, timeout_seconds=STOP_SECONDS if timeout_seconds is None else timeout_seconds)
        for process in processes:
            process.link.close()
        for member in self._members:
            row = self._counters.searcher(member.index)
            row["pid"], row["place"] = 0, PLACES.index("none")
        self._members, self._incarnations = [], []

    def _run(self) -> None:
        # Everything from here on runs in the pool's thread; `incarnations` and `forget` run in the trainer's.
        try:
            while not self._stopping.is_set():
                self._counters.trainer["pool_beats"] += 1
                wanted = int(self._counters.supervisor["searchers_wanted"])
                if wanted != self._wanted:
                    self._wanted = wanted
                    self._set_count(wanted or self._count)
                for member in self._members:
                    if member.filled_by is not None:
                        self._check_process(member, member.filled_by)
                    elif member.place == "empty" and time.monotonic() >= member.starts_at and self._may_start():
                        self._fill(member)
                    self._counters.searcher(member.index)["place"] = PLACES.index(member.place)
                self._stopping.wait(CHECK_SECONDS)
        except Exception:
            logger.exception("searchers are not looked after any more")
            self.failure = "the thread that looks after searchers has failed: its error is in the trainer's output."

    def _set_count(self, count: int) -> None:
        """New ones start; those with the highest numbers end, and their rollouts go to others."""
        for member in self._members[count:]:
            # The searcher goes on until it reads the message, and its place counts as filled until then.
            if member.filled_by is not None:
                member.filled_by.process.link.send(STOP)
            member.closed = True
        # A place that was given up is tried again when a number is asked for, but its early ends still count.
        for member in self._members[:count]:
            member.closed = member.given_up = False
        self._members += [Member(index) for index in range(len(self._members), min(count, MAX_SEARCHERS))]

    def _check_process(self, member: Member, found: Incarnation) -> None:
        process, row = found.process, self._counters.searcher(member.index)
        row["pid"] = process.pid
        failure, beats = process.link.failure, row["heartbeat"]
        limit = self._config.wait_seconds
        if failure is not None:
            if failure.error.startswith(WaitedTooLong.__name__):
                self.show_stacks()  # what the others did meanwhile
            self._replace_lost(member, found, f"failed: {failure.error}", final=failure.final)
        elif not process.alive and process.link.closed:
            # The link must be closed too: the process may have ended while its last groups are still being read.
            self._replace_lost(member, found, f"ended (exit status {process.status})")
        elif found.idleness.look(beats) > limit:
            what = f"(process {process.pid}) has shown no sign of life for runtime.wait_seconds={limit:g} s"
            # Where none has ever come up, the next would be as slow.
            never = not any(self._counters.searcher(other.index)["groups"] for other in self._members)
            self._replace_lost(member, found, what, final=not beats and never)

    def _fill(self, member: Member) -> None:
        # The row counts for one process: heartbeat 0 means that it still loads, few groups that it ended early.
        row, incarnation = self._counters.searcher(member.index), secrets.token_hex(4)
        row.clear()
        # Or it would show as not wanted for a moment.
        row["place"] = PLACES.index("empty" if member.starts_at else "filled")
        try:
            process = self._start(member.index, incarnation)
        except (OSError, ServerGone) as error:  # no process or no descriptor is to be had: perhaps later
            self._end_member(member, f"searcher-{member.index} could not be started: {error}", early=True)
            return
        member.filled_by = Incarnation(index=member.index, id=incarnation, process=process)
        self._incarnations.append(member.filled_by)

    def _replace_lost(self, member: Member, found: Incarnation, what: str, *, final: bool = False) -> None:
        """A searcher has ended or hangs. Others get its rollouts, and another process gets its place in the pool."""
        process, row = found.process, self._counters.searcher(member.index)
        # The process is killed before its place is free: two processes would write one row of the counters.
        process.kill()
        process.link.close()
        member.filled_by, row["pid"] = None, 0
        if final and not member.closed:
            member.given_up = True
            self.failure = self.failure or f"searcher-{member.index} {what} (log: {process.log})"
        else:
            # A traceback stays in the log: what a person can mend is in its last line.
            last = "" if what.startswith("failed: ") else f", which ends with: {last_lines(process.log, 1).strip()}"
            self._end_member(
                member, f"searcher-{member.index} {what} (log: {process.log}{last}).", early=row["groups"] < FEW_GROUPS
            )
        found.replaced = member.place == "empty"
        found.gone = True  # last of all: the trainer then forgets it

    def _end_member(self, member: Member, message: str, *, early: bool) -> None:
        """Decide whether another process takes a place in the pool, and when. `early`: the last one has hardly worked."""
        member.early_ends = member.early_ends + 1 if early else 0
        member.given_up = member.early_ends > MAX_EARLY_ENDS and not member.closed
        if member.closed:
            logger.info("searcher-%d has ended, as was asked.", member.index)
        elif all(other.given_up or other.closed for other in self._members):
            why = f"{MAX_EARLY_ENDS + 1} searchers in a row ended before they had sent {FEW_GROUPS} groups."
            self.failure = f"{message}\n{why}"
        elif member.given_up:
            logger.error("%s\nIts place stays empty: %d in a row ended early.", message, member.early_ends)
        else:
            # 0, 1, 2 and 4 s after the first to the fourth early end; after the fifth the place is given up.
            wait = FIRST_BACK_OFF_SECONDS * 2.0 ** (member.early_ends - 2) if member.early_ends > 1 else 0.0
            member.starts_at = time.monotonic() + wait
            # Before the change that others look for.
            self._counters.searcher(member.index)["place"] = PLACES.index("empty")
            self._counters.trainer["replaced"] += 1
            logger.warning("%s\nIt is replaced; its rollouts are handed to others.", message)
