"""How long nothing has moved, and the stacks of all threads of every role when a deadline passes (`wait_until` in
channels.py).

Nothing here imports torch or NumPy: reward workers use it too.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

MOST_COUNTED_SECONDS = 1.0
"""Most seconds that count between two looks. More pass when the observer was suspended or busy."""


class Idleness:
    """How long a number has stayed the same, by the observer's clock. Time without observation counts little."""

    def __init__(self) -> None:
        self.seen: float | None = None
        self._looked = time.monotonic()
        self.seconds = 0.0
        self.changed = False
        """Whether it has changed since the first look."""

    def look(self, number: float) -> float:
        now = time.monotonic()
        passed, self._looked = now - self._looked, now
        if number == self.seen:
            # A process that was suspended for an hour adds one second here, so no deadline passes while it sleeps.
            self.seconds += min(passed, MOST_COUNTED_SECONDS)
        else:
            # The number need not rise: a counter that starts again at zero has changed too.
            self.seconds, self.changed = 0.0, self.seen is not None
        self.seen = number
        return self.seconds


def write_stacks_when_asked(stream: TextIO | None = None) -> bool:
    """From now on SIGUSR1 has this process write the stacks of all its threads to a stream (None = stderr) and go on,
    also while the main thread is stuck in C code. False where the signal is used otherwise."""
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
    """Have processes write their stacks to their logs; returns those that were asked. One without a handler for the
    signal is left out, for the signal would end it."""
    asked = []
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError, FileNotFoundError):  # it has ended meanwhile
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            # A hexadecimal mask of the signals that have a handler; bit n - 1 stands for signal n.
            (caught,) = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")]
            if caught >> (signal.SIGUSR1 - 1) & 1:
                os.kill(pid, signal.SIGUSR1)
                asked.append(pid)
    return asked
