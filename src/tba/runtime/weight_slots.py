"""Weights between processes: two shared slots, written in turn by the trainer, copied out by searchers.

The trainer writes into the slot that is not newest, so a reader of the newest slot is disturbed only when it is so slow
that a whole publication passes it by. A sequence number before and after each copy tells; the reader then tries again.
Nobody decodes from a slot.

Headers lie in shared host memory. The tensors lie there too, or, when trainer and searchers use one GPU, on it: CUDA IPC
lets the other process read them, and weights go from device to device.

    slot header (int64):  sequence (odd while it is written), version, checksum, 1 + version of the canary, then the canary's
                          log-probs (float64)

Searchers see a version as soon as it is written; its canary follows when the trainer has computed it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tba.models.weights import CANARY_TOKENS, ChecksumMismatch, checksum, verify
from tba.runtime.board import MemoryHandle, SharedMemory
from tba.types import Weights

logger = logging.getLogger("tba")

_ALIGNMENT = 64
_NEWEST_BYTES = 64
_HEADER_NUMBERS = 4
_HEADER_BYTES = -(-8 * (_HEADER_NUMBERS + CANARY_TOKENS) // _ALIGNMENT) * _ALIGNMENT

MAX_RETRIES = 100
"""Copies that may be overtaken in a row before fetching gives up with an error."""
MAX_CHECKSUM_MISSES = 3
"""Copies with a wrong checksum before fetching gives up: a second copy of bytes that are damaged is as wrong."""

_FENCE = threading.Lock()


def fence() -> None:
    """Every load and store of this thread before the call is done, for all processes, before any after it.

    x86 keeps the order of plain loads and of plain stores by itself; ARM does not, and without this a reader there could see
    an even sequence number before the data that it stands for. Python has no fence. A lock has: giving it back is a
    release, which nothing before it may pass, and taking it is an acquire, which nothing after it may pass. One cycle does
    not do, for both neighbours may move into it and pass each other there. Of two cycles the first one's release comes
    before the second one's acquire (ARM never moves an acquire before an earlier release), and so what was before the one
    before what is after the other. That no other process sees this lock does not matter: order is made by the core that
    runs this thread, and the memory is one for all. What OpenMP threads copied was done before they joined this thread.
    """
    with _FENCE:
        pass
    with _FENCE:
        pass


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """TensorSpec(name="model.norm.weight", shape=(64,), dtype=torch.float32, offset=1024)"""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    """Bytes from the start of a slot's data."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def layout_of(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[TensorSpec, ...]:
    """Where each tensor lies in a slot, in the dtype it travels in."""
    specs, offset = [], 0
    for name, tensor in tensors.items():
        spec = TensorSpec(name=name, shape=tuple(tensor.shape), dtype=dtype, offset=offset)
        specs.append(spec)
        # Views of a slot's bytes in another dtype need offsets that are multiples of its size.
        offset += -(-spec.num_bytes // _ALIGNMENT) * _ALIGNMENT
    return tuple(specs)


@dataclass(frozen=True, kw_only=True, eq=False)
class SlotsHandle:
    """How another process finds the slots. SlotsHandle(memory=MemoryHandle(...), layout=(...), device_data=None)"""

    memory: MemoryHandle
    layout: tuple[TensorSpec, ...]
    device_data: tuple[tuple[Callable[..., Tensor], tuple[Any, ...]], ...] | None
    """For each slot how to open its memory on the GPU; None = the tensors lie behind the headers."""


class WeightSlots:
    """Two slots. One process publishes, any number fetch."""

    def __init__(
        self, memory: SharedMemory, layout: Sequence[TensorSpec], device_data: Sequence[Tensor] | None = None
    ) -> None:
        self.memory = memory
        self.layout = tuple(layout)
        self._device_data = device_data
        self._newest = memory.array(np.int64, count=1)
        """Number of publications so far; the newest lies in slot (number - 1) % 2."""
        self._headers, self._canaries = [], []
        for slot in range(2):
            start = _NEWEST_BYTES + slot * _HEADER_BYTES
            self._headers.append(memory.array(np.int64, offset=start, count=_HEADER_NUMBERS))
            canary = memory.array(np.float64, offset=start + 8 * _HEADER_NUMBERS, count=CANARY_TOKENS)
            self._canaries.append(canary)
        self._data = _host_data(memory, self.layout) if device_data is None else list(device_data)
        self._tensors = [_views(data, self.layout) for data in self._data]
        self._private: Tensor | None = None
        """A reader's copy of a slot."""

    @classmethod
    def create(
        cls, tensors: Mapping[str, Tensor], dtype: torch.dtype, *, device: torch.device | None = None
    ) -> WeightSlots:
        """New slots, in host memory or on a GPU."""
        layout = layout_of(tensors, dtype)
        size = _data_bytes(layout)
        on_gpu = device is not None and device.type == "cuda"
        memory = SharedMemory.create(_NEWEST_BYTES + 2 * _HEADER_BYTES + (0 if on_gpu else 2 * size))
        data = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)] if on_gpu else None
        return cls(memory, layout, data)

    @classmethod
    def attach(cls, handle: SlotsHandle) -> WeightSlots:
        """The same slots in another process."""
        device_data = handle.device_data
        opened = None if device_data is None else [open_memory(*arguments) for open_memory, arguments in device_data]
        return cls(SharedMemory.attach(handle.memory), handle.layout, opened)

    def handle(self) -> SlotsHandle:
        device_data = None
        if self._device_data is not None:
            from torch.multiprocessing.reductions import reduce_tensor

            device_data = tuple(reduce_tensor(data) for data in self._device_data)
        return SlotsHandle(memory=self.memory.handle(), layout=self.layout, device_data=device_data)

    @property
    def newest_version(self) -> int:
        """-1 before the first publication."""
        number = int(self._newest[0])
        fence()
        return -1 if number == 0 else int(self._headers[(number - 1) % 2][1])

    def publish(self, tensors: Mapping[str, Tensor], *, version: int) -> Weights:
        """Cast-copy into the older slot, make it the newest version, and return what lies there."""
        slot = int(self._newest[0]) % 2
        header, shared = self._headers[slot], self._tensors[slot]
        # Odd from here on: a reader whose copy began before sees another number after it, and copies again.
        header[0] += 1
        fence()
        for name, tensor in tensors.items():
            shared[name].copy_(tensor)
        found = checksum(self._data[slot])  # waits for the copies: it comes back to the host
        # No canary yet: the one that lies in this slot is of the publication two before this one.
        header[1], header[2], header[3] = version, np.uint64(found).astype(np.int64), 0
        fence()
        header[0] += 1
        fence()
        # Last of all: who sees the new number finds a slot that is complete.
        self._newest[0] += 1
        return Weights(version=version, tensors=shared, checksum=found)

    def add_canary(self, canary: np.ndarray) -> None:
        """Add to the newest version the log-probs of the canary tokens under what lies in its slot."""
        slot = (int(self._newest[0]) - 1) % 2
        # The numbers first, then the version they belong to: `canary` takes them for complete once it is there.
        self._canaries[slot][:] = canary
        fence()
        self._headers[slot][3] = 1 + self._headers[slot][1]

    def canary(self, version: int) -> np.ndarray | None:
        """float64 [CANARY_TOKENS] of this version; None = not there yet, or overtaken by newer ones."""
        for header, stored in zip(self._headers, self._canaries):
            before = int(header[0])
            fence()
            if before % 2 == 0 and int(header[1]) == version and int(header[3]) == 1 + version:
                fence()
                found = stored.copy()
                fence()
                # The trainer may have come round to this slot while it was copied.
                if int(header[0]) == before:
                    return found
        return None

    def stored(self, version: int) -> Weights | None:
        """What lies in the slot of a version, for the process that publishes, until it publishes twice more; None = it was
        overwritten, or never published."""
        for header, tensors in zip(self._headers, self._tensors):
            if header[0] > 0 and header[0] % 2 == 0 and int(header[1]) == version:
                return Weights(version=version, tensors=tensors, checksum=int(header[2].astype(np.uint64)))
        return None

    def fetch(self) -> Weights:
        """A private copy of the newest version, checked; the copy is overwritten by the next fetch."""
        if self._private is None:
            self._private = torch.empty_like(self._data[0])
        misses = 0
        for attempt in range(MAX_RETRIES):
            slot = (int(self._newest[0]) - 1) % 2
            fence()
            header = self._headers[slot]
            before = int(header[0])
            fence()
            if before % 2 == 0:
                self._private.copy_(self._data[slot])
                _wait_for(self._private)
                # Read before the sequence number is compared, so that they are known to belong to what was copied.
                version, published = int(header[1]), int(header[2].astype(np.uint64))
                fence()
                if int(header[0]) == before:
                    try:
                        verify(self._private, published=published, version=version)
                    except ChecksumMismatch as error:
                        misses += 1
                        if misses >= MAX_CHECKSUM_MISSES:
                            raise
                        logger.warning("%s They are copied again.", error)
                    else:
                        tensors = _views(self._private, self.layout)
                        return Weights(version=version, tensors=tensors, checksum=published)
            # A reader that spins could keep the trainer, which it waits for, from its core.
            time.sleep(0.001 * min(attempt, 10))
        raise TimeoutError(
            f"weights could not be copied: {MAX_RETRIES} times the trainer wrote the slot while it was read. "
            "Raise train.publish_every."
        )


def _data_bytes(layout: Sequence[TensorSpec]) -> int:
    data = 0 if not layout else layout[-1].offset + layout[-1].num_bytes
    return -(-data // _ALIGNMENT) * _ALIGNMENT


def _host_data(memory: SharedMemory, layout: Sequence[TensorSpec]) -> list[Tensor]:
    size, first = _data_bytes(layout), _NEWEST_BYTES + 2 * _HEADER_BYTES
    return [torch.from_numpy(memory.array(np.uint8, offset=first + slot * size, count=size)) for slot in range(2)]


def _views(data: Tensor, layout: Sequence[TensorSpec]) -> dict[str, Tensor]:
    return {
        spec.name: data[spec.offset : spec.offset + spec.num_bytes].view(spec.dtype).view(spec.shape) for spec in layout
    }


def _wait_for(data: Tensor) -> None:
    # A copy on a GPU is only queued: the sequence number tells nothing about it before it has ended.
    if data.is_cuda:
        torch.cuda.current_stream(data.device).synchronize()
