"""GRPO and Dr. GRPO: rewards compared within a prompt, and a surrogate of the ratio to the behaviour policy at every token.

    A          = r - mean r,   / (std + 1e-4) with scale_rewards
    token loss = surrogate(A, w) + beta k3,   w = pi / pi_behaviour of the token, or of its response (`ratio`)

    clip       max(-A min(w, max_ratio), -A clip(w, 1 - clip, 1 + clip_high))          (PPO; max_ratio: INTELLECT-2)
    cispo      -SG[min(w, clip_high)] A log pi                            (MiniMax-M1, ScaleRL: arXiv 2506.13585, 2510.13786)
    sapo       -A (4 / t) sigmoid(t (w - 1)),   t by the sign of A                                       (arXiv 2511.20347)
    vespo      -SG[W^k exp(lambda (1 - W))] A log pi,   W = pi / pi_behaviour of the whole response      (arXiv 2602.10693)

The settings are those of TRL 1.16's GRPOConfig; docs/algorithm.md translates them. `off_policy_mask` and `top_entropy` leave
surrogates out, never the KL term, and nothing that is divided by.

Axes: P prompts, K responses per prompt, N tokens of all responses.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import Self

from tba.config import Config, ConfigError
from tba.objectives.objective import (
    LARGEST_LOG_RATIO,
    Coupling,
    Needs,
    Objective,
    centred,
    clipped_surrogate,
    k3,
    mean_over_responses,
    mean_where,
    prompt_std,
    ratio_metrics,
    ratios,
    sum_where,
    token_log_ratios,
)
from tba.types import Batch, Forward, Loss

STD_EPSILON = 1e-4
SMALLEST_RESPONSE_RATIO = 1e-8  # smallest ratio of a whole response in VESPO's weight, as in its authors' code

SAPO_TEMPERATURES = (1.0, 1.05)
"""Steepness t of SAPO's sigmoid where the advantage is above 0, and where it is not (arXiv 2511.20347)."""
VESPO_UP, VESPO_DOWN = (2.0, 3.0), (3.0, 2.0)
"""Exponent k and decay lambda of VESPO's weight, of advantages from 0 on and below 0 (arXiv 2602.10693): k weighs small
ratios down, lambda large ones."""

SURROGATES_OF: dict[str, tuple[str, ...]] = {
    "clip": ("clip",),
    "clip_high": ("clip", "cispo"),
    "max_ratio": ("clip",),
    "ratio": ("clip", "cispo", "sapo"),  # vespo has the ratio of the whole response, and no other
}
"""The surrogates that read a setting; a setting that is not here is read by all."""


class GroupRelative(Objective):
    """Base of GRPO and Dr. GRPO, which differ only in the average over token losses.

    It logs objective/ratio_mean; objective/clip_fraction, the share of tokens whose ratio is beyond a bound (clip, cispo);
    objective/weight_mean, the mean weight of a response (vespo); objective/masked, the share of responses that
    off_policy_mask leaves out.
    """

    clip: float = Field(default=0.2, gt=0.0, le=1.0)
    """Distance below 1 to which the token ratio counts: from 1 - clip on."""
    clip_high: float = Field(default=0.2, gt=0.0)
    """Distance above 1 to which the token ratio counts: up to 1 + clip_high (DAPO: 0.28). With surrogate=cispo the largest
    ratio itself, as in TRL: 5 is usual there, and below 1 every token's ratio is cut."""
    ratio: Literal["token", "sequence"] = "token"
    """Whose ratio counts: each token's own, or one for all tokens of a response, exp(mean of log pi - log pi_behaviour over
    them) (GSPO, arXiv 2507.18071, where clip is 3e-4 and clip_high 4e-4)."""
    surrogate: Literal["clip", "cispo", "sapo", "vespo"] = "clip"
    """Loss of a token as a function of its ratio and advantage: PPO's clip, a weighted log-prob under a bounded ratio, a
    sigmoid of the ratio, or a log-prob weighted by the ratio of the whole response."""
    max_ratio: float | None = Field(default=None, gt=0.0)
    """Largest ratio of the unclipped term, which bounds the push against responses of negative advantage; sensible above
    1 + clip_high. None = no bound."""
    off_policy_mask: float | None = Field(default=None, ge=0.0)
    """Largest mean of log pi_behaviour - log pi over a response's tokens, in nats per token, with which a response of
    negative advantage still counts (DeepSeek-V3.2, arXiv 2512.02556). None = all count."""
    top_entropy: float = Field(default=1.0, ge=0.0, le=1.0)
    """Share of the step's tokens that count, those at which the policy has the highest entropy (arXiv 2506.01939: 0.2). 0 =
    the highest alone, 1 = all."""

    scale_rewards: bool
    default_coupling: ClassVar[Coupling] = "token"
    needs: ClassVar[Needs] = Needs(reference=True, group=True, behaviour=True, multiplicities=True)

    @classmethod
    def make(cls, config: Config) -> Self:
        made = super().make(config)
        problems = [
            f"objective.{name}={getattr(made, name)} has no effect with objective.surrogate={made.surrogate}: it belongs to "
            f"{' and '.join(owners)}. Leave objective.{name} unset, or set objective.surrogate={owners[0]}."
            for name, owners in SURROGATES_OF.items()
            # Not model_fields_set: a config that was filled in with all defaults must be valid too.
            if made.surrogate not in owners and getattr(made, name) != cls.model_fields[name].default
        ]
        if problems:
            raise ConfigError("\n".join(problems))
        return made

    @property
    def coupling(self) -> Coupling:
        if self.top_entropy < 1.0:  # which tokens count depends on the entropies of all
            return "batch"
        of_response = self.ratio == "sequence" or self.surrogate == "vespo" or self.off_policy_mask is not None
        return "response" if of_response else self.default_coupling

    def __call__(self, batch: Batch, forward: Forward, *, beta: float) -> Loss:
        advantage_PK = centred(batch.reward_PK, batch.weight_PK)
        if self.scale_rewards:
            advantage_PK = advantage_PK / (prompt_std(batch.reward_PK, batch.weight_PK) + STD_EPSILON)
        log_ratio_N = token_log_ratios(batch, forward.log_pi_N)
        loss_N, metrics = self._surrogate_losses(batch, forward.log_pi_N, log_ratio_N, advantage_PK)
        if self.off_policy_mask is not None:
            kl_PK = -response_mean(batch, log_ratio_N.detach())
            masked_PK = (advantage_PK < 0.0) & (kl_PK > self.off_policy_mask)
            loss_N = torch.where(batch.per_token(masked_PK), torch.zeros_like(loss_N), loss_N)
            metrics["objective/masked"] = mean_where(masked_PK, batch.weight_PK > 0)
        if self.top_entropy < 1.0:
            assert forward.entropy_N is not None
            top_N = highest(batch, forward.entropy_N.detach(), share=self.top_entropy)
            loss_N = torch.where(top_N, loss_N, torch.zeros_like(loss_N))
        # After the masks: a response that is left out of the surrogate is still held to the reference.
        if beta > 0.0:
            loss_N = loss_N + beta * k3(batch, forward.log_pi_N)
        return Loss(value=self._average(loss_N, batch), metrics=metrics)

    def _surrogate_losses(
        self, batch: Batch, log_pi_N: Tensor, log_ratio_N: Tensor, advantage_PK: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        advantage_N, kept_N = batch.per_token(advantage_PK), batch.kept_N
        ratio_N = ratios(log_ratio_N)
        if self.ratio == "sequence":
            # One ratio for all tokens of a response: the geometric mean of theirs.
            ratio_N = batch.per_token(ratios(response_mean(batch, log_ratio_N)))
        if self.surrogate == "clip":
            loss_N = clipped_surrogate(
                advantage_N, ratio_N, low=self.clip, high=self.clip_high, max_ratio=self.max_ratio
            )
            return loss_N, ratio_metrics(ratio_N, kept_N, low=self.clip, high=self.clip_high)
        metrics = {"objective/ratio_mean": mean_where(ratio_N, kept_N)}
        if self.surrogate == "cispo":
            metrics["objective/clip_fraction"] = mean_where(ratio_N > self.clip_high, kept_N)
            # The weight carries no gradient: a token beyond the bound still learns, where PPO's clip leaves it none.
            return -ratio_N.detach().clamp(max=self.clip_high) * advantage_N * log_pi_N, metrics
        if self.surrogate == "sapo":
            slope_N = _by_sign(advantage_N > 0.0, *SAPO_TEMPERATURES, like=ratio_N)
            return -advantage_N * torch.sigmoid(slope_N * (ratio_N - 1.0)) * 4.0 / slope_N, metrics
        # vespo: W^k exp(lambda (1 - W)) of each response is 1 on fresh data, and small where W is far from 1 on either side.
        log_w_PK = batch.sum_per_response(log_ratio_N.detach().clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))
        log_w_PK = log_w_PK.clamp(math.log(SMALLEST_RESPONSE_RATIO), LARGEST_LOG_RATIO)
        k_PK, decay_PK = (
            _by_sign(advantage_PK >= 0.0, up, down, like=log_w_PK) for up, down in zip(VESPO_UP, VESPO_DOWN)
        )
        weight_PK = (k_PK * log_w_PK + decay_PK * (1.0 - log_w_PK.exp())).clamp(max=LARGEST_LOG_RATIO).exp()
        metrics["objective/weight_mean"] = mean_where(weight_PK, batch.weight_PK > 0)
        return -batch.per_token(weight_PK) * advantage_N * log_pi_N, metrics

    @abstractmethod
    def _average(self, loss_N: Tensor, batch: Batch) -> Tensor: ...


class GRPO(GroupRelative):
    """`grpo` (arXiv 2402.03300): A = (r - mean) / (std + 1e-4); mean over a response's tokens, then over responses."""

    scale_rewards: bool = True
    """Whether advantages are divided by the standard deviation of the prompt's rewards."""
    aggregate: Literal["responses", "tokens"] = "responses"
    """Average over token losses: over the tokens of a response and then the responses, or all tokens of the step
    (DAPO, arXiv 2503.14476)."""

    default_beta: ClassVar[float] = 0.04

    def _average(self, loss_N: Tensor, batch: Batch) -> Tensor:
        if self.aggregate == "tokens":
            return sum_where(loss_N, batch.kept_N) / max(1, batch.totals.tokens)
        return mean_over_responses(response_mean(batch, loss_N), batch)


class DrGRPO(GroupRelative):
    """`dr_grpo` (arXiv 2503.20783): A = r - mean; the sum of token losses / a constant length, so that neither easy
    prompts nor short responses weigh more. No KL term unless beta is set."""

    scale_rewards: bool = False
    """Whether advantages are divided by the standard deviation of the prompt's rewards, as GRPO's are."""
    normal_length: int | None = Field(default=None, ge=1)
    """Number of tokens that token losses are divided by, a constant. None = generate.max_new_tokens."""

    default_beta: ClassVar[float] = 0.0

    @classmethod
    def settings_from(cls, config: Config) -> dict[str, Any]:
        return {"normal_length": config.generate.max_new_tokens}

    def _average(self, loss_N: Tensor, batch: Batch) -> Tensor:
        assert self.normal_length is not None
        return mean_over_responses(batch.sum_per_response(loss_N), batch) / self.normal_length


def response_mean(batch: Batch, value_N: Tensor) -> Tensor:
    """Mean over the chosen tokens of each response -> [P, K]; 0 where there is none."""
    return batch.sum_per_response(value_N) / batch.sum_per_response(torch.ones_like(value_N)).clamp(min=1.0)


def highest(batch: Batch, value_N: Tensor, *, share: float) -> Tensor:
    """bool [N]: the 1 + floor(share (n - 1)) largest values at the n tokens that count in the whole step, and those equal
    to the last of them. These are the values at or above the (1 - share) quantile, interpolated linearly."""
    # Of the whole step, all of which is here: with top_entropy below 1 the coupling is `batch`.
    tokens = max(1, batch.totals.tokens)
    count = 1 + math.floor(share * (tokens - 1) * (1.0 + 1e-9))  # .29 x 100 is 28.999999999999996
    kept_N = batch.kept_N
    largest_first = torch.where(kept_N, value_N, -torch.inf).sort(descending=True).values
    return kept_N & (value_N >= largest_first[count - 1])


def _by_sign(up: Tensor, positive: float, negative: float, *, like: Tensor) -> Tensor:
    return torch.where(up, torch.full_like(like, positive), negative)
