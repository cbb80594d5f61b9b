"""Ratios pi / pi_behaviour, the clipped surrogate of PPO and its kin, and the k3 estimate of a KL divergence.

Axes: N tokens of all responses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tba.objectives.groups import mean_where
from tba.types import Batch

LARGEST_LOG_RATIO = 20.0
"""Nats; a ratio of e^20 is far beyond every clip."""


def token_log_ratios(batch: Batch, log_pi_N: Tensor) -> Tensor:
    """log pi - log behaviour, 0 at tokens that do not count: there the behaviour may be unknown (NaN)."""
    return torch.where(batch.kept_N, log_pi_N - batch.behaviour_N, torch.zeros_like(log_pi_N))


def ratios(log_ratio: Tensor) -> Tensor:
    """exp, with the exponent kept below what fp32 holds: an infinite ratio would stop the run, whatever clips it later."""
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def clipped_surrogate(advantage: Tensor, ratio: Tensor, *, low: float, high: float) -> Tensor:
    """max(-A ratio, -A clip(ratio, 1 - low, 1 + high)): PPO's pessimistic loss (arXiv 1707.06347)."""
    plain, clipped = -advantage * ratio, -advantage * ratio.clamp(1.0 - low, 1.0 + high)
    # Not torch.maximum: at a tie it halves the gradient of both sides.
    return torch.where(clipped > plain, clipped, plain)


def k3(batch: Batch, log_pi_N: Tensor) -> Tensor:
    """exp(log ref - log pi) - (log ref - log pi) - 1 >= 0: unbiased for KL(pi, ref) on samples of pi; 0 where nothing
    counts."""
    difference_N = torch.where(batch.kept_N, batch.log_ref_N - log_pi_N, torch.zeros_like(log_pi_N))
    return difference_N.exp() - difference_N - 1.0


def ratio_metrics(ratio: Tensor, kept: Tensor, *, low: float, high: float) -> dict[str, Tensor]:
    """How far the data is off-policy, as the clip sees it."""
    outside = (ratio < 1.0 - low) | (ratio > 1.0 + high)
    return {"objective/ratio_mean": mean_where(ratio, kept), "objective/clip_fraction": mean_where(outside, kept)}
