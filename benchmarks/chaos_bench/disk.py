"""A disk that can be filled: a small tmpfs of the run's own, or, where nothing can be mounted, a limit on file sizes."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import psutil

DISK_BYTES = 1 << 30
"""Size of the tmpfs: the run's checkpoints and durable replay take some hundred megabytes of it."""


class Disk(Protocol):
    name: str

    def fill(self, writers: Sequence[psutil.Process]) -> None:
        """Have writes fail from now on; `writers` are the processes that write to the run folder."""
        ...

    def free(self, writers: Sequence[psutil.Process]) -> None:
        """Have them succeed again, also in processes that were started meanwhile."""
        ...

    def close(self) -> None: ...


class SmallDisk:
    """A tmpfs at a folder, filled by a file that takes what is left."""

    name = "a tmpfs of its own"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._filler = folder / "filler"
        options = f"size={DISK_BYTES}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True, capture_output=True)

    def fill(self, writers: Sequence[psutil.Process]) -> None:
        descriptor = os.open(self._filler, os.O_WRONLY | os.O_CREAT)
        size, chunk = 0, DISK_BYTES
        try:
            while chunk >= resource.getpagesize():
                try:
                    os.posix_fallocate(descriptor, size, chunk)
                    size += chunk
                except OSError:
                    chunk //= 2
        finally:
            os.close(descriptor)

    def free(self, writers: Sequence[psutil.Process]) -> None:
        self._filler.unlink(missing_ok=True)

    def close(self) -> None:
        # Lazily: what the run may have left open there must not keep the mount.
        subprocess.run(["umount", "--lazy", str(self._folder)], check=True)


class LimitedWrites:
    """A limit on the size of the files that processes may write, which is that of a short file while the disk is full."""

    name = "a limit on file sizes (no tmpfs could be mounted)"

    def __init__(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self, writers: Sequence[psutil.Process]) -> None:
        self._limit(writers, resource.getpagesize())

    def free(self, writers: Sequence[psutil.Process]) -> None:
        self._limit(writers, self._before[0])

    def close(self) -> None:
        """Nothing is left behind."""

    def _limit(self, processes: Sequence[psutil.Process], most: int) -> None:
        for process in processes:
            with suppress(ProcessLookupError):
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, self._before[1]))


def make_disk(folder: Path) -> Disk:
    """A disk that can be filled, at an empty folder."""
    if os.geteuid() == 0 and shutil.which("mount"):
        with suppress(subprocess.CalledProcessError):  # a container that may not mount
            return SmallDisk(folder)
    return LimitedWrites()
