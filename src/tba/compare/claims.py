"""Claims: several `tba compare` of one study share its runs, each run is taken by one of them.

A claim is a file beside the run folder that names the process doing the run. It is made exclusively, so of two processes
one gets it; the claim of a process that is gone is taken over.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Claims:
    """The claims that this holder has. `lock` is a file that all holders of a study share."""

    def __init__(self, lock: Path) -> None:
        self._lock = lock
        self._pid = os.getpid()

    def take(self, claim: Path) -> bool:
        """Whether the run is now ours. A live claim is respected whoever holds it, this process included."""
        claim.parent.mkdir(parents=True, exist_ok=True)
        content = {"pid": self._pid, "process_started": process_started(self._pid), "time": time.time()}
        with self._locked():  # or two processes could both remove a dead claim, one of them the other's new one
            if read_holder(claim) is not None:
                return False
            claim.unlink(missing_ok=True)
            return _create(claim, json.dumps(content))

    def release(self, claim: Path) -> None:
        claim.unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._lock.parent.mkdir(parents=True, exist_ok=True)
        with self._lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # goes with the file, so a killed process cannot keep it
            yield


def read_holder(claim: Path) -> int | None:
    """Process id of the living holder; None where there is no claim, or its process is gone."""
    try:
        content: dict[str, Any] = json.loads(claim.read_text(encoding="utf-8"))
        pid, started = int(content["pid"]), content["process_started"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return pid if is_alive(pid) and process_started(pid) == started else None


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's, but there
        return True
    return True


def process_started(pid: int) -> int | None:
    """When the process began, in clock ticks since the machine's start: process ids are used again. None = not known, or
    it has ended and only its parent has not noticed."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()  # the name before them may hold spaces
    return None if state == "Z" else int(fields[18])


def _create(claim: Path, text: str) -> bool:
    """Make the file with its content in one move, unless it is there."""
    temporary = claim.with_name(f".{claim.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    try:
        os.link(temporary, claim)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True
