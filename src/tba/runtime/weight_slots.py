"""Weights between processes: two shared slots, written in turn by the trainer, copied out by searchers.

The trainer writes into the slot that is not newest, so a reader of the newest slot is disturbed only when it is so slow
that a whole publication passes it by. A sequence number before and after each copy tells; the reader then tries again.
Nobody decodes from a slot.

    slot header (int64):  sequence (odd while it is written), version, checksum, then the canary's log-probs (float64)
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tba.models.canary import CANARY_TOKENS
from tba.models.weights import checksum, verify
from tba.runtime.memory import SharedMemory
from tba.types import Weights

_HEADER_BYTES = 8 * (3 + CANARY_TOKENS)
_ALIGNMENT = 64
_NEWEST_BYTES = 64

MAX_RETRIES = 100
"""Copies that may be overtaken in a row before fetching gives up with an error."""


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
        offset += -(-spec.num_bytes // _ALIGNMENT) * _ALIGNMENT
    return tuple(specs)


@dataclass(frozen=True, kw_only=True, eq=False)
class Published:
    """What a reader gets: a private copy of the weights, and the trainer's canary for them."""

    weights: Weights
    canary: np.ndarray
    """float64 [CANARY_TOKENS]"""


class WeightSlots:
    """Two slots in shared memory. One process publishes, any number fetch."""

    def __init__(self, memory: SharedMemory, layout: Sequence[TensorSpec]) -> None:
        self.memory = memory
        self.layout = tuple(layout)
        self._newest = memory.array(np.int64, count=1)
        """Number of publications so far; the newest lies in slot (number - 1) % 2."""
        self._headers, self._canaries, self._tensors = [], [], []
        for slot in range(2):
            start = _NEWEST_BYTES + slot * _slot_bytes(self.layout)
            self._headers.append(memory.array(np.int64, offset=start, count=3))
            self._canaries.append(memory.array(np.float64, offset=start + 24, count=CANARY_TOKENS))
            self._tensors.append({spec.name: _view(memory, start + _data_start(), spec) for spec in self.layout})
        self._private = {spec.name: torch.empty(spec.shape, dtype=spec.dtype) for spec in self.layout}

    @classmethod
    def create(cls, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> WeightSlots:
        layout = layout_of(tensors, dtype)
        return cls(SharedMemory.create(_NEWEST_BYTES + 2 * _slot_bytes(layout)), layout)

    @property
    def newest_version(self) -> int:
        """-1 before the first publication."""
        number = int(self._newest[0])
        return -1 if number == 0 else int(self._headers[(number - 1) % 2][1])

    def write(self, tensors: Mapping[str, Tensor], *, version: int) -> Weights:
        """Cast-copy into the older slot and return what lies there; readers see it after `announce`."""
        slot = int(self._newest[0]) % 2
        header, shared = self._headers[slot], self._tensors[slot]
        header[0] += 1
        for name, tensor in tensors.items():
            shared[name].copy_(tensor)
        found = checksum(shared)
        header[1], header[2] = version, np.uint64(found).astype(np.int64)
        return Weights(version=version, tensors=shared, checksum=found)

    def announce(self, canary: np.ndarray) -> None:
        """Make what was written the newest version."""
        slot = int(self._newest[0]) % 2
        self._canaries[slot][:] = canary
        self._headers[slot][0] += 1
        self._newest[0] += 1

    def fetch(self) -> Published:
        """A private copy of the newest version, checked; the copy is overwritten by the next fetch."""
        for attempt in range(MAX_RETRIES):
            slot = (int(self._newest[0]) - 1) % 2
            header = self._headers[slot]
            before = int(header[0])
            if before % 2 == 0:
                for name, tensor in self._tensors[slot].items():
                    self._private[name].copy_(tensor)
                version, found = int(header[1]), int(header[2].astype(np.uint64))
                canary = self._canaries[slot].copy()
                if int(header[0]) == before:
                    weights = Weights(version=version, tensors=self._private, checksum=found)
                    verify(weights)
                    return Published(weights=weights, canary=canary)
            time.sleep(0.001 * min(attempt, 10))
        raise TimeoutError(
            f"weights could not be copied: {MAX_RETRIES} times the trainer wrote the slot while it was read. "
            "Raise train.publish_every."
        )


def _data_start() -> int:
    return -(-_HEADER_BYTES // _ALIGNMENT) * _ALIGNMENT


def _slot_bytes(layout: Sequence[TensorSpec]) -> int:
    data = 0 if not layout else layout[-1].offset + layout[-1].num_bytes
    return _data_start() + -(-data // _ALIGNMENT) * _ALIGNMENT


def _view(memory: SharedMemory, start: int, spec: TensorSpec) -> Tensor:
    raw = memory.array(np.uint8, offset=start + spec.offset, count=spec.num_bytes)
    return torch.from_numpy(raw).view(spec.dtype).view(spec.shape)
