"""`vineppo`: PPO with Monte-Carlo values instead of a critic (arXiv 2410.01679; McGill-NLP/VinePPO).

A response is split into reasoning steps. V(prefix) is the mean reward of fresh continuations of it, which the searchers
generate; a step's tokens share the advantage

    A_s = sum_{t in s} -beta (log pi_old - log ref) + V(next step) - V(this step),   and r - V(this step) for the last one

under the clipped token ratio, mean over all tokens.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from tba.objectives.base import Coupling, Extras, Needs, Objective
from tba.objectives.ppo import token_rewards
from tba.objectives.ratios import clipped_surrogate, ratio_metrics, ratios, token_log_ratios
from tba.types import Batch, Forward, Loss


class VinePPO(Objective):
    clip: float = Field(default=0.2, gt=0.0, lt=1.0)
    """The token ratio counts between 1 - clip and 1 + clip."""
    continuations: int = Field(default=9, ge=1)
    """Responses generated from each step's prefix to estimate its value; read by the searchers."""

    coupling: ClassVar[Coupling] = "token"
    needs: ClassVar[Needs] = Needs(reference=True, behaviour=True, policy=True, multiplicities=True)
    default_beta: ClassVar[float] = 1e-4

    @property
    def extras(self) -> Extras:
        return Extras(continuations=self.continuations)

    def __call__(self, batch: Batch, forward: Forward, *, beta: float) -> Loss:
        kept_N, tokens = batch.kept_N, max(1, batch.totals.tokens)
        advantage_N = step_advantages(batch, token_rewards(batch, beta=beta))
        ratio_N = ratios(token_log_ratios(batch, forward.log_pi_N))
        loss_N = clipped_surrogate(advantage_N, ratio_N, low=self.clip, high=self.clip)
        total = torch.where(kept_N, loss_N, torch.zeros_like(loss_N)).sum()
        return Loss(value=total / tokens, metrics=ratio_metrics(ratio_N, kept_N, low=self.clip, high=self.clip))


def step_advantages(batch: Batch, reward_N: Tensor) -> Tensor:
    """[N]: the advantage of each token's step; `reward_N` holds the response's reward at its last token."""
    assert batch.step_values_N is not None
    begins_N = torch.isfinite(batch.step_values_N)
    step_N = begins_N.long().cumsum(0) - 1
    value_S = batch.step_values_N[begins_N]
    response_S = batch.response_of_token[begins_N]
    next_S = torch.cat([value_S[1:], value_S.new_zeros(1)])
    goes_on_S = torch.cat([response_S[1:] == response_S[:-1], response_S.new_zeros(1, dtype=torch.bool)])
    gain_S = torch.where(goes_on_S, next_S, torch.zeros_like(next_S)) - value_S
    counted_N = torch.where(batch.loss_mask_N, reward_N, torch.zeros_like(reward_N))
    return (gain_S + torch.zeros_like(value_S).index_add(0, step_N, counted_N))[step_N]
