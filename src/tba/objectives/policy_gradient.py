"""Policy gradients on whole responses: REINFORCE, RLOO and Proximal RLOO (arXiv 2402.14740; mnoukhov/async_rlhf).

    R_ij = r_ij - beta sum_t (log pi_old - log ref)

Axes: P prompts, K responses per prompt, N tokens of all responses.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from tba.objectives.base import (
    Coupling,
    Needs,
    Objective,
    centred,
    clipped_surrogate,
    leave_one_out,
    mean_over_responses,
    penalised_rewards,
    ratio_metrics,
    ratios,
    token_log_ratios,
)
from tba.types import Batch, Forward, Loss


class Reinforce(Objective):
    """`reinforce`: loss = -mean A log pi, A = R - mean of the prompt's R. No correction for stale data."""

    default_coupling: ClassVar[Coupling] = "response"
    needs: ClassVar[Needs] = Needs(reference=True, group=True, multiplicities=True, own_samples=True)
    default_beta: ClassVar[float] = 0.05

    def __call__(self, batch: Batch, forward: Forward, *, beta: float) -> Loss:
        return_PK = penalised_rewards(batch, beta=beta)
        return _score_function(batch, forward, centred(return_PK, batch.weight_PK))


class RLOO(Objective):
    """`rloo`: loss = -mean A log pi, A = R - mean of the prompt's other R. No correction for stale data."""

    default_coupling: ClassVar[Coupling] = "response"
    needs: ClassVar[Needs] = Needs(reference=True, group=True, multiplicities=True, own_samples=True)
    default_beta: ClassVar[float] = 0.05

    def __call__(self, batch: Batch, forward: Forward, *, beta: float) -> Loss:
        advantage_PK = leave_one_out(penalised_rewards(batch, beta=beta), batch.weight_PK)
        return _score_function(batch, forward, advantage_PK)


class ProximalRLOO(Objective):
    """`proximal_rloo`: RLOO's advantage under the clipped ratio of whole responses, for stale data."""

    clip: float = Field(default=0.2, gt=0.0, lt=1.0)
    """Distance from 1 within which the response's ratio pi / pi_behaviour counts: between 1 - clip and 1 + clip."""

    default_coupling: ClassVar[Coupling] = "response"
    needs: ClassVar[Needs] = Needs(reference=True, group=True, behaviour=True, policy=True, multiplicities=True)
    default_beta: ClassVar[float] = 0.05

    def __call__(self, batch: Batch, forward: Forward, *, beta: float) -> Loss:
        advantage_PK = leave_one_out(penalised_rewards(batch, beta=beta), batch.weight_PK)
        ratio_PK = ratios(batch.sum_per_response(token_log_ratios(batch, forward.log_pi_N)))
        loss_PK = clipped_surrogate(advantage_PK, ratio_PK, low=self.clip, high=self.clip)
        metrics = ratio_metrics(ratio_PK, batch.weight_PK > 0, low=self.clip, high=self.clip)
        return Loss(value=mean_over_responses(loss_PK, batch), metrics=metrics)


def _score_function(batch: Batch, forward: Forward, advantage_PK: Tensor) -> Loss:
    # Dropped first: the advantage of a response that does not count may be unknown, and 0 x NaN is NaN.
    advantage_PK = torch.where(batch.weight_PK > 0, advantage_PK, torch.zeros_like(advantage_PK))
    log_pi_PK = batch.sum_per_response(forward.log_pi_N)
    return Loss(value=mean_over_responses(-advantage_PK * log_pi_PK, batch), metrics={})
