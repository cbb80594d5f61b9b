"""The claim on a run folder: a file in it that says which process writes there, so that no two runs share a folder.

    {"pid": 4711, "started": "8c1e...:1203344", "host": "node7", "inode": 9922}

A claim holds while its process lives. It says when the process was started too, because process ids are used again; and the
number of its own file, because a folder that was copied is not the one that was claimed.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NAME = ".claim.json"


class FolderInUse(FileExistsError):
    """Another run writes in the folder."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process that may have a claim, on this host or another one.

    Holder(pid=4711, started="8c1e...:1203344", host="node7")
    """

    pid: int
    started: str | None
    host: str

    @classmethod
    def of_this_process(cls) -> Holder:
        return cls(pid=os.getpid(), started=start_of(os.getpid()), host=socket.gethostname())

    def has(self, claim: Mapping[str, Any]) -> bool:
        """Whether a claim is this process's."""
        return {**claim, "inode": None} == {**asdict(self), "inode": None}


@dataclass(frozen=True)
class Claim:
    """The right to write in a folder, from `take` to `release`."""

    path: Path
    holder: Holder

    @classmethod
    def take(cls, folder: Path, *, holder: Holder | None = None) -> Claim:
        """Claim an existing folder for this process, or for another one, which may have it already; FolderInUse names the
        process that has it. A claim whose process is gone is taken over."""
        path, unless = folder / NAME, holder
        holder = holder or Holder.of_this_process()
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                with suppress(OSError):  # a file system without locks: two runs that start at once are not told apart
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                if not _is_at(path, descriptor):
                    continue  # released between the two calls: the file is no longer the one in the folder
                refuse(folder, _read(descriptor), unless=unless)
                text = json.dumps({**asdict(holder), "inode": os.fstat(descriptor).st_ino}) + "\n"
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, text.encode(), 0)
                return cls(path, holder)
            finally:
                os.close(descriptor)

    def release(self) -> None:
        """Give the folder up, whatever has become of it; a claim that is no longer the process's own stays."""
        with suppress(OSError):
            if self.holder.has(holder_of(self.path.parent)):
                self.path.unlink()


def holder_of(folder: Path) -> Mapping[str, Any]:
    """What the claim on a folder says; empty where there is none."""
    try:
        descriptor = os.open(folder / NAME, os.O_RDONLY)
    except OSError:
        return {}
    try:
        return _read(descriptor)
    finally:
        os.close(descriptor)


def refuse(folder: Path, claim: Mapping[str, Any], *, unless: Holder | None = None) -> None:
    """Raise FolderInUse where a claim holds, unless it is that of the process `unless`."""
    if not claim or (unless is not None and unless.has(claim)):
        return
    host = claim.get("host")
    if host != socket.gethostname():
        raise FolderInUse(
            f"run folder {folder} is in use by process {claim.get('pid')} on host {host}: choose another name (name=...). "
            f"If that process is gone, delete {folder / NAME}."
        )
    if claim.get("started") == start_of(claim.get("pid")):
        raise FolderInUse(
            f"run folder {folder} is in use by process {claim.get('pid')} on this host ({host}): choose another name "
            f"(name=...), or end that run (tba stop {folder})."
        )


def start_of(pid: Any) -> str | None:
    """Which start of a process id this is: the machine's boot and the clock tick; None = there is no such process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # The command's name stands in brackets and may hold anything; the start is the 20th field after it.
        fields = Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else f"{boot}:{fields[19]}"
    except (OSError, ValueError, TypeError, IndexError):
        pass
    if Path("/proc/self/stat").exists():
        return None
    try:  # no Linux: that the id is in use must do
        os.kill(int(pid), 0)
    except (OSError, ValueError, TypeError):
        return None
    return "unknown"


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.stat(path).st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False


def _read(descriptor: int) -> Mapping[str, Any]:
    """The claim in an open file; empty where it is none, is half written, or was copied with its folder."""
    try:
        claim = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return claim if isinstance(claim, dict) and claim.get("inode") == os.fstat(descriptor).st_ino else {}
