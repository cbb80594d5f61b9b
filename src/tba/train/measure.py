"""What a trained batch looked like: rewards, distance to the reference, staleness."""

from __future__ import annotations

import torch
from torch import Tensor

from tba.objectives.base import centred
from tba.types import Batch

LEAST_SIZE = 1e-4
"""Below this size drift is the rounding of an engine, or all rewards of every prompt are the same."""


def batch_metrics(batch: Batch, log_pi_N: Tensor, *, step: int) -> dict[str, float]:
    """Metrics of a batch (on the CPU) given log_pi before the update; responses without weight are left out."""
    kept_PK, dropped = batch.weight_PK > 0, float((batch.sampled_PK & (batch.weight_PK == 0)).sum())
    if not kept_PK.any():
        return {"off_policy/dropped": dropped}
    log_pi_PK, log_ref_PK = batch.sum_per_response(log_pi_N), batch.sum_per_response(batch.log_ref_N)
    lag = _lags(batch, kept_PK, step)
    std_P = _reward_std(batch)
    return {
        **_responses(batch, log_pi_PK - log_ref_PK, kept_PK),
        **{f"rewards/{name}/mean": float(value[kept_PK].nanmean()) for name, value in batch.rewards.items()},
        "reward_std": float(std_P.mean()),
        "frac_reward_zero_std": float((std_P < 1e-12).float().mean()),
        "off_policy/lag_mean": float(lag.mean()),
        "off_policy/lag_max": float(lag.max()),
        "off_policy/dropped": dropped,
        **_drift(batch, log_pi_PK, kept_PK),
    }


def _reward_std(batch: Batch) -> Tensor:
    """[P]: standard deviation of the rewards of the responses that were sampled for each prompt."""
    sampled_PK = batch.sampled_PK.to(batch.reward_PK.dtype)
    squares_P = centred(batch.reward_PK, sampled_PK).square().sum(dim=1)
    return (squares_P / sampled_PK.sum(dim=1).clamp(min=1.0)).sqrt()


def _lags(batch: Batch, kept_PK: Tensor, step: int) -> Tensor:
    """Of the responses that the policy generated; imported ones and the reference's have no lag. 0 if there are none."""
    own_PK = kept_PK & torch.isfinite(batch.sum_per_response(batch.policy_N))
    return (step - batch.version_PK)[own_PK].float() if own_PK.any() else torch.zeros(1)


def watched_metrics(batch: Batch, log_pi_N: Tensor) -> dict[str, float]:
    """What the collapse guard looks at, of all sampled responses: where equal-reward groups or cut-off responses lose their
    weight, those that count look well until none is left."""
    log_ratio_PK = batch.sum_per_response(log_pi_N) - batch.sum_per_response(batch.log_ref_N)
    return _responses(batch, log_ratio_PK, batch.sampled_PK)


def _responses(batch: Batch, log_ratio_PK: Tensor, kept_PK: Tensor) -> dict[str, float]:
    return {
        "reward": float(batch.reward_PK[kept_PK].mean()),
        "kl": float(log_ratio_PK[kept_PK].mean()),
        "completions/mean_length": float(batch.lengths.view(batch.shape)[kept_PK].float().mean()),
        "completions/clipped_ratio": float(batch.truncated_PK[kept_PK].float().mean()),
    }


def _drift(batch: Batch, log_pi_PK: Tensor, kept_PK: Tensor) -> dict[str, float]:
    """How far the policy has moved from what generated the responses; only where those log-probs are known."""
    behaviour_PK, policy_PK = batch.sum_per_response(batch.behaviour_N), batch.sum_per_response(batch.policy_N)
    known_PK = kept_PK & torch.isfinite(behaviour_PK) & torch.isfinite(policy_PK)
    if not known_PK.any():
        return {}
    moved = agreement(batch.reward_PK, log_pi_PK - policy_PK, known_PK)
    log_ratio = (log_pi_PK - behaviour_PK)[known_PK]
    ratio = torch.exp(log_ratio - log_ratio.max())
    return {
        "off_policy/ess": float(ratio.sum().square() / ratio.square().sum() / len(ratio)),
        "off_policy/kl": float((policy_PK - log_pi_PK)[known_PK].mean()),
        **({} if moved is None else {"off_policy/agreement": moved}),
    }


def agreement(reward_PK: Tensor, drift_PK: Tensor, known_PK: Tensor) -> float | None:
    """Correlation, within prompts, of the rewards with the drift log_pi now - log_pi when generated; None without drift.

    Responses that have not been trained on yet are an unseen test of the last updates: where those were signal, the policy
    has already moved towards the better of them; where they were noise, it has moved at random.
    """
    weight_PK = known_PK.to(drift_PK.dtype)
    moved_PK = centred(torch.where(known_PK, drift_PK, torch.zeros_like(drift_PK)), weight_PK)
    better_PK = centred(reward_PK.to(drift_PK.dtype), weight_PK)
    size = float((moved_PK.square().sum() * better_PK.square().sum()).sqrt())
    return float((moved_PK * better_PK).sum()) / size if size > LEAST_SIZE else None
