"""Trajectory balance with the VarGrad estimate of log Z (arXiv 2503.18929, section 3; TB: arXiv 2201.13259).

The target is pi*(y|x) ~ pi_ref(y|x) exp(r(y; x) / beta). At the optimum log Z(x) = log_ref + r / beta - log_pi for every
response y, so its spread within a prompt is the loss:

    log_z_ij   = log_ref_ij + r_ij / beta - log_pi_ij
    loss       = mean_ij (log_z_ij - SG[mean_j log_z_ij])^2

Any response may be trained on, whoever generated it: no importance weight appears.

Axes: P prompts, K responses per prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tba.objectives.base import Coupling, Needs
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
    weight_PK: Tensor | None = None,
    num_responses: int | None = None,
) -> Tensor:
    """Spread of the log-partition estimates around their prompt's mean (VarGrad): the paper's loss value.

    A response of weight 0 counts neither in the mean nor in the loss. `num_responses` is the global normaliser when the
    arguments are part of a step.
    """
    weight_PK = torch.ones_like(log_pi_PK) if weight_PK is None else weight_PK
    log_z_PK = log_z_estimates(log_pi_PK, log_ref_PK, reward_PK, beta=beta)
    residual_PK = weight_PK * (log_z_PK - prompt_mean(log_z_PK.detach(), weight_PK))
    return residual_PK.square().sum() / (num_responses or max(1, int(weight_PK.sum())))


def prompt_mean(value_PK: Tensor, weight_PK: Tensor) -> Tensor:
    """Mean over the K responses of each prompt that have weight -> [P, 1]; 0 where none has."""
    total_P1 = (weight_PK * value_PK).sum(dim=1, keepdim=True)
    return total_P1 / weight_PK.sum(dim=1, keepdim=True).clamp(min=1.0)


@dataclass(frozen=True, kw_only=True)
class TrajectoryBalance:
    """VarGrad TB as an objective.

    Deviation: (beta / 2) x the paper's loss is back-propagated, so that gradients have reward units and one clipping
    threshold means the same at every beta; `tb/loss` logs the paper's value.
    """

    residual_clip: float | None = None
    """Largest |beta * residual| in reward units whose gradient grows; beyond it the pull is constant (Huber)."""

    coupling: ClassVar[Coupling] = "group"
    needs: ClassVar[Needs] = Needs(reference=True)

    def __call__(self, batch: Batch, forward: Forward, *, beta: float) -> Loss:
        log_pi_PK = batch.sum_per_response(forward.log_pi_N)
        log_ref_PK = batch.sum_per_response(batch.log_ref_N)
        weight_PK = batch.weight_PK
        log_z_PK = log_z_estimates(log_pi_PK, log_ref_PK, batch.reward_PK, beta=beta)
        mean_P1 = prompt_mean(log_z_PK.detach(), weight_PK)
        residual_PK = torch.where(weight_PK > 0, log_z_PK - mean_P1, torch.zeros_like(log_z_PK))
        squared_PK, clipped_PK = self._squared(residual_PK, beta)
        num_responses = max(1, batch.totals.responses)
        loss = squared_PK.sum() / num_responses
        return Loss(
            value=0.5 * beta * loss,
            metrics=self._metrics(residual_PK.detach(), mean_P1, clipped_PK, weight_PK, loss.item()),
        )

    def _squared(self, residual_PK: Tensor, beta: float) -> tuple[Tensor, Tensor]:
        """residual^2, or its Huber continuation beyond the clip; and where it was clipped."""
        if self.residual_clip is None:
            return residual_PK.square(), torch.zeros_like(residual_PK, dtype=torch.bool)
        limit = self.residual_clip / beta
        size_PK = residual_PK.abs()
        clipped_PK = size_PK > limit
        return torch.where(clipped_PK, limit * (2 * size_PK - limit), residual_PK.square()), clipped_PK

    @staticmethod
    def _metrics(
        residual_PK: Tensor, mean_P1: Tensor, clipped_PK: Tensor, weight_PK: Tensor, loss: float
    ) -> dict[str, float]:
        responses = weight_PK.sum().clamp(min=1.0)
        prompts_P1 = weight_PK.sum(dim=1, keepdim=True) > 0
        return {
            "tb/loss": loss,
            "tb/log_z": float(mean_P1[prompts_P1].mean()) if prompts_P1.any() else 0.0,
            "tb/log_z_std": float((residual_PK.square().sum() / responses).sqrt()),
            "tb/max_abs_residual": float(residual_PK.abs().max()),
            "tb/clip_fraction": float((clipped_PK & (weight_PK > 0)).sum() / responses),
        }
