"""A versioned bundle of named tensors with a checksum, as trainers publish it and engines load it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tba.types import Weights

_ROW = 4096


class ChecksumMismatch(RuntimeError):
    """Weights arrived other than they were published."""


def make_weights(model: nn.Module, *, version: int) -> Weights:
    """The parameters that train, as they are now (views, not copies; tied tensors once), not yet published: no checksum."""
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    return Weights(version=version, tensors=tensors)


def checksum(data: Tensor) -> int:
    """Integer reduction of all bytes of a packed bundle, on its device. Sees changed values, moved rows and other tensors;
    values that trade places within 4,096 neighbours it does not see (the canary does)."""
    values = data.view(torch.int32)
    whole = values.numel() // _ROW * _ROW
    rows = values[:whole].view(-1, _ROW).sum(dim=1, dtype=torch.int64)
    rows = torch.cat([rows, values[whole:].sum(dtype=torch.int64)[None]])
    # Fletcher-like: the rows weighted by their number, so that rows out of place are seen too.
    weighted = rows * torch.arange(1, len(rows) + 1, device=rows.device)
    place_sum, plain_sum = torch.stack([weighted.sum(), rows.sum()]).tolist()
    return (place_sum ^ (plain_sum << 17)) % 2**64


def verify(data: Tensor, *, published: int, version: int) -> None:
    """Raise unless the bytes are what was published."""
    found = checksum(data)
    if found != published:
        raise ChecksumMismatch(
            f"weights of version {version} have checksum {found:#018x}, published was {published:#018x}: the copy is "
            "damaged; nothing was loaded."
        )
