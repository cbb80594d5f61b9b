"""The ranks of a sharded trainer: processes that compute every optimizer step together.

Rank 0 is the trainer: it has the replay buffer, publishes weights and writes checkpoints. The others have a part of the
model and of the optimizer, and do what rank 0 tells them (`tell`, `listen`), for which they may wait as long as it takes.
What they are told is JSON and tensors, never pickle. Whatever breaks between them ends the trainer with `RankLost`, and the
supervisor resumes it with new ranks.

Collectives on tensors of the model run on the devices by NCCL, or on CPUs by gloo. Messages go through host memory by gloo.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors.numpy import save
from safetensors.torch import load
from torch import Tensor

from tba.train.state import Snapshot, restore, take_snapshot

FOREVER = timedelta(days=3650)
"""Time that a rank waits to be told what to do: the trainer may wait for responses as long as it likes."""


class RankLost(RuntimeError):
    """A rank of the trainer has ended, or does not answer."""


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


class ConnectedRanks(Ranks):
    """Several ranks, joined by torch.distributed."""

    def __init__(self, *, device: torch.device, control: dist.ProcessGroup) -> None:
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), device
        from torch.distributed.device_mesh import init_device_mesh  # takes long to import

        self.mesh = init_device_mesh(device.type, (self.size,))
        self.lost = False
        """Whether one of them has ended or does not answer: nothing more can be done together."""
        self._control = control
        """Group in which ranks wait to be told what to do."""

    def sum_(self, tensor: Tensor) -> Tensor:
        with told_as_lost():
            dist.all_reduce(tensor)
        return tensor

    def concatenated(self, values: Sequence[Any]) -> list[Any]:
        own = torch.frombuffer(bytearray(json.dumps(list(values)).encode()), dtype=torch.uint8)
        with told_as_lost():
            sizes = torch.zeros(self.size, dtype=torch.int64)
            sizes[self.rank] = len(own)
            dist.all_reduce(sizes)
            padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
            padded[: len(own)] = own
            parts = [torch.empty_like(padded) for _ in range(self.size)]
            dist.all_gather(parts, padded)
        texts = [part[:size].numpy().tobytes() for part, size in zip(parts, sizes.tolist())]
        return [value for text in texts for value in json.loads(text)]

    def tell(self, what: str, **values: Any) -> None:
        """Have all other ranks do something, which this one then does too."""
        snapshot = take_snapshot({"what": what, "values": values})
        parts = [json.dumps(snapshot.tree).encode(), save(snapshot.arrays)]
        with told_as_lost():
            sizes = torch.tensor([len(part) for part in parts])
            dist.broadcast(sizes, src=0, group=self._control)
            for part in parts:
                dist.broadcast(torch.frombuffer(bytearray(part), dtype=torch.uint8), src=0)

    def listen(self) -> tuple[str, dict[str, Any]]:
        """What this rank is told next."""
        with told_as_lost():
            sizes = torch.zeros(2, dtype=torch.int64)
            dist.broadcast(sizes, src=0, group=self._control)
            parts = [torch.empty(size, dtype=torch.uint8) for size in sizes.tolist()]
            for part in parts:
                dist.broadcast(part, src=0)
        tree, tensors = (part.numpy().tobytes() for part in parts)
        told = restore(Snapshot(tree=json.loads(tree), tensors=load(tensors)))
        return told["what"], told["values"]


@contextmanager
def told_as_lost(*, only_of_sockets: bool = False) -> Iterator[None]:
    """Errors of torch.distributed, which speak of sockets, as the loss of a rank; inside the model there are others too."""
    try:
        yield
    except RuntimeError as error:
        of_a_socket = isinstance(error, dist.DistError) or "gloo" in str(error)
        if isinstance(error, RankLost) or (only_of_sockets and not of_a_socket):
            raise
        words = str(error).strip().splitlines()[0]
        raise RankLost(f"a rank of the trainer has ended or does not answer: {words}") from error


@contextmanager
def connected(
    store: dist.Store, *, rank: int, size: int, device: torch.device, wait_seconds: float
) -> Iterator[ConnectedRanks]:
    """Meet the other ranks in a store; `wait_seconds` is the deadline of every collective."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    deadline = timedelta(seconds=wait_seconds)
    with told_as_lost():
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=deadline)
    try:
        with told_as_lost():
            control = dist.new_group(backend="gloo", timeout=FOREVER)
        yield ConnectedRanks(device=device, control=control)
    finally:
        dist.destroy_process_group()
