"""An optimizer step over several ranks, as rank 0 sees it: the TrainStep of one process, but for who computes.

Every rank makes one of these from the same config and model. On rank 0 each method first tells the other ranks, which then
do the same (`follow`), so that the trainer's loop, its checkpoints and its publications need not know. What a searcher or a
file gets are whole tensors under the model's own names, gathered one at a time: a checkpoint does not tell how many ranks
wrote it, and a run may go on with another number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tba.models.load import has_lora
from tba.models.weights import CANARY_TOKENS, canary_tokens
from tba.policy.model import PolicyModel, is_sharded, local_part
from tba.policy.packing import pack
from tba.train.ranks import ConnectedRanks, RankLost, first_words, is_of_a_socket
from tba.train.step import NonFiniteLoss, StepResult, TrainStep
from tba.types import Batch, Weights


class ShardedTrainStep(TrainStep):
    """A TrainStep whose model is spread over ranks."""

    ranks: ConnectedRanks

    def __init__(self, policy: PolicyModel, *arguments: Any, ranks: ConnectedRanks, **options: Any) -> None:
        """`policy` is sharded already, and the optimizer is over this rank's part of it."""
        super().__init__(policy, *arguments, ranks=ranks, **options)
        self._gathering = False
        """Whether the other ranks are in the middle of giving out their parts."""
        self._gathered = -1
        """Version that the weights had when they were last given out."""

    # What rank 0 is asked for. The others are told of it, and do their part.

    def gradients(self, batch: Batch, *, beta: float) -> StepResult:
        log_z = self.policy.log_z
        start = None if log_z is None or not log_z.started else float(log_z.start)
        return self._lead("gradients", batch=batch, log_z_start=start, beta=beta)

    def move(
        self, learning_rate: float, *, nats: float | None = None, of: Sequence[int] = (), measure: bool = False
    ) -> dict[str, float]:
        return self._lead("move", learning_rate=learning_rate, nats=nats, of=of, measure=measure)

    def restart_log_z(self) -> None:
        self._lead("restart")

    def weights(self, version: int) -> Weights:
        """Tensors that are gathered, in the host memory of rank 0, when they are looked at."""
        self._gathered = version
        return Weights(version=version, tensors=GatheredTensors(self))

    def canary(self, published: Weights) -> np.ndarray:
        """Of the weights as they are on the ranks, where those were published: what was lost on the way from here shows."""
        if published.version == self._gathered:
            return self._lead("own_canary")
        # A reference of the past, which only a resumed run publishes: the ranks take it in for a moment.
        return self._lead("canary_of", own={"tensors": published.tensors})

    @property
    def is_finite(self) -> bool:
        return not self.ranks.lost and not self._gathering and self._lead("all_finite")

    def state(self) -> dict[str, Any]:
        """That of the optimizer, of all ranks."""
        return self._lead("optimizer_state")

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over the state of an optimizer of any number of ranks."""
        self._lead("take_optimizer_state", own={"state": state})

    def whole_weights(self) -> dict[str, Tensor]:
        """What a checkpoint holds of the model, in host memory; tied tensors are one."""
        return self._lead("model_state")

    def gathered(self, names: Sequence[str]) -> Iterator[Tensor]:
        """Whole parameters, one after the other. All of them are gathered, also where the caller wants no more."""
        self._lead("begin_parameters", names=tuple(names))
        rest, self._gathering = iter(names), True
        try:
            for name in rest:
                yield self._together(partial(self._parameter, name))
        finally:
            for name in rest:
                self._together(partial(self._parameter, name))
            self._gathering = False

    def _lead(self, what: str, *, own: Mapping[str, Any] | None = None, **values: Any) -> Any:
        """Have every rank call `_{what}` with these values; `own` are rank 0's alone."""
        self._together(partial(self.ranks.tell, what, **values))
        return self._together(partial(getattr(self, f"_{what}"), **values, **(own or {})))

    def _together(self, call: Callable[[], Any]) -> Any:
        """What all ranks do now; where it fails nothing more can be done together."""
        try:
            return call()
        except NonFiniteLoss:  # all ranks have met it
            raise
        except BaseException as error:
            # Also what this rank alone has met, or Ctrl-C: the others are left in the middle of what they were told.
            self.ranks.lost = True
            if isinstance(error, RuntimeError) and not isinstance(error, RankLost) and is_of_a_socket(error):
                raise RankLost(first_words(error)) from error
            raise

    def follow(self, what: str, values: Mapping[str, Any]) -> None:
        """What rank 0 has told this one."""
        with suppress(NonFiniteLoss):  # rank 0 has met it too, and decides what becomes of the run
            getattr(self, f"_{what}")(**values)
        self.moved = False

    # What every rank does

    def _gradients(self, batch: Batch, log_z_start: float | None, beta: float) -> StepResult:
        log_z = self.policy.log_z
        if log_z is not None and self.ranks.rank > 0:  # a resumed trainer knows of it, its ranks do not
            log_z.started = log_z_start is not None
            if log_z_start is not None:
                log_z.start.fill_(log_z_start)
        return super().gradients(batch, beta=beta)

    def _move(self, **values: Any) -> dict[str, float]:
        return super().move(**values)

    def _restart(self) -> None:
        super().restart_log_z()

    @torch.no_grad()
    def _own_canary(self) -> np.ndarray:
        tokens = torch.from_numpy(canary_tokens(self.policy.vocabulary, CANARY_TOKENS)).long()
        packed = pack([tokens[:1]], [[tokens[1:]]], device=self.policy.device)
        return self.policy.forward(packed, temperature=1.0).log_pi_N.double().cpu().numpy()

    @torch.no_grad()
    def _canary_of(self, tensors: Mapping[str, Tensor] | None = None) -> np.ndarray:
        trained = {name: found for name, found in self.policy.model.named_parameters() if found.requires_grad}
        before = {name: local_part(parameter).clone() for name, parameter in trained.items()}
        for name, parameter in trained.items():
            part = local_part(parameter)
            rows = torch.empty_like(part, device="cpu")
            self.ranks.scatter_(rows, None if tensors is None else tensors[name].to(rows.dtype))
            part.copy_(rows)
        canary = self._own_canary()
        for name, parameter in trained.items():
            local_part(parameter).copy_(before[name])
        return canary

    def _all_finite(self) -> bool:
        parts = [local_part(parameter) for parameter in self.policy.model.parameters()]
        return float(self.ranks.sum_(torch.tensor(float(sum(int((~p.isfinite()).sum()) for p in parts))))) == 0.0

    def _begin_parameters(self, names: Sequence[str]) -> None:
        if self.ranks.rank > 0:  # rank 0 gathers each when it is wanted
            for name in names:
                self._parameter(name)

    def _parameter(self, name: str) -> Tensor | None:
        return self._whole(self.policy.model.get_parameter(name))

    def _model_state(self) -> dict[str, Tensor]:
        found: dict[int, Tensor | None] = {}
        tensors = self.policy.model.state_dict(keep_vars=True)
        if has_lora(self.policy.model):
            tensors = {name: tensor for name, tensor in tensors.items() if ".lora_" in name}
        for tensor in tensors.values():
            if id(tensor) not in found:
                found[id(tensor)] = self._whole(tensor)
        whole = {name: found[id(tensor)] for name, tensor in tensors.items()}
        return {name: tensor for name, tensor in whole.items() if tensor is not None}

    def _optimizer_state(self) -> dict[str, Any]:
        state = self.optimizer.state()
        shapes = [parameter.shape for parameter in self.optimizer.parameters]
        spread = [is_sharded(parameter) for parameter in self.optimizer.parameters]

        def whole(index: int, tensor: Tensor) -> Tensor | None:
            if not spread[index] or tensor.ndim == 0:  # a head's, or the number of steps
                return tensor.detach().to("cpu", copy=True)
            return self.ranks.gather(tensor, shapes[index])

        masters = [whole(index, master) for index, master in enumerate(state["masters"])]
        moments = {
            index: {name: whole(index, value) for name, value in found.items()}
            for index, found in state["moments"].items()
        }
        return {"masters": masters, "moments": moments}

    @torch.no_grad()
    def _take_optimizer_state(self, state: Mapping[str, Any] | None = None) -> None:
        """Every rank takes its rows of what rank 0 has."""
        moments = {} if state is None else state["moments"]
        known = self.ranks.concatenated([{str(index): sorted(found) for index, found in moments.items()}])[0]
        parameters, masters = self.optimizer.parameters, self.optimizer.masters

        def own_rows(index: int, whole: Tensor | None) -> Tensor:
            master = masters[index]
            rows = torch.empty_like(master, device="cpu")
            if is_sharded(parameters[index]):
                self.ranks.scatter_(rows, whole)
            else:
                rows.copy_(whole) if whole is not None else rows.zero_()
                self.ranks.sum_(rows)
            return rows

        def number(whole: Tensor | None) -> Tensor:
            return self.ranks.sum_(torch.zeros(()) if whole is None else whole.clone().float().cpu())

        own: dict[str, Any] = {"masters": [], "moments": {}}
        for index in range(len(masters)):
            own["masters"].append(own_rows(index, None if state is None else state["masters"][index]))
        for text, names in known.items():
            index = int(text)
            whole = moments.get(index, {})
            own["moments"][index] = {
                name: number(whole.get(name)) if name == "step" else own_rows(index, whole.get(name)) for name in names
            }
        self.optimizer.load_state(own)

    def _whole(self, tensor: Tensor) -> Tensor | None:
        if not is_sharded(tensor):
            return tensor.detach().to("cpu", copy=True)
        return self.ranks.gather(local_part(tensor), tensor.shape)


class GatheredTensors(Mapping[str, Tensor]):
    """The parameters that train, by name, each gathered when it is looked at, and then whole on rank 0 alone."""

    def __init__(self, step: ShardedTrainStep) -> None:
        self._step = step
        self._names = [name for name, found in step.policy.model.named_parameters() if found.requires_grad]

    def __getitem__(self, name: str) -> Tensor:
        return next(self._step.gathered([name]))

    def items(self) -> Any:
        """Pairs of name and tensor, for which the ranks are told once."""
        return zip(self._names, self._step.gathered(self._names))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
