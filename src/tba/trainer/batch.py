"""The batch of a step: its targets, its micro-batches, packed under a token budget, and its metrics.

Targets are made from stored reward components when a batch is trained, so that weights, penalties, schedules and rules may
change between runs over the same data. Micro-batches hold prompts sorted by length and whole where they fit: attention
blocks have little padding, and group-coupled losses need one pass only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from tba.config import Config, TrainConfig
from tba.models.packing import PackedTokens, pack, split_by_budget
from tba.objectives.objective import centred
from tba.types import Batch, Forward, Totals, on_device, total_reward

ROUNDING = 1e-6  # largest difference of rewards, as a share of the largest, that is rounding
ROUNDING_DRIFT, LEAST_EXACT = 0.016, 0.3
"""Nats per square root of the tokens that log_pi of an engine in bf16 and of its trainer are apart (mean |difference|), and
the share of a drift in bf16 that is no rounding, at least."""
LEAST_SIZE = 1e-4  # below this size drift is the rounding of an engine, or all rewards of every prompt are the same


def combine(batch: Batch, config: TrainConfig, *, reward_weights: Mapping[str, float]) -> Batch:
    """Weighted sum of the components (not-applicable ones left out), then the truncation rule."""
    components = [value_PK.numpy() for value_PK in batch.rewards.values()]
    reward_PK = torch.from_numpy(total_reward(components, [reward_weights[name] for name in batch.rewards]))
    # A prompt with fewer than K responses has places without one, where sampled_PK is false.
    weight_PK = batch.sampled_PK.to(reward_PK.dtype)
    if config.cut_off_reward is not None:
        reward_PK = torch.where(batch.truncated_PK, config.cut_off_reward, reward_PK)
    if config.truncated == "drop":
        weight_PK = weight_PK * ~batch.truncated_PK
    return _weighted(replace(batch, reward_PK=reward_PK), weight_PK)


def _weighted(batch: Batch, weight_PK: Tensor) -> Batch:
    batch, prompts = replace(batch, weight_PK=weight_PK), int((weight_PK.sum(dim=1) > 0).sum())
    totals = Totals(prompts=prompts, responses=int(weight_PK.sum()), tokens=int(batch.kept_N.sum()))
    return replace(batch, totals=totals)


def shape_target(batch: Batch, config: Config, step: int, progress: float, *, beta: float) -> tuple[Batch, float]:
    """The batch and the beta whose target log pi_ref + r / beta is (log pi_ref + r / beta) / tau of this step."""
    temperature = config.target_temperature_at(step, progress)
    if temperature == 1.0:
        return batch, beta
    return replace(batch, log_ref_N=batch.log_ref_N / temperature), beta * temperature


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits of one micro-batch: Budget(max_tokens=16384, max_responses=4, share_prompts=False)"""

    max_tokens: int
    max_responses: int | None = None
    share_prompts: bool = True

    def admits(self, *, tokens: int, responses: int) -> bool:
        return tokens <= self.max_tokens and (self.max_responses is None or responses <= self.max_responses)


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """Some responses of a batch, packed: MicroBatch(responses=[0, 1, 2, 3], packed=..., tokens_N=[0, 1, ..., 57])"""

    responses: Tensor  # int64, those of a prompt together and in order
    tokens_N: Tensor  # int64: where the packed targets lie in the batch's N
    prompts: Tensor  # int64: the prompts these responses belong to, in their order
    begins: Tensor
    """bool: whether a prompt's first response is among them. What belongs to a prompt is counted there, once."""
    packed: PackedTokens


EVEN_SHARES = (1.0, 1.03, 1.1, 1.25, 1.5)
"""Sizes of a micro-batch that are tried, as shares of the mean, before it is filled to the budget."""


def _evenly(
    items: Sequence[int], budget: Budget, *, responses: int, cost: Callable[[Sequence[int], int], int]
) -> list[list[int]]:
    """Items of so many responses each, in the number of micro-batches that the budget takes, none much smaller than the
    others: small ones may take the host longer to launch than the device to compute."""

    def joins(part: Sequence[int], _: int) -> bool:
        return budget.admits(tokens=0, responses=(len(part) + 1) * responses)

    split = partial(split_by_budget, items, cost=cost, joins=joins)
    full = split(max_tokens=budget.max_tokens)
    if len(full) < 2:
        return full
    # Each item beside its neighbour, as in one large micro-batch: a prompt that they share counts once.
    total = sum(cost(items[max(0, place - 1) : place], item) for place, item in enumerate(items))
    # The smallest size that needs no more micro-batches than full ones do is the most even.
    for share in EVEN_SHARES:
        limit = math.ceil(share * total / len(full))
        if limit < budget.max_tokens:
            parts = split(max_tokens=limit)
            if len(parts) == len(full):
                return parts
    return full


def split_whole_prompts(batch: Batch, budget: Budget, prompts: Sequence[int]) -> list[list[int]] | None:
    """Whole prompts per micro-batch, similar lengths together, of about the same size; None when one exceeds the budget."""
    K, cost = batch.shape[1], _prompt_costs(batch, budget)
    # Group-coupled losses need a prompt's responses side by side: one that is spread costs all prompts a second pass.
    if not all(budget.admits(tokens=cost[prompt], responses=K) for prompt in prompts):
        return None
    falling = sorted(prompts, key=cost.__getitem__, reverse=True)
    return _evenly(falling, budget, responses=K, cost=lambda _, prompt: cost[prompt])


def split_responses(batch: Batch, budget: Budget, responses: Sequence[int]) -> list[list[int]]:
    """Responses per micro-batch, in order, of about the same size; a single response beyond the budget runs alone."""
    K, lengths = batch.shape[1], batch.lengths.tolist()

    def cost(part: Sequence[int], response: int) -> int:
        same_prompt = bool(part) and part[-1] // K == response // K
        shared = budget.share_prompts and same_prompt
        return lengths[response] + (0 if shared else len(batch.prompt_tokens[response // K]))

    return _evenly(responses, budget, responses=1, cost=cost)


def deal_prompts(batch: Batch, budget: Budget, *, num_ranks: int) -> list[list[list[int]]] | None:
    """Prompts of each micro-batch of each rank, whole; None when a prompt exceeds the budget or a rank would get none."""
    # Every rank divides the same batch in the same way, so no rank needs a message about its part.
    cost, tokens = _prompt_costs(batch, budget), [0] * num_ranks
    own: list[list[int]] = [[] for _ in range(num_ranks)]
    for prompt in sorted(range(batch.shape[0]), key=cost.__getitem__, reverse=True):
        rank = tokens.index(min(tokens))  # the costliest prompt left goes to the rank that has least to do
        own[rank].append(prompt)
        tokens[rank] += cost[prompt]
    dealt = [split_whole_prompts(batch, budget, prompts) for prompts in own]
    # `parts` is None where a prompt exceeds the budget, and empty for a rank without prompts.
    found = [parts for parts in dealt if parts]
    return found if len(found) == num_ranks else None


def deal_responses(batch: Batch, budget: Budget, responses: Sequence[int], *, num_ranks: int) -> list[list[list[int]]]:
    """Responses of each micro-batch of each rank: runs of about as many tokens each, in order."""
    lengths = batch.lengths.tolist()
    share, tokens = sum(lengths[response] for response in responses) / num_ranks, 0
    own: list[list[int]] = [[] for _ in range(num_ranks)]
    for response in responses:
        # By the middle of the response, so that a rounded end does not fall to a rank of its own.
        rank = min(num_ranks - 1, int((tokens + lengths[response] / 2) / max(share, 1e-9)))
        own[rank].append(response)
        tokens += lengths[response]
    return [split_responses(batch, budget, given) for given in own]


def empty_micro_batch(batch: Batch, *, device: torch.device) -> MicroBatch:
    """A micro-batch of no response, for a rank that has to take part: one token is computed, which does not count."""
    token, nothing = batch.prompt_tokens[0][:1].cpu(), torch.zeros(0, dtype=torch.int64)
    return MicroBatch(
        responses=nothing,
        tokens_N=nothing.to(device),
        prompts=nothing.to(device),
        begins=nothing.bool().to(device),
        packed=pack([token], [[token]], device=device),
    )


def pack_responses(batch: Batch, responses: list[int], *, device: torch.device) -> MicroBatch:
    K, index, ends = batch.shape[1], torch.tensor(responses), batch.offsets.tolist()
    prompts, own, begins = [], [], []
    for prompt, of_prompt in groupby(responses, key=lambda response: response // K):
        members = list(of_prompt)
        prompts.append(prompt)
        own.append([batch.token_ids_N[ends[r] : ends[r + 1]] for r in members])
        # A prompt begins at its response k = 0: where its responses are spread, log Z counts in one micro-batch alone.
        begins.append(members[0] == prompt * K)
    packed = pack([batch.prompt_tokens[p] for p in prompts], own, device=device)
    return MicroBatch(
        responses=index,
        tokens_N=on_device(batch.tokens_of(index), device),
        prompts=on_device(torch.tensor(prompts), device),
        begins=on_device(torch.tensor(begins), device),
        packed=packed,
    )


def _prompt_costs(batch: Batch, budget: Budget) -> list[int]:
    (P, K) = batch.shape
    response_tokens = batch.lengths.view(P, K).sum(dim=1).tolist()
    copies = 1 if budget.share_prompts else K
    return [own + copies * len(prompt) for own, prompt in zip(response_tokens, batch.prompt_tokens)]


def batch_metrics(batch: Batch, log_pi_N: Tensor, *, step: int) -> dict[str, float]:
    """Metrics of a batch (on the CPU) given log_pi before the update; responses without weight are left out."""
    kept_PK, dropped = batch.weight_PK > 0, float((batch.sampled_PK & (batch.weight_PK == 0)).sum())
    if not kept_PK.any():
        return {"off_policy/dropped": dropped}
    # Imported responses and the reference's have no lag.
    own_PK = kept_PK & torch.isfinite(batch.sum_per_response(batch.policy_N))
    lag = (step - batch.version_PK)[own_PK].float() if own_PK.any() else torch.zeros(1)
    sampled_PK = batch.sampled_PK.to(batch.reward_PK.dtype)
    # Of all responses that were sampled, also those without weight.
    squares_P = centred(batch.reward_PK, sampled_PK).square().sum(dim=1)
    std_P = (squares_P / sampled_PK.sum(dim=1).clamp(min=1.0)).sqrt()
    return {
        **response_means(batch, log_pi_N, kept_PK),
        **{f"rewards/{name}/mean": float(value[kept_PK].nanmean()) for name, value in batch.rewards.items()},
        "reward_std": float(std_P.mean()),
        "frac_reward_zero_std": float((std_P < 1e-12).float().mean()),
        "off_policy/lag_mean": float(lag.mean()),
        "off_policy/lag_max": float(lag.max()),
        "off_policy/dropped": dropped,
    }


def response_means(batch: Batch, log_pi_N: Tensor, kept_PK: Tensor) -> dict[str, float]:
    log_ratio_PK = batch.sum_per_response(log_pi_N) - batch.sum_per_response(batch.log_ref_N)
    return {
        "reward": float(batch.reward_PK[kept_PK].mean()),
        "kl": float(log_ratio_PK[kept_PK].mean()),
        "completions/mean_length": float(batch.lengths.view(batch.shape)[kept_PK].float().mean()),
        "completions/clipped_ratio": float(batch.truncated_PK[kept_PK].float().mean()),
    }


def drift_metrics(batch: Batch, log_pi_N: Tensor, *, step: int, exact: bool) -> dict[str, float]:
    """How far the policy has moved from what generated the responses; only where those log-probs are known. What is not
    `exact` was computed in bf16."""
    kept_PK, log_pi_PK = batch.weight_PK > 0, batch.sum_per_response(log_pi_N)
    behaviour_PK, policy_PK = batch.sum_per_response(batch.behaviour_N), batch.sum_per_response(batch.policy_N)
    known_PK = kept_PK & torch.isfinite(behaviour_PK) & torch.isfinite(policy_PK)
    if not known_PK.any():
        return {}
    # The drift is of the policy itself; the ratio is to what chose the tokens, which exploration and top-p shift.
    drift_PK, log_ratio = log_pi_PK - policy_PK, (log_pi_PK - behaviour_PK)[known_PK]
    # A common factor does not change the effective sample size, and with a largest ratio of 1 nothing overflows.
    ratio = torch.exp(log_ratio - log_ratio.max())
    found = {
        "off_policy/ess": float(ratio.sum().square() / ratio.square().sum() / len(ratio)),
        "off_policy/kl": -float(drift_PK[known_PK].mean()),
    }
    # Responses of this very version have not been moved by any update: only earlier ones show what updates do.
    late_PK = known_PK & (batch.version_PK < step)
    if late_PK.any():
        size = float(drift_PK[late_PK].abs().mean())
        if not exact:
            size = without_rounding(size, float(batch.lengths.view(batch.shape)[late_PK].float().mean()))
        found["off_policy/drift"] = size
        found["off_policy/drift_lag"] = float((step - batch.version_PK)[late_PK].float().mean())
    # In bf16 most of a small drift is rounding, which correlates with nothing.
    moved = drift_reward_correlation(batch.reward_PK, drift_PK, known_PK) if exact else None
    return found if moved is None else {**found, "off_policy/drift_reward_correlation": moved}


def without_rounding(nats: float, tokens: float) -> float:
    """A change of log_pi of responses of so many tokens, less the part that is rounding: two passes in bf16 are some way
    apart even where nothing has moved, and independent distances add up by their squares."""
    return math.sqrt(max(nats**2 - ROUNDING_DRIFT**2 * tokens, (LEAST_EXACT * nats) ** 2))


def hold_out(batch: Batch) -> tuple[Batch, list[int]]:
    """The batch with a quarter of its responses dropped, and those responses: whole prompts where there are four or more.
    An update does to them what it does to new responses; responses that it follows move several times as far."""
    weight_PK = batch.weight_PK.clone()
    if len(weight_PK) >= 4:
        weight_PK[3::4] = 0.0
    else:
        weight_PK[:, 3::4] = 0.0
    dropped = torch.nonzero((batch.weight_PK > weight_PK).flatten()).flatten().tolist()
    return _weighted(batch, weight_PK), dropped


def entropy_of(batch: Batch, outputs: Forward) -> float:
    """Mean entropy of a response in nats; NaN where no response has weight."""
    assert outputs.entropy_N is not None
    entropy_PK = batch.sum_per_response(outputs.entropy_N.to(batch.log_ref_N.device))
    kept_PK = batch.weight_PK > 0
    return float(entropy_PK[kept_PK].mean()) if kept_PK.any() else math.nan


def reward_spread(batch: Batch) -> float:
    """Standard deviation of the rewards within prompts, of those whose responses differ in them."""
    better_PK, differ_P = _differing_rewards(batch)
    count = int((batch.weight_PK[differ_P] > 0).sum())
    return math.sqrt(float(better_PK[differ_P].square().sum()) / count) if count else 0.0


def _differing_rewards(batch: Batch) -> tuple[Tensor, Tensor]:
    """Rewards less the mean of their prompt [P, K], and whether those of a prompt differ by more than rounding [P]."""
    kept_PK, reward_PK = batch.weight_PK > 0, batch.reward_PK.double()
    # In fp64, so that ROUNDING is far above the error of the mean itself.
    better_PK = centred(reward_PK, kept_PK.double())
    size_P = torch.where(kept_PK, reward_PK, 0.0).abs().amax(dim=1)
    return better_PK, better_PK.abs().amax(dim=1) > ROUNDING * size_P


def drift_reward_correlation(reward_PK: Tensor, drift_PK: Tensor, known_PK: Tensor) -> float | None:
    """Correlation, within prompts, of the rewards with the drift log_pi now - log_pi when generated; None without drift.
    Where the last updates were signal, the policy has already moved towards the better of responses that it has not been
    trained on; where they were noise, it has moved at random."""
    weight_PK = known_PK.to(drift_PK.dtype)
    moved_PK = centred(torch.where(known_PK, drift_PK, torch.zeros_like(drift_PK)), weight_PK)
    better_PK = centred(reward_PK.to(drift_PK.dtype), weight_PK)
    size = float((moved_PK.square().sum() * better_PK.square().sum()).sqrt())
    return float((moved_PK * better_PK).sum()) / size if size > LEAST_SIZE else None


def target_metrics(batch: Batch, log_pi_N: Tensor, *, beta: float) -> dict[str, float]:
    """How far the policy is on its way from the reference to the target pi_ref exp(r / beta), on the CPU:
    `tb/target_reached` and `tb/reward_spread`; nothing where no prompt's responses differ in their rewards. At the target
    beta x (log_pi - log_ref) and the reward differ by a constant for each prompt; at the reference the former is 0. So the
    slope of the one on the other, within prompts, goes from 0 to 1."""
    kept_PK = batch.weight_PK > 0
    log_ratio_PK = batch.sum_per_response(log_pi_N - batch.log_ref_N).double()
    moved_PK = centred(torch.where(kept_PK, log_ratio_PK, 0.0), kept_PK.double())
    better_PK, differ_P = _differing_rewards(batch)
    squares = float(better_PK[differ_P].square().sum())
    if not 0.0 < squares < math.inf:
        return {}
    return {
        "tb/target_reached": beta * float((moved_PK * better_PK)[differ_P].sum()) / squares,
        "tb/reward_spread": reward_spread(batch),
    }
