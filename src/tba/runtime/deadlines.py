"""Deadlines: how long nothing has moved, and the report when a deadline passes. The report says who waited for whom, since
when the awaited roles have been silent, which setting decides, and what every thread of every role was doing.

Nothing here imports torch or NumPy: reward workers use it too.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

MOST_COUNTED_SECONDS = 1.0
"""Most seconds that count between two looks. More pass when the observer was suspended or busy."""
MOST_NAMED = 8
"""Roles whose last heartbeat an error names; those that have been silent longest."""


class Idleness:
    """How long a number has stayed the same, by the observer's clock: the clocks of two hosts are never
    compared, and time without observation counts little."""

    def __init__(self) -> None:
        self._seen: float | None = None
        self._looked = time.monotonic()
        self.seconds = 0.0
        self.changed = False
        """Whether it has changed since the first look."""

    def look(self, number: float) -> float:
        now = time.monotonic()
        passed, self._looked = now - self._looked, now
        if number == self._seen:
            # A process that was suspended for an hour adds one second here, so no deadline passes while it sleeps.
            self.seconds += min(passed, MOST_COUNTED_SECONDS)
        else:
            # The number need not rise: a counter that starts again at zero has changed too.
            self.seconds, self.changed = 0.0, self._seen is not None
        self._seen = number
        return self.seconds


@dataclass(kw_only=True)
class Waiting:
    """A wait, for the error when its deadline passes: the role that waits and the roles it waits for.

    Waiting(waiter="the trainer", awaited="2 searchers", setting="runtime.wait_seconds",
            heartbeats=lambda: {"searcher-0": 1071.0, "searcher-1": 0.0})
    """

    waiter: str
    awaited: str
    setting: str
    """The one that says how long nothing may move."""
    heartbeats: Callable[[], Mapping[str, float]] = dict
    """For each awaited role a number that changes while it lives; 0 = it has shown no sign yet."""
    _ages: dict[str, tuple[float, Idleness]] = field(default_factory=dict, init=False)

    def look(self) -> None:
        """See which heartbeats have come, as far as the one who waits can."""
        for name, beats in self.heartbeats().items():
            _, idleness = self._ages.get(name, (0.0, Idleness()))
            idleness.look(beats)
            self._ages[name] = (beats, idleness)

    def overdue(self, what: str, *, name: str, seconds: float) -> str:
        """The error of a wait called `name`, of which `what` says what is lacking and where to look. It names the heartbeats
        of those that have been silent longest: searcher-1 more than 300 s ago, searcher-0 0.1 s ago"""
        ages = []
        for role, (beats, idleness) in sorted(self._ages.items(), key=lambda item: -item[1][1].seconds)[:MOST_NAMED]:
            # The last one came before anybody looked, where none has been seen to come.
            age = f"{'' if idleness.changed else 'more than '}{idleness.seconds:.1f} s ago"
            ages.append(f"{role} {age if beats else 'none yet'}")
        more = f" and {len(self._ages) - MOST_NAMED} more" if len(self._ages) > MOST_NAMED else ""
        return (
            f"{what} ({name}: {self.waiter} waited for {self.awaited}, and nothing moved for {self.setting}={seconds:g} s; "
            f"last heartbeat: {', '.join(ages) + more or 'no process is there to show one'})"
        )


def write_stacks_when_asked(stream: TextIO | None = None) -> bool:
    """From now on SIGUSR1 has this process write the stacks of all its threads to a stream (None = stderr) and go on; it
    works while the main thread is stuck in C code too. False where the signal is used otherwise."""
    if not hasattr(signal, "SIGUSR1") or signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
        return False
    faulthandler.register(signal.SIGUSR1, file=stream or sys.stderr, all_threads=True, chain=False)
    return True


@contextmanager
def stacks_to(log: Path) -> Iterator[None]:
    """The same to the end of a file, while the context lasts: for a process that is not only a role."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as stream:
        registered = write_stacks_when_asked(stream)
        try:
            yield
        finally:
            if registered:
                faulthandler.unregister(signal.SIGUSR1)


def dump_stacks(pids: Sequence[int]) -> list[int]:
    """Have processes write their stacks to their logs; returns those that were asked. One that does not handle the
    signal (it has just started, or is not ours) is left out, for the signal would end it."""
    asked = []
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError, FileNotFoundError):  # it has ended meanwhile
            if _handles_signal(pid):
                os.kill(pid, signal.SIGUSR1)
                asked.append(pid)
    return asked


def _handles_signal(pid: int) -> bool:
    """Whether a process has a handler for SIGUSR1; where the system does not say, none is assumed."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            # SigCgt is a hexadecimal mask of the caught signals; bit n - 1 stands for signal n.
            return bool(int(line.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1)
    return False
