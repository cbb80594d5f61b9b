"""Shared memory without names: an unlinked file that lives as long as a process holds it.

Nothing is left behind in /dev/shm or the run folder, whatever way the processes end.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import numpy as np


class SharedMemory:
    """Bytes that a process and the children it hands `fd` to see alike."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd = fd
        self.num_bytes = num_bytes
        self._map = mmap.mmap(fd, num_bytes)

    @classmethod
    def create(cls, num_bytes: int) -> SharedMemory:
        """New zeroed memory, in RAM where the system has /dev/shm with room for it."""
        folder = Path("/dev/shm")
        room = os.statvfs(folder) if folder.is_dir() else None
        in_ram = room is not None and room.f_bavail * room.f_frsize > 2 * num_bytes
        with tempfile.TemporaryFile(dir=folder if in_ram else None) as file:
            file.truncate(num_bytes)
            return cls(os.dup(file.fileno()), num_bytes)

    def array(self, dtype: np.dtype | type, *, offset: int = 0, count: int = -1) -> np.ndarray:
        """A view of part of the memory."""
        return np.frombuffer(self._map, dtype=dtype, offset=offset, count=count)

    def close(self) -> None:
        """Give up the descriptor, once; views that are still in use keep the mapping alive."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
