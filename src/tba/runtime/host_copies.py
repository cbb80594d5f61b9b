"""The bytes of published weights: their checksum, and large copies between a GPU and host memory (pages that stay where they
are, weights packed on the GPU).

The checksum says whether the bytes that arrived are those that were published. Whether the engine computes with them is for
the canary (models/weights.py).

A GPU copies straight from and to memory whose pages the driver has locked, at the speed of the bus. From and to any other
memory the driver goes through a small buffer of its own, which is several times as slow.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from tba.runtime.weight_memory import TensorSpec, data_bytes

logger = logging.getLogger("tba")

_ROW = 2048
ROW_BYTES = 8 * _ROW
PART_BYTES = 4096 * ROW_BYTES
"""Bytes that are packed on the GPU at once, 64 MiB: whole rows of the checksum."""
_PORTABLE = 1
"""cudaHostRegisterPortable: for all contexts of this process."""


def checksum(data: Tensor) -> int:
    """Integer reduction of all bytes of a packed bundle, on its device. Sees changed values, moved rows and other tensors;
    eight bytes that trade places with others of their row of 16 KiB it does not see (the canary does)."""
    return checksum_of_rows(row_sums(data))


def row_sums(data: Tensor) -> Tensor:
    """int64 [rows]: the sum of each row of a packed bundle, or of a part of it that begins with a row; the last row may be
    shorter."""
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
    """Writes tensors of a GPU into packed bytes in host memory, a part after the other: cast, put side by side and summed on
    the GPU, where that takes no time beside the copy."""

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
