"""Losses on whole responses: the policy gradients REINFORCE, RLOO and Proximal RLOO (arXiv 2402.14740;
mnoukhov/async_rlhf), and online DPO.

    R_ij = r_ij - beta sum_t (log pi_old - log ref)    for the policy gradients

Axes: P prompts, K responses per prompt, N tokens of all responses.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid

from tba.objectives.objective import (
    Coupling,
    Needs,
    Objective,
    centred,
    clipped_surrogate,
    leave_one_out,
    mean_over_responses,
    mean_where,
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
        advantage_PK = self._advantage(penalised_rewards(batch, beta=beta), batch.weight_PK)
        # Dropped first: the advantage of a response that does not count may be unknown, and 0 x NaN is NaN.
        advantage_PK = torch.where(batch.weight_PK > 0, advantage_PK, torch.zeros_like(advantage_PK))
        log_pi_PK = batch.sum_per_response(forward.log_pi_N)
        return Loss(value=mean_over_responses(-advantage_PK * log_pi_PK, batch), metrics={})

    def _advantage(self, return_PK: Tensor, weight_PK: Tensor) -> Tensor:
        return centred(return_PK, weight_PK)


class RLOO(Reinforce):
    """`rloo`: loss = -mean A log pi, A = R - mean of the prompt's other R. No correction for stale data."""

    def _advantage(self, return_PK: Tensor, weight_PK: Tensor) -> Tensor:
        return leave_one_out(return_PK, weight_PK)


class ProximalRLOO(Objective):
    """`proximal_rloo`: RLOO's advantage under the clipped ratio of whole responses, for stale data."""

    clip: float = Field(default=0.2, gt=0.0, lt=1.0)
    """Distance from 1 within which the response's ratio pi / pi_behaviour counts: between 1 - clip and 1 + clip."""

    default_coupling: ClassVar[Coupling] = "response"
    needs: ClassVar[Needs] = Needs(reference=True, group=True, behaviour=True, policy=True, multiplicities=True)
    default_beta: ClassVar[float] = 0.05

    def __call__(self, batch: Batch, forward: Forward, *, beta: float) -> Loss:
        advantage_PK = leave_one_out(penalised_rewards(batch, beta=beta), batch.weight_PK)
        # A sum of logs that is clamped once: the product of the tokens' ratios may leave fp32.
        ratio_PK = ratios(batch.sum_per_response(token_log_ratios(batch, forward.log_pi_N)))
        loss_PK = clipped_surrogate(advantage_PK, ratio_PK, low=self.clip, high=self.clip)
        metrics = ratio_metrics(ratio_PK, batch.weight_PK > 0, low=self.clip, high=self.clip)
        return Loss(value=mean_over_responses(loss_PK, batch), metrics=metrics)


class OnlineDPO(Objective):
    """`online_dpo`: direct preferences between the best and the worst of a prompt's responses (arXiv 2402.04792).

        loss = -mean_i log sigmoid(beta [(log pi_c - log pi_r) - (log ref_c - log ref_r)])

    On stale data this is Async DPO (arXiv 2410.18252). A prompt whose rewards are all equal has no preference: its pair is
    one and the same response, which gives no gradient.
    """

    default_coupling: ClassVar[Coupling] = "group"
    needs: ClassVar[Needs] = Needs(reference=True, positive_beta=True, group=True)
    default_beta: ClassVar[float] = 0.1

    def __call__(self, batch: Batch, forward: Forward, *, beta: float) -> Loss:
        gap_PK = batch.sum_per_response(forward.log_pi_N) - batch.sum_per_response(batch.log_ref_N)
        kept_PK = batch.weight_PK > 0
        chosen_P1 = batch.reward_PK.masked_fill(~kept_PK, -torch.inf).argmax(dim=1, keepdim=True)
        rejected_P1 = batch.reward_PK.masked_fill(~kept_PK, torch.inf).argmin(dim=1, keepdim=True)
        margin_P = beta * (gap_PK.gather(1, chosen_P1) - gap_PK.gather(1, rejected_P1))[:, 0]
        # Without any weight both choices fall on response 0, which makes no pair, and the prompt's loss is left out.
        prompts_P = kept_PK.any(dim=1)
        loss_P = torch.where(prompts_P, -logsigmoid(margin_P), torch.zeros_like(margin_P))
        pairs_P = prompts_P & (chosen_P1 != rejected_P1)[:, 0]
        metrics = {
            "objective/pairs": pairs_P.float().mean(),
            "objective/margin": mean_where(margin_P, pairs_P),
            "objective/accuracy": mean_where(margin_P > 0, pairs_P),
        }
        return Loss(value=loss_P.sum() / max(1, batch.totals.prompts), metrics=metrics)
