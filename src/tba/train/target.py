"""From stored reward components to the target of a step: reward and weight of each response, reference weight, temperature.

Nothing here is stored: weights, penalties, schedules and rules may change between runs over the same data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from tba.config import Config, TrainConfig
from tba.types import Batch, Totals, total_reward


def combine(batch: Batch, config: TrainConfig, *, reward_weights: Mapping[str, float]) -> Batch:
    """Weighted sum of the components (not-applicable ones left out), then the truncation and equal-reward rules."""
    components = [value_PK.numpy() for value_PK in batch.rewards.values()]
    reward_PK = torch.from_numpy(total_reward(components, [reward_weights[name] for name in batch.rewards]))
    weight_PK = batch.sampled_PK.to(reward_PK.dtype)
    if config.truncated == "penalise":
        reward_PK = torch.where(batch.truncated_PK, config.truncated_reward, reward_PK)
    if config.truncated == "drop":
        weight_PK = weight_PK * ~batch.truncated_PK
    if config.equal_reward_groups == "drop":
        equal_P1 = (reward_PK == reward_PK[:, :1]).all(dim=1, keepdim=True)
        weight_PK = weight_PK * ~equal_P1
    return _weighted(replace(batch, reward_PK=reward_PK), weight_PK)


def _weighted(batch: Batch, weight_PK: Tensor) -> Batch:
    batch = replace(batch, weight_PK=weight_PK)
    totals = Totals(
        prompts=int((weight_PK.sum(dim=1) > 0).sum()),
        responses=int(weight_PK.sum()),
        tokens=int(batch.kept_N.sum()),
    )
    return replace(batch, totals=totals)


def shape_target(batch: Batch, config: Config, step: int) -> tuple[Batch, float]:
    """The batch and the beta whose target log pi_ref + r / beta is (w log pi_ref + r / beta) / tau of this step."""
    weight, temperature = config.reference_weight_at(step), config.target_temperature_at(step)
    beta = config.beta_at(step) * temperature
    if weight == temperature:
        return batch, beta
    return replace(batch, log_ref_N=batch.log_ref_N * (weight / temperature)), beta
