"""One optimizer step: batch -> micro-batches -> gradients -> clipped AdamW update.

Whole prompts per micro-batch: each back-propagates its share of the loss, divided by the totals of the step. Prompts
spread over micro-batches: a first pass without gradients collects log_pi, the objective turns it into one coefficient per
token, and a second pass back-propagates those. Both give the same gradients (a test compares them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tba.models.policy import PolicyModel
from tba.objectives.base import Objective
from tba.observe.metrics import reduce_metrics
from tba.train.collate import Budget, MicroBatch, pack_responses, split_responses, split_whole_prompts
from tba.train.optim import MasterAdamW
from tba.types import Batch, Forward, Loss


class NonFiniteLoss(RuntimeError):
    """The loss or the gradient is NaN or infinite; the optimizer has not moved."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepResult:
    """What a step did: metrics, and log_pi of every trained token as it was before the update."""

    metrics: Mapping[str, float]
    log_pi_N: Tensor
    entropy: float


class TrainStep:
    """Computes gradients of an objective and applies them."""

    def __init__(
        self, policy: PolicyModel, objective: Objective, optimizer: MasterAdamW, *, budget: Budget, temperature: float
    ) -> None:
        self.policy = policy
        self.objective = objective
        self.optimizer = optimizer
        self.budget = budget if policy.packed else replace(budget, share_prompts=False)
        self.temperature = temperature

    def __call__(self, batch: Batch, *, beta: float, learning_rate: float) -> StepResult:
        result = self.gradients(batch, beta=beta)
        norm = self.optimizer.clip_gradients()
        if not torch.isfinite(norm):
            raise NonFiniteLoss(f"gradient norm is {norm.item()} (loss {result.metrics['loss']}).")
        self.optimizer.step(learning_rate)
        return replace(result, metrics={**result.metrics, "grad_norm": norm.item(), "learning_rate": learning_rate})

    def gradients(self, batch: Batch, *, beta: float) -> StepResult:
        """Leave the gradients of the whole batch in the optimizer's weights."""
        batch = batch.to(self.policy.device)
        whole = split_whole_prompts(batch, self.budget)
        if whole is not None:
            return self._one_pass(batch, whole, beta=beta)
        return self._two_passes(batch, split_responses(batch, self.budget), beta=beta)

    def _one_pass(self, batch: Batch, parts: list[list[int]], *, beta: float) -> StepResult:
        K, losses, entropy = batch.shape[1], [], 0.0
        log_pi_N = torch.empty_like(batch.log_ref_N)
        for prompts in parts:
            part = batch.take(prompts)
            forward = self._forward(self._pack(part, list(range(len(prompts) * K))))
            loss = self.objective(part, forward, beta=beta)
            self._backward(loss.value)
            losses.append((loss, len(prompts)))
            members = torch.tensor(prompts)[:, None] * K + torch.arange(K)
            log_pi_N[batch.tokens_of(members.flatten()).to(log_pi_N.device)] = forward.log_pi_N.detach()
            entropy += _total(forward.entropy_N)
        return _result(losses, log_pi_N, entropy)

    def _two_passes(self, batch: Batch, parts: list[list[int]], *, beta: float) -> StepResult:
        micro_batches = [self._pack(batch, responses) for responses in parts]
        log_pi_N, entropy = torch.empty_like(batch.log_ref_N), 0.0
        with torch.no_grad():
            for micro_batch in micro_batches:
                forward = self._forward(micro_batch)
                log_pi_N[micro_batch.tokens_N.to(log_pi_N.device)] = forward.log_pi_N
                entropy += _total(forward.entropy_N)
        leaf_N = log_pi_N.requires_grad_()
        loss = self.objective(batch, Forward(log_pi_N=leaf_N), beta=beta)
        _check_finite(loss.value)
        (coefficient_N,) = torch.autograd.grad(loss.value, leaf_N)
        for micro_batch in micro_batches:
            forward = self._forward(micro_batch)
            self._backward((forward.log_pi_N * coefficient_N[micro_batch.tokens_N.to(leaf_N.device)]).sum())
        return _result([(loss, batch.shape[0])], leaf_N.detach(), entropy)

    def _pack(self, batch: Batch, responses: list[int]) -> MicroBatch:
        share = self.budget.share_prompts
        return pack_responses(batch, responses, share_prompts=share, device=self.policy.device)

    def _forward(self, micro_batch: MicroBatch) -> Forward:
        return self.policy.forward(micro_batch.packed, temperature=self.temperature)

    def _backward(self, value: Tensor) -> None:
        _check_finite(value)
        value.backward()
        self.optimizer.accumulate()


def _check_finite(value: Tensor) -> None:
    if not torch.isfinite(value):
        raise NonFiniteLoss(f"loss is {value.item()}.")


def _total(entropy_N: Tensor | None) -> float:
    return 0.0 if entropy_N is None else float(entropy_N.sum())


def _result(losses: list[tuple[Loss, int]], log_pi_N: Tensor, entropy: float) -> StepResult:
    metrics = reduce_metrics([({"loss": loss.value.item(), **loss.metrics}, weight) for loss, weight in losses])
    return StepResult(metrics=metrics, log_pi_N=log_pi_N, entropy=entropy / max(1, len(log_pi_N)))
