"""`vineppo`: PPO with Monte-Carlo values instead of a critic (arXiv 2410.01679; McGill-NLP/VinePPO).

A response is split into reasoning steps. V(prefix) is the mean reward of fresh continuations of it, which the searchers
generate; a step's tokens share the advantage

    A_s  = V(next step) - V(this step),   and r - V(this step) for the last one
    loss = mean_t max(-A w, -A clip(w)) + beta mean_ij sum_t min(k3, 10),   A whitened over the step's tokens

with w = pi / pi_behaviour and k3 of the live policy to the reference. A cut-off continuation counts as a cut-off response
does (train.truncated).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from tba.objectives.base import Coupling, Extras, Needs, Objective
from tba.objectives.groups import mean_over_responses
from tba.objectives.ppo import whiten
from tba.objectives.ratios import clipped_surrogate, k3, ratio_metrics, ratios, token_log_ratios
from tba.types import Batch, Forward, Loss


class VinePPO(Objective):
    clip: float = Field(default=0.2, gt=0.0, lt=1.0)
    """The token ratio counts between 1 - clip and 1 + clip."""
    continuations: int = Field(default=9, ge=1)
    """Responses generated from each step's prefix to estimate its value; read by the searchers."""

    kl_clip: float = Field(default=10.0, gt=0.0)
    """Nats; k3 of a token counts no more than this, and above it pulls no more."""
    whiten: bool = True
    """Whether advantages are brought to mean 0 and variance 1 over all tokens of the step."""

    coupling: ClassVar[Coupling] = "batch"
    needs: ClassVar[Needs] = Needs(reference=True, behaviour=True, multiplicities=True, all_responses=True)
    default_beta: ClassVar[float] = 1e-4

    @property
    def extras(self) -> Extras:
        return Extras(continuations=self.continuations)

    def __call__(self, batch: Batch, forward: Forward, *, beta: float) -> Loss:
        kept_N, tokens = batch.kept_N, max(1, batch.totals.tokens)
        advantage_N = step_advantages(batch)
        if self.whiten:
            advantage_N = whiten(advantage_N, kept_N)
        ratio_N = ratios(token_log_ratios(batch, forward.log_pi_N))
        surrogate_N = clipped_surrogate(advantage_N, ratio_N, low=self.clip, high=self.clip)
        value = torch.where(kept_N, surrogate_N, torch.zeros_like(surrogate_N)).sum() / tokens
        if beta > 0.0:
            kl_PK = batch.sum_per_response(k3(batch, forward.log_pi_N).clamp(max=self.kl_clip))
            value = value + beta * mean_over_responses(kl_PK, batch)
        return Loss(value=value, metrics=ratio_metrics(ratio_N, kept_N, low=self.clip, high=self.clip))


def step_advantages(batch: Batch) -> Tensor:
    """[N]: the advantage of each token's step."""
    assert batch.step_values_N is not None
    begins_N = torch.isfinite(batch.step_values_N)
    step_N = begins_N.long().cumsum(0) - 1
    value_S = batch.step_values_N[begins_N]
    response_S = batch.response_of_token[begins_N]
    next_S = torch.cat([value_S[1:], value_S.new_zeros(1)])
    goes_on_S = torch.cat([response_S[1:] == response_S[:-1], response_S.new_zeros(1, dtype=torch.bool)])
    return (torch.where(goes_on_S, next_S, batch.reward_PK.flatten()[response_S]) - value_S)[step_N]
