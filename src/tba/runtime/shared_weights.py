"""Weights between processes: two shared buffers (weight_memory.py), written in turn by the trainer, copied out by
searchers. No engine decodes from a buffer.

Headers lie in shared host memory. The tensors lie there too, or, when trainer and searchers use one GPU, on it (CUDA IPC).
There a reader copies and checks on a stream of its own: it waits for the copy, not for decode steps that are under way.

The checksum says whether the bytes that arrived are those that were published. Whether the engine computes with them is for
the canary (models/weights.py). A GPU copies straight from and to memory whose pages the driver has locked, at the speed of
the bus. Otherwise the driver goes through a small buffer of its own, which is several times as slow.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import numpy as np
import torch
from torch import Tensor

from tba.runtime.counters import SharedMemory
from tba.runtime.weight_memory import (
    ALIGNMENT,
    Header,
    SharedWeightsHandle,
    TensorSpec,
    WeightMemory,
    data_bytes,
    reserve,
)
from tba.types import Weights, copy_all

logger = logging.getLogger("tba")

MAX_RETRIES = 100
"""Copies that may be overtaken in a row before fetching gives up with an error."""
LONG_BYTES = 2**28
"""Bytes in host memory from which on copying and checking them would hold up many decode steps."""
MAX_CHECKSUM_MISSES = 3
"""Copies with a wrong checksum before fetching gives up: a second copy of bytes that are damaged is as wrong."""
_ROW = 2048
ROW_BYTES = 8 * _ROW
PART_BYTES = 4096 * ROW_BYTES
"""Bytes that are packed on the GPU at once, 64 MiB: whole rows of the checksum."""
_PORTABLE = 1
"""cudaHostRegisterPortable: for all contexts of this process."""


def layout_of(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[TensorSpec, ...]:
    """Where each tensor lies in a buffer, in the dtype it travels in."""
    specs, offset = [], 0
    for name, tensor in tensors.items():
        spec = TensorSpec(name=name, shape=tuple(tensor.shape), dtype=str(dtype).removeprefix("torch."), offset=offset)
        specs.append(spec)
        # Views of a buffer's bytes in another dtype need offsets that are multiples of its size.
        offset += -(-spec.num_bytes // ALIGNMENT) * ALIGNMENT
    return tuple(specs)


class ChecksumMismatch(RuntimeError):
    """Weights arrived other than they were published."""


class SharedWeights(WeightMemory):
    """Two buffers. One process publishes, any number fetch."""

    def __init__(
        self, memory: SharedMemory, layout: Sequence[TensorSpec], device_data: Sequence[Tensor] | None = None
    ) -> None:
        """`device_data` are the two buffers where they lie on a GPU: the shared memory then holds only the headers."""
        super().__init__(memory)
        self.layout, size = tuple(layout), data_bytes(layout)
        self._device_data = device_data
        self._data = device_data or [torch.from_numpy(self.data(buffer, size)) for buffer in range(2)]
        self._tensors = [_views(data, self.layout) for data in self._data]
        self._private: Tensor | None = None
        self._private_tensors: dict[str, Tensor] = {}
        """Views of that copy: hundreds, which would take milliseconds to make at every fetch."""
        self._stream: torch.cuda.Stream | None = None
        self._loaded: torch.cuda.Event | None = None
        """The device has passed it when the private copy is not read any longer; None = the reader has not said."""
        self._writer: PackedWriter | None = None
        """How weights of a GPU come into buffers in host memory."""

    @classmethod
    def create(
        cls, tensors: Mapping[str, Tensor], dtype: torch.dtype, *, device: torch.device | None = None
    ) -> SharedWeights:
        layout = layout_of(tensors, dtype)
        size = data_bytes(layout)
        on_gpu = device is not None and device.type == "cuda"
        data = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)] if on_gpu else None
        return cls(reserve(0 if on_gpu else size), layout, data)

    @classmethod
    def attach(cls, handle: SharedWeightsHandle) -> SharedWeights:
        device_data = handle.device_data
        opened = None if device_data is None else [open_memory(*arguments) for open_memory, arguments in device_data]
        return cls(SharedMemory.attach(handle.memory), handle.layout, opened)

    def handle(self) -> SharedWeightsHandle:
        device_data = None
        if self._device_data is not None:
            from torch.multiprocessing.reductions import reduce_tensor

            # These are CUDA IPC handles: this process must keep the tensors for as long as another one has them open.
            device_data = tuple(reduce_tensor(data) for data in self._device_data)
        return SharedWeightsHandle(memory=self.memory.handle, layout=self.layout, device_data=device_data)

    @property
    def takes_long(self) -> bool:
        """Whether a fetch is worth a thread of its own: gigabytes that pass through host memory take seconds."""
        return self._device_data is None and data_bytes(self.layout) >= LONG_BYTES

    @torch.no_grad()
    def publish(self, tensors: Mapping[str, Tensor], *, version: int) -> Weights:
        """Cast-copy into the older buffer, make it the newest version, and return what lies there; of weights that go
        from a GPU to host memory in their own dtype those on the GPU, which are the same numbers."""
        differing = sorted(tensors.keys() ^ self._tensors[0].keys())
        if differing:  # one left out would keep the value of two versions before
            where = "the buffers have no place for it" if differing[0] in tensors else "it is not in what is published"
            raise ValueError(
                f"weights to publish are not those that the buffers were made for: {differing[0]!r}, {where} "
                f"({len(differing)} such names). Publish the same parameters every time."
            )
        buffer = self.begin()
        shared: Mapping[str, Tensor] = self._tensors[buffer]
        # Tensors of several ranks are no dict: they are gathered into host memory whenever one looks at them.
        to_host = self._device_data is None and isinstance(tensors, dict)
        devices = {tensor.device for tensor in tensors.values()} if to_host else set()
        if len(devices) != 1 or next(iter(devices)).type != "cuda":
            copy_all((shared[name] for name in tensors), tensors.values())
            found = checksum(self._data[buffer])  # waits for the copies: it comes back to the host
        else:
            if self._writer is None:
                lock_pages(torch.from_numpy(self.memory.array(np.uint8)), self)  # all of it: the buffers share a page
                self._writer = PackedWriter(self.layout, devices.pop())
            found = self._writer.write(tensors, self._data[buffer])
            # The canary is computed from the returned tensors: they must be the numbers that searchers load, in their dtype.
            if all(tensor.dtype == shared[name].dtype for name, tensor in tensors.items()):
                shared = tensors
        self.finish(buffer, Header(version=version, checksum=found))
        return Weights(version=version, tensors=shared, checksum=found)

    def stored(self, version: int) -> Weights | None:
        """What lies in the buffer of a version (`buffer_of`)."""
        buffer = self.buffer_of(version)
        return None if buffer is None else Weights(version=version, tensors=self._tensors[buffer])

    def fetch(self) -> Weights:
        """A private copy of the newest version, checked; the copy is overwritten by the next fetch."""
        misses = 0
        with self._reading():
            for attempt in range(MAX_RETRIES):
                header = self.copy_newest(self._copy)
                if header is not None:
                    assert self._private is not None
                    version, published, found = header.version, header.checksum, checksum(self._private)
                    if found == published:
                        return Weights(version=version, tensors=self._private_tensors, checksum=published)
                    misses += 1
                    error = (
                        f"weights of version {version} have checksum {found:#018x}, published was {published:#018x}: the "
                        "copy is damaged; nothing was loaded."
                    )
                    if misses >= MAX_CHECKSUM_MISSES:
                        raise ChecksumMismatch(error)
                    logger.warning("%s They are copied again.", error)
                # A reader that spins could keep the trainer, which it waits for, from its core.
                time.sleep(0.001 * min(attempt, 10))
        raise TimeoutError(
            f"weights could not be copied: {MAX_RETRIES} times the trainer wrote the buffer while it was read. "
            "Raise train.publish_every."
        )

    def loaded(self) -> None:
        """What was fetched last is being read by work that is queued already, and by nothing later: the next fetch
        waits for that work alone."""
        if self._private is not None and self._private.is_cuda:
            self._loaded = torch.cuda.Event()
            self._loaded.record(torch.cuda.current_stream(self._private.device))

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Have what follows run on the reader's stream, behind whatever still reads its copy."""
        if self._private is None:
            # The copy is made at the first fetch: the process that publishes never needs one.
            self._private = torch.empty_like(self._data[0])
            self._private_tensors = _views(self._private, self.layout)
            if not self._private.is_cuda and torch.cuda.is_initialized():  # the engine is on a GPU: they go there next
                lock_pages(self._private, self)
        if not self._private.is_cuda:
            yield
            return
        device = self._private.device
        if self._stream is None:
            # Before decode steps where both have work: they last longer by a millisecond, but the weights are there.
            self._stream = torch.cuda.Stream(device, priority=-1)
        if self._loaded is None:
            # The reader has not said when it stops reading, so everything that it has queued is waited for.
            self._stream.wait_stream(torch.cuda.current_stream(device))
        else:
            self._stream.wait_event(self._loaded)
            self._loaded = None
        with torch.cuda.stream(self._stream):
            yield

    def _copy(self, buffer: int) -> None:
        assert self._private is not None
        self._private.copy_(self._data[buffer])
        # A copy on a GPU is only queued: the sequence number says nothing about it before it has ended.
        if self._private.is_cuda:
            torch.cuda.current_stream(self._private.device).synchronize()


def _views(data: Tensor, layout: Sequence[TensorSpec]) -> dict[str, Tensor]:
    return {
        spec.name: data[spec.offset : spec.offset + spec.num_bytes].view(getattr(torch, spec.dtype)).view(spec.shape)
        for spec in layout
    }


def checksum(data: Tensor) -> int:
    """Integer reduction of all bytes of a packed bundle, on its device. Sees changed values, moved rows and other
    tensors; eight bytes that trade places with others of their row of 16 KiB it does not see (the canary does)."""
    return checksum_of_rows(row_sums(data))


def row_sums(data: Tensor) -> Tensor:
    """int64 [rows]: the sum of each row of packed bytes that begin with a row; the last row may be shorter."""
    # Sums of int64 wrap around, alike on all devices. For those of int32 into int64 a CPU would cast all of it first: twice
    # the memory, and up to forty times as long (1 GB: .2 to .6 GB/s, so 10 to 19).
    numbers = data[: data.numel() // 8 * 8].view(torch.int64)
    whole = numbers.numel() // _ROW * _ROW
    rows = numbers[:whole].view(-1, _ROW).sum(dim=1)
    if data.numel() == 8 * whole:
        return rows
    # Fewer than eight bytes may be left behind the last int64; they are summed as bytes.
    rest = numbers[whole:].sum() + data[8 * numbers.numel() :].sum(dtype=torch.int64)
    return torch.cat([rows, rest[None]])


def checksum_of_rows(rows: Tensor) -> int:
    # Fletcher-like: the rows weighted by their number, so that rows out of place are seen too.
    weighted = rows * torch.arange(1, len(rows) + 1, device=rows.device)
    place_sum, plain_sum = torch.stack([weighted.sum(), rows.sum()]).tolist()
    # Rotated, not shifted: in a row of even number the highest bits show in the plain sum alone.
    plain_sum %= 2**64
    return place_sum % 2**64 ^ (plain_sum << 17 | plain_sum >> 47) % 2**64


def lock_pages(data: Tensor, owner: object) -> bool:
    """Have the driver lock the pages of a CPU tensor until `owner` is gone. Returns whether it has."""
    error = torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.numel() * data.element_size(), _PORTABLE)
    if int(error) == 0:
        # The function holds the tensor: its memory is still there when its pages are unlocked. A process that ends need not:
        # the driver does.
        weakref.finalize(owner, lambda: torch.cuda.cudart().cudaHostUnregister(data.data_ptr())).atexit = False
        return True
    with suppress(RuntimeError):  # the driver repeats its last error at the next kernel: let it be this one
        torch.zeros(1, device="cuda")
    logger.warning(
        "%.1f GiB of host memory cannot be locked for copies to and from the GPU (%s): weights travel several times as "
        "slowly. `ulimit -l` says how much a process may lock.",
        data.numel() * data.element_size() / 2**30,
        error,
    )
    return False


class PackedWriter:
    """Writes tensors of a GPU into packed bytes in host memory: cast, packed and summed on the GPU, part by part."""

    def __init__(self, layout: Sequence[TensorSpec], device: torch.device, *, part_bytes: int = PART_BYTES) -> None:
        self._layout = layout
        self._size = data_bytes(layout)
        self._part = torch.empty(min(part_bytes, self._size), dtype=torch.uint8, device=device)

    def write(self, tensors: Mapping[str, Tensor], target: Tensor) -> int:
        """Fill `target`, uint8 [bytes of the layout] in host memory; returns the checksum of what it then holds."""
        sums = []
        for start in range(0, self._size, len(self._part)):
            part = self._part[: self._size - start]
            # The gaps between tensors are part of the checksum, so they must not hold bytes of the part before.
            part.zero_()
            for spec in self._layout:
                first, last = max(spec.offset, start), min(spec.offset + spec.num_bytes, start + len(part))
                if first < last:
                    dtype = getattr(torch, spec.dtype)
                    # Both ends fall on whole elements: parts begin at multiples of ROW_BYTES, tensors of ALIGNMENT.
                    elements = slice((first - spec.offset) // dtype.itemsize, (last - spec.offset) // dtype.itemsize)
                    part[first - start : last - start].view(dtype).copy_(tensors[spec.name].reshape(-1)[elements])
            sums.append(row_sums(part))
            # In the order of the stream: the part is filled again only when it has been copied.
            target[start : start + len(part)].copy_(part, non_blocking=True)
        return checksum_of_rows(torch.cat(sums))  # comes back to the host behind all copies
