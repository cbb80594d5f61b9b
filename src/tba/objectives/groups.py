"""Means over the responses of a prompt. A response of weight 0 counts nowhere.

Axes: P prompts, K responses per prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tba.types import Batch


def prompt_mean(value_PK: Tensor, weight_PK: Tensor) -> Tensor:
    """Mean over the K responses of each prompt that have weight -> [P, 1]; 0 where none has."""
    return _kept(value_PK, weight_PK).sum(dim=1, keepdim=True) / _count(weight_PK).clamp(min=1.0)


def centred(value_PK: Tensor, weight_PK: Tensor) -> Tensor:
    """value - mean of its prompt; 0 where it has no weight."""
    return _kept(value_PK - prompt_mean(value_PK, weight_PK), weight_PK)


def leave_one_out(value_PK: Tensor, weight_PK: Tensor) -> Tensor:
    """value - mean of the prompt's other values = n / (n - 1) x (value - mean); 0 where there is no other."""
    count_P1 = _count(weight_PK)
    factor_P1 = torch.where(count_P1 > 1, count_P1 / (count_P1 - 1).clamp(min=1.0), 0.0)
    return factor_P1 * centred(value_PK, weight_PK)


def prompt_std(value_PK: Tensor, weight_PK: Tensor) -> Tensor:
    """Unbiased standard deviation within each prompt -> [P, 1]; 0 where fewer than two have weight."""
    squares_P1 = centred(value_PK, weight_PK).square().sum(dim=1, keepdim=True)
    return (squares_P1 / (_count(weight_PK) - 1).clamp(min=1.0)).sqrt()


def penalised_rewards(batch: Batch, *, beta: float) -> Tensor:
    """R_ij = r_ij - beta sum_t (log pi_old - log ref): the KL penalty in the reward, by the policy that generated."""
    if beta == 0.0:
        return batch.reward_PK
    return batch.reward_PK - beta * batch.sum_per_response(batch.policy_N - batch.log_ref_N)


def mean_over_responses(value_PK: Tensor, batch: Batch) -> Tensor:
    """Sum over the responses that have weight / their number in the whole step."""
    return _kept(value_PK, batch.weight_PK).sum() / max(1, batch.totals.responses)


def mean_where(value: Tensor, kept: Tensor) -> Tensor:
    """Mean of the values that count, for the log; NaN where none does. Nothing is read back from the device."""
    return torch.where(kept, value.detach().float(), 0.0).sum() / kept.sum()


def _kept(value_PK: Tensor, weight_PK: Tensor) -> Tensor:
    return torch.where(weight_PK > 0, value_PK, torch.zeros_like(value_PK))


def _count(weight_PK: Tensor) -> Tensor:
    return weight_PK.sum(dim=1, keepdim=True)
