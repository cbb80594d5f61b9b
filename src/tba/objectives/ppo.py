"""PPO with a critic (arXiv 1707.06347; as in mnoukhov/async_rlhf), and VinePPO, which has Monte-Carlo values instead of one
(arXiv 2410.01679; McGill-NLP/VinePPO). In both w = pi / pi_behaviour.

`ppo`:
    token reward  = -beta (log pi_old - log ref), + r at the last token
    advantages    = GAE(gamma, lambda) over the critic's values, whitened over the step
    loss          = mean_t max(-A w, -A clip(w)) + c / 2 mean_t max((V - ret)^2, (clip(V, V_old +- d) - ret)^2)

V_old is the critic when the batch was first trained on: the value clip acts from the second update on
(train.updates_per_batch).

`vineppo`: a response is split into reasoning steps. V(prefix) is the mean reward of fresh continuations of it, which the
searchers generate; the tokens of a reasoning step share the advantage
    A_s  = V(next reasoning step) - V(this one),   and r - V(this one) for the last
    loss = mean_t max(-A w, -A clip(w)) + beta mean_ij sum_t min(k3, 10),   A whitened over the tokens of the step

with k3 of the live policy to the reference. A cut-off continuation counts as a cut-off response does (train.truncated).

Axes: R = P K responses, T tokens of the longest one, N tokens of all responses, S reasoning steps of all responses.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from tba.objectives.objective import (
    Coupling,
    Needs,
    Objective,
    clipped_surrogate,
    k3,
    mean_over_responses,
    ratio_metrics,
    ratios,
    sum_where,
    token_log_ratios,
)
from tba.types import Batch, Forward, Loss

LARGEST_K3 = 10.0  # largest k3 of a token that counts in vineppo, in nats; above it nothing pulls
VALUE_CLIP = 0.2  # distance, in reward units, that a value may move from V_old and still lower its loss
WHITEN_EPSILON = 1e-8


class PPO(Objective):
    clip: float = Field(default=0.2, gt=0.0, lt=1.0)
    """Distance from 1 within which the token ratio counts: between 1 - clip and 1 + clip."""
    gamma: ClassVar[float] = 1.0  # discount of rewards and values, per token
    gae_lambda: ClassVar[float] = 0.95
    """Weight lambda of longer returns in GAE, per token: 0 = one step, 1 = the whole response."""
    has_critic: ClassVar[bool] = True
    value_coefficient: ClassVar[float] = 0.1  # weight c of the value loss
    default_coupling: ClassVar[Coupling] = "batch"
    needs: ClassVar[Needs] = Needs(reference=True, behaviour=True, policy=True, multiplicities=True)
    default_beta: ClassVar[float] = 0.05

    def __call__(self, batch: Batch, forward: Forward, *, beta: float) -> Loss:
        assert forward.values_N is not None
        kept_N, tokens = batch.kept_N, max(1, batch.totals.tokens)
        values_N = forward.values_N
        # In the first update on a batch the old values are those of now, and the value clip does nothing.
        old_N = values_N.detach() if batch.old_values_N is None else batch.old_values_N
        advantage_N = generalised_advantages(
            batch, token_rewards(batch, beta=beta), old_N, gamma=self.gamma, gae_lambda=self.gae_lambda
        )
        # Of advantages that are not whitened: the critic learns returns in reward units.
        return_N = advantage_N + old_N
        ratio_N = ratios(token_log_ratios(batch, forward.log_pi_N))
        surrogate_N = clipped_surrogate(whiten(advantage_N, kept_N), ratio_N, low=self.clip, high=self.clip)
        # max((V - ret)^2, (clip(V, V_old +- d) - ret)^2)
        plain_N = (values_N - return_N).square()
        clipped_N = (old_N + (values_N - old_N).clamp(-VALUE_CLIP, VALUE_CLIP) - return_N).square()
        squares_N = torch.where(clipped_N > plain_N, clipped_N, plain_N)
        value_loss = 0.5 * sum_where(squares_N, kept_N) / tokens
        # Share of the returns' variance that the critic explains; 0 where there is none to explain.
        target, value = return_N[kept_N], values_N.detach()[kept_N]
        variance = float(target.var(unbiased=False)) if len(target) else 0.0
        explained = 1.0 - float((target - value).var(unbiased=False)) / variance if variance > 0.0 else 0.0
        metrics: dict[str, float | Tensor] = {
            **ratio_metrics(ratio_N, kept_N, low=self.clip, high=self.clip),
            "objective/value_loss": value_loss.detach(),
            "objective/value_explained": explained,
        }
        return Loss(
            value=sum_where(surrogate_N, kept_N) / tokens + self.value_coefficient * value_loss, metrics=metrics
        )


def token_rewards(batch: Batch, *, beta: float) -> Tensor:
    """The KL penalty at every chosen token, and the response's reward at its last one -> [N]."""
    reward_N = torch.zeros_like(batch.log_ref_N)
    if beta > 0.0:
        # Of the policy that generated: the penalty stays the same in every update on the batch.
        reward_N = torch.where(batch.kept_N, -beta * (batch.policy_N - batch.log_ref_N), reward_N)
    index_N = torch.arange(len(batch.loss_mask_N), device=batch.loss_mask_N.device)
    chosen_N = torch.where(batch.loss_mask_N, index_N, -1)
    last_R = torch.full((len(batch.lengths),), -1, device=index_N.device)
    last_R = last_R.scatter_reduce(0, batch.response_of_token, chosen_N, "amax")
    is_last_N = index_N == last_R[batch.response_of_token]
    return torch.where(is_last_N, reward_N + batch.per_token(batch.reward_PK), reward_N)


def generalised_advantages(
    batch: Batch, reward_N: Tensor, value_N: Tensor, *, gamma: float, gae_lambda: float
) -> Tensor:
    """GAE over each response's chosen tokens; after the last one the value is 0. Zero at tokens not chosen."""
    chosen_N, response_N = batch.loss_mask_N, batch.response_of_token
    starts_R = batch.offsets[:-1].to(response_N.device)
    before_N = chosen_N.long().cumsum(0) - chosen_N.long()
    # Chosen tokens before this one, less those before its response begins.
    column_N = before_N - before_N[starts_R.clamp(max=len(before_N) - 1)][response_N]
    # Where each chosen token stands in a table of responses x chosen tokens. T is the length of the longest response: at
    # least as many as any has chosen ones.
    R, T = len(batch.lengths), int(batch.lengths.max())
    place = (response_N * T + column_N)[chosen_N]
    reward_RT, value_RT = (
        values_N.new_zeros(R * T).index_put((place,), values_N[chosen_N]).view(R, T) for values_N in (reward_N, value_N)
    )
    # One token of all responses at a time: a value needs the one after it, and responses are many.
    advantage_RT = torch.zeros_like(reward_RT)
    running_R = next_value_R = torch.zeros(R, dtype=reward_RT.dtype, device=reward_RT.device)
    for t in range(T - 1, -1, -1):
        running_R = reward_RT[:, t] + gamma * next_value_R - value_RT[:, t] + gamma * gae_lambda * running_R
        # Chosen tokens stand first in a row, so a row's zeros behind them leave 0 here until its last token.
        next_value_R = value_RT[:, t]
        advantage_RT[:, t] = running_R
    return torch.zeros_like(reward_N).index_put((chosen_N,), advantage_RT.flatten()[place])


def whiten(value_N: Tensor, kept_N: Tensor) -> Tensor:
    """Mean 0 and variance 1 over the tokens that count."""
    kept = value_N[kept_N]
    if len(kept) < 2:
        return torch.zeros_like(value_N)
    return (value_N - kept.mean()) / (kept.var() + WHITEN_EPSILON).sqrt()


class VinePPO(Objective):
    clip: float = Field(default=0.2, gt=0.0, lt=1.0)
    """Distance from 1 within which the token ratio counts: between 1 - clip and 1 + clip."""
    continuations: ClassVar[int] = 9
    """Number of responses generated from each step's prefix to estimate its value, the paper's; read by the searchers."""
    default_coupling: ClassVar[Coupling] = "batch"
    needs: ClassVar[Needs] = Needs(reference=True, behaviour=True, multiplicities=True, all_responses=True)
    default_beta: ClassVar[float] = 1e-4

    def __call__(self, batch: Batch, forward: Forward, *, beta: float) -> Loss:
        kept_N, tokens = batch.kept_N, max(1, batch.totals.tokens)
        advantage_N = whiten(step_advantages(batch), kept_N)
        ratio_N = ratios(token_log_ratios(batch, forward.log_pi_N))
        surrogate_N = clipped_surrogate(advantage_N, ratio_N, low=self.clip, high=self.clip)
        value = sum_where(surrogate_N, kept_N) / tokens
        if beta > 0.0:
            kl_PK = batch.sum_per_response(k3(batch, forward.log_pi_N).clamp(max=LARGEST_K3))
            value = value + beta * mean_over_responses(kl_PK, batch)
        return Loss(value=value, metrics=ratio_metrics(ratio_N, kept_N, low=self.clip, high=self.clip))


def step_advantages(batch: Batch) -> Tensor:
    """[N]: the advantage of each token's step."""
    assert batch.step_values_N is not None
    # A value stands at the first token of each reasoning step, and NaN at all others.
    begins_N = torch.isfinite(batch.step_values_N)
    step_N = begins_N.long().cumsum(0) - 1
    value_S = batch.step_values_N[begins_N]
    response_S = batch.response_of_token[begins_N]
    # Behind a response's last step stands a value of the next response: goes_on_S puts the reward in its place.
    next_S = torch.cat([value_S[1:], value_S.new_zeros(1)])
    goes_on_S = torch.cat([response_S[1:] == response_S[:-1], response_S.new_zeros(1, dtype=torch.bool)])
    return (torch.where(goes_on_S, next_S, batch.reward_PK.flatten()[response_S]) - value_S)[step_N]
