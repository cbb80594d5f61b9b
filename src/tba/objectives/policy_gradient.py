"""Policy gradients: REINFORCE, RLOO and Proximal RLOO on whole responses (arXiv 2402.14740; mnoukhov/async_rlhf), GRPO and
Dr. GRPO on tokens under a clipped ratio.

    R_ij       = r_ij - beta sum_t (log pi_old - log ref)                              (REINFORCE, RLOO, Proximal RLOO)
    token loss = max(-A w, -A clip(w, 1 - low, 1 + high)) + beta k3,   w = pi / pi_behaviour           (GRPO, Dr. GRPO)

Axes: P prompts, K responses per prompt, N tokens of all responses.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import Self

from tba.config import Config, ConfigError
from tba.objectives.base import (
    Coupling,
    Needs,
    Objective,
    centred,
    clipped_surrogate,
    k3,
    leave_one_out,
    mean_over_responses,
    penalised_rewards,
    prompt_std,
    ratio_metrics,
    ratios,
    token_log_ratios,
)
from tba.types import Batch, Forward, Loss


class Reinforce(Objective):
    """`reinforce`: loss = -mean A log pi, A = R - mean of the prompt's R. No correction for stale data."""

    baseline: Literal["prompt", "none"] = "prompt"
    """What is subtracted from R: the mean of the prompt's responses, or nothing."""

    coupling: ClassVar[Coupling] = "response"
    needs: ClassVar[Needs] = Needs(reference=True, multiplicities=True, own_samples=True)
    default_beta: ClassVar[float] = 0.05

    @classmethod
    def make(cls, config: Config) -> Self:
        made = super().make(config)
        if made.baseline == "prompt" and config.train.samples_per_prompt < 2:
            raise ConfigError(
                "objective.baseline=prompt needs train.samples_per_prompt of 2 or more: the mean of one response is itself. "
                "Set objective.baseline=none."
            )
        return made

    def __call__(self, batch: Batch, forward: Forward, *, beta: float) -> Loss:
        return_PK = penalised_rewards(batch, beta=beta)
        advantage_PK = return_PK if self.baseline == "none" else centred(return_PK, batch.weight_PK)
        return _score_function(batch, forward, advantage_PK)


class RLOO(Objective):
    """`rloo`: loss = -mean A log pi, A = R - mean of the prompt's other R. No correction for stale data."""

    coupling: ClassVar[Coupling] = "response"
    needs: ClassVar[Needs] = Needs(reference=True, group=True, multiplicities=True, own_samples=True)
    default_beta: ClassVar[float] = 0.05

    def __call__(self, batch: Batch, forward: Forward, *, beta: float) -> Loss:
        advantage_PK = leave_one_out(penalised_rewards(batch, beta=beta), batch.weight_PK)
        return _score_function(batch, forward, advantage_PK)


class ProximalRLOO(Objective):
    """`proximal_rloo`: RLOO's advantage under the clipped ratio of whole responses, for stale data."""

    clip: float = Field(default=0.2, gt=0.0, lt=1.0)
    """Distance from 1 within which the response's ratio pi / pi_behaviour counts: between 1 - clip and 1 + clip."""

    coupling: ClassVar[Coupling] = "response"
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


STD_EPSILON = 1e-4


class GRPO(Objective):
    """`grpo` (arXiv 2402.03300): A = (r - mean) / (std + 1e-4); mean over a response's tokens, then over responses."""

    clip_low: float = Field(default=0.2, gt=0.0, le=1.0)
    """Distance below 1 to which the token ratio counts: from 1 - clip_low on."""
    clip_high: float = Field(default=0.2, gt=0.0)
    """Distance above 1 to which the token ratio counts: up to 1 + clip_high (DAPO: 0.28)."""

    coupling: ClassVar[Coupling] = "token"
    needs: ClassVar[Needs] = Needs(reference=True, group=True, behaviour=True, multiplicities=True)
    default_beta: ClassVar[float] = 0.04

    def __call__(self, batch: Batch, forward: Forward, *, beta: float) -> Loss:
        std_P1 = prompt_std(batch.reward_PK, batch.weight_PK)
        advantage_PK = centred(batch.reward_PK, batch.weight_PK) / (std_P1 + STD_EPSILON)
        loss_N, metrics = self._token_losses(batch, forward, advantage_PK, beta=beta)
        tokens_PK = batch.sum_per_response(torch.ones_like(loss_N)).clamp(min=1.0)
        return Loss(value=mean_over_responses(batch.sum_per_response(loss_N) / tokens_PK, batch), metrics=metrics)

    def _token_losses(
        self, batch: Batch, forward: Forward, advantage_PK: Tensor, *, beta: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        ratio_N = ratios(token_log_ratios(batch, forward.log_pi_N))
        advantage_N = batch.per_token(advantage_PK)
        loss_N = clipped_surrogate(advantage_N, ratio_N, low=self.clip_low, high=self.clip_high)
        if beta > 0.0:
            loss_N = loss_N + beta * k3(batch, forward.log_pi_N)
        return loss_N, ratio_metrics(ratio_N, batch.kept_N, low=self.clip_low, high=self.clip_high)


class DrGRPO(GRPO):
    """`dr_grpo` (arXiv 2503.20783): A = r - mean; the sum of token losses / a constant length, so that neither easy
    prompts nor short responses weigh more. No KL term unless beta is set."""

    normal_length: int | None = Field(default=None, ge=1)
    """Number of tokens that token losses are divided by, a constant. None = generate.max_new_tokens."""

    default_beta: ClassVar[float] = 0.0

    @classmethod
    def make(cls, config: Config) -> Self:
        return cls.model_validate({"normal_length": config.generate.max_new_tokens} | config.objective.settings)

    def __call__(self, batch: Batch, forward: Forward, *, beta: float) -> Loss:
        assert self.normal_length is not None
        advantage_PK = centred(batch.reward_PK, batch.weight_PK)
        loss_N, metrics = self._token_losses(batch, forward, advantage_PK, beta=beta)
        loss = mean_over_responses(batch.sum_per_response(loss_N), batch) / self.normal_length
        return Loss(value=loss, metrics=metrics)
