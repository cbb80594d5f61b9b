"""Does the faults of a plan to a run, undoes those that last, and takes down what it did and how long recoveries took."""

from __future__ import annotations

import heapq
import itertools
import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from chaos_bench.accounting import Recovery
from chaos_bench.plan import Fault
from chaos_bench.target import GONE_SECONDS, StepWatch, Target, is_alive

LATEST_SECONDS = 30.0
"""How long a fault waits for what it is done to; after that it is left out."""
FLIPPED_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class Done:
    """A fault that was done: Done(fault=Fault(...), who="searcher-0", time=1.79e9)"""

    fault: Fault
    who: str
    """The role it was done to, or "disk"."""
    time: float
    """Seconds since 1970."""


@dataclass
class Injector:
    """Does the faults of a plan. `tick` is called all the time."""

    target: Target
    watch: StepWatch
    done: list[Done] = field(default_factory=list)
    left_out: list[Fault] = field(default_factory=list)
    """Faults for which there was nothing to do them to."""
    recoveries: list[Recovery] = field(default_factory=list)
    """Of the trainer and the supervisor, from the kill to the next optimizer step."""
    killed: list[psutil.Process] = field(default_factory=list)
    """Processes of the run when its first one was killed here; empty = it was not."""
    full: bool = False
    """Whether the disk is full now."""
    latest_seconds: float = LATEST_SECONDS
    _unrecovered: list[tuple[str, float]] = field(default_factory=list)
    """Roles that were killed and have not worked since, with the times of their kills in seconds since 1970."""
    _later: list[tuple[float, int, Callable[[], Any]]] = field(default_factory=list)
    """What is to be done at a time of the monotonic clock."""
    _order: Iterator[int] = field(default_factory=itertools.count)
    _flipped: set[tuple[int, int]] = field(default_factory=set)
    """Files that were damaged, by device and number."""

    @property
    def busy(self) -> bool:
        """Whether a fault lasts, or a recovery is waited for."""
        return bool(self._later or self._unrecovered)

    def tick(self) -> None:
        """Undo what is over, and see who has recovered."""
        while self._later and self._later[0][0] <= time.monotonic():
            heapq.heappop(self._later)[2]()
        if self.watch.look():
            self._recovered(time.time())

    def attempt(self, fault: Fault, *, late: float) -> bool:
        """Do a fault if it can be done now. Returns True when it is done or given up. `late` is how long it has waited, in
        seconds."""
        now = time.time()
        who = getattr(self, f"_{fault.kind}")(fault)
        if who is not None:
            self.done.append(Done(fault=fault, who=who, time=now))
        elif late > self.latest_seconds:
            self.left_out.append(fault)
        return who is not None or late > self.latest_seconds

    def end(self) -> None:
        """Undo what lasts; recoveries that have not come are none."""
        while self._later:
            heapq.heappop(self._later)[2]()
        self._recovered(None)

    def _recovered(self, now: float | None) -> None:
        for who, killed in self._unrecovered:
            self.recoveries.append(Recovery(who=who, killed=killed, seconds=None if now is None else now - killed))
        self._unrecovered = []

    def _kill_searcher(self, fault: Fault) -> str | None:
        name, process = self._searcher(fault)
        return name if process is not None and send(process, signal.SIGKILL) else None

    def _stop_searcher(self, fault: Fault) -> str | None:
        name, process = self._searcher(fault)
        return name if process is not None and self._hold(process, fault.seconds) else None

    def _stop_trainer(self, fault: Fault) -> str | None:
        trainer = self.target.roles().get("trainer")
        return "trainer" if trainer is not None and self._hold(trainer, fault.seconds) else None

    def _kill_trainer(self, fault: Fault) -> str | None:
        return self._kill("trainer")

    def _kill_supervisor(self, fault: Fault) -> str | None:
        return self._kill("supervisor")

    def _corrupt_checkpoint(self, fault: Fault) -> str | None:
        """Flip bytes of a file of the newest checkpoint, then kill the trainer: it must go on from an older one."""
        intact = self._intact_checkpoints()
        if len(intact) < 2 or "trainer" not in self.target.roles():
            return None
        try:
            files = sorted(json.loads((intact[-1] / "manifest.json").read_text())["files"])
            path = intact[-1] / files[int(fault.draw * len(files))]
            flip(path, fault.draw)
            self._flipped.add(number_of(path))
        except (OSError, ValueError):  # it was dropped in this moment
            return None
        return self._kill("trainer")

    def _fill_disk(self, fault: Fault) -> str | None:
        roles = self.target.roles()
        writers = [process for name, process in roles.items() if name in ("supervisor", "trainer")]
        if not writers:
            return None
        limit_files(writers, resource.getpagesize())
        self.full = True
        self._in(fault.seconds, self._free_disk)
        return "disk"

    def _free_disk(self) -> None:
        limit_files(self.target.tree(), resource.getrlimit(resource.RLIMIT_FSIZE)[0])
        self.full = False

    def _searcher(self, fault: Fault) -> tuple[str, psutil.Process | None]:
        found = {name: process for name, process in self.target.roles().items() if name.startswith("searcher-")}
        if not found:
            return "", None
        name = sorted(found)[int(fault.draw * len(found))]
        return name, found[name]

    def _kill(self, who: str) -> str | None:
        """Kill a role whose return shows in an optimizer step."""
        process = self.target.roles().get(who)
        if process is None:
            return None
        tree = self.target.tree() if process.pid == self.target.pid else []
        killed = time.time()
        if not send(process, signal.SIGKILL):
            return None
        self.killed = tree or self.killed
        deadline = time.monotonic() + GONE_SECONDS
        while is_alive(process) and time.monotonic() < deadline:
            time.sleep(0.001)
        self.tick()  # its last steps, which are not those of its successor
        self._unrecovered.append((who, killed))
        return who

    def _hold(self, process: psutil.Process, seconds: float) -> bool:
        """Stop a process for a while."""
        if not send(process, signal.SIGSTOP):
            return False
        self._in(seconds, lambda: send(process, signal.SIGCONT))
        return True

    def _in(self, seconds: float, action: Callable[[], Any]) -> None:
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._order), action))

    def _intact_checkpoints(self) -> list[Path]:
        """Whole checkpoints that were not damaged here, the newest last."""
        found: dict[int, Path] = {}
        for path in self.target.folder.glob("checkpoints/step-*"):
            step = path.name.removeprefix("step-")
            if not step.isdecimal():
                continue
            try:
                files = list(path.iterdir())
                numbers = {number_of(file) for file in files}
            except OSError:
                continue
            if path / "manifest.json" in files and not numbers & self._flipped:
                found[int(step)] = path
        return [found[step] for step in sorted(found)]


def send(process: psutil.Process, number: signal.Signals) -> bool:
    """Send a signal; False where the process is gone. psutil makes sure that the number is not another process's by now."""
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return False
    return True


def limit_files(processes: Iterable[psutil.Process], most: int) -> None:
    """Let processes write files of at most so many bytes: a disk is full for them where that is little."""
    for process in processes:
        with suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def number_of(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def flip(path: Path, draw: float) -> None:
    """Turn over all bits of some bytes in the middle of a file."""
    size = path.stat().st_size
    start = int(draw * max(0, size - FLIPPED_BYTES))
    with path.open("r+b") as file:
        file.seek(start)
        damaged = bytes(byte ^ 0xFF for byte in file.read(FLIPPED_BYTES))
        file.seek(start)
        file.write(damaged)
        file.flush()
        os.fsync(file.fileno())
