"""GRPO and Dr. GRPO: group-relative advantages under a clipped token ratio.

    token loss = max(-A w, -A clip(w, 1 - low, 1 + high)) + beta k3,   w = pi / pi_behaviour

Axes: P prompts, K responses per prompt, N tokens of all responses.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import Self

from tba.config import Config
from tba.objectives.base import Coupling, Needs, Objective
from tba.objectives.groups import centred, mean_over_responses, prompt_std
from tba.objectives.ratios import clipped_surrogate, k3, ratio_metrics, ratios, token_log_ratios
from tba.types import Batch, Forward, Loss

STD_EPSILON = 1e-4


class GRPO(Objective):
    """`grpo` (arXiv 2402.03300): A = (r - mean) / (std + 1e-4); mean over a response's tokens, then over responses."""

    clip_low: float = Field(default=0.2, gt=0.0, le=1.0)
    """The token ratio counts from 1 - clip_low ..."""
    clip_high: float = Field(default=0.2, gt=0.0)
    """... to 1 + clip_high (DAPO: 0.28)."""

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
    """Tokens; None = generate.max_new_tokens."""

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
