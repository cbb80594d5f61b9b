"""The base of objectives: settings, and a pure function of a batch and the model's outputs. Below it are the terms that
losses share. A response of weight 0 counts in none of them.

Axes: P prompts, K responses per prompt, N tokens of all responses.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import Self

from tba.config import Config
from tba.config.sections import Section
from tba.types import Batch, Forward, Loss

Coupling = Literal["token", "response", "group", "batch"]
"""Coupling: a token's gradient depends, besides stored data, on itself, its response, the other responses of its prompt, or
all responses of the step. Group-coupled losses take two passes when a prompt is spread over micro-batches, batch-coupled
ones whenever there is more than one micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Inputs that an objective needs. The launcher provides them or refuses the combination with an error."""

    reference: bool = False  # whether log_ref is needed per token (a policy gradient with beta = 0 does without)
    positive_beta: bool = False  # whether beta must be above 0, because it divides or nothing would be learned at 0
    group: bool = False  # whether at least two responses per prompt are needed
    behaviour: bool = False  # whether behaviour log-probs are needed per token, for ratios
    policy: bool = False  # whether log-probs of the policy that generated are needed, for its KL to the reference
    multiplicities: bool = False  # whether equal responses must count as often as they were sampled
    own_samples: bool = False
    """Whether responses must be samples of the policy itself: no exploration, no truncation of the distribution."""
    all_responses: bool = False
    """Whether cut-off responses must be there too, which train.truncated=drop leaves out: the values that a response is
    compared with count them."""
    target: bool = False  # whether the target is a distribution, which objective.target_temperature can shape


class Objective(Section):
    """A subclass declares its settings as fields and computes the loss in `__call__`. `value` of the returned Loss is
    divided by the totals of the whole step, so that the losses of a step's micro-batches add up."""

    default_coupling: ClassVar[Coupling]  # coupling with default settings
    needs: ClassVar[Needs]  # needs with default settings
    default_beta: ClassVar[float]
    """Value of objective.beta where it is not set; see `beta_where_unset` for long responses."""
    default_beta_tokens: ClassVar[int | None] = None  # largest generate.max_new_tokens for which that is so; None = any
    default_max_kl_penalty: ClassVar[float | None] = None
    """Value of objective.max_kl_penalty where neither it nor beta is set; None = no bound."""
    default_reset_every: ClassVar[int] = 0  # value of reference.reset_every where it is not set; 0 = never
    has_critic: ClassVar[bool] = False  # whether forward.values_N are made, by a head on the policy's hidden states
    has_log_z: ClassVar[bool] = False  # whether forward.log_z_P is made, by a head of its own
    heads_learning_rate: ClassVar[float | None] = None
    """Learning rate of the critic's and log Z's heads; None = the policy's."""
    continuations: ClassVar[int] = 0
    """Number of responses that searchers generate from each step's prefix, whose mean reward is batch.step_values_N. 0 =
    none."""

    @classmethod
    def make(cls, config: Config) -> Self:
        """From objective.*; override it where a combination of them is refused."""
        return cls.model_validate({**cls.settings_from(config), **config.objective.settings})

    @classmethod
    def settings_from(cls, config: Config) -> dict[str, Any]:
        """Settings that follow from other sections, where they are not given."""
        return {}

    @classmethod
    def beta_where_unset(cls, max_new_tokens: int) -> float:
        """`default_beta`, and in proportion less for responses of more than `default_beta_tokens` tokens."""
        if cls.default_beta_tokens is None:
            return cls.default_beta
        return cls.default_beta * min(1.0, cls.default_beta_tokens / max_new_tokens)

    @property
    def coupling(self) -> Coupling:
        """`default_coupling`, or what the settings make of it; override it where a setting couples more."""
        return self.default_coupling

    @property
    def bounds_drift(self) -> bool:
        """Whether the push of a response is bounded by how far the policy has moved since it was generated, so that it may
        be trained again some steps later."""
        return False

    @abstractmethod
    def __call__(self, batch: Batch, forward: Forward, *, beta: float) -> Loss: ...


def prompt_mean(value_PK: Tensor, weight_PK: Tensor) -> Tensor:
    """Mean over the K responses of each prompt that have weight -> [P, 1]; 0 where none has."""
    return _kept(value_PK, weight_PK).sum(dim=1, keepdim=True) / weight_PK.sum(dim=1, keepdim=True).clamp(min=1.0)


def centred(value_PK: Tensor, weight_PK: Tensor) -> Tensor:
    """value - mean of its prompt; 0 where it has no weight."""
    return _kept(value_PK - prompt_mean(value_PK, weight_PK), weight_PK)


def leave_one_out(value_PK: Tensor, weight_PK: Tensor) -> Tensor:
    """value - mean of the prompt's other values = n / (n - 1) x (value - mean); 0 where there is no other."""
    count_P1 = weight_PK.sum(dim=1, keepdim=True)
    factor_P1 = torch.where(count_P1 > 1, count_P1 / (count_P1 - 1).clamp(min=1.0), 0.0)
    return factor_P1 * centred(value_PK, weight_PK)


def prompt_std(value_PK: Tensor, weight_PK: Tensor) -> Tensor:
    """Unbiased standard deviation within each prompt -> [P, 1]; 0 where fewer than two have weight."""
    squares_P1 = centred(value_PK, weight_PK).square().sum(dim=1, keepdim=True)
    return (squares_P1 / (weight_PK.sum(dim=1, keepdim=True) - 1).clamp(min=1.0)).sqrt()


def penalised_rewards(batch: Batch, *, beta: float) -> Tensor:
    """R_ij = r_ij - beta sum_t (log pi_old - log ref): the KL penalty in the reward, by the policy that generated."""
    # Nothing is subtracted: log-probs of the policy may be unknown (NaN), and 0 x NaN is NaN.
    if beta == 0.0:
        return batch.reward_PK
    return batch.reward_PK - beta * batch.sum_per_response(batch.policy_N - batch.log_ref_N)


def mean_over_responses(value_PK: Tensor, batch: Batch) -> Tensor:
    """Sum over the responses that have weight / their number in the whole step."""
    return sum_where(value_PK, batch.weight_PK > 0) / max(1, batch.totals.responses)


def sum_where(value: Tensor, kept: Tensor) -> Tensor:
    return torch.where(kept, value, torch.zeros_like(value)).sum()


def mean_where(value: Tensor, kept: Tensor) -> Tensor:
    """Mean of the values that count, for the log; NaN where none does. Nothing is read back from the device."""
    return torch.where(kept, value.detach().float(), 0.0).sum() / kept.sum()


def _kept(value_PK: Tensor, weight_PK: Tensor) -> Tensor:
    # Not a product: a value without weight may be NaN, and 0 x NaN is NaN.
    return torch.where(weight_PK > 0, value_PK, torch.zeros_like(value_PK))


LARGEST_LOG_RATIO = 20.0  # largest log of a ratio, in nats: a ratio of e^20 is far beyond every clip


def token_log_ratios(batch: Batch, log_pi_N: Tensor) -> Tensor:
    """log pi - log behaviour, 0 at tokens that do not count: there the behaviour may be unknown (NaN)."""
    return torch.where(batch.kept_N, log_pi_N - batch.behaviour_N, torch.zeros_like(log_pi_N))


def ratios(log_ratio: Tensor) -> Tensor:
    """exp, with the exponent kept below what fp32 holds: an infinite ratio would stop the run, whatever clips it later."""
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def clipped_surrogate(
    advantage: Tensor, ratio: Tensor, *, low: float, high: float, max_ratio: float | None = None
) -> Tensor:
    """max(-A ratio, -A clip(ratio, 1 - low, 1 + high)): PPO's pessimistic loss (arXiv 1707.06347). With A < 0 it grows with
    the ratio without end, unless the ratio of its first term is bounded by `max_ratio` (INTELLECT-2, arXiv 2505.07291)."""
    clipped = -advantage * ratio.clamp(1.0 - low, 1.0 + high)
    plain = -advantage * (ratio if max_ratio is None else ratio.clamp(max=max_ratio))
    # Not torch.maximum: at a tie it halves the gradient of both sides.
    return torch.where(clipped > plain, clipped, plain)


def k3(batch: Batch, log_pi_N: Tensor) -> Tensor:
    """exp(log ref - log pi) - (log ref - log pi) - 1 >= 0: unbiased for KL(pi, ref) on samples of pi."""
    difference_N = torch.where(batch.kept_N, batch.log_ref_N - log_pi_N, torch.zeros_like(log_pi_N))
    return difference_N.exp() - difference_N - 1.0


def ratio_metrics(ratio: Tensor, kept: Tensor, *, low: float, high: float) -> dict[str, Tensor]:
    """How far the data is off-policy, as the clip sees it."""
    outside = (ratio < 1.0 - low) | (ratio > 1.0 + high)
    return {"objective/ratio_mean": mean_where(ratio, kept), "objective/clip_fraction": mean_where(outside, kept)}
