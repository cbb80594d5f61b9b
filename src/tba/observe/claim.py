"""The claim on a run folder: a lock on a file in it, so that no two runs share a folder.

    {"pid": 4711, "host": "node7", "time": 1790000000.0}

The process that owns the run (`tba train`, or the Python process of a script) holds the lock for the length of the run, and
the kernel frees it when that process is gone. The content of the file is for messages, and tells a trainer that the folder
is its own supervisor's.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

logger = logging.getLogger("tba")

NAME = ".claim.json"
_held: set[int] = set()
"""Descriptors of the locks of this process."""


class FolderInUse(FileExistsError):
    """Another run writes in the folder."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that owns a run: Holder(pid=4711, host="node7", time=1790000000.0)"""

    pid: int
    host: str
    time: float
    """Seconds since 1970 when this was made: two containers may have one host name and the same process ids."""

    @classmethod
    def of_this_process(cls) -> Holder:
        return cls(pid=os.getpid(), host=socket.gethostname(), time=time.time())


@dataclass
class Claim:
    """The right to write in a folder, from `take` to `release` or the end of the process."""

    path: Path
    descriptor: int | None
    """Open file with the lock; None = the supervisor of this process has it, or it was released."""
    made: list[Path] = field(default_factory=list)
    """Folders that did not exist before, the innermost first."""

    @classmethod
    def take(cls, folder: Path, *, holder: Holder | None = None) -> Claim:
        """Lock a folder, which is made where it does not exist, for this process, or for a supervisor that may have it
        already. FolderInUse names the process that has it."""
        path, made = folder / NAME, [parent for parent in (folder, *folder.parents) if not parent.exists()]
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                found = holder_of(folder)
                if found is not None and found == holder:
                    return cls(path, None)
                raise _in_use(folder, found) from None
            except OSError as error:
                logger.warning(
                    "%s: the file system has no locks (%s), so nothing keeps a second run out of this folder.",
                    folder,
                    error,
                )
            if _is_at(path, descriptor):
                break
            os.close(descriptor)  # released between the two calls: the file is no longer the one in the folder
        _held.add(descriptor)
        claim = cls(path, descriptor, made)
        try:
            _tell_of_another_host(folder)
            text = json.dumps(asdict(holder or Holder.of_this_process())) + "\n"
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, text.encode(), 0)
            os.fsync(descriptor)  # or a trainer on another node would see an empty file on a network disk
        except BaseException:
            claim.release()
            raise
        return claim

    def release(self) -> None:
        """Give the folder up; where nothing was written in it, it is as it was before. May be called more than once."""
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is None:
            return
        with suppress(OSError):  # whatever has become of the folder
            if _is_at(self.path, descriptor):
                self.path.unlink()
        _held.remove(descriptor)
        os.close(descriptor)
        with suppress(OSError):  # something is in there
            for folder in self.made:
                folder.rmdir()


def holder_of(folder: Path) -> Holder | None:
    """The process that took the claim on a folder last; None = the folder has no claim that can be read."""
    try:
        return Holder(**json.loads((folder / NAME).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _in_use(folder: Path, holder: Holder | None) -> FolderInUse:
    host = socket.gethostname()
    if holder is None:
        who = "another process"
    else:
        who = f"process {holder.pid} on " + (f"this host ({host})" if holder.host == host else f"host {holder.host}")
    return FolderInUse(
        f"run folder {folder} is in use by {who}: choose another name (name=...), or end that run (tba stop {folder})."
    )


def _tell_of_another_host(folder: Path) -> None:
    """A run that was killed on another host leaves its claim, without the lock."""
    last = holder_of(folder)
    if last is not None and last.host != socket.gethostname():
        logger.warning(
            "%s was in use by process %d on host %s, which did not release it and has no lock on it now. If that process "
            "still runs, the file system does not share its locks between hosts: end one of the two runs.",
            *(folder, last.pid, last.host),
        )


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _close_in_child() -> None:
    """A lock lasts until its last descriptor is closed: a forked child that outlives this process must not keep it."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)
