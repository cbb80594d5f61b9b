"""A model whose weights are spread over the ranks of a process group, by PyTorch's FSDP2.

Every layer is a group of parameters that is gathered when it computes and let go afterwards; what lies around the layers
(embeddings, last norm, head) is one more group. Each rank keeps its rows of every parameter: of 10 rows and 4 ranks the rows
0 to 2, 3 to 5, 6 to 8 and 9.

    rank 0  rows 0..2 of every parameter   its gradients   its master weights and moments
    rank 1  rows 3..5 ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tba.models.text_part import trunk_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Compute = Callable[..., tuple[Any, ...]]
"""A forward pass: it returns tensors, or None in the place of one."""


class Ranks:
    """This process among the ranks of a trainer. `Ranks()` is a trainer of one process, for which all of this is nothing."""

    rank = 0
    size = 1

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over all ranks, in place."""
        return tensor

    def concatenated(self, values: Sequence[Any]) -> list[Any]:
        """The values of all ranks, plain data, one rank after the other."""
        return list(values)


ALONE = Ranks()


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a parameter or a gradient, sharing its memory; a tensor that is not sharded is all here."""
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

        mesh, placements = sharded.device_mesh, sharded.placements
        rows = tensor.to(sharded.device)  # moments may be offloaded
        tensor = DTensor.from_local(rows, mesh, placements, shape=sharded.shape, stride=sharded.stride())
    whole: Any = tensor.detach()
    return (whole.full_tensor() if is_sharded(whole) else whole).to("cpu", copy=True)


def own_rows(whole: Tensor | None, like: Tensor) -> Tensor:
    """This rank's rows, in fp32, of a tensor that rank 0 has, spread as the sharded parameter `like` is. All ranks call it
    at once."""
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = like
    empty = torch.empty(sharded.shape, dtype=torch.float32, device=sharded.device)
    given = empty if whole is None else empty.copy_(whole)
    return distribute_tensor(given, sharded.device_mesh, sharded.placements).to_local()


class ShardedForward(nn.Module):
    """The forward pass of a policy as one module: FSDP2 gathers what lies around the layers while it runs."""

    def __init__(self, model: PreTrainedModel, compute: Compute) -> None:
        super().__init__()
        self.model = model
        self._compute = compute

    def forward(self, *arguments: Any, **options: Any) -> tuple[Any, ...]:
        # FSDP2 hooks into the tensors that a module returns, which it cannot do for views.
        outputs = self._compute(*arguments, **options)
        return tuple(part.clone() if part is not None and part._is_view() else part for part in outputs)


def shard(model: PreTrainedModel, compute: Compute, mesh: DeviceMesh) -> Compute:
    """Spread the model's parameters over the ranks, in place. From here on `compute`, which returns tensors, runs through
    what this returns, and on all ranks at once."""
    from torch.distributed.fsdp import fully_shard

    trunk = trunk_of(model)
    layers = getattr(trunk, "layers", None) or getattr(trunk, "h", None)
    if layers is None:
        raise ValueError(
            f"train.ranks: {type(model).__name__} has no list of layers to shard (`layers` or `h`). Train it with "
            "train.ranks=1."
        )
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    # What lies around the layers stays whole from the forward pass to the backward pass: the head is used in both.
    whole = ShardedForward(model, compute)
    sharded = fully_shard(whole, mesh=mesh, reshard_after_forward=False)

    def run(*arguments: Any, **options: Any) -> tuple[Any, ...]:
        outputs = whole(*arguments, **options)
        if not torch.is_grad_enabled():
            sharded.reshard()  # no backward pass will: the next forward pass would go on with these weights
        return outputs

    return run
