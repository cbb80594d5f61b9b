"""One optimizer step: batch -> micro-batches -> gradients -> clipped AdamW update.

Where a micro-batch holds all that a gradient depends on, it back-propagates its share of the loss, divided by the totals
of the step. Otherwise (a prompt spread over micro-batches; a loss that couples the whole batch) a first pass without
gradients collects what the model says, the objective turns it into one coefficient per number, and a second pass
back-propagates those. Both give the same gradients (a test compares them).

Gradients and the move are two calls. What the pass has found is read in between: the rate of an update depends on the drift
of its own batch, and nothing moves unless losses and gradient are finite. What is sent to a device is pinned, and
micro-batches are packed while it computes those before.

Where a trainer has several ranks, each runs this with the same batch and computes its share of the micro-batches: whole
prompts where there are enough of them, otherwise single responses. A sharded model computes on all ranks at once, so those
with fewer micro-batches than others take part with empty ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from tba.models.policy import PolicyModel
from tba.models.sharding import ALONE, Ranks
from tba.models.weights import make_weights
from tba.objectives.objective import Objective
from tba.observe.metrics import reduce_metrics
from tba.runtime.workers import Workers
from tba.trainer.batch import (
    Budget,
    MicroBatch,
    deal_prompts,
    deal_responses,
    empty_micro_batch,
    pack_responses,
    without_rounding,
)
from tba.trainer.optimizer import MasterAdamW
from tba.types import Batch, Forward, Loss, Weights

MEASURED_RESPONSES = 32
"""Responses whose change by an update is measured."""
TRIALS, NEAR, MOST_STRETCH = 4, 0.25, 30.0
"""Lengths of the first update that are tried at most, the log of a factor that needs no other, and the largest factor."""
LEAST_UPDATE_DRIFT = 1e-6
"""Nats that a first update moves log_pi by at least, where it follows a gradient."""

LEAST_WORK = 2e9
"""Floating-point operations of a full micro-batch, forward and backward, below which one thread computes all of them. Here
two workers cost as much processor time as one (0.2M parameters, 1,024 tokens); below, they mostly wait for Python's lock."""
MOST_PENDING = 4 * 2**30
"""Bytes of the gradients that workers have in their hands: large models have fewer workers."""

Piece = TypeVar("Piece")
Found = TypeVar("Found")


class NonFiniteLoss(RuntimeError):
    """The loss or the gradient is NaN or infinite; the optimizer has not moved."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepResult:
    """StepResult(metrics={"loss": 0.31, "grad_norm": 1.2}, outputs=Forward(...))"""

    metrics: Mapping[str, float]
    outputs: Forward
    """Outputs of the model for the whole batch before the update, without gradients."""

    @property
    def entropy(self) -> float:
        """Mean over tokens."""
        return float(self.outputs.entropy_N.mean()) if self.outputs.entropy_N is not None else 0.0


class TrainStep:
    """Computes gradients of an objective and applies them."""

    def __init__(
        self,
        policy: PolicyModel,
        objective: Objective,
        optimizer: MasterAdamW,
        *,
        budget: Budget,
        temperature: float,
        ranks: Ranks = ALONE,
        workers: int = 1,
    ) -> None:
        """`workers` threads compute micro-batches side by side on a CPU; what comes of them does not depend on how many."""
        self.policy = policy
        self.ranks = ranks
        self.objective = objective
        self.optimizer = optimizer
        if ranks.size > 1 and (not policy.packed or policy.switch is not None):
            # A micro-batch may then take several passes, and ranks that compute together must do so equally often.
            budget = replace(budget, share_prompts=False, max_responses=1)
        elif not policy.packed:
            budget = replace(budget, share_prompts=False)
        self.budget = budget
        self.temperature = temperature
        self._passed: tuple[Batch, StepResult] | None = None
        """The batch whose gradients wait for their update."""
        # Models that switch rotary angles by length do so in a buffer, which passes would share.
        side_by_side = policy.device.type == "cpu" and ranks.size == 1 and policy.packed and policy.switch is None
        size = policy.model.num_parameters()
        workers = min(workers, MOST_PENDING // (size * policy.model.dtype.itemsize))
        work = 6.0 * size * budget.max_tokens
        self._workers = Workers(workers) if side_by_side and workers > 1 and work >= LEAST_WORK else None
        self.moved = False
        """Whether the optimizer has begun to move weights in a step that its caller has not finished."""

    def weights(self, version: int) -> Weights:
        """The weights that train, as they are now, to be published as this version."""
        return make_weights(self.policy.model, version=version)

    def canary(self, published: Weights) -> np.ndarray:
        """Log-probs of the canary tokens under what was published."""
        return self.policy.canary(published.tensors)

    @property
    def is_finite(self) -> bool:
        return all(bool(torch.isfinite(parameter).all()) for parameter in self.policy.model.parameters())

    def __call__(self, batch: Batch, *, beta: float, learning_rate: float) -> StepResult:
        """One update: gradients, then a step of this rate."""
        result = self.gradients(batch, beta=beta)
        return replace(result, metrics={**result.metrics, **self.move(learning_rate)})

    def move(
        self, learning_rate: float, *, nats: float | None = None, of: Sequence[int] = (), measure: bool = False
    ) -> dict[str, float]:
        """Make the update of the last gradients. With `nats` it is then scaled until it moves log_pi of the responses `of`
        by so many nats (none = of all). Returns the norm of the gradients and the rate. With `nats` it also returns the
        change of those responses, and with `measure` the change of all responses."""
        assert self._passed is not None, "there are gradients"
        (batch, result), self._passed = self._passed, None
        # `.item()` waits for the device: nothing moves before the norm is known to be finite.
        norm = self.optimizer.clip_gradients().item()
        if not math.isfinite(norm):
            self.optimizer.drop_gradients()
            raise NonFiniteLoss(f"gradient norm is {norm} (loss {result.metrics['loss']}).")
        if not batch.totals.responses:  # no response has weight: Adam's momentum alone would move the weights
            self.optimizer.drop_gradients()
            return {"grad_norm": norm, "learning_rate": learning_rate}
        self.moved = True
        self.optimizer.step(learning_rate)
        found = {"grad_norm": norm, "learning_rate": learning_rate}
        if nats is not None:
            factor, found["update_drift"] = self._stretch(batch, result.outputs, nats, of)
            found["learning_rate"] *= factor
        if measure:
            found["own_movement"] = self.update_drift(batch, result.outputs)
        return found

    def _stretch(self, batch: Batch, before: Forward, nats: float, of: Sequence[int]) -> tuple[float, float]:
        """Make the update just made as much longer or shorter as it takes to move log_pi so far; returns the factor and how
        far it moved, 0 where it follows no gradient."""
        whole, factor, moved = 1.0, 1.0, 0.0
        for _ in range(TRIALS):
            moved = self.update_drift(batch, before, of)
            if not self.is_exact:
                moved = without_rounding(moved, float(batch.lengths.float().mean()))
            if moved < LEAST_UPDATE_DRIFT:  # the gradient is nothing, or rounding noise
                return whole, 0.0
            factor = min(MOST_STRETCH, max(1.0 / MOST_STRETCH, nats / moved))
            self.optimizer.stretch(factor)
            whole *= factor
            if abs(math.log(factor)) < NEAR:
                break
        return whole, factor * moved

    @property
    def is_exact(self) -> bool:
        """Whether the policy computes in fp32."""
        return self.policy.model.dtype == torch.float32

    def update_drift(self, batch: Batch, before: Forward, of: Sequence[int] = ()) -> float:
        """Nats that log_pi has moved since these outputs of the batch: mean |change| of a few of the responses `of` (none =
        of all)."""
        among = of or range(len(batch.lengths))
        count = min(len(among), MEASURED_RESPONSES)
        # Neighbours are responses to one prompt: those that are measured are spread over all prompts.
        responses = [among[index * len(among) // count] for index in range(count)]
        change_R = torch.zeros(len(responses), device=self.policy.device)
        dealt = deal_responses(batch, self.budget, responses, num_ranks=self.ranks.size)
        for forward, micro_batch in self._computed(self._own_micro_batches(batch, dealt)):
            moved_N = forward.log_pi_N - before.log_pi_N[micro_batch.tokens_N]
            chosen_N = torch.where(batch.loss_mask_N.to(moved_N.device)[micro_batch.tokens_N], moved_N, 0.0)
            place = torch.tensor([responses.index(response) for response in micro_batch.responses.tolist()]).long()
            place_N = torch.repeat_interleave(place, batch.lengths[micro_batch.responses]).to(moved_N.device)
            change_R.index_add_(0, place_N, chosen_N.float())
        # Each response is computed on one rank, and is 0 on the others.
        self.ranks.sum_(change_R)
        return float(change_R.abs().mean())

    def gradients(self, batch: Batch, *, beta: float) -> StepResult:
        """Leave the gradients of the whole batch in the optimizer's weights; none where the loss is not finite."""
        try:
            result = self._pass_over(batch, beta=beta)
        except NonFiniteLoss:
            self.optimizer.drop_gradients()
            raise
        self._passed = batch, result
        return result

    def _pass_over(self, batch: Batch, *, beta: float) -> StepResult:
        host, batch = batch, batch.to(self.policy.device)  # packing looks at single tokens: on the host that is free
        log_z, num_ranks = self.policy.log_z, self.ranks.size
        by_response = partial(deal_responses, host, self.budget, range(len(host.lengths)), num_ranks=num_ranks)
        if log_z is not None and not log_z.started and batch.totals.responses:
            # The VarGrad estimate by the policy as it is now: it costs a forward pass, but only where a learned log Z
            # starts, and the policies that generated may be many.
            log_pi_N = self._gather(batch, self._own_micro_batches(host, by_response())).forward.log_pi_N
            gap_PK = batch.sum_per_response(batch.log_ref_N - log_pi_N)
            first = float((gap_PK + batch.reward_PK / beta)[batch.weight_PK > 0].mean())
            if math.isfinite(first):  # otherwise the loss is not either, and nothing may move
                log_z.start_at(first)
        # None where a prompt exceeds the budget, or a rank would get no prompt: single responses are then dealt.
        whole = deal_prompts(host, self.budget, num_ranks=num_ranks)
        if whole is not None and (self.objective.coupling != "batch" or len(whole[0]) == num_ranks == 1):
            return self._one_pass(host, batch, whole, beta=beta)
        return self._two_passes(host, batch, by_response(), beta=beta)

    def restart_log_z(self) -> None:
        """Let a learned log Z begin again at the next batch's estimate: after a reference reset it is of another target."""
        if self.policy.log_z is not None:
            self.policy.log_z.started = False
            self.optimizer.forget(self.policy.log_z.parameters())

    def _one_pass(self, host: Batch, batch: Batch, dealt: list[list[list[int]]], *, beta: float) -> StepResult:
        """`dealt`: the prompts of each micro-batch of each rank."""
        K, losses, outputs = batch.shape[1], [], GatheredOutputs(batch)
        own = dealt[self.ranks.rank]
        responses = [[[prompt * K + k for prompt in prompts for k in range(K)] for prompts in parts] for parts in dealt]

        def compute(piece: tuple[int, MicroBatch]) -> tuple[tuple[MicroBatch, Forward, Loss | None], Tensor]:
            index, micro_batch = piece
            forward = self._forward(micro_batch)
            # An empty micro-batch, so that all ranks make as many passes: the gradient must be 0, not missing.
            if index >= len(own):
                return (micro_batch, forward, None), _sum_of_nothing(forward)
            loss = self.objective(batch.take(own[index]), forward, beta=beta)
            return (micro_batch, forward, loss), loss.value

        pieces = enumerate(self._own_micro_batches(host, responses))
        for index, (micro_batch, forward, loss) in enumerate(self._back_propagated(compute, pieces)):
            if loss is not None:
                losses.append((loss, len(own[index])))
            outputs.add(forward, micro_batch)
        outputs.sum_over(self.ranks)
        return _result(losses, outputs.forward, self.ranks)

    def _two_passes(self, host: Batch, batch: Batch, dealt: list[list[list[int]]], *, beta: float) -> StepResult:
        """`dealt`: the responses of each micro-batch of each rank. The objective sees the whole batch on every rank."""
        # A list, since both passes compute the same micro-batches.
        micro_batches = list(self._own_micro_batches(host, dealt))
        outputs = self._gather(batch, micro_batches)
        leaves = outputs.with_gradients()
        loss = self.objective(batch, leaves, beta=beta)
        # d loss / d each number that the model outputs, by output
        names = [name for name in TRAINED if getattr(leaves, name) is not None]
        found = torch.autograd.grad(loss.value, [getattr(leaves, name) for name in names], allow_unused=True)
        coefficients = {name: gradient for name, gradient in zip(names, found) if gradient is not None}

        def compute(micro_batch: MicroBatch) -> tuple[None, Tensor]:
            return None, _weighted_sum(self._forward(micro_batch), coefficients, micro_batch)

        for _ in self._back_propagated(compute, micro_batches):
            pass
        # ALONE, since every rank has the loss of the whole batch already.
        return _result([(loss, batch.shape[0])], outputs.forward, ALONE)

    @torch.no_grad()
    def _gather(self, batch: Batch, micro_batches: Iterable[MicroBatch]) -> GatheredOutputs:
        outputs = GatheredOutputs(batch)
        for forward, micro_batch in self._computed(micro_batches):
            outputs.add(forward, micro_batch)
        outputs.sum_over(self.ranks)
        return outputs

    def _computed(self, micro_batches: Iterable[MicroBatch]) -> Iterator[tuple[Forward, MicroBatch]]:
        """Outputs without gradients."""

        def compute(micro_batch: MicroBatch) -> tuple[Forward, MicroBatch]:
            with torch.no_grad():  # each thread has its own
                return self._forward(micro_batch), micro_batch

        in_order = map if self._workers is None else self._workers.in_order
        return in_order(compute, micro_batches)

    def _own_micro_batches(self, batch: Batch, dealt: list[list[list[int]]]) -> Iterator[MicroBatch]:
        """This rank's micro-batches of the responses dealt to all ranks, as many as the rank with the most has; each is
        packed when it is asked for."""
        own = dealt[self.ranks.rank]
        for responses in own:
            yield pack_responses(batch, responses, device=self.policy.device)
        for _ in range(max(map(len, dealt)) - len(own)):
            yield empty_micro_batch(batch, device=self.policy.device)

    def _forward(self, micro_batch: MicroBatch) -> Forward:
        forward = self.policy.forward(micro_batch.packed, temperature=self.temperature)
        return forward if len(micro_batch.responses) else forward.nothing()

    def _back_propagated(
        self, compute: Callable[[Piece], tuple[Found, Tensor]], pieces: Iterable[Piece]
    ) -> Iterator[Found]:
        """Compute pieces of the loss and leave its gradients in the optimizer's weights; yields the rest in order.

        Gradients are added in the order of the pieces, so that they are the same bit for bit however many workers there are.
        """
        if self._workers is None:
            for piece in pieces:
                found, value = compute(piece)
                # Ranks are averaged over where gradients meet, and a loss is the sum of theirs.
                (value * self.ranks.size if self.ranks.size > 1 else value).backward()
                self.optimizer.accumulate()
                yield found
            return
        parameters = self.optimizer.parameters

        def differentiate(piece: Piece) -> tuple[Found, tuple[Tensor | None, ...]]:
            found, value = compute(piece)
            # Not backward(): threads would add to the same .grad at once, in any order.
            return found, torch.autograd.grad(value, parameters, allow_unused=True)

        for found, gradients in self._workers.in_order(differentiate, pieces):
            for parameter, gradient in zip(parameters, gradients):
                if gradient is not None:
                    # A gradient may share its memory with another one, so that the first is copied.
                    parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad.add_(gradient)
            self.optimizer.accumulate()
            yield found


class GatheredOutputs:
    """Outputs of the model for a whole batch, put together from its micro-batches."""

    def __init__(self, batch: Batch) -> None:
        self._shapes = {"log_pi_N": len(batch.token_ids_N), "entropy_N": len(batch.token_ids_N)}
        self._shapes |= {"values_N": len(batch.token_ids_N), "log_z_P": batch.shape[0]}
        self._tensors: dict[str, Tensor] = {}

    def add(self, forward: Forward, micro_batch: MicroBatch) -> None:
        for name, length in self._shapes.items():
            part = getattr(forward, name)
            if part is None:
                continue
            whole, index = self._tensors.setdefault(name, part.new_zeros(length)), micro_batch.tokens_N
            if name == "log_z_P":  # that of a prompt in several micro-batches is taken once
                index, part = micro_batch.prompts[micro_batch.begins], part[micro_batch.begins]
            whole[index.to(whole.device)] = part.detach()

    def sum_over(self, ranks: Ranks) -> None:
        """Take what other ranks have computed: each number is of one rank, and 0 on the others."""
        for tensor in self._tensors.values():
            ranks.sum_(tensor)

    @property
    def forward(self) -> Forward:
        return Forward(**{name: tensor.detach() for name, tensor in self._tensors.items()})

    def with_gradients(self) -> Forward:
        """The same outputs as leaves of a graph."""
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in self._tensors.items()}
        return Forward(**leaves)


TRAINED = ("log_pi_N", "values_N", "log_z_P")
"""Parts of Forward that gradients go through."""


def _weighted_sum(forward: Forward, coefficients: Mapping[str, Tensor], micro_batch: MicroBatch) -> Tensor:
    """Whose gradient is the loss's; log Z counts in the micro-batch where its prompt begins."""
    total = forward.log_pi_N.new_zeros(())
    for name, coefficient in coefficients.items():
        if name == "log_z_P":
            part = coefficient[micro_batch.prompts] * micro_batch.begins
        else:
            part = coefficient[micro_batch.tokens_N]
        total = total + (getattr(forward, name) * part).sum()
    return total


def _sum_of_nothing(forward: Forward) -> Tensor:
    """0, whose gradient goes through all of the model."""
    parts = [getattr(forward, name).sum() for name in TRAINED if getattr(forward, name) is not None]
    return torch.stack(parts).sum()


def _result(losses: list[tuple[Loss, int]], outputs: Forward, ranks: Ranks) -> StepResult:
    """Of the losses of all ranks."""
    read = _read([{**loss.metrics, "loss": loss.value} for loss, _ in losses])
    # Of all ranks before the check: a loss that is not finite on one raises on all, or the others would wait for it.
    found = ranks.concatenated([(numbers, weight) for numbers, (_, weight) in zip(read, losses)])
    for numbers, _ in found:
        if not math.isfinite(numbers["loss"]):
            raise NonFiniteLoss(f"loss is {numbers['loss']}.")
    parts = [
        # NaN = nothing in this micro-batch counted for the metric (mean_where).
        ({name: number for name, number in numbers.items() if not math.isnan(number)}, weight)
        for numbers, weight in found
    ]
    return StepResult(metrics=reduce_metrics(parts), outputs=outputs)


def _read(metrics: list[dict[str, float | Tensor]]) -> list[dict[str, float]]:
    """All numbers from the device at once."""
    tensors = [value for part in metrics for value in part.values() if isinstance(value, Tensor)]
    numbers = iter(torch.stack([value.detach().double().reshape(()) for value in tensors]).tolist())
    return [
        {name: next(numbers) if isinstance(value, Tensor) else value for name, value in part.items()}
        for part in metrics
    ]
