"""Tensors that are spread over the ranks of a trainer, and the ranks as a trainer of one process sees them. Each rank keeps
its rows of every parameter (FSDP2): of 10 rows and 4 ranks the rows 0 to 2, 3 to 5, 6 to 8 and 9."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Ranks:
    """This process among the ranks of a trainer. `Ranks()` is a trainer of one process, for which all of this is nothing."""

    rank = 0
    size = 1

    def sum_(self, tensor: Tensor) -> Tensor:
        return tensor

    def concatenated(self, values: Sequence[Any]) -> list[Any]:
        """The values of all ranks, plain data, one rank after the other."""
        return list(values)


ALONE = Ranks()


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter or a gradient, sharing its memory. A tensor that is not sharded is whole."""
    sharded: Any = tensor.detach()
    return sharded.to_local() if is_sharded(tensor) else tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor. Their module takes long to import, and a trainer of one rank never meets one."""
    return hasattr(tensor, "to_local")


def whole_tensor(tensor: Tensor, like: Tensor) -> Tensor:
    """A copy of the whole of `tensor`, or of this rank's rows of it, in host memory. `like` is the parameter it belongs to:
    where that is sharded, all ranks call this at once."""
    sharded: Any = like
    if is_sharded(like) and not is_sharded(tensor):
        from torch.distributed.tensor import DTensor

        # A moment is kept as plain rows: it gets the layout of its parameter, to be gathered like it.
        rows, layout = tensor.to(sharded.device), (sharded.device_mesh, sharded.placements)  # moments may be offloaded
        tensor = DTensor.from_local(rows, *layout, shape=sharded.shape, stride=sharded.stride())
    # A collective for sharded tensors: a rank that does not call it leaves the others waiting.
    whole: Any = tensor.detach()
    return (whole.full_tensor() if is_sharded(whole) else whole).to("cpu", copy=True)


def own_rows(whole: Tensor | None, like: Tensor) -> Tensor:
    """This rank's rows, in fp32, of a tensor that rank 0 has, spread as the sharded parameter `like` is. All ranks call it
    at once."""
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = like
    # Ranks other than 0 give memory of the right shape: distribute_tensor sends them rank 0's rows.
    empty = torch.empty(sharded.shape, dtype=torch.float32, device=sharded.device)
    given = empty if whole is None else empty.copy_(whole)
    return distribute_tensor(given, sharded.device_mesh, sharded.placements).to_local()
