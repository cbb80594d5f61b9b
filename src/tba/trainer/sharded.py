"""A trainer of several processes, its ranks: the TrainStep of one process, but for who computes.

Rank 0 is the trainer: it has the replay buffer, publishes weights and writes checkpoints. The others have a part of the
model and of the optimizer. On rank 0 each method first sends a command to the other ranks (`tell`). They wait for commands
without a limit (`listen`) and then do the same (`follow`). A broken connection between ranks ends the trainer with
`RankLost`, and the supervisor resumes it with new ranks.

Searchers and files get whole tensors under the model's own names, gathered one at a time. A checkpoint does not depend on
the number of ranks that wrote it. Collectives on tensors of the model run by NCCL, or on CPUs by gloo. Messages go through
host memory by gloo; they are JSON and tensors, never pickle.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import load, save
from torch import Tensor

from tba.models.load import has_lora
from tba.models.packing import pack
from tba.models.policy import ALONE as ALONE
from tba.models.policy import Ranks as Ranks
from tba.models.policy import is_sharded, local_part, own_rows, whole_tensor
from tba.models.weights import CANARY_TOKENS, canary_tokens
from tba.trainer.checkpoint import restore, take_snapshot
from tba.trainer.step import NonFiniteLoss, StepResult, TrainStep
from tba.types import Batch, Weights

FOREVER = timedelta(days=3650)
"""Time a rank waits for a command: the trainer may wait for responses as long as it likes."""


class RankLost(RuntimeError):
    """A rank of the trainer has ended, or does not answer."""


class ConnectedRanks(Ranks):
    def __init__(self, *, device: torch.device, control: dist.ProcessGroup) -> None:
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), device
        from torch.distributed.device_mesh import init_device_mesh  # takes long to import

        self.mesh = init_device_mesh(device.type, (self.size,))
        self.lost = False  # whether one of them has ended or does not answer: nothing more can be done together
        self._control = control  # group in which ranks wait for commands

    def sum_(self, tensor: Tensor) -> Tensor:
        with as_rank_lost():
            dist.all_reduce(tensor)
        return tensor

    def concatenated(self, values: Sequence[Any]) -> list[Any]:
        own = torch.frombuffer(bytearray(json.dumps(list(values)).encode()), dtype=torch.uint8)
        with as_rank_lost():
            sizes = torch.zeros(self.size, dtype=torch.int64)
            sizes[self.rank] = len(own)
            dist.all_reduce(sizes)
            # all_gather takes tensors of one size: texts are padded here and cut below.
            padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
            padded[: len(own)] = own
            parts = [torch.empty_like(padded) for _ in range(self.size)]
            dist.all_gather(parts, padded)
        texts = [part[:size].numpy().tobytes() for part, size in zip(parts, sizes.tolist())]
        return [value for text in texts for value in json.loads(text)]

    def tell(self, what: str, **values: Any) -> None:
        """Have all other ranks do something, which this one then does too."""
        tree, arrays = take_snapshot({"what": what, "values": values})
        parts = [json.dumps(tree).encode(), save(arrays)]
        with as_rank_lost():
            sizes = torch.tensor([len(part) for part in parts])
            # Ranks wait for this one without a limit; what follows it has the deadline of the default group.
            dist.broadcast(sizes, src=0, group=self._control)
            for part in parts:
                dist.broadcast(torch.frombuffer(bytearray(part), dtype=torch.uint8), src=0)

    def listen(self) -> tuple[str, dict[str, Any]]:
        """The next command for this rank."""
        with as_rank_lost():
            sizes = torch.zeros(2, dtype=torch.int64)
            dist.broadcast(sizes, src=0, group=self._control)
            parts = [torch.empty(size, dtype=torch.uint8) for size in sizes.tolist()]
            for part in parts:
                dist.broadcast(part, src=0)
        tree, arrays = (part.numpy().tobytes() for part in parts)
        told = restore(json.loads(tree), load(arrays))
        return told["what"], told["values"]


@contextmanager
def as_rank_lost(*, only_of_sockets: bool = False) -> Iterator[None]:
    """Errors of torch.distributed, which speak of sockets, as the loss of a rank; inside the model there are others too."""
    try:
        yield
    except RuntimeError as error:
        of_a_socket = isinstance(error, dist.DistError) or "gloo" in str(error)
        if isinstance(error, RankLost) or (only_of_sockets and not of_a_socket):
            raise
        message = str(error).strip().splitlines()[0]
        raise RankLost(f"a rank of the trainer has ended or does not answer: {message}") from error


@contextmanager
def connected(
    store: dist.Store, *, rank: int, size: int, device: torch.device, wait_seconds: float
) -> Iterator[ConnectedRanks]:
    """Meet the other ranks in a store; `wait_seconds` is the deadline of every collective."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    deadline = timedelta(seconds=wait_seconds)
    with as_rank_lost():
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=deadline)
    try:
        with as_rank_lost():
            # Every rank makes it at the same place: a new group is itself a meeting of all.
            control = dist.new_group(backend="gloo", timeout=FOREVER)
        yield ConnectedRanks(device=device, control=control)
    finally:
        dist.destroy_process_group()


class ShardedTrainStep(TrainStep):
    ranks: ConnectedRanks

    # Methods of rank 0. Each sends its command to the other ranks, which do their part.

    def gradients(self, batch: Batch, *, beta: float) -> StepResult:
        log_z = self.policy.log_z
        start = None if log_z is None or not log_z.started else float(log_z.start)
        return self._lead("gradients", batch=batch, log_z_start=start, beta=beta)

    def move(
        self, learning_rate: float, *, nats: float | None = None, of: Sequence[int] = (), measure: bool = False
    ) -> dict[str, float]:
        return self._lead("move", learning_rate=learning_rate, nats=nats, of=of, measure=measure)

    def restart_log_z(self) -> None:
        self._lead("restart_log_z")

    def weights(self, version: int) -> Weights:
        """Tensors that are gathered, in the host memory of rank 0, when they are looked at."""
        return Weights(version=version, tensors=GatheredTensors(self))

    def canary(self, published: Weights) -> np.ndarray:
        """Of the weights as they are on the ranks: what was lost on the way from here shows."""
        return self._lead("canary")

    @property
    def is_finite(self) -> bool:
        # A rank that is lost does not answer, and nothing is known of its part.
        return not self.ranks.lost and self._lead("all_finite")

    def state(self) -> dict[str, Tensor]:
        return self._lead("optimizer_state")

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over the state of an optimizer of any number of ranks."""
        # The command has the shapes alone; the tensors are spread one at a time.
        shapes = {name: list(tensor.shape) for name, tensor in state.items()}
        self._lead("take_optimizer_state", own={"state": state}, shapes=shapes)

    def whole_weights(self) -> dict[str, Tensor]:
        """Tensors of the model for a checkpoint, in host memory; tied tensors are one."""
        return self._lead("model_state")

    def _lead(self, what: str, *, own: Mapping[str, Any] | None = None, **values: Any) -> Any:
        """Have every rank call `_{what}` with these values; `own` are rank 0's alone."""
        try:
            with as_rank_lost(only_of_sockets=True):
                # Before the own part, whose collectives wait for the other ranks.
                self.ranks.tell(what, **values)
                return getattr(self, f"_{what}")(**values, **(own or {}))
        except NonFiniteLoss:  # all ranks have met it
            raise
        except BaseException:
            # Errors of this rank alone and Ctrl-C count too: the other ranks are then in the middle of a command.
            self.ranks.lost = True
            raise

    def follow(self, what: str, values: Mapping[str, Any]) -> None:
        """The command of rank 0 for this one."""
        # All ranks meet a loss that is not finite, and rank 0 decides what becomes of the run.
        with suppress(NonFiniteLoss), as_rank_lost(only_of_sockets=True):
            getattr(self, f"_{what}")(**values)
        # Rank 0 alone asks whether a step was finished.
        self.moved = False

    # What every rank does. Tensors that are gathered or spread are the same on all ranks, and in the same order.

    def _gradients(self, batch: Batch, log_z_start: float | None, beta: float) -> StepResult:
        log_z = self.policy.log_z
        if log_z is not None and self.ranks.rank > 0:  # a resumed trainer knows of it, its ranks do not
            log_z.started = log_z_start is not None
            if log_z_start is not None:
                log_z.start.fill_(log_z_start)
        return super().gradients(batch, beta=beta)

    _move, _restart_log_z = TrainStep.move, TrainStep.restart_log_z

    @torch.no_grad()
    def _canary(self) -> np.ndarray:
        tokens = torch.from_numpy(canary_tokens(self.policy.vocabulary, CANARY_TOKENS)).long()
        packed = pack([tokens[:1]], [[tokens[1:]]], device=self.policy.device)
        return self.policy.forward(packed, temperature=1.0).log_pi_N.double().cpu().numpy()

    def _all_finite(self) -> bool:
        parts = [local_part(parameter) for parameter in self.policy.model.parameters()]
        return float(self.ranks.sum_(torch.tensor(float(sum(int((~p.isfinite()).sum()) for p in parts))))) == 0.0

    def _parameter(self, name: str) -> Tensor:
        parameter = self.policy.model.get_parameter(name)
        return whole_tensor(parameter, parameter)

    def _model_state(self) -> dict[str, Tensor]:
        found: dict[int, Tensor] = {}
        tensors = self.policy.model.state_dict(keep_vars=True)
        if has_lora(self.policy.model):
            tensors = {name: tensor for name, tensor in tensors.items() if ".lora_" in name}
        for tensor in tensors.values():
            # Tied parameters are one object: gathered once and written once.
            if id(tensor) not in found:
                found[id(tensor)] = self._kept(whole_tensor(tensor, tensor))
        return {name: found[id(tensor)] for name, tensor in tensors.items()}

    def _optimizer_state(self) -> dict[str, Tensor]:
        # The number of steps is the same everywhere; heads are whole on every rank.
        return {
            name: self._kept(whole_tensor(tensor, tensor if tensor.ndim == 0 else self._parameter_of(name)))
            for name, tensor in self.optimizer.state().items()
        }

    def _parameter_of(self, name: str) -> Tensor:
        """The parameter that `adam.3.exp_avg` belongs to."""
        return self.optimizer.parameters[int(name.split(".")[1])]

    def _kept(self, whole: Tensor) -> Tensor:
        """Only rank 0 keeps the gathered tensor. Other ranks would need the memory of all of it."""
        return whole if self.ranks.rank == 0 else whole.new_empty(0)

    @torch.no_grad()
    def _take_optimizer_state(self, shapes: Mapping[str, list[int]], state: Mapping[str, Tensor] | None = None) -> None:
        """Every rank takes its rows of what rank 0 has."""
        own: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            parameter, whole = self._parameter_of(name), None if state is None else state[name]
            if shape and is_sharded(parameter):
                own[name] = own_rows(whole, parameter).cpu()
            else:  # of a head, or the number of steps: the sum over ranks of which rank 0 alone has it
                own[name] = self.ranks.sum_(torch.zeros(shape) if whole is None else whole.cpu().clone())
        self.optimizer.load_state(own)


class GatheredTensors(Mapping[str, Tensor]):
    """The parameters that train, by name, each gathered when it is looked at: a whole model need not fit on rank 0."""

    def __init__(self, step: ShardedTrainStep) -> None:
        self._step = step
        self._names = [name for name, found in step.policy.model.named_parameters() if found.requires_grad]

    def __getitem__(self, name: str) -> Tensor:
        """The whole parameter, in host memory."""
        return self._step._lead("parameter", name=name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
