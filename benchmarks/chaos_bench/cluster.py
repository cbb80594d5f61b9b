"""A run on a cluster, and the faults that are done to it: those of one machine's processes, and the loss of whole nodes.

The folder of the run is on the trainer's node and is deleted with it; what its supervisor tells is in the replica, beside it
(replay.durability=node). All nodes are on one machine, so both are seen here.
"""

from __future__ import annotations

import shutil
import signal
import sqlite3
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from chaos_bench.accounting import Note, Recovery
from chaos_bench.inject import Done, Injector, send
from chaos_bench.nodes import Nodes
from chaos_bench.plan import CLUSTER_RARE, Fault
from chaos_bench.target import Target, is_alive, read_json

SETTINGS = [
    *("search.num_searchers=2", "train.checkpoint_every=10", "train.keep_checkpoints=3", "replay.durability=node"),
    *(
        "observe.progress=false",
        "evaluate.every=200",
        "evaluate.num_prompts=200",
        "observe.healthy_checkpoint_every=50",
    ),
    *("runtime.kind=ray", "train.responses_per_step=32"),
]
LATEST_SECONDS = 300.0
"""How long a fault waits until the run has got over the one before."""
USE_SECONDS = 300.0
"""How long it is waited for that a node that was added is used, and that a searcher is back."""
LOOK_SECONDS = 0.5
DELETE_SECONDS = 10.0


@dataclass
class ClusterTarget(Target):
    """A run whose roles are on the nodes of a cluster."""

    nodes: Nodes = field(kw_only=True)
    gone_seconds: float = 60.0
    no_step_seconds: float = 420.0
    """A trainer on a new node gets all groups again before its first step, on cores that others use too."""

    def arguments(self, *, resume: bool) -> list[str]:
        """The same command, also to resume: the run folder may be gone with its node."""
        return [*super().arguments(resume=False), *(["--resume"] if resume else [])]

    def status(self) -> dict[str, Any]:
        return read_json(self.folder.with_name(f"{self.folder.name}.replica") / "status.json")

    def roles(self) -> dict[str, psutil.Process]:
        """Processes by role, those of the supervisor's present life that are on a node."""
        status = self.status()
        if self.exit_status is not None or status.get("pid") != self.pid:
            return {}
        found = {"supervisor": psutil.Process(self.pid)}
        for role in status.get("roles", []):
            try:
                process = psutil.Process(role.get("pid") or 0)
            except psutil.NoSuchProcess:
                continue
            if self.nodes.node_of(process) is not None:
                found[role["name"]] = process
        return found

    def tree(self) -> list[psutil.Process]:
        """Also the roles, each with the actor that it is a child of, and what it has started."""
        found = super().tree()
        for process in self.roles().values():
            try:
                if process.pid != self.pid:
                    found += [process.parent() or process, process, *process.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
        return [process for process in found if is_alive(process)]


@dataclass
class FirstNotes:
    """When each searcher process was first told that a group is stored, seen from outside."""

    folder: Path
    seen: dict[str, float] = field(default_factory=dict)
    """By searcher and incarnation: seconds since 1970."""
    _read: dict[Path, int] = field(default_factory=dict)

    def look(self) -> None:
        for path in self.folder.glob("*.log"):
            size, read = path.stat().st_size, self._read.get(path, 0)
            if size > read:
                with path.open() as file:
                    file.seek(read)
                    lines = file.read().splitlines()
                self._read[path] = size
                for line in lines:
                    self.seen.setdefault(line.partition("/")[0], time.time())

    def recoveries(self, done: Sequence[Done]) -> list[Recovery]:
        """From the kill of a searcher, or of its node, to the first group of a process that had sent none before."""
        found = []
        for one in done:
            if one.fault.kind in ("kill_searcher", "kill_searcher_node"):
                times = [when for source, when in self.seen.items() if source.startswith(f"{one.who}.")]
                later = [when - one.time for when in times if when > one.time]
                found.append(Recovery(who=one.who, killed=one.time, seconds=min(later, default=None)))
        return found


@dataclass
class ClusterInjector(Injector):
    """Does the faults of a plan to a run on a cluster. One that ends the trainer, the run or a node waits until the run has
    made a step since the last such fault, and the node that was added is used."""

    target: ClusterTarget
    notes: FirstNotes = field(kw_only=True)
    latest_seconds: float = LATEST_SECONDS
    _ended: tuple[str, int, float] | None = None
    """What was done to the supervisor, its process id and when; its trainer may make steps until it is resumed."""
    _looked: float = 0.0

    @property
    def busy(self) -> bool:
        """Also while a searcher has not come back, but not for ever."""
        away = [one for one in self.notes.recoveries(self.done) if one.seconds is None]
        return self.recovers or any(time.time() - one.killed < USE_SECONDS for one in away)

    @property
    def recovers(self) -> bool:
        """Whether the run has made no step yet since something ended, or a node that was added is not used yet."""
        waits = self.target.nodes.unused(within_seconds=USE_SECONDS)
        return super().busy or self._ended is not None or bool(waits)

    def tick(self) -> None:
        super().tick()
        if self._ended is not None and self._ended[1] != self.target.pid:
            self._unrecovered.append((self._ended[0], self._ended[2]))
            self._ended = None
        if time.monotonic() - self._looked > LOOK_SECONDS:
            self._looked = time.monotonic()
            self.notes.look()
            self.target.nodes.look([process for name, process in self.target.roles().items() if name != "supervisor"])

    def attempt(self, fault: Fault, *, late: float) -> bool:
        if fault.kind in CLUSTER_RARE and self.recovers and late <= self.latest_seconds:
            return False
        settled = super().attempt(fault, late=late)
        if self.done and self.done[-1].fault is fault:
            print(f"{time.strftime('%X')} {fault.kind} {self.done[-1].who} at step {self.watch.step}", flush=True)
        return settled

    def _recovered(self, now: float | None) -> None:
        for who, killed in self._unrecovered:
            if now is not None:
                print(f"{time.strftime('%X')} a step {now - killed:.1f} s after the end of the {who}", flush=True)
        super()._recovered(now)

    def _kill_searcher_node(self, fault: Fault) -> str | None:
        name, process = self._searcher(fault)
        return name if process is not None and self._kill_node(process, "searcher's node", fault) else None

    def _kill_trainer_node(self, fault: Fault) -> str | None:
        """With its disk: the run folder, which only the trainer's node has."""
        process = self.target.roles().get("trainer")
        if process is None or not self._kill_node(process, "trainer's node", fault):
            return None
        deadline = time.monotonic() + DELETE_SECONDS
        while self.target.folder.exists() and time.monotonic() < deadline:
            shutil.rmtree(self.target.folder, ignore_errors=True)  # a searcher may write its log there meanwhile
        return "trainer"

    def _kill_supervisor(self, fault: Fault) -> str | None:
        return self._end_run("supervisor", signal.SIGKILL)

    def _interrupt_run(self, fault: Fault) -> str | None:
        """As `tba stop` does: the run saves and ends, and is resumed. (SIGINT is ignored in the background of a script.)"""
        return self._end_run("interrupted run", signal.SIGTERM)

    def _end_run(self, what: str, number: signal.Signals) -> str | None:
        roles, tree = self.target.roles(), self.target.tree()
        if "trainer" not in roles or not send(roles["supervisor"], number):
            return None
        self.killed, self._ended = tree, (what, self.target.pid, time.time())
        return "supervisor"

    def _kill_node(self, process: psutil.Process, what: str, fault: Fault) -> bool:
        node = self.target.nodes.node_of(process)
        if node is None:
            return False
        killed = time.time()
        self.target.nodes.kill(node)
        super().tick()  # the last steps of a trainer that was there
        self._unrecovered.append((what, killed))
        self._in(fault.seconds, self.target.nodes.add)
        return True


def missing_in_replica(run: Path, notes: Sequence[Note]) -> list[str]:
    """Acknowledged groups that the second copy lacks. Read here and not by tba, which is what is audited."""
    path = run.with_name(f"{run.name}.replica") / "groups.sqlite"
    database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=30.0)
    try:
        there = {f"{source}/{number}" for source, number in database.execute("SELECT source, number FROM groups")}
    finally:
        database.close()
    return sorted({note.id for note in notes} - there)


def use_in_words(nodes: Nodes) -> str:
    """For people: "5 nodes added, 5 used, median 9.1 s after they were asked for, worst 20.0 s" """
    seconds = [one.used for one in nodes.added if one.used is not None]
    times = f", median {statistics.median(seconds):.1f} s after they were asked for, worst {max(seconds):.1f} s"
    return f"{len(nodes.added)} nodes added, {len(seconds)} used" + (times if seconds else "")
