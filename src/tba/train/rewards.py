"""From stored reward components to the reward and weight of each response, at training time.

Nothing here is stored: weights, penalties and rules may change between runs over the same data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from tba.config import TrainConfig
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
