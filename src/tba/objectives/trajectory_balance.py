"""Trajectory balance (TB: arXiv 2201.13259): the loss, its objectives, and its trust regions on stale data.

The target is pi*(y|x) ~ pi_ref(y|x) exp(r(y; x) / beta). At the optimum log Z(x) = log_ref + r / beta - log_pi for every
response y. `tb`, `tb_learned_z` and `kimi` differ in what they put for log Z in

    residual_ij = log Z_i - (log_ref_ij + r_ij / beta - log_pi_ij),        loss = mean_ij residual_ij^2

Any response may be trained on, whichever policy generated it: no importance weight appears. `tba_prime` puts the same
advantage into a token-level ratio loss.

Deviation: (beta / 2) x the loss is back-propagated, so that gradients have reward units and one clipping threshold means
the same at every beta; `tb/loss` logs the loss itself.

Axes: P prompts, K responses per prompt, N tokens of all responses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from tba.config import Config
from tba.objectives.objective import (
    Coupling,
    Needs,
    Objective,
    centred,
    mean_where,
    prompt_mean,
    ratios,
    sum_where,
    token_log_ratios,
)
from tba.types import Batch, Forward, Loss

ROUNDING = 0.02
"""Nats per square root of the tokens that a bf16 engine and its trainer are apart (KL 2e-4 a token at 0.5B): no drift."""
LARGEST_TOKEN_KL = 10.0  # largest |log pi - log ref| of a token that counts in the KL of tba_prime, in nats
USUAL = 1.5
"""Multiple of the drift by one update below which no gradient is masked: most of a long update's drift is common to all."""
TrustRegion = Literal["response", "token", "taper", "none"]
"""Trust region: the rule that bounds the gradient of a response on stale data; see `gradient_share`."""


def log_z_estimates(log_pi_PK: Tensor, log_ref_PK: Tensor, reward_PK: Tensor, *, beta: float) -> Tensor:
    return log_ref_PK + reward_PK / beta - log_pi_PK


def trajectory_balance_loss(
    log_pi_PK: Tensor,
    log_ref_PK: Tensor,
    reward_PK: Tensor,
    *,
    beta: float,
    log_z_P1: Tensor | None = None,
    weight_PK: Tensor | None = None,
    num_responses: int | None = None,
) -> Tensor:
    """The mean squared residual: the paper's loss value, and the function that training calls. `log_z_P1` is log Z of each
    prompt; None = the VarGrad estimate, the mean estimate of its responses, without gradient. `num_responses` is the global
    normaliser when the arguments are part of a step."""
    weight_PK = torch.ones_like(log_pi_PK) if weight_PK is None else weight_PK
    log_z_PK = log_z_estimates(log_pi_PK, log_ref_PK, reward_PK, beta=beta)
    if log_z_P1 is None:
        log_z_P1 = prompt_mean(log_z_PK.detach(), weight_PK)
    squared_PK = residuals(log_z_PK, log_z_P1, weight_PK).square()
    return squared_PK.sum() / (max(1, int(weight_PK.sum())) if num_responses is None else num_responses)


def residuals(log_z_PK: Tensor, log_z_P1: Tensor, weight_PK: Tensor) -> Tensor:
    """Estimate of log Z by each response, less log Z; 0 for one without weight, whose numbers may be unknown (NaN)."""
    return torch.where(weight_PK > 0, log_z_PK - log_z_P1, torch.zeros_like(log_z_PK))


class TrajectoryBalance(Objective):
    """`tb`: log Z_i = SG[mean_j log_z_ij], the VarGrad estimate (arXiv 2503.18929, section 3).

    Its gradient is that of REINFORCE with mean baseline and KL in the reward, on- and off-policy:
    A_ij = (r_ij - mean r) - beta (KL_ij - mean KL).

    Deviation: the gradient of a response is masked once its log-prob has moved far enough in the direction of that gradient
    (trust_region). On fresh data nothing changes.
    """

    trust_region: TrustRegion = "response"
    """Rule that bounds the gradient of a response once the policy has moved away from it since generation.
    tba.objectives.trajectory_balance.gradient_share has the rules. none = the paper's loss."""
    max_drift: ClassVar[float] = 0.15
    """Largest drift, in units of the square root of the entropy that responses of the prompt had
    (trust_region=response) or in nats per token (trust_region=token). With trust_region=response and
    train.learning_rate=auto it is at least 1.5 times what one update moves a response by."""

    default_coupling: ClassVar[Coupling] = "group"
    needs: ClassVar[Needs] = Needs(reference=True, positive_beta=True, target=True, group=True)
    default_beta: ClassVar[float] = 0.01
    # The KL to the reference is a sum over tokens, the reward is not: on GSM8K (400 tokens) .01 held the policy at 14 nats,
    # where a tenth of it went to 32 and solved 2.9 points more (notes/).
    default_beta_tokens: ClassVar[int | None] = 64
    # What the KL of 31 nats on GSM8K costs at that beta. Where a policy ends within 5 nats, as on most of the bench, it
    # changes nothing.
    default_max_kl_penalty: ClassVar[float | None] = 0.05

    @property
    def bounds_drift(self) -> bool:
        return self.trust_region in ("response", "token")

    def __call__(self, batch: Batch, forward: Forward, *, beta: float) -> Loss:
        log_pi_N = forward.log_pi_N
        # Detached: log Z is the paper's SG[mean], and no gradient goes through it.
        log_z_PK = _estimates(batch, log_pi_N.detach(), beta=beta)
        log_z_P1 = prompt_mean(log_z_PK, batch.weight_PK)
        share_N = gradient_share(
            batch, log_pi_N.detach(), log_z_PK > log_z_P1, rule=self.trust_region, max_drift=self.max_drift
        )
        # The same number with less gradient: a masked response still counts in the loss and in log Z.
        bounded_N = torch.lerp(log_pi_N.detach(), log_pi_N, share_N.to(log_pi_N.dtype))
        loss = _loss(batch, bounded_N, log_z_P1, beta=beta)
        masked_fraction = 1.0 - mean_where(share_N, batch.kept_N)
        return replace(loss, metrics={**loss.metrics, "tb/masked_fraction": masked_fraction})


class LearnedLogZ(Objective):
    """`tb_learned_z`: log Z_i is a linear head on the prompt's mean hidden state (the synchronous GFlowNet baseline,
    GFNOrg/red-teaming). The head starts at the first batch's VarGrad estimate, and again after every reference reset, and
    has its own learning rate."""

    has_log_z: ClassVar[bool] = True
    heads_learning_rate: ClassVar[float | None] = 0.5
    """Learning rate of log Z in nats, whatever the width of the model: the first optimizer step moves the log Z of every
    prompt by this and, as the prompt's hidden state is, by up to as much again; for later steps see
    `tba.models.policy.LogZ`. log Z has to follow r / beta: this does where the mean reward rises by no more than beta per
    step."""

    default_coupling: ClassVar[Coupling] = "response"
    needs: ClassVar[Needs] = Needs(reference=True, positive_beta=True, target=True)
    default_beta: ClassVar[float] = 0.05

    def __call__(self, batch: Batch, forward: Forward, *, beta: float) -> Loss:
        assert forward.log_z_P is not None
        return _loss(batch, forward.log_pi_N, forward.log_z_P[:, None], beta=beta)


class Kimi(Objective):
    """`kimi`: log Z_i = mean_j r_ij / beta (Kimi k1.5, arXiv 2501.12599): no mean log-ratio in the control variate."""

    default_coupling: ClassVar[Coupling] = "response"
    needs: ClassVar[Needs] = Needs(reference=True, positive_beta=True, group=True)
    default_beta: ClassVar[float] = 0.05

    def __call__(self, batch: Batch, forward: Forward, *, beta: float) -> Loss:
        log_z_P1 = prompt_mean(batch.reward_PK, batch.weight_PK) / beta
        return _loss(batch, forward.log_pi_N, log_z_P1, beta=beta)


def _estimates(batch: Batch, log_pi_N: Tensor, *, beta: float) -> Tensor:
    log_pi_PK = batch.sum_per_response(log_pi_N)
    return log_z_estimates(log_pi_PK, batch.sum_per_response(batch.log_ref_N), batch.reward_PK, beta=beta)


def _loss(batch: Batch, log_pi_N: Tensor, log_z_P1: Tensor, *, beta: float) -> Loss:
    """(beta / 2) x the loss of a batch, with what is logged about its residuals."""
    loss = trajectory_balance_loss(
        batch.sum_per_response(log_pi_N),
        batch.sum_per_response(batch.log_ref_N),
        batch.reward_PK,
        beta=beta,
        log_z_P1=log_z_P1,
        weight_PK=batch.weight_PK,
        # Of the whole step, so that the losses of micro-batches add up to the step's.
        num_responses=max(1, batch.totals.responses),
    )
    kept_PK = batch.weight_PK > 0
    size_PK = residuals(_estimates(batch, log_pi_N.detach(), beta=beta), log_z_P1.detach(), batch.weight_PK).abs()
    metrics = {
        "tb/loss": loss.detach(),
        "tb/log_z": mean_where(log_z_P1, kept_PK.any(dim=1, keepdim=True)),
        "tb/log_z_std": mean_where(size_PK.square(), kept_PK).sqrt(),
        "tb/max_abs_residual": size_PK.max(),
    }
    return Loss(value=0.5 * beta * loss, metrics=metrics)


def gradient_share(
    batch: Batch, log_pi_N: Tensor, push_up_PK: Tensor, *, rule: TrustRegion, max_drift: float
) -> Tensor:
    """Share [N] of its gradient that each token keeps, in 0 to 1. `log_pi_N` carries no gradient.

    TB's gradient pushes a response up or down by its residual, without an importance weight. On stale data a wrong response
    that was sampled once is pushed down each time it is trained, by up to r / beta nats, although the policy would not
    produce it any more. Tokens that it shares with right responses go down with it (docs/algorithm.md has figures).

    So the push of a response is measured by its drift, log_pi now - log_pi when it was generated. Its gradient is masked
    once the policy has moved far enough in the direction of the push:

        response    no gradient once drift exceeds max_drift * sqrt(entropy) upwards for a push up, or downwards for a push
                    down; entropy is the mean of -log_pi over the prompt's responses when they were generated
        token       the same for each token alone, with max_drift itself (PPO's clip)
        taper       a push down is weighted by min(1, exp(drift)), a push up is left alone (TOPR, arXiv 2503.14286)
        none        trajectory balance as it is

    A masked response still counts in its prompt's log Z. The log-probs of a policy's own samples differ by about the root of
    the entropy: so short and long responses, sure and unsure policies are masked alike. Two kinds of drift mask no response:
    the change of all responses by one update (USUAL), and the gap between a bf16 engine and its trainer (ROUNDING).
    """
    # The policy's own log-probs, not the behaviour's: exploration and top-p shift those. Where they are unknown (imports,
    # responses of the reference) the drift is 0 and nothing is masked.
    drift_N = torch.nan_to_num(log_pi_N - batch.policy_N, nan=0.0)
    if rule == "none":
        return torch.ones_like(drift_N)
    push_up_N = batch.per_token(push_up_PK)
    if rule == "token":
        return (~_beyond(drift_N, push_up_N, max_drift)).to(drift_N.dtype)
    drift_PK = batch.sum_per_response(drift_N)
    if rule == "taper":
        # TOPR's weight of a push down: the ratio of the whole response, at most 1.
        return torch.where(push_up_N, 1.0, batch.per_token(drift_PK.clamp(max=0.0).exp()))
    # Responses whose log-probs are unknown do not count in their prompt's entropy; none of them drifts.
    known_N = torch.isfinite(batch.policy_N)
    known_PK = batch.sum_per_response(known_N.to(batch.policy_N.dtype)) > 0
    # 0 for a response of unknown log-probs, which has no weight in the mean below.
    surprise_PK = batch.sum_per_response(torch.where(known_N, -batch.policy_N, 0.0))
    entropy_P1 = prompt_mean(surprise_PK, (known_PK & (batch.weight_PK > 0)).to(surprise_PK.dtype)).clamp(min=0.0)
    tokens_PK = batch.sum_per_response(torch.ones_like(batch.policy_N))
    least_PK = (ROUNDING * tokens_PK.sqrt()).clamp(min=USUAL * batch.usual_drift)
    limit_PK = torch.maximum(max_drift * entropy_P1.sqrt(), least_PK)
    return batch.per_token((~_beyond(drift_PK, push_up_PK, limit_PK)).to(drift_N.dtype))


def _beyond(drift: Tensor, push_up: Tensor, limit: Tensor | float) -> Tensor:
    """Whether the policy has moved further than the limit in the direction of the push."""
    return torch.where(push_up, drift > limit, drift < -limit)


class TBAPrime(Objective):
    """`tba_prime`: TB's advantage in a token-level ratio loss (arXiv 2503.18929, TBA'; code in bbartoldson/tba-prime).

        A_ij = (r_ij - mean r) - beta (KL_ij - mean KL),   KL_ij = SG[sum_t clip(log pi - log ref, -10, 10)]
        loss = -sum_ijt min(pi / pi_behaviour, 8) A_ij / (responses x length)

    with no replay and a reference that is reset to the current policy every 50 steps. Above the clamp of the ratio the
    gradient is zero. pi in KL_ij is the live policy: it sees how far training has gone since.
    """

    ratio_max: ClassVar[float] = 8.0
    """Largest token ratio, at which it is clamped (the authors: "not apparently critical")."""
    normal_length: int | None = Field(default=None, ge=1)
    """Number of tokens that token losses are divided by, a constant. None = generate.max_new_tokens."""

    default_coupling: ClassVar[Coupling] = "group"
    needs: ClassVar[Needs] = Needs(reference=True, group=True, behaviour=True, multiplicities=True)
    default_beta: ClassVar[float] = 0.005
    default_reset_every: ClassVar[int] = 50

    @classmethod
    def settings_from(cls, config: Config) -> dict[str, Any]:
        return {"normal_length": config.generate.max_new_tokens}

    def __call__(self, batch: Batch, forward: Forward, *, beta: float) -> Loss:
        assert self.normal_length is not None
        log_pi_N, weight_PK = forward.log_pi_N, batch.weight_PK
        reward_PK, kept_N = centred(batch.reward_PK, weight_PK), batch.kept_N
        kl_PK = torch.zeros_like(reward_PK)
        if beta > 0.0:
            # The KL is part of the reward: it carries no gradient of its own. Each token is clamped before the sum.
            kl_N = (log_pi_N.detach() - batch.log_ref_N).clamp(-LARGEST_TOKEN_KL, LARGEST_TOKEN_KL)
            kl_PK = centred(batch.sum_per_response(kl_N), weight_PK)
        ratio_N = ratios(token_log_ratios(batch, log_pi_N))
        clamped_N = ratio_N.clamp(max=self.ratio_max)
        total = sum_where(clamped_N * batch.per_token(reward_PK - beta * kl_PK), kept_N)
        metrics = {
            "objective/ratio_mean": mean_where(clamped_N, kept_N),
            "objective/clip_fraction": mean_where(ratio_N > self.ratio_max, kept_N),
        }
        return Loss(value=-total / (max(1, batch.totals.responses) * self.normal_length), metrics=metrics)
