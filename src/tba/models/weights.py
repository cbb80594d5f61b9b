"""A versioned bundle of named tensors with a checksum, as trainers publish it and engines load it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tba.types import Weights

_ROW = 4096
_MIX = 0x9E3779B97F4A7C15


class ChecksumMismatch(RuntimeError):
    """Weights arrived other than they were published."""


def make_weights(model: nn.Module, *, version: int) -> Weights:
    """The model's parameters as they are now (views, not copies; tied tensors once), not yet published: no checksum."""
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return Weights(version=version, tensors=tensors)


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """Integer reduction of all bytes, on the tensors' device. Sees changed values, moved rows and other tensors; values
    that trade places within 4,096 neighbours it does not see (the canary does)."""
    total = 0
    for tensor in tensors.values():
        total = (total * _MIX + _tensor_checksum(tensor)) % 2**64
    return total


def verify(weights: Weights) -> None:
    """Raise unless the tensors are what was published."""
    if weights.checksum is None:
        raise ValueError(f"weights of version {weights.version} carry no checksum.")
    found = checksum(weights.tensors)
    if found != weights.checksum:
        raise ChecksumMismatch(
            f"weights of version {weights.version} have checksum {found:#018x}, published was {weights.checksum:#018x}: "
            "the copy is damaged; nothing was loaded."
        )


def _tensor_checksum(tensor: Tensor) -> int:
    """Fletcher-like: row sums, then the rows weighted by their number, so that rows out of place are seen too."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    values = tensor.detach().contiguous().view(-1).view(width)
    whole = values.numel() // _ROW * _ROW
    rows = values[:whole].view(-1, _ROW).sum(dim=1, dtype=torch.int64)
    rows = torch.cat([rows, values[whole:].sum(dtype=torch.int64)[None]])
    weighted = rows * torch.arange(1, len(rows) + 1, device=rows.device)
    return (int(weighted.sum()) ^ (int(rows.sum()) << 17)) % 2**64
