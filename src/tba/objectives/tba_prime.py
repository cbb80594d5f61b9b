"""`tba_prime`: TB's advantage in a token-level ratio loss (arXiv 2503.18929, TBA'; code in bbartoldson/tba-prime).

    A_ij = (r_ij - mean r) - beta (KL_ij - mean KL),   KL_ij = SG[sum_t clip(log pi - log ref, -10, 10)]
    loss = -sum_ijt min(pi / pi_behaviour, 8) A_ij / (responses x length)

with no replay and a reference that is reset to the current policy every 50 steps. Above the clamp of the ratio the gradient
is zero. pi in KL_ij is the live policy, or the one that generated the response (`objective.kl_policy`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import Self

from tba.config import Config
from tba.objectives.base import Coupling, Needs, Objective
from tba.objectives.terms import centred, mean_where, ratios, token_log_ratios
from tba.types import Batch, Forward, Loss


class TBAPrime(Objective):
    ratio_max: float = Field(default=8.0, gt=0.0)
    """The token ratio is clamped here ("not apparently critical")."""
    log_ratio_clamp: float = Field(default=10.0, gt=0.0)
    """Nats; |log pi - log ref| of a token counts no more than this in KL_ij."""
    kl_policy: Literal["live", "inference"] = "live"
    """Whose KL to the reference is in the advantage: the policy's as it is now, or that of the policy that generated the
    response. The first sees how far training has gone since; the second is a constant of the response, as its reward."""
    ratio_on_reward: bool = True
    """False: the reward part of the advantage multiplies log pi instead of the ratio."""
    ratio_on_kl: bool = True
    """The same for the KL part."""
    normal_length: int | None = Field(default=None, ge=1)
    """Tokens; the constant that token losses are divided by. None = generate.max_new_tokens."""

    coupling: ClassVar[Coupling] = "group"
    needs: ClassVar[Needs] = Needs(reference=True, group=True, behaviour=True, multiplicities=True)
    default_beta: ClassVar[float] = 0.005
    default_reset_every: ClassVar[int] = 50

    @classmethod
    def make(cls, config: Config) -> Self:
        return cls.model_validate({"normal_length": config.generate.max_new_tokens} | config.objective.settings)

    @property
    def all_needs(self) -> Needs:
        return replace(self.needs, policy=self.kl_policy == "inference")

    def __call__(self, batch: Batch, forward: Forward, *, beta: float) -> Loss:
        assert self.normal_length is not None
        log_pi_N, weight_PK = forward.log_pi_N, batch.weight_PK
        reward_PK = centred(batch.reward_PK, weight_PK)
        kl_PK = centred(self._kl(batch, log_pi_N), weight_PK) if beta > 0.0 else torch.zeros_like(reward_PK)
        ratio_N = ratios(token_log_ratios(batch, log_pi_N))
        clamped_N = ratio_N.clamp(max=self.ratio_max)
        gain_N = _factor(self.ratio_on_reward, clamped_N, log_pi_N) * batch.per_token(reward_PK)
        gain_N = gain_N - beta * _factor(self.ratio_on_kl, clamped_N, log_pi_N) * batch.per_token(kl_PK)
        kept_N = batch.kept_N
        total = torch.where(kept_N, gain_N, torch.zeros_like(gain_N)).sum()
        metrics = {
            "objective/ratio_mean": mean_where(clamped_N, kept_N),
            "objective/clip_fraction": mean_where(ratio_N > self.ratio_max, kept_N),
        }
        return Loss(value=-total / (max(1, batch.totals.responses) * self.normal_length), metrics=metrics)

    def _kl(self, batch: Batch, log_pi_N: Tensor) -> Tensor:
        """KL_ij, each token clamped before the sum."""
        # policy_N, not behaviour_N: exploration and top_p change what was sampled from, not the policy's own log-probs.
        own_N = log_pi_N.detach() if self.kl_policy == "live" else batch.policy_N
        return batch.sum_per_response((own_N - batch.log_ref_N).clamp(-self.log_ratio_clamp, self.log_ratio_clamp))


def _factor(by_ratio: bool, ratio_N: Tensor, log_pi_N: Tensor) -> Tensor:
    """What the advantage multiplies: d ratio = ratio d log_pi, or d log_pi itself."""
    return ratio_N if by_ratio else log_pi_N
