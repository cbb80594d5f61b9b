"""Two buffers of bytes in shared memory, written in turn by one process and copied out by any number.

The writer takes the buffer that is not newest. A reader compares the sequence number before and after its copy, and tries
again where it has changed.

    memory:  number of publications so far, two headers, two times the data (unless it lies on a GPU)
    header:  sequence (odd while its buffer is written), version, checksum, 1 + version of the canary (int64), then the
             canary's log-probs (float64)

Readers see a version as soon as it is written; its canary follows when the writer has computed it. Nothing here imports
torch, so that processes that pass weights on between machines need not either.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tba.runtime.counters import SharedMemory

ALIGNMENT = 64
CANARY_ROOM = 64
# The counter takes 8 of these bytes; the others keep the headers and the data at multiples of ALIGNMENT.
_NEWEST_BYTES = 64
_HEADER_NUMBERS = 4
_HEADER_BYTES = -(-8 * (_HEADER_NUMBERS + CANARY_ROOM) // ALIGNMENT) * ALIGNMENT
_SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1}

_FENCE = threading.Lock()


def fence() -> None:
    """Every load and store of this thread before the call is done, for all processes, before any after it.

    x86 keeps the order of plain loads and of plain stores by itself; ARM does not, and without this a reader there could see
    an even sequence number before the data that it stands for. Python has no fence. A lock has: giving it back is a
    release, which nothing before it may pass, and taking it is an acquire, which nothing after it may pass. One cycle does
    not do, for both neighbours may move into it and pass each other there. Of two cycles the first one's release comes
    before the second one's acquire (ARM never moves an acquire before an earlier release). That no other process sees this
    lock does not matter: order is made by the core that runs this thread.
    """
    with _FENCE:
        pass
    with _FENCE:
        pass


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """TensorSpec(name="model.norm.weight", shape=(64,), dtype="float32", offset=1024)"""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    """Bytes from the start of a buffer's data."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _SIZES[self.dtype]


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedWeightsHandle:
    """How another process finds the buffers: SharedWeightsHandle(memory="/proc/4711/fd/9", layout=(...))"""

    memory: str
    layout: tuple[TensorSpec, ...]
    device_data: tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...] | None = None
    """For each buffer how to open its memory on the GPU; None = the tensors lie behind the headers."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """A publication: Header(version=12, checksum=0x5d1f...)"""

    version: int
    checksum: int


def data_bytes(layout: Sequence[TensorSpec]) -> int:
    data = 0 if not layout else layout[-1].offset + layout[-1].num_bytes
    return -(-data // ALIGNMENT) * ALIGNMENT


def reserve(size: int) -> SharedMemory:
    """Memory for two buffers with so many bytes of data each; 0 = the data lies elsewhere."""
    return SharedMemory.create(_NEWEST_BYTES + 2 * _HEADER_BYTES + 2 * size)


class WeightMemory:
    """The bytes of two buffers and the lock that keeps readers from half-written ones."""

    def __init__(self, memory: SharedMemory) -> None:
        self.memory = memory
        self._newest = memory.array(np.int64, count=1)
        """Number of publications so far; the newest lies in buffer (number - 1) % 2."""
        starts = (_NEWEST_BYTES, _NEWEST_BYTES + _HEADER_BYTES)
        self._headers = [memory.array(np.int64, offset=start, count=_HEADER_NUMBERS) for start in starts]
        canaries = (start + 8 * _HEADER_NUMBERS for start in starts)
        self._canaries = [memory.array(np.float64, offset=start, count=CANARY_ROOM) for start in canaries]

    def data(self, buffer: int, size: int) -> np.ndarray:
        """The bytes of a buffer, uint8 [size]."""
        first = _NEWEST_BYTES + 2 * _HEADER_BYTES
        return self.memory.array(np.uint8, offset=first + buffer * size, count=size)

    @property
    def number(self) -> int:
        return int(self._newest[0])

    @property
    def newest_version(self) -> int:
        """-1 before the first publication."""
        number = self.number
        fence()
        return -1 if number == 0 else int(self._headers[(number - 1) % 2][1])

    def begin(self) -> int:
        """The buffer to write, which readers keep away from until `finish`."""
        buffer = self.number % 2
        # Odd from here on: a reader whose copy began before sees another number after it, and copies again.
        self._headers[buffer][0] += 1
        fence()
        return buffer

    def finish(self, buffer: int, header: Header) -> None:
        numbers = self._headers[buffer]
        # No canary yet: the one that lies in this buffer is of the publication two before this one.
        numbers[1], numbers[2], numbers[3] = header.version, np.uint64(header.checksum).astype(np.int64), 0
        fence()
        numbers[0] += 1
        fence()
        # Last of all: who sees the new number finds a buffer that is complete.
        self._newest[0] += 1

    def add_canary(self, canary: np.ndarray) -> None:
        """Add to the newest version the log-probs of the canary tokens under what lies in its buffer."""
        # The writer has begun no other publication since, so the newest buffer is the one that the canary belongs to.
        buffer = (self.number - 1) % 2
        # The numbers first, then the version they belong to: `canary` takes them for complete once it is there.
        self._canaries[buffer][:] = canary
        fence()
        self._headers[buffer][3] = 1 + self._headers[buffer][1]

    def canary(self, version: int) -> np.ndarray | None:
        """float64 [CANARY_ROOM] of this version; None = not there yet, or overtaken by newer ones."""
        for numbers, stored in zip(self._headers, self._canaries):
            before = int(numbers[0])
            fence()
            if before % 2 == 0 and int(numbers[1]) == version and int(numbers[3]) == 1 + version:
                fence()
                found = stored.copy()
                fence()
                # The writer may have come round to this buffer while it was copied.
                if int(numbers[0]) == before:
                    return found
        return None

    def buffer_of(self, version: int) -> int | None:
        """For the process that writes, until it publishes twice more; None = it was overwritten, or never published."""
        for buffer, numbers in enumerate(self._headers):
            # Only the writer calls this, so its loads need no fence against its own stores.
            if numbers[0] > 0 and numbers[0] % 2 == 0 and int(numbers[1]) == version:
                return buffer
        return None

    def copy_newest(self, copy: Callable[[int], None]) -> Header | None:
        """Have `copy` copy the newest buffer; returns what it has copied, None where it was overtaken."""
        buffer = (self.number - 1) % 2
        fence()
        numbers = self._headers[buffer]
        before = int(numbers[0])
        fence()
        if before % 2:
            return None  # the writer has come round to this buffer since `number` was read
        copy(buffer)
        # Read before the sequence number is compared, so that it is known to belong to what was copied.
        # `finish` has stored the 64 bits of the checksum as an int64; here they are unsigned again.
        header = Header(version=int(numbers[1]), checksum=int(numbers[2].astype(np.uint64)))
        fence()
        return header if int(numbers[0]) == before else None
