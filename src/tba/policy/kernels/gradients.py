"""Gradients of all parameters added to their fp32 sums in one launch.

A model has hundreds of parameters, most of them small: one launch each takes the host longer than the device, and PyTorch's
kernels for lists of tensors add only numbers of one type.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tba.types import on_device

BLOCK = 4096
"""Number of elements that one program adds."""
ALIGNMENT = 16
"""Bytes that addresses and lengths of the sums are multiples of, so that they are read and written in wide pieces."""


@triton.jit
def _accumulate(
    addresses, sizes, tensor_of, start_of, N, IS_FIRST: tl.constexpr, IS_BF16: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    tensor, start = tl.load(tensor_of + program), tl.multiple_of(tl.load(start_of + program), 16)
    total = tl.multiple_of(tl.load(addresses + tensor).to(tl.pointer_type(tl.float32)), 16)
    kind = tl.bfloat16 if IS_BF16 else tl.float16
    gradient = tl.multiple_of(tl.load(addresses + N + tensor).to(tl.pointer_type(kind)), 16)
    element, size = start + tl.arange(0, BLOCK), tl.load(sizes + tensor)
    if start + BLOCK <= size:  # without a mask numbers are read and written in wide pieces
        value = tl.load(gradient + element).to(tl.float32)
        if not IS_FIRST:
            value += tl.load(total + element)
        tl.store(total + element, value)
    else:
        inside = element < size
        value = tl.load(gradient + element, mask=inside).to(tl.float32)
        if not IS_FIRST:
            value += tl.load(total + element, mask=inside)
        tl.store(total + element, value, mask=inside)


@lru_cache(maxsize=8)
def _programs(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Number of elements of each tensor; tensor and first element of each program."""
    lengths = torch.tensor(sizes)
    counts = (lengths + BLOCK - 1) // BLOCK
    tensor_of = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), counts)
    ends = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    start_of = ((torch.arange(len(tensor_of)) - ends) * BLOCK).to(torch.int32)
    return on_device(lengths, device), on_device(tensor_of, device), on_device(start_of, device)


def can_accumulate(sums: Sequence[Tensor] | None, gradients: Sequence[Tensor]) -> bool:
    """Whether `accumulate` serves these tensors: gradients of one half-precision type, everything contiguous and aligned."""
    first = gradients[0]
    return first.dtype in (torch.bfloat16, torch.float16) and all(
        tensor.dtype == wanted
        and tensor.is_contiguous()
        and tensor.data_ptr() % ALIGNMENT == 0
        and tensor.numel() < 2**31
        for wanted, tensors in ((first.dtype, gradients), (torch.float32, sums or ()))
        for tensor in tensors
    )


def accumulate(sums: Sequence[Tensor] | None, gradients: Sequence[Tensor]) -> list[Tensor]:
    """fp32 sums with the gradients added, in place; None = the gradients are the first, and the sums are new tensors."""
    device, sizes = gradients[0].device, tuple(gradient.numel() for gradient in gradients)
    totals = _empty_like(gradients, sizes) if sums is None else list(sums)
    lengths, tensor_of, start_of = _programs(sizes, device)
    addresses = on_device(torch.tensor([tensor.data_ptr() for tensor in (*totals, *gradients)]), device)
    _accumulate[(len(tensor_of),)](
        addresses, lengths, tensor_of, start_of, len(sizes),
        IS_FIRST=sums is None, IS_BF16=gradients[0].dtype == torch.bfloat16, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return totals


def _empty_like(gradients: Sequence[Tensor], sizes: tuple[int, ...]) -> list[Tensor]:
    """Parts of one fp32 tensor: one allocation instead of hundreds."""
    step = ALIGNMENT // 4
    padded = [-(-size // step) * step for size in sizes]
    whole = torch.empty(sum(padded), dtype=torch.float32, device=gradients[0].device)
    return [part[:size].view(like.shape) for part, size, like in zip(whole.split(padded), sizes, gradients)]
