"""Trajectory balance (TB: arXiv 2201.13259) with log Z estimated from the group (VarGrad), learned, or from rewards alone.

The target is pi*(y|x) ~ pi_ref(y|x) exp(r(y; x) / beta). At the optimum log Z(x) = log_ref + r / beta - log_pi for every
response y. The three objectives here differ in what they put for log Z in

    residual_ij = log Z_i - (log_ref_ij + r_ij / beta - log_pi_ij),        loss = mean_ij residual_ij^2

Any response may be trained on, whoever generated it: no importance weight appears.

Deviation: (beta / 2) x the loss is back-propagated, so that gradients have reward units and one clipping threshold means
the same at every beta; `tb/loss` logs the loss itself.

Axes: P prompts, K responses per prompt.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from tba.objectives.base import Coupling, Extras, Needs, Objective
from tba.objectives.drift import OffPolicyRule, gradient_share
from tba.objectives.terms import mean_where, prompt_mean
from tba.types import Batch, Forward, Loss


def log_z_estimates(log_pi_PK: Tensor, log_ref_PK: Tensor, reward_PK: Tensor, *, beta: float) -> Tensor:
    """log Z as each single response tells it."""
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
    residual_clip: float | None = None,
) -> Tensor:
    """The mean squared residual: the paper's loss value, and the function that training calls.

    `log_z_P1` is log Z of each prompt; None = the VarGrad estimate, the mean of what its responses tell, without gradient. A
    response of weight 0 counts neither in that mean nor in the loss. `num_responses` is the global normaliser when the
    arguments are part of a step. Beyond |residual| = residual_clip / beta the loss grows linearly (Huber).
    """
    weight_PK = torch.ones_like(log_pi_PK) if weight_PK is None else weight_PK
    log_z_PK = log_z_estimates(log_pi_PK, log_ref_PK, reward_PK, beta=beta)
    if log_z_P1 is None:
        log_z_P1 = prompt_mean(log_z_PK.detach(), weight_PK)
    residual_PK = residuals(log_z_PK, log_z_P1, weight_PK)
    squared_PK = residual_PK.square()
    if residual_clip is not None:
        limit, size_PK = residual_clip / beta, residual_PK.abs()
        squared_PK = torch.where(size_PK > limit, limit * (2 * size_PK - limit), squared_PK)
    return squared_PK.sum() / (max(1, int(weight_PK.sum())) if num_responses is None else num_responses)


def residuals(log_z_PK: Tensor, log_z_P1: Tensor, weight_PK: Tensor) -> Tensor:
    """What each response tells of log Z less log Z; 0 for a response without weight, whose numbers may be unknown (NaN)."""
    return torch.where(weight_PK > 0, log_z_PK - log_z_P1, torch.zeros_like(log_z_PK))


class TrajectoryBalance(Objective):
    """`tb`: log Z_i = SG[mean_j log_z_ij], the VarGrad estimate (arXiv 2503.18929, section 3).

    Its gradient is that of REINFORCE with mean baseline and KL in the reward, on- and off-policy:
    A_ij = (r_ij - mean r) - beta (KL_ij - mean KL).

    Deviation: a response whose log-prob has already moved far enough in the direction of its push gets no further gradient
    (off_policy). On fresh data nothing changes.
    """

    off_policy: OffPolicyRule = "response"
    """What bounds the push of a response that the policy has moved away from since it was generated; tba.objectives.drift
    tells the rules apart. exact = the paper's loss."""
    max_drift: float = Field(default=0.1, gt=0.0)
    """Nats per square root of a response's tokens (off_policy=response), or nats per token (off_policy=token)."""
    residual_clip: float | None = Field(default=None, gt=0.0)
    """Largest |beta * residual| in reward units whose gradient grows; beyond it the pull is constant (Huber). None = no
    clip."""

    coupling: ClassVar[Coupling] = "group"
    needs: ClassVar[Needs] = Needs(reference=True, positive_beta=True, target=True, group=True)
    default_beta: ClassVar[float] = 0.01

    def __call__(self, batch: Batch, forward: Forward, *, beta: float) -> Loss:
        log_pi_N = forward.log_pi_N
        log_z_PK = _estimates(batch, log_pi_N.detach(), beta=beta)
        log_z_P1 = prompt_mean(log_z_PK, batch.weight_PK)
        share_N = gradient_share(
            batch, log_pi_N.detach(), log_z_PK > log_z_P1, rule=self.off_policy, max_drift=self.max_drift
        )
        # The same number with less gradient: a response that is held back keeps its place in the loss and in log Z.
        bounded_N = torch.lerp(log_pi_N.detach(), log_pi_N, share_N.to(log_pi_N.dtype))
        loss = _loss(batch, bounded_N, log_z_P1, beta=beta, residual_clip=self.residual_clip)
        held_back = 1.0 - mean_where(share_N, batch.kept_N)
        return replace(loss, metrics={**loss.metrics, "tb/held_back": held_back})


class LearnedLogZ(Objective):
    """`tb_learned_z`: log Z_i is a linear head on the prompt's mean hidden state (the synchronous GFlowNet baseline,
    GFNOrg/red-teaming). The head starts at the first batch's VarGrad estimate, and again after every reference reset, and
    has its own learning rate."""

    log_z_learning_rate: float = Field(default=0.5, gt=0.0)
    """Nats, whatever the width of the model: the first optimizer step moves the log Z of every prompt by this and, as the
    prompt's hidden state is, by up to as much again; for later steps see `tba.models.policy.LogZ`. log Z has to follow r /
    beta: the default does where the mean reward rises by no more than beta per step."""

    coupling: ClassVar[Coupling] = "response"
    needs: ClassVar[Needs] = Needs(reference=True, positive_beta=True, target=True)
    default_beta: ClassVar[float] = 0.05

    @property
    def extras(self) -> Extras:
        return Extras(log_z=True, heads_learning_rate=self.log_z_learning_rate)

    def __call__(self, batch: Batch, forward: Forward, *, beta: float) -> Loss:
        assert forward.log_z_P is not None
        return _loss(batch, forward.log_pi_N, forward.log_z_P[:, None], beta=beta)


class Kimi(Objective):
    """`kimi`: log Z_i = mean_j r_ij / beta (Kimi k1.5, arXiv 2501.12599): no mean log-ratio in the control variate."""

    coupling: ClassVar[Coupling] = "response"
    needs: ClassVar[Needs] = Needs(reference=True, positive_beta=True, group=True)
    default_beta: ClassVar[float] = 0.05

    def __call__(self, batch: Batch, forward: Forward, *, beta: float) -> Loss:
        log_z_P1 = prompt_mean(batch.reward_PK, batch.weight_PK) / beta
        return _loss(batch, forward.log_pi_N, log_z_P1, beta=beta)


def _estimates(batch: Batch, log_pi_N: Tensor, *, beta: float) -> Tensor:
    log_pi_PK = batch.sum_per_response(log_pi_N)
    return log_z_estimates(log_pi_PK, batch.sum_per_response(batch.log_ref_N), batch.reward_PK, beta=beta)


def _loss(batch: Batch, log_pi_N: Tensor, log_z_P1: Tensor, *, beta: float, residual_clip: float | None = None) -> Loss:
    """(beta / 2) x the loss of a batch, with what is logged about its residuals."""
    loss = trajectory_balance_loss(
        batch.sum_per_response(log_pi_N),
        batch.sum_per_response(batch.log_ref_N),
        batch.reward_PK,
        beta=beta,
        log_z_P1=log_z_P1,
        weight_PK=batch.weight_PK,
        num_responses=max(1, batch.totals.responses),
        residual_clip=residual_clip,
    )
    kept_PK = batch.weight_PK > 0
    size_PK = residuals(_estimates(batch, log_pi_N.detach(), beta=beta), log_z_P1.detach(), batch.weight_PK).abs()
    clipped_PK = size_PK > (torch.inf if residual_clip is None else residual_clip / beta)
    metrics = {
        "tb/loss": loss.detach(),
        "tb/log_z": mean_where(log_z_P1, kept_PK.any(dim=1, keepdim=True)),
        "tb/log_z_std": mean_where(size_PK.square(), kept_PK).sqrt(),
        "tb/max_abs_residual": size_PK.max(),
        "tb/clip_fraction": mean_where(clipped_PK, kept_PK),
    }
    return Loss(value=0.5 * beta * loss, metrics=metrics)
