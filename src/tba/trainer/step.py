"""One optimizer step: batch -> micro-batches -> gradients -> clipped AdamW update.

Where a micro-batch holds all that a gradient depends on, it back-propagates its share of the loss, divided by the totals
of the step. Otherwise (a prompt spread over micro-batches; a loss that couples the whole batch) a first pass without
gradients collects what the model says, the objective turns it into one coefficient per number, and a second pass
back-propagates those. Both give the same gradients (a test compares them).

Gradients and the move are two calls: the rate of an update depends on the drift of its own batch, and nothing moves unless
losses and gradient are finite.

Where a trainer has several ranks, each computes its share of the micro-batches of the same batch: whole prompts where there
are enough of them, otherwise single responses. Ranks with fewer micro-batches than others take part with empty ones.
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

from tba.models.policy import ALONE, PolicyModel, Ranks
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

MEASURED_RESPONSES = 32  # responses whose change by an update is measured
TRIALS, NEAR, MOST_STRETCH, LEAST_UPDATE_DRIFT = 4, 0.25, 30.0, 1e-6
"""Lengths of the first update that are tried at most, the log of a factor that needs no other, the largest factor, and the
nats that a first update moves log_pi by at least, where it follows a gradient."""
LEAST_WORK = 2e9
"""Floating-point operations of a full micro-batch, forward and backward, below which one thread computes all of them. Here
two workers cost as much processor time as one (0.2M parameters, 1,024 tokens); below, they mostly wait for Python's lock."""
MOST_PENDING = 4 * 2**30  # bytes of the gradients that workers have in their hands: large models have fewer workers

Piece = TypeVar("Piece")
Found = TypeVar("Found")


class NonFiniteLoss(RuntimeError):
    """The loss or the gradient is NaN or infinite; the optimizer has not moved."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepResult:
    """StepResult(metrics={"loss": 0.31, "grad_norm": 1.2}, outputs=Forward(...))"""

    metrics: Mapping[str, float]
    outputs: Forward  # outputs of the model for the whole batch before the update, without gradients

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
        self.policy, self.objective, self.optimizer, self.ranks = policy, objective, optimizer, ranks
        if ranks.size > 1 and (not policy.packed or policy.switch is not None):
            # A micro-batch may then take several passes, and ranks that compute together must do so equally often.
            budget = replace(budget, share_prompts=False, max_responses=1)
        elif not policy.packed:
            budget = replace(budget, share_prompts=False)
        self.budget = budget
        self.temperature = temperature
        self._passed: tuple[Batch, StepResult] | None = None  # the batch whose gradients wait for their update
        # Models that switch rotary angles by length do so in a buffer, which passes would share.
        side_by_side = policy.device.type == "cpu" and ranks.size == 1 and policy.packed and policy.switch is None
        size = policy.model.num_parameters()
        workers = min(workers, MOST_PENDING // (size * policy.model.dtype.itemsize))
        work = 6.0 * size * budget.max_tokens
        self._workers = Workers(workers) if side_by_side and workers > 1 and work >= LEAST_WORK else None
        self.moved = False  # whether the optimizer has begun to move weights in a step that its caller has not finished

    def weights(self, version: int) -> Weights:
        """The weights that train, as they are now, to be published as this version."""
        return make_weights(self.policy.model, version=version)

    def canary(self, published: Weights) -> np.ndarray:
        """Log-probs of the canary tokens under what was published."""
        return self.policy.canary(published.tensors)

    @property
    def is_finite(self) -> bool:
        return all(bool(torch.isfinite(parameter).all()) for parameter in self.policy.model.parameters())

    @property
    def is_exact(self) -> bool:
        """Whether the policy computes in fp32."""
        return self.policy.model.dtype == torch.float32

    def __call__(self, batch: Batch, *, beta: float, learning_rate: float) -> StepResult:
        """One update: gradients, then a step of this rate."""
        result = self.gradients(batch, beta=beta)
        return replace(result, metrics={**result.metrics, **self.move(learning_rate)})

    def move(
        self, learning_rate: float, *, nats: float | None = None, of: Sequence[int] = (), measure: bool = False
    ) -> dict[str, float]:
        """Make the update of the last gradients. With `nats` it is then scaled until it moves log_pi of the responses `of`
        by so many nats (none = of all). Returns the norm of the gradients and the rate. With `nats` it also returns the
        change of those responses, 0 where it follows no gradient, and with `measure` the change of all responses."""
        assert self._passed is not None, "there are gradients"
        (batch, result), self._passed = self._passed, None
        # `.item()` waits for the device: nothing moves before the norm is known to be finite.
        norm = self.optimizer.clip_gradients().item()
        if not math.isfinite(norm):
            self.optimizer.drop_gradients()
            raise NonFiniteLoss(f"gradient norm is {norm} (loss {result.metrics['loss']}).")
        found = {"grad_norm": norm, "learning_rate": learning_rate}
        if not batch.totals.responses:  # no response has weight: Adam's momentum alone would move the weights
            self.optimizer.drop_gradients()
            return found
        self.moved = True
        self.optimizer.step(learning_rate)
        if nats is not None:
            whole = 1.0
            for _ in range(TRIALS):
                moved = self.update_drift(batch, result.outputs, of)
                if not self.is_exact:
                    moved = without_rounding(moved, float(batch.lengths.float().mean()))
                found["update_drift"] = 0.0
                if moved < LEAST_UPDATE_DRIFT:  # the gradient is nothing, or rounding noise
                    break
                factor = min(MOST_STRETCH, max(1.0 / MOST_STRETCH, nats / moved))
                self.optimizer.stretch(factor)
                whole, found["update_drift"] = whole * factor, factor * moved
                if abs(math.log(factor)) < NEAR:
                    break
            found["learning_rate"] *= whole
        if measure:
            found["own_movement"] = self.update_drift(batch, result.outputs)
        return found

    def update_drift(self, batch: Batch, before: Forward, of: Sequence[int] = ()) -> float:
        """Nats that log_pi has moved since these outputs: mean |change| of a few of the responses `of` (none = of all)."""
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
        # Packing looks at single tokens: on the host that is free.
        host, batch, num_ranks = batch, batch.to(self.policy.device), self.ranks.size
        by_response = partial(deal_responses, host, self.budget, range(len(host.lengths)), num_ranks=num_ranks)
        log_z = self.policy.log_z
        if log_z is not None and not log_z.started and batch.totals.responses:
            # The VarGrad estimate by the policy as it is now: it costs a forward pass, but only where a learned log Z
            # starts, and the policies that generated may be many.
            computed = self._computed(self._own_micro_batches(host, by_response()))
            log_pi_N = _put_together(batch, computed, self.ranks).log_pi_N
            gap_PK = batch.sum_per_response(batch.log_ref_N - log_pi_N)
            first = float((gap_PK + batch.reward_PK / beta)[batch.weight_PK > 0].mean())
            if math.isfinite(first):  # otherwise the loss is not either, and nothing may move
                log_z.start_at(first)
        # None where a prompt exceeds the budget, or a rank would get no prompt: single responses are then dealt.
        whole = deal_prompts(host, self.budget, num_ranks=num_ranks)
        try:
            if whole is not None and (self.objective.coupling != "batch" or len(whole[0]) == num_ranks == 1):
                result = self._one_pass(host, batch, whole, beta=beta)
            else:
                result = self._two_passes(host, batch, by_response(), beta=beta)
        except NonFiniteLoss:
            self.optimizer.drop_gradients()
            raise
        self._passed = host, result
        return result

    def restart_log_z(self) -> None:
        """Let a learned log Z begin again at the next batch's estimate: after a reference reset it is of another target."""
        if self.policy.log_z is not None:
            self.policy.log_z.started = False
            self.optimizer.forget(self.policy.log_z.parameters())

    def _one_pass(self, host: Batch, batch: Batch, dealt: list[list[list[int]]], *, beta: float) -> StepResult:
        """`dealt`: the prompts of each micro-batch of each rank."""
        K, own = batch.shape[1], dealt[self.ranks.rank]
        losses: list[tuple[Loss, int]] = []
        responses = [[[prompt * K + k for prompt in prompts for k in range(K)] for prompts in parts] for parts in dealt]

        def compute(piece: tuple[int, MicroBatch]) -> tuple[tuple[MicroBatch, Forward, Loss | None], Tensor]:
            index, micro_batch = piece
            forward = self._forward(micro_batch)
            # An empty micro-batch, so that all ranks make as many passes: the gradient must be 0, not missing.
            if index >= len(own):
                nothing = [getattr(forward, name).sum() for name in TRAINED if getattr(forward, name) is not None]
                return (micro_batch, forward, None), torch.stack(nothing).sum()
            loss = self.objective(batch.take(own[index]), forward, beta=beta)
            return (micro_batch, forward, loss), loss.value

        def computed() -> Iterator[tuple[Forward, MicroBatch]]:
            pieces = enumerate(self._own_micro_batches(host, responses))
            for index, (micro_batch, forward, loss) in enumerate(self._back_propagated(compute, pieces)):
                if loss is not None:
                    losses.append((loss, len(own[index])))
                yield forward, micro_batch

        outputs = _put_together(batch, computed(), self.ranks)
        return _result(losses, outputs, self.ranks)

    def _two_passes(self, host: Batch, batch: Batch, dealt: list[list[list[int]]], *, beta: float) -> StepResult:
        """`dealt`: the responses of each micro-batch of each rank. The objective sees the whole batch on every rank."""
        # A list, since both passes compute the same micro-batches.
        micro_batches = list(self._own_micro_batches(host, dealt))
        outputs = _put_together(batch, self._computed(micro_batches), self.ranks)
        # The same outputs as leaves of a graph.
        found = {name: tensor for name, tensor in vars(outputs).items() if tensor is not None}
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in found.items()}
        loss = self.objective(batch, Forward(**leaves), beta=beta)
        # d loss / d each number that the model outputs, by output
        names = [name for name in TRAINED if name in leaves]
        slopes = torch.autograd.grad(loss.value, [leaves[name] for name in names], allow_unused=True)

        def compute(micro_batch: MicroBatch) -> tuple[None, Tensor]:
            """A weighted sum of the outputs, whose gradient is the loss's."""
            forward = self._forward(micro_batch)
            total = forward.log_pi_N.new_zeros(())
            for name, slope in zip(names, slopes):
                if slope is not None:
                    # log Z counts in the micro-batch where its prompt begins.
                    is_log_z = name == "log_z_P"
                    part = slope[micro_batch.prompts] * micro_batch.begins if is_log_z else slope[micro_batch.tokens_N]
                    total = total + (getattr(forward, name) * part).sum()
            return None, total

        for _ in self._back_propagated(compute, micro_batches):
            pass
        # ALONE, since every rank has the loss of the whole batch already.
        return _result([(loss, batch.shape[0])], outputs, ALONE)

    def _computed(self, micro_batches: Iterable[MicroBatch]) -> Iterator[tuple[Forward, MicroBatch]]:
        """Outputs without gradients."""

        def compute(micro_batch: MicroBatch) -> tuple[Forward, MicroBatch]:
            with torch.no_grad():  # each thread has its own
                return self._forward(micro_batch), micro_batch

        in_order = map if self._workers is None else self._workers.in_order
        return in_order(compute, micro_batches)

    def _own_micro_batches(self, batch: Batch, dealt: list[list[list[int]]]) -> Iterator[MicroBatch]:
        """This rank's micro-batches of the responses dealt to all ranks, as many as the rank with the most has."""
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
        """Compute pieces of the loss and leave its gradients in the optimizer's weights; yields the rest in order. They are
        added in the order of the pieces, so that they are the same bit for bit however many workers there are."""
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


TRAINED = ("log_pi_N", "values_N", "log_z_P")  # parts of Forward that gradients go through


def _put_together(batch: Batch, computed: Iterable[tuple[Forward, MicroBatch]], ranks: Ranks) -> Forward:
    """Outputs of the model for a whole batch, without gradients, from those of the micro-batches of all ranks."""
    (P, _), N = batch.shape, len(batch.token_ids_N)
    outputs: dict[str, Tensor] = {}
    for forward, micro_batch in computed:
        for name, part in vars(forward).items():
            if part is None:
                continue
            index, length = micro_batch.tokens_N, N
            if name == "log_z_P":  # that of a prompt in several micro-batches is taken once
                index, part, length = micro_batch.prompts[micro_batch.begins], part[micro_batch.begins], P
            whole = outputs.setdefault(name, part.new_zeros(length))
            whole[index.to(whole.device)] = part.detach()
    # Each number is of one rank, and 0 on the others.
    return Forward(**{name: ranks.sum_(tensor) for name, tensor in outputs.items()})


def _result(losses: list[tuple[Loss, int]], outputs: Forward, ranks: Ranks) -> StepResult:
    """Of the losses of all ranks."""
    # All numbers from the device at once.
    metrics = [{**loss.metrics, "loss": loss.value} for loss, _ in losses]
    tensors = [value for part in metrics for value in part.values() if isinstance(value, Tensor)]
    read = iter(torch.stack([value.detach().double().reshape(()) for value in tensors]).tolist())
    own = [
        {name: next(read) if isinstance(value, Tensor) else value for name, value in part.items()} for part in metrics
    ]
    # Of all ranks before the check: a loss that is not finite on one raises on all, or the others would wait for it.
    found = ranks.concatenated([(numbers, weight) for numbers, (_, weight) in zip(own, losses)])
    for numbers, _ in found:
        if not math.isfinite(numbers["loss"]):
            raise NonFiniteLoss(f"loss is {numbers['loss']}.")
    parts = [
        # NaN = nothing in this micro-batch counted for the metric (mean_where).
        ({name: number for name, number in numbers.items() if not math.isnan(number)}, weight)
        for numbers, weight in found
    ]
    return StepResult(metrics=reduce_metrics(parts), outputs=outputs)
