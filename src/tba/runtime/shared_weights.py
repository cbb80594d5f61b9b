"""Weights between processes: two shared buffers (weight_memory.py), written in turn by the trainer, copied out by searchers.
No engine decodes from a buffer.

Headers lie in shared host memory. The tensors lie there too, or, when trainer and searchers use one GPU, on it: CUDA IPC
lets the other process read them, and weights go from device to device. There a reader copies and checks on a stream of its
own, beside the decode steps that are under way: it waits for the copy, not for the steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from tba.runtime.counters import SharedMemory
from tba.runtime.host_copies import PackedWriter, checksum, lock_pages
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
        writer = self._writer_of(tensors)
        if writer is None:
            copy_all((shared[name] for name in tensors), tensors.values())
            found = checksum(self._data[buffer])  # waits for the copies: it comes back to the host
        else:
            found = writer.write(tensors, self._data[buffer])
            # The canary is computed from the returned tensors: they must be the numbers that searchers load, in their dtype.
            if all(tensor.dtype == shared[name].dtype for name, tensor in tensors.items()):
                shared = tensors
        self.finish(buffer, Header(version=version, checksum=found))
        return Weights(version=version, tensors=shared, checksum=found)

    def _writer_of(self, tensors: Mapping[str, Tensor]) -> PackedWriter | None:
        """None where the buffers lie on the GPU, or the tensors do not."""
        # Those of several ranks are no dict: they are gathered into host memory whenever one looks at them.
        if self._device_data is not None or not isinstance(tensors, dict):
            return None
        devices = {tensor.device for tensor in tensors.values()}
        device = devices.pop()
        if devices or device.type != "cuda":
            return None
        if self._writer is None:
            lock_pages(torch.from_numpy(self.memory.array(np.uint8)), self)  # all of it: the buffers share a page
            self._writer = PackedWriter(self.layout, device)
        return self._writer

    def stored(self, version: int) -> Weights | None:
        """Contents of the buffer of a version, for the process that publishes, until it publishes twice more; None = it was
        overwritten, or never published."""
        buffer = self.buffer_of(version)
        return None if buffer is None else Weights(version=version, tensors=self._tensors[buffer])

    def fetch(self) -> Weights:
        """A private copy of the newest version, checked; the copy is overwritten by the next fetch."""
        with self._reading():
            return self._fetch()

    def loaded(self) -> None:
        """Say that what was fetched last is being read by work that is queued already, and by nothing later: the next fetch
        then waits for that work, and not for what is queued until then."""
        if self._private is not None and self._private.is_cuda:
            self._loaded = torch.cuda.Event()
            self._loaded.record(torch.cuda.current_stream(self._private.device))

    def _fetch(self) -> Weights:
        misses = 0
        for attempt in range(MAX_RETRIES):
            header = self.copy_newest(self._copy)
            if header is not None:
                assert self._private is not None
                version, published, found = header.version, header.checksum, checksum(self._private)
                if found == published:
                    return Weights(version=version, tensors=self._private_tensors, checksum=published)
                misses += 1
                error = (
                    f"weights of version {version} have checksum {found:#018x}, published was {published:#018x}: the copy "
                    "is damaged; nothing was loaded."
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
