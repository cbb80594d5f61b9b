"""Thirteen objectives written a second time, in NumPy and float64, with gradients derived by hand.

The library's losses are checked against this file, so it shares no code with them and prefers loops
over ragged Python lists to padding: whatever padding, masking or reshaping can get wrong cannot go
wrong in the same way here.

Every function selects the counted tokens and responses *before* any arithmetic, so NaN in a masked
token or in a response of weight 0 never reaches a number.

Axis suffixes: T all tokens of a response; M its masked-in tokens ("own" tokens, in order); K the
weight-1 responses of a prompt; N the own tokens of the whole batch.

Self-check of the gradients by central differences:
    OMP_NUM_THREADS=1 .venv/bin/python tests/objectives/numpy_objectives.py
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

STD_EPSILON = 1e-4
"""GRPO's guard against a group of equal rewards."""

WHITEN_EPSILON = 1e-8
"""PPO's guard inside the square root of the whitening."""


@dataclass
class Response:
    """One response of T tokens; all arrays float64 [T] but `mask`, bool [T].

    Example: Response(log_pi=np.array([-1.0, -3.0]), log_ref=np.array([-2.0, -2.0]),
    behaviour=np.array([-1.0, -2.5]), policy=np.array([-1.0, -2.5]), mask=np.array([True, True]),
    reward=1.0)
    """

    log_pi: np.ndarray
    """Log-probs under the current policy: what is differentiated."""
    log_ref: np.ndarray
    """Log-probs under the reference."""
    behaviour: np.ndarray
    """Log-probs under the distribution that was sampled from."""
    policy: np.ndarray
    """Log-probs under the generating policy, untruncated."""
    mask: np.ndarray
    """False: the token is not the policy's (a tool's words) and counts nowhere."""
    reward: float
    weight: float = 1.0
    """1, or 0 for a response that counts nowhere."""
    values: np.ndarray | None = None
    """PPO: the critic's value of the state before each token, now."""
    old_values: np.ndarray | None = None
    """PPO: the same when the batch was first seen; None = `values`, as constants."""
    mc_values: np.ndarray | None = None
    """VinePPO: value of the prefix before the first token of each step, NaN at the other tokens."""


@dataclass
class Prompt:
    """The responses to one prompt. Example: Prompt(responses=[first, second], log_z=0.0)"""

    responses: list[Response]
    log_z: float = 0.0
    """Learned log partition; only `tb_learned_z` reads it."""


@dataclass
class Answer:
    """A loss and its gradients, shaped like the prompts' responses; zero where nothing counts."""

    loss: float
    d_log_pi: list[list[np.ndarray]]
    d_values: list[list[np.ndarray]] | None = None
    d_log_z: list[float] | None = None


# ---------------------------------------------------------------------------------------------
# What counts
# ---------------------------------------------------------------------------------------------


class Counts(NamedTuple):
    """The normalisers. Never below 1, so that an empty batch has loss 0 instead of 0 / 0."""

    num_responses: int
    num_tokens: int
    num_prompts: int


def kept_indices(prompt: Prompt) -> list[int]:
    """Positions of the weight-1 responses."""
    for response in prompt.responses:
        if response.weight not in (0, 1):
            raise ValueError(f"Response.weight must be 0 or 1, got {response.weight}")
    return [k for k, response in enumerate(prompt.responses) if response.weight == 1]


def kept_groups(prompts: list[Prompt]) -> Iterator[tuple[int, list[int], list[Response]]]:
    """(prompt index, response indices, responses) of each prompt that has a weight-1 response."""
    for p, prompt in enumerate(prompts):
        ks = kept_indices(prompt)
        if ks:
            yield p, ks, [prompt.responses[k] for k in ks]


def count(prompts: list[Prompt]) -> Counts:
    groups = [responses for _, _, responses in kept_groups(prompts)]
    num_responses = sum(len(responses) for responses in groups)
    num_tokens = sum(int(response.mask.sum()) for responses in groups for response in responses)
    return Counts(max(num_responses, 1), max(num_tokens, 1), max(len(groups), 1))


def zeros_like_tokens(prompts: list[Prompt]) -> list[list[np.ndarray]]:
    return [[np.zeros(len(r.log_pi)) for r in prompt.responses] for prompt in prompts]


def own_sum(values_T: np.ndarray, mask_T: np.ndarray) -> float:
    return float(values_T[mask_T].sum())


def log_ratio_to_reference_K(responses: list[Response]) -> np.ndarray:
    """log pi - log ref of whole sequences, under the current policy."""
    return np.array([own_sum(r.log_pi, r.mask) - own_sum(r.log_ref, r.mask) for r in responses])


def rewards_K(responses: list[Response]) -> np.ndarray:
    return np.array([r.reward for r in responses], dtype=np.float64)


def kl_penalised_rewards_K(responses: list[Response], beta: float) -> np.ndarray:
    """R = r - beta * sum(log pi_old - log ref); a constant, since it holds the old policy."""
    penalty_K = [own_sum(r.policy, r.mask) - own_sum(r.log_ref, r.mask) for r in responses]
    return rewards_K(responses) - beta * np.array(penalty_K)


# ---------------------------------------------------------------------------------------------
# Squared residuals: trajectory balance and Kimi
# ---------------------------------------------------------------------------------------------


def tb(
    prompts: list[Prompt],
    *,
    beta: float,
    trust_region: str = "none",
    max_drift: float = 0.15,
    usual_drift: float = 0.0,
    frozen: list[Prompt] | None = None,
) -> Answer:
    """VarGrad trajectory balance: (beta / 2) * mean residual^2.

    trust_region, max_drift, usual_drift: which part of the gradient is kept, see `kept_share`.

    beta / 2 turns the gradient into -(1 / n) sum A grad log pi with
    A = (r - rbar) - beta (KL - KLbar), whose scale does not change with beta.
    frozen: where stop-gradients are read from; None = `prompts`.
    """
    num_responses = count(prompts).num_responses
    d_log_pi = zeros_like_tokens(prompts)
    loss = 0.0
    for p, ks, responses in kept_groups(prompts):
        constants = [(frozen or prompts)[p].responses[k] for k in ks]
        log_z = np.mean(rewards_K(constants) / beta - log_ratio_to_reference_K(constants))
        entropy = np.mean([-own_sum(response.policy, response.mask) for response in responses])
        residual_K = log_z + log_ratio_to_reference_K(responses) - rewards_K(responses) / beta
        for k, response, residual in zip(ks, responses, residual_K, strict=True):
            loss += beta / 2 * residual**2 / num_responses
            share = kept_share(
                response,
                up=residual < 0,
                trust_region=trust_region,
                max_drift=max_drift,
                usual_drift=usual_drift,
                entropy=entropy,
            )
            d_log_pi[p][k][response.mask] = beta * residual / num_responses * share
    return Answer(loss=float(loss), d_log_pi=d_log_pi)


def kept_share(
    response: Response, *, up: bool, trust_region: str, max_drift: float, usual_drift: float, entropy: float
) -> np.ndarray:
    """For each chosen token the share of its gradient that is kept, given which way the response is pushed. `entropy`: mean
    -log pi of the prompt's responses when they were generated; `usual_drift`: nats that one update moves log pi."""
    drift_T = [
        pi - old for pi, old, chosen in zip(response.log_pi, response.policy, response.mask, strict=True) if chosen
    ]
    sign = 1.0 if up else -1.0
    if trust_region == "token":
        return np.array([0.0 if sign * drift > max_drift else 1.0 for drift in drift_T])
    if trust_region == "response":
        limit = max(max_drift * entropy**0.5, 0.02 * len(drift_T) ** 0.5, 1.5 * usual_drift)
        return np.array(0.0 if sign * sum(drift_T) > limit else 1.0)
    if trust_region == "taper":
        return np.array(1.0 if up else min(1.0, np.exp(sum(drift_T))))
    return np.array(1.0)


def tb_learned_z(prompts: list[Prompt], *, beta: float) -> Answer:
    """(beta / 2) * mean (log Z + log pi - log ref - r / beta)^2 with log Z a parameter."""
    num_responses = count(prompts).num_responses
    d_log_pi = zeros_like_tokens(prompts)
    d_log_z = [0.0 for _ in prompts]
    loss = 0.0
    for p, ks, responses in kept_groups(prompts):
        log_ratio_K = log_ratio_to_reference_K(responses)
        residual_K = prompts[p].log_z + log_ratio_K - rewards_K(responses) / beta
        loss += beta / 2 * np.sum(residual_K**2) / num_responses
        d_log_z[p] = float(beta * np.sum(residual_K) / num_responses)
        for k, response, residual in zip(ks, responses, residual_K, strict=True):
            d_log_pi[p][k][response.mask] = beta * residual / num_responses
    return Answer(loss=float(loss), d_log_pi=d_log_pi, d_log_z=d_log_z)


def kimi(prompts: list[Prompt], *, beta: float) -> Answer:
    """Kimi k1.5: only the mean reward is subtracted, the mean log-ratio stays in."""
    num_responses = count(prompts).num_responses
    d_log_pi = zeros_like_tokens(prompts)
    loss = 0.0
    for p, ks, responses in kept_groups(prompts):
        reward_K = rewards_K(responses)
        residual_K = (reward_K - reward_K.mean()) / beta - log_ratio_to_reference_K(responses)
        loss += beta / 2 * np.sum(residual_K**2) / num_responses
        for k, response, residual in zip(ks, responses, residual_K, strict=True):
            d_log_pi[p][k][response.mask] = -beta * residual / num_responses
    return Answer(loss=float(loss), d_log_pi=d_log_pi)


# ---------------------------------------------------------------------------------------------
# Subtrajectory balance over turns
# ---------------------------------------------------------------------------------------------


def turns_of(mask: np.ndarray) -> list[list[int]]:
    """Own tokens of each turn: runs of masked-in tokens without a gap."""
    turns: list[list[int]] = []
    for t in (int(t) for t in np.flatnonzero(mask)):
        if turns and turns[-1][-1] == t - 1:
            turns[-1].append(t)
        else:
            turns.append([t])
    return turns


def subtb(prompts: list[Prompt], *, beta: float, decay: float = 0.9, value_share: float | None = None) -> Answer:
    """(beta / 2) * mean over responses of the weighted mean square residual of all stretches of turns; weight
    decay^turns. A state's log flow is the value at its turn's first token / beta, and r / beta at the end.

    value_share: share of the gradient by the values that is kept; None = beta.
    """
    num_responses = count(prompts).num_responses
    d_log_pi, d_values = zeros_like_tokens(prompts), zeros_like_tokens(prompts)
    loss = 0.0
    for p, ks, responses in kept_groups(prompts):
        for k, response in zip(ks, responses, strict=True):
            turns = turns_of(response.mask)
            stretches = [(i, j) for i in range(len(turns)) for j in range(i + 1, len(turns) + 1)]
            total = sum(decay ** (j - i) for i, j in stretches)
            for i, j in stretches:
                own = [t for turn in turns[i:j] for t in turn]
                start = response.values[turns[i][0]] / beta
                end = response.reward / beta if j == len(turns) else response.values[turns[j][0]] / beta
                residual = start + sum(response.log_pi[t] - response.log_ref[t] for t in own) - end
                share = decay ** (j - i) / total / num_responses
                loss += beta / 2 * share * residual**2
                d_log_pi[p][k][own] += beta * share * residual
                by_value = (beta if value_share is None else value_share) * share * residual
                d_values[p][k][turns[i][0]] += by_value
                if j < len(turns):
                    d_values[p][k][turns[j][0]] -= by_value
    return Answer(loss=float(loss), d_log_pi=d_log_pi, d_values=d_values)


# ---------------------------------------------------------------------------------------------
# TBA'
# ---------------------------------------------------------------------------------------------


def clamped_kl(response: Response, log_ratio_clamp: float, kl_policy: Literal["live", "inference"]) -> float:
    """Each token is clamped before the sum, so that one wild token cannot own the advantage."""
    log_prob = {"live": response.log_pi, "inference": response.policy}[kl_policy]
    log_ratio_M = log_prob[response.mask] - response.log_ref[response.mask]
    return float(np.clip(log_ratio_M, -log_ratio_clamp, log_ratio_clamp).sum())


def ratio_factor(response: Response, ratio_max: float) -> tuple[np.ndarray, np.ndarray]:
    """min(w, ratio_max) and its derivative by log pi: w up to the clamp, zero above."""
    ratio_M = np.exp(response.log_pi[response.mask] - response.behaviour[response.mask])
    return np.minimum(ratio_M, ratio_max), np.where(ratio_M <= ratio_max, ratio_M, 0.0)


def tba_prime(
    prompts: list[Prompt],
    *,
    beta: float,
    normal_length: float,
    ratio_max: float = 8.0,
    log_ratio_clamp: float = 10.0,
    kl_policy: Literal["live", "inference"] = "live",
    frozen: list[Prompt] | None = None,
) -> Answer:
    """TB's advantage in Dr. GRPO's token-level ratio loss.

    frozen: where the detached KL is read from; None = `prompts`.
    """
    scale = 1.0 / (count(prompts).num_responses * normal_length)
    d_log_pi = zeros_like_tokens(prompts)
    loss = 0.0
    for p, ks, responses in kept_groups(prompts):
        constants = [(frozen or prompts)[p].responses[k] for k in ks]
        kl_K = np.array([clamped_kl(r, log_ratio_clamp, kl_policy) for r in constants])
        reward_K = rewards_K(responses)
        advantage_reward_K = reward_K - reward_K.mean()
        advantage_kl_K = -beta * (kl_K - kl_K.mean())
        for i, (k, response) in enumerate(zip(ks, responses, strict=True)):
            ratio_M, d_ratio_M = ratio_factor(response, ratio_max)
            advantage = advantage_reward_K[i] + advantage_kl_K[i]
            loss -= scale * advantage * ratio_M.sum()
            d_log_pi[p][k][response.mask] -= scale * advantage * d_ratio_M
    return Answer(loss=float(loss), d_log_pi=d_log_pi)


# ---------------------------------------------------------------------------------------------
# Sequence-level policy gradients
# ---------------------------------------------------------------------------------------------


def leave_one_out_advantage_K(return_K: np.ndarray) -> np.ndarray:
    """Return minus the mean of the others; zero when there is no other to compare with."""
    if len(return_K) < 2:
        return np.zeros_like(return_K)
    others_K = [np.delete(return_K, i).mean() for i in range(len(return_K))]
    return return_K - np.array(others_K)


def policy_gradient(prompts: list[Prompt], advantage_of: Callable[[list[Response]], np.ndarray]) -> Answer:
    """-mean A log pi(sequence), A constant."""
    num_responses = count(prompts).num_responses
    d_log_pi = zeros_like_tokens(prompts)
    loss = 0.0
    for p, ks, responses in kept_groups(prompts):
        for k, response, advantage in zip(ks, responses, advantage_of(responses), strict=True):
            loss -= advantage * own_sum(response.log_pi, response.mask) / num_responses
            d_log_pi[p][k][response.mask] = -advantage / num_responses
    return Answer(loss=float(loss), d_log_pi=d_log_pi)


def reinforce(prompts: list[Prompt], *, beta: float, baseline: Literal["prompt", "none"] = "prompt") -> Answer:
    if baseline not in ("prompt", "none"):
        raise ValueError(f'baseline must be "prompt" or "none", got {baseline!r}')

    def advantage_K(responses: list[Response]) -> np.ndarray:
        return_K = kl_penalised_rewards_K(responses, beta)
        return return_K - return_K.mean() if baseline == "prompt" else return_K

    return policy_gradient(prompts, advantage_K)


def rloo(prompts: list[Prompt], *, beta: float) -> Answer:
    return policy_gradient(prompts, lambda rs: leave_one_out_advantage_K(kl_penalised_rewards_K(rs, beta)))


def clipped_surrogate(
    log_ratio: np.ndarray, advantage: np.ndarray | float, low: float, high: float
) -> tuple[np.ndarray, np.ndarray]:
    """max(-A w, -A clip(w)) and its derivative by log pi.

    Where the clipped side is strictly larger the clip is active, hence flat; a tie takes the
    unclipped side.
    """
    ratio = np.exp(log_ratio)
    unclipped = -advantage * ratio
    clipped = -advantage * np.clip(ratio, 1 - low, 1 + high)
    return np.maximum(unclipped, clipped), np.where(unclipped >= clipped, unclipped, 0.0)


def proximal_rloo(prompts: list[Prompt], *, beta: float, clip: float = 0.2) -> Answer:
    """RLOO for stale data: one clipped ratio per sequence."""
    num_responses = count(prompts).num_responses
    d_log_pi = zeros_like_tokens(prompts)
    loss = 0.0
    for p, ks, responses in kept_groups(prompts):
        advantage_K = leave_one_out_advantage_K(kl_penalised_rewards_K(responses, beta))
        for k, response, advantage in zip(ks, responses, advantage_K, strict=True):
            log_ratio = own_sum(response.log_pi, response.mask) - own_sum(response.behaviour, response.mask)
            value, slope = clipped_surrogate(np.array(log_ratio), advantage, clip, clip)
            loss += float(value) / num_responses
            d_log_pi[p][k][response.mask] = float(slope) / num_responses
    return Answer(loss=float(loss), d_log_pi=d_log_pi)


# ---------------------------------------------------------------------------------------------
# Token-level group objectives
# ---------------------------------------------------------------------------------------------


def group_token_loss(
    response: Response, advantage: float, *, beta: float, clip_low: float, clip_high: float
) -> tuple[np.ndarray, np.ndarray]:
    """Clipped surrogate plus beta * k3 of each own token, and the derivative by its log pi."""
    log_pi_M, log_ref_M, behaviour_M = (
        x[response.mask] for x in (response.log_pi, response.log_ref, response.behaviour)
    )
    surrogate_M, slope_M = clipped_surrogate(log_pi_M - behaviour_M, advantage, clip_low, clip_high)
    gap_M = log_ref_M - log_pi_M
    k3_M = np.exp(gap_M) - gap_M - 1
    return surrogate_M + beta * k3_M, slope_M + beta * (1 - np.exp(gap_M))


def grpo(prompts: list[Prompt], *, beta: float, clip_low: float = 0.2, clip_high: float = 0.2) -> Answer:
    """Standardised rewards; mean over a response's tokens, then over responses."""
    num_responses = count(prompts).num_responses
    d_log_pi = zeros_like_tokens(prompts)
    loss = 0.0
    for p, ks, responses in kept_groups(prompts):
        reward_K = rewards_K(responses)
        advantage_K = np.zeros(len(reward_K))  # one response has no unbiased deviation
        if len(reward_K) > 1:
            advantage_K = (reward_K - reward_K.mean()) / (reward_K.std(ddof=1) + STD_EPSILON)
        for k, response, advantage in zip(ks, responses, advantage_K, strict=True):
            token_loss_M, slope_M = group_token_loss(
                response, advantage, beta=beta, clip_low=clip_low, clip_high=clip_high
            )
            # A response of the tool's words alone still counts in num_responses, with loss 0.
            scale = 1.0 / (max(len(token_loss_M), 1) * num_responses)
            loss += scale * token_loss_M.sum()
            d_log_pi[p][k][response.mask] = scale * slope_M
    return Answer(loss=float(loss), d_log_pi=d_log_pi)


def dr_grpo(
    prompts: list[Prompt],
    *,
    beta: float,
    normal_length: float,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Answer:
    """GRPO without its two divisions: by the deviation, and by the response's own length."""
    scale = 1.0 / (count(prompts).num_responses * normal_length)
    d_log_pi = zeros_like_tokens(prompts)
    loss = 0.0
    for p, ks, responses in kept_groups(prompts):
        reward_K = rewards_K(responses)
        for k, response, advantage in zip(ks, responses, reward_K - reward_K.mean(), strict=True):
            token_loss_M, slope_M = group_token_loss(
                response, advantage, beta=beta, clip_low=clip_low, clip_high=clip_high
            )
            loss += scale * token_loss_M.sum()
            d_log_pi[p][k][response.mask] = scale * slope_M
    return Answer(loss=float(loss), d_log_pi=d_log_pi)


# ---------------------------------------------------------------------------------------------
# Value-based objectives
# ---------------------------------------------------------------------------------------------


def old_values_M(response: Response) -> np.ndarray:
    values_T = response.values if response.old_values is None else response.old_values
    if values_T is None:
        raise ValueError("ppo needs Response.values; got None for a response of weight 1")
    return values_T[response.mask]


def token_rewards_M(response: Response, beta: float) -> np.ndarray:
    """KL penalty of the old policy at each own token, the reward at the last."""
    reward_M = -beta * (response.policy[response.mask] - response.log_ref[response.mask])
    if len(reward_M):
        reward_M[-1] += response.reward
    return reward_M


def gae_M(reward_M: np.ndarray, value_M: np.ndarray, *, gamma: float, gae_lambda: float) -> np.ndarray:
    """Written as the sum A_t = sum_s (gamma lambda)^(s-t) delta_s, not as the usual recursion."""
    value_after_M = np.append(value_M[1:], 0.0)[: len(value_M)]
    delta_M = reward_M + gamma * value_after_M - value_M
    decay_M = (gamma * gae_lambda) ** np.arange(len(delta_M))
    return np.array([decay_M[: len(delta_M) - t] @ delta_M[t:] for t in range(len(delta_M))])


def whiten_N(advantage_N: np.ndarray) -> np.ndarray:
    if len(advantage_N) < 2:
        return np.zeros_like(advantage_N)
    variance = advantage_N.var(ddof=1)
    return (advantage_N - advantage_N.mean()) / np.sqrt(variance + WHITEN_EPSILON)


def clipped_value_loss(
    value_M: np.ndarray, old_M: np.ndarray, return_M: np.ndarray, value_clip: float
) -> tuple[np.ndarray, np.ndarray]:
    """max of the plain and the clipped squared error, and its derivative by the value."""
    move_M = value_M - old_M
    clipped_M = old_M + np.clip(move_M, -value_clip, value_clip)
    plain_error_M, clipped_error_M = value_M - return_M, clipped_M - return_M
    # Inside the clip old + (V - old) can differ from V in the last bit, so either side may win there;
    # both then have the same slope.
    clipped_slope_M = np.where(np.abs(move_M) <= value_clip, 2 * clipped_error_M, 0.0)
    plain_wins_M = plain_error_M**2 >= clipped_error_M**2
    return (
        np.maximum(plain_error_M**2, clipped_error_M**2),
        np.where(plain_wins_M, 2 * plain_error_M, clipped_slope_M),
    )


def ppo(
    prompts: list[Prompt],
    *,
    beta: float,
    clip: float = 0.2,
    value_clip: float = 0.2,
    value_coefficient: float = 0.1,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
    frozen: list[Prompt] | None = None,
) -> Answer:
    """Critic, GAE over own tokens, advantages whitened over the batch, both losses clipped.

    frozen: where old values are read from when a response has none; None = `prompts`.
    """
    num_tokens = count(prompts).num_tokens
    d_log_pi, d_values = zeros_like_tokens(prompts), zeros_like_tokens(prompts)
    kept = [(p, k) for p, ks, _ in kept_groups(prompts) for k in ks]
    if not kept:
        return Answer(loss=0.0, d_log_pi=d_log_pi, d_values=d_values)

    olds, advantages = [], []
    for p, k in kept:
        constant = (frozen or prompts)[p].responses[k]
        olds.append(old_values_M(constant))
        reward_M = token_rewards_M(constant, beta)
        advantages.append(gae_M(reward_M, olds[-1], gamma=gamma, gae_lambda=gae_lambda))
    ends = np.cumsum([len(a) for a in advantages])[:-1]
    whitened = np.split(whiten_N(np.concatenate(advantages)), ends)

    loss = 0.0
    for (p, k), old_M, raw_M, white_M in zip(kept, olds, advantages, whitened, strict=True):
        response = prompts[p].responses[k]
        if response.values is None:
            raise ValueError(f"ppo needs Response.values; got None at prompt {p}, response {k}")
        mask = response.mask
        log_ratio_M = response.log_pi[mask] - response.behaviour[mask]
        surrogate_M, slope_M = clipped_surrogate(log_ratio_M, white_M, clip, clip)
        value_loss_M, value_slope_M = clipped_value_loss(response.values[mask], old_M, raw_M + old_M, value_clip)
        loss += (surrogate_M.sum() + value_coefficient * 0.5 * value_loss_M.sum()) / num_tokens
        d_log_pi[p][k][mask] = slope_M / num_tokens
        d_values[p][k][mask] = value_coefficient * 0.5 * value_slope_M / num_tokens
    return Answer(loss=float(loss), d_log_pi=d_log_pi, d_values=d_values)


def step_advantages_M(response: Response) -> np.ndarray:
    """VinePPO's advantage of each own token: that of the step it is in. The KL penalty is no part of it."""
    if response.mc_values is None:
        raise ValueError("vineppo needs Response.mc_values; got None for a response of weight 1")
    value_M = response.mc_values[response.mask]
    if len(value_M) == 0:
        return np.zeros(0)
    if np.isnan(value_M[0]):
        raise ValueError("mc_values is NaN at the first own token; it begins a step and needs a value")
    starts = [int(t) for t in np.flatnonzero(~np.isnan(value_M))]
    advantage_M = np.zeros(len(value_M))
    for start, end in zip(starts, [*starts[1:], len(value_M)], strict=True):
        after = value_M[end] if end < len(value_M) else response.reward
        advantage_M[start:end] = after - value_M[start]
    return advantage_M


def vineppo(
    prompts: list[Prompt], *, beta: float, clip: float = 0.2, kl_clip: float = 10.0, whiten: bool = True
) -> Answer:
    """PPO's clip with whitened Monte-Carlo step advantages; a clipped k3 summed over each response, in the loss."""
    num_responses, num_tokens = count(prompts).num_responses, count(prompts).num_tokens
    d_log_pi = zeros_like_tokens(prompts)
    kept = [prompts[p].responses[k] for p, ks, _ in kept_groups(prompts) for k in ks]
    if not kept:
        return Answer(loss=0.0, d_log_pi=d_log_pi)
    raw_N = np.concatenate([step_advantages_M(response) for response in kept])
    advantage_N = whiten_N(raw_N) if whiten else raw_N
    loss, begin = 0.0, 0
    for p, ks, responses in kept_groups(prompts):
        for k, response in zip(ks, responses, strict=True):
            log_pi_M = response.log_pi[response.mask]
            advantage_M = advantage_N[begin : begin + len(log_pi_M)]
            begin += len(log_pi_M)
            surrogate_M, slope_M = clipped_surrogate(
                log_pi_M - response.behaviour[response.mask], advantage_M, clip, clip
            )
            gap_M = response.log_ref[response.mask] - log_pi_M
            k3_M = np.exp(gap_M) - gap_M - 1.0
            k3_slope_M = np.where(k3_M <= kl_clip, 1.0 - np.exp(gap_M), 0.0)
            loss += surrogate_M.sum() / num_tokens + beta * np.minimum(k3_M, kl_clip).sum() / num_responses
            d_log_pi[p][k][response.mask] = slope_M / num_tokens + beta * k3_slope_M / num_responses
    return Answer(loss=float(loss), d_log_pi=d_log_pi)


# ---------------------------------------------------------------------------------------------
# Preferences
# ---------------------------------------------------------------------------------------------


def online_dpo(prompts: list[Prompt], *, beta: float) -> Answer:
    """Best against worst of a prompt's samples; a prompt of equal rewards costs log 2."""
    num_prompts = count(prompts).num_prompts
    d_log_pi = zeros_like_tokens(prompts)
    loss = 0.0
    for p, ks, responses in kept_groups(prompts):
        reward_K, log_ratio_K = rewards_K(responses), log_ratio_to_reference_K(responses)
        # argmax and argmin return the first of equals, so equal rewards choose one response twice.
        chosen, rejected = int(reward_K.argmax()), int(reward_K.argmin())
        margin = beta * (log_ratio_K[chosen] - log_ratio_K[rejected])
        loss += np.logaddexp(0.0, -margin) / num_prompts  # -log sigmoid(margin)
        slope = -beta * np.exp(-np.logaddexp(0.0, margin)) / num_prompts  # -beta sigmoid(-margin)
        # Adding, not assigning: with chosen == rejected the two cancel.
        d_log_pi[p][ks[chosen]][responses[chosen].mask] += slope
        d_log_pi[p][ks[rejected]][responses[rejected].mask] -= slope
    return Answer(loss=float(loss), d_log_pi=d_log_pi)


# ---------------------------------------------------------------------------------------------
# Self-check
# ---------------------------------------------------------------------------------------------


def copied(prompts: list[Prompt]) -> list[Prompt]:
    """A copy that shares no array with the original, nor its responses with each other."""

    def copied_response(response: Response) -> Response:
        arrays = {k: v.copy() for k, v in vars(response).items() if isinstance(v, np.ndarray)}
        return replace(response, **arrays)

    return [replace(p, responses=[copied_response(r) for r in p.responses]) for p in prompts]


def random_response(rng: np.random.Generator, *, with_old_values: bool) -> Response:
    """Ragged, partly masked; ratios on both sides of .8 and 1.2; NaN wherever nothing counts."""
    T = int(rng.integers(2, 9))
    mask = rng.random(T) < 0.75
    mask[rng.integers(T)] = True
    log_pi = rng.normal(-2.0, 0.7, T)
    behaviour = log_pi + rng.normal(0.0, 0.4, T)
    behaviour[rng.random(T) < 0.08] -= 3.0  # ratios above TBA's clamp at 8
    values = rng.normal(0.0, 0.5, T)
    response = Response(
        log_pi=log_pi,
        log_ref=log_pi + rng.normal(0.1, 0.5, T),
        behaviour=behaviour,
        policy=behaviour + rng.normal(0.0, 0.2, T),
        mask=mask,
        reward=float(rng.choice([0.0, 0.3, 1.0])),
        weight=float(rng.random() < 0.8),
        values=values,
        old_values=values + rng.normal(0.0, 0.3, T) if with_old_values else None,
        mc_values=np.where(rng.random(T) < 0.4, rng.random(T), np.nan),
    )
    first_own = int(np.flatnonzero(mask)[0])
    response.mc_values[first_own] = rng.random()
    counted = mask & (response.weight == 1)
    for name in ("log_pi", "log_ref", "behaviour", "policy", "values", "old_values"):
        if getattr(response, name) is not None:
            getattr(response, name)[~counted] = np.nan
    return response if response.weight else replace(response, reward=float("nan"))


def random_prompts(rng: np.random.Generator, *, with_old_values: bool) -> list[Prompt]:
    """Groups of 1 to 6 responses and one group in which nothing counts."""
    prompts = []
    for num_responses in (4, 6, 1, 3, 2):
        responses = [random_response(rng, with_old_values=with_old_values) for _ in range(num_responses)]
        prompts.append(Prompt(responses=responses, log_z=float(rng.normal())))
    nothing = [replace(r, weight=0.0, reward=float("nan")) for r in prompts[0].responses]
    return copied([*prompts, Prompt(responses=nothing, log_z=float("nan"))])


def central_difference(
    loss_of: Callable[[list[Prompt]], float],
    prompts: list[Prompt],
    move: Callable[[list[Prompt], float], None],
    width: float,
) -> float:
    ends = []
    for sign in (1.0, -1.0):
        moved = copied(prompts)
        move(moved, sign * width)
        ends.append(loss_of(moved))
    return (ends[0] - ends[1]) / (2 * width)


def gradient_gap(
    objective: Callable[..., Answer], prompts: list[Prompt], *, has_frozen: bool, width: float = 1e-5
) -> tuple[float, float]:
    """(largest |analytic - central difference|, largest |analytic|) over every input."""
    frozen = {"frozen": copied(prompts)} if has_frozen else {}
    answer = objective(prompts)
    assert np.isfinite(answer.loss)

    def loss_of(moved: list[Prompt]) -> float:
        return objective(moved, **frozen).loss

    pairs = []
    for p, prompt in enumerate(prompts):
        for k, response in enumerate(prompt.responses):
            fields = {"log_pi": answer.d_log_pi}
            if answer.d_values is not None:
                fields["values"] = answer.d_values
            for name, gradient in fields.items():
                for t in range(len(response.log_pi)):

                    def move(moved, by, p=p, k=k, t=t, name=name):
                        getattr(moved[p].responses[k], name)[t] += by

                    numeric = central_difference(loss_of, prompts, move, width)
                    pairs.append((gradient[p][k][t], numeric))
                    if not response.mask[t] or response.weight == 0:
                        assert gradient[p][k][t] == 0
        if answer.d_log_z is not None:

            def move_z(moved, by, p=p):
                moved[p].log_z += by

            pairs.append((answer.d_log_z[p], central_difference(loss_of, prompts, move_z, width)))
    analytic, numeric = np.array(pairs).T
    assert np.isfinite(analytic).all()
    assert np.isfinite(numeric).all()
    return float(np.abs(analytic - numeric).max()), float(np.abs(analytic).max())


def check_gradients(num_seeds: int = 12) -> None:
    def bind(objective, **settings):
        return lambda prompts, **frozen: objective(prompts, **settings, **frozen)

    cases: dict[str, tuple[Callable[..., Answer], bool]] = {
        "tb": (bind(tb, beta=0.3), True),
        "tb (log Z not detached)": (bind(tb, beta=0.3), False),
        "tb_learned_z": (bind(tb_learned_z, beta=0.3), False),
        "kimi": (bind(kimi, beta=0.3), False),
        "subtb": (bind(subtb, beta=0.3, value_share=1.0), False),
        "tba_prime": (bind(tba_prime, beta=0.3, normal_length=7.0), True),
        "tba_prime tight clamps": (
            bind(tba_prime, beta=0.3, normal_length=7.0, ratio_max=1.1, log_ratio_clamp=0.3),
            True,
        ),
        "tba_prime, KL of the generating policy": (
            bind(tba_prime, beta=0.3, normal_length=7.0, kl_policy="inference"),
            False,
        ),
        "reinforce prompt": (bind(reinforce, beta=0.3), False),
        "reinforce none": (bind(reinforce, beta=0.3, baseline="none"), False),
        "rloo": (bind(rloo, beta=0.3), False),
        "proximal_rloo": (bind(proximal_rloo, beta=0.3), False),
        "grpo": (bind(grpo, beta=0.3), False),
        "grpo low .1 high .3": (bind(grpo, beta=0.0, clip_low=0.1, clip_high=0.3), False),
        "dr_grpo": (bind(dr_grpo, beta=0.3, normal_length=7.0), False),
        "dr_grpo low .1 high .3": (
            bind(dr_grpo, beta=0.0, normal_length=7.0, clip_low=0.1, clip_high=0.3),
            False,
        ),
        "ppo": (bind(ppo, beta=0.3), True),
        "ppo gamma .9, large value coefficient": (
            bind(ppo, beta=0.3, gamma=0.9, gae_lambda=0.8, value_coefficient=2.0),
            True,
        ),
        "vineppo": (bind(vineppo, beta=0.3), False),
        "vineppo, tight KL clip, not whitened": (bind(vineppo, beta=0.3, kl_clip=0.1, whiten=False), False),
        "online_dpo": (bind(online_dpo, beta=0.3), False),
    }
    for name, (objective, has_frozen) in cases.items():
        worst, largest = 0.0, 0.0
        for seed in range(num_seeds):
            prompts = random_prompts(np.random.default_rng(seed), with_old_values=seed % 3 != 0)
            gap, size = gradient_gap(objective, prompts, has_frozen=has_frozen)
            worst, largest = max(worst, gap), max(largest, size)
        print(f"{name:40s} largest gap {worst:.1e}   largest gradient {largest:.1e}")
        assert worst < 1e-8, name


def check_coverage(num_seeds: int = 12) -> None:
    """The gradient check means little unless both sides of every clip occur, with both signs of A."""
    seen = {"w": np.zeros((2, 4), int), "sequence": np.zeros((2, 3), int), "value": np.zeros(2, int)}
    for seed in range(num_seeds):
        prompts = random_prompts(np.random.default_rng(seed), with_old_values=seed % 3 != 0)
        for _, _, responses in kept_groups(prompts):
            reward_K = rewards_K(responses)
            loo_K = leave_one_out_advantage_K(kl_penalised_rewards_K(responses, 0.3))
            for response, reward, loo in zip(responses, reward_K, loo_K, strict=True):
                mask = response.mask
                log_ratio_M = response.log_pi[mask] - response.behaviour[mask]
                if reward != reward_K.mean():
                    sign = int(reward > reward_K.mean())
                    bins = np.digitize(np.exp(log_ratio_M), [0.8, 1.2, 8.0])
                    np.add.at(seen["w"][sign], bins, 1)
                if loo:
                    ratio = np.exp(log_ratio_M.sum())
                    seen["sequence"][int(loo > 0), np.digitize(ratio, [0.8, 1.2])] += 1
                if response.old_values is not None:
                    outside_M = np.abs(response.values[mask] - response.old_values[mask]) > 0.2
                    np.add.at(seen["value"], outside_M.astype(int), 1)
    print("token ratios  <.8, <1.2, <8, >8 (rows A<0, A>0):", seen["w"].tolist())
    print("sequence ratios  <.8, <1.2, >1.2 (rows A<0, A>0):", seen["sequence"].tolist())
    print("value moves inside, outside the clip:", seen["value"].tolist())
    assert all((counts > 0).all() for counts in seen.values())


def plain(log_pi: list[float], log_ref: list[float], reward: float, **fields) -> Response:
    """All tokens own, behaviour and generating policy equal to log_pi unless said otherwise."""
    array = np.array(log_pi, dtype=np.float64)
    given = {"behaviour": array.copy(), "policy": array.copy(), **fields}
    return Response(log_pi=array, log_ref=np.array(log_ref), mask=np.ones(len(array), bool), reward=reward, **given)


def check_by_hand() -> None:
    """Loss values worked out by hand: central differences cannot see a wrong constant in a loss."""
    ln2 = np.log(2.0)
    pair = [Prompt(responses=[plain([-1.0], [-2.0], 2.0), plain([-1.0, -2.0], [-1.0, -1.0], 0.0)])]
    # log ratios 1 and -1; r / beta 4 and 0: log Z 3 and 1, residuals -1 and 1; mean square 1
    assert np.isclose(tb(pair, beta=0.5).loss, 0.25)
    # log Z 0: residuals 1 - 4 = -3 and -1; mean square 5
    assert np.isclose(tb_learned_z(pair, beta=0.5).loss, 1.25)
    # 1 / .5 - 1 = 1 and -2 + 1 = -1
    assert np.isclose(kimi(pair, beta=0.5).loss, 0.25)
    # A = 1 - .5 = .5 and -.5 (r +-1, -beta * (+-1)); ratios 1: -(.5 - .5 * 2) / (2 * 10)
    assert np.isclose(tba_prime(pair, beta=0.5, normal_length=10.0).loss, 0.5 / 20)
    # Generating policy 3 and 0 nats above the reference: KL +-1.5 around its mean, A = 1 - .75 = .25 and -.25
    pair[0].responses[0].policy, pair[0].responses[1].policy = np.array([1.0]), np.array([-1.0, -1.0])
    assert np.isclose(tba_prime(pair, beta=0.5, normal_length=10.0, kl_policy="inference").loss, 0.25 / 20)
    pair[0].responses[0].policy, pair[0].responses[1].policy = np.array([-1.0]), np.array([-1.0, -2.0])
    # R = 1.5 and .5; A +-.5 (leave one out +-1); log pi -1 and -3: -(-.5 + 1.5) / 2
    assert np.isclose(reinforce(pair, beta=0.5).loss, -0.5)
    assert np.isclose(reinforce(pair, beta=0.5, baseline="none").loss, (1.5 + 1.5) / 2)
    assert np.isclose(rloo(pair, beta=0.5).loss, -1.0)
    # margin .5 * 2 = 1
    assert np.isclose(online_dpo(pair, beta=0.5).loss, np.log1p(np.exp(-1.0)))

    # ratio 2 with A = 1 clips at 1.2; ratio 2 with A = -1 does not clip: (-1.2 + 2) / 2
    stale = copied(pair)
    stale[0].responses[0].behaviour -= ln2
    stale[0].responses[1].behaviour[0] -= ln2
    assert np.isclose(proximal_rloo(stale, beta=0.5).loss, 0.4)
    # std of (2, 0) is sqrt 2; token losses -1.2 A, and (2 A, A) over two tokens; k3 of gaps -1; 0, 1
    A = 1 / (np.sqrt(2.0) + 1e-4)
    k3_first, k3_second = np.exp(-1.0), (np.e - 2) / 2
    expected = (-1.2 * A + 0.5 * k3_first + 1.5 * A + 0.5 * k3_second) / 2
    assert np.isclose(grpo(stale, beta=0.5).loss, expected)
    expected = (-1.2 + 0.5 * k3_first + 3.0 + 0.5 * (np.e - 2)) / (2 * 10)
    assert np.isclose(dr_grpo(stale, beta=0.5, normal_length=10.0).loss, expected)

    # beta 0, lambda .5: deltas .5 - .2 = .3 and 1 - .5 = .5; A = .55, .5; returns .75, 1.
    # Ratios 2, 1; whitened +-1/sqrt 2 (variance .00125): -1.2/sqrt 2 + 1/sqrt 2, over two tokens.
    # Values .6 and .5: the first clips at .4, errors -.15 and -.35 -> .1225; the second -.5 -> .25.
    critic = plain([-1.0, -1.0], [-1.0, -1.0], 1.0, behaviour=np.array([-1.0 - ln2, -1.0]))
    critic.values, critic.old_values = np.array([0.6, 0.5]), np.array([0.2, 0.5])
    expected = -0.2 / np.sqrt(2) / 2 + 0.1 * 0.5 * (0.1225 + 0.25) / 2
    loss = ppo([Prompt(responses=[critic])], beta=0.0, gae_lambda=0.5).loss
    assert np.isclose(loss, expected, atol=1e-6, rtol=0)
    # Steps {0, 1} and {2}: A = .7 - .5 = .2 and 1 - .7 = .3, ratios 1; log ref - log pi -1, 0, 0: k3 1/e, 0, 0. Whitened
    # advantages have mean 0, and so has the surrogate where all ratios are 1.
    vine = plain([-1.0, -1.0, -1.0], [-2.0, -1.0, -1.0], 1.0, mc_values=np.array([0.5, np.nan, 0.7]))
    loss = vineppo([Prompt(responses=[vine])], beta=0.1, whiten=False).loss
    assert np.isclose(loss, -(0.2 + 0.2 + 0.3) / 3 + 0.1 / np.e)
    assert np.isclose(vineppo([Prompt(responses=[vine])], beta=0.1).loss, 0.1 / np.e)
    print("values worked out by hand: as expected")


if __name__ == "__main__":
    check_by_hand()
    check_coverage()
    check_gradients()
