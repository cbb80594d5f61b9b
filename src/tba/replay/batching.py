"""A TrajectoryGroup becomes the responses of a prompt's entry, and chosen responses become the Batch that is trained
on.

Axis letters: P prompts, K places per prompt, R responses of a group, C reward components, N tokens of responses end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from tba.replay.draw import Choice
from tba.runtime.columns import ResponseColumns, columns_of
from tba.types import NO_ROW, Batch, Totals, TrajectoryGroup, total_reward

NUM_FLOATS = 3
"""Numbers stored of each token besides its id: log_ref, behaviour and policy log-prob. Step values are a fourth."""
LARGEST_SCORE = float(np.finfo(np.float32).max)
"""Largest absolute value of a score: an infinite one would make the softmax of its prompt NaN."""
LOG_IMPORTANCE = (-12.0, 0.5)
"""Range that the log of reference / behaviour probability is clipped to: a response that the policy hardly ever says must
not be drawn again and again."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedGroup:
    """Responses of one prompt, as PromptEntry stores them."""

    ids: list[bytes]
    """Token ids of each response, int32, ~id where the policy did not choose the token."""
    floats: list[bytes]
    """log_ref, behaviour and policy log-probs (and step values) of each token, float32 [T, 3 or 4]."""
    columns: dict[str, np.ndarray]
    """One array per fact: `version`, `truncated` and `rewards` [R, C]; `log_importance`, the clipped log of reference /
    behaviour probability (0 where that is unknown); `has_lag`, whether the policy of some version generated the response."""
    reference_version: int

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, responses: Sequence[int]) -> PackedGroup:
        if len(responses) == len(self):
            return self
        return PackedGroup(
            ids=[self.ids[r] for r in responses],
            floats=[self.floats[r] for r in responses],
            columns={name: column[responses] for name, column in self.columns.items()},
            reference_version=self.reference_version,
        )


def pack_group(group: TrajectoryGroup, reward_names: Sequence[str], *, step_values: bool = False) -> PackedGroup:
    """Check a group, which holds at least one trajectory, and pack it. `step_values`: whether those are kept."""
    columns = columns_of(group)
    if not columns.lengths.all():
        sample = columns.sample_indices[int(columns.lengths.argmin())]
        raise ValueError(f"group {group.id}: sample {sample} has no tokens; a response ends with EOS.")
    unknown = set().union(*set(columns.reward_names)) - set(reward_names)
    if unknown:
        raise ValueError(f"group {group.id} has rewards {sorted(unknown)}; the buffer knows {sorted(reward_names)}.")
    reference_versions = set(columns.reference_versions)
    if len(reference_versions) > 1:
        raise ValueError(
            f"group {group.id} mixes reference versions {sorted(reference_versions)}: send one group for each."
        )
    per_token = [columns.log_ref, columns.behaviour, columns.policy]
    if step_values:
        per_token.append(_step_values(columns, group.id))
    # One sum for each response. None is empty, as was checked: reduceat would give an empty one its neighbour's first token.
    log_importance = np.add.reduceat(columns.log_ref.astype(np.float64) - columns.behaviour, columns.starts)
    # A reward beyond float32 becomes infinite here, without a warning; combine_rewards makes its score finite again.
    with np.errstate(over="ignore"):
        rewards = columns.components(reward_names).astype(np.float32)
    return PackedGroup(
        # ~id is negative for every id, so the sign holds the loss mask; `unpack_ids` reads it.
        ids=cut(np.where(columns.loss_mask, columns.token_ids, ~columns.token_ids).tobytes(), columns.lengths),
        floats=cut(np.stack(per_token, axis=1).tobytes(), columns.lengths),
        columns={
            "version": columns.versions.astype(np.int32),
            "truncated": np.array([finish == "length" for finish in columns.finishes]),
            "rewards": rewards,
            "log_importance": np.nan_to_num(log_importance, nan=0.0).clip(*LOG_IMPORTANCE).astype(np.float32),
            # The policy's log-probs are known only of what it generated.
            "has_lag": np.isfinite(np.add.reduceat(columns.policy, columns.starts)),
        },
        reference_version=reference_versions.pop(),
    )


def cut(memory: bytes, lengths: np.ndarray) -> list[bytes]:
    """The memory of each response, by its number of tokens, as bytes objects, which Python's allocator takes back."""
    # 4 bytes a token of ids, 12 or 16 of floats.
    width = len(memory) // max(1, int(lengths.sum()))
    return [memory[start:end] for start, end in pairwise(accumulate((width * lengths).tolist(), initial=0))]


def _step_values(columns: ResponseColumns, group_id: str) -> np.ndarray:
    """Of all tokens. Every response has them, one of its first token among them."""
    known = np.array(columns.has_step_values)
    if known.all():
        known = np.isfinite(columns.step_values[columns.starts])
    if not known.all():
        sample = columns.sample_indices[int(known.argmin())]
        raise ValueError(
            f"group {group_id}: sample {sample} has no Monte-Carlo values of its steps, which the "
            "objective needs (one per token, NaN inside a step)."
        )
    return columns.step_values


def combine_rewards(rewards: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Reward components [R, C] -> finite float32 [R]: the weighted sum, components that do not apply left out."""
    score = total_reward(rewards.astype(np.float64).clip(-LARGEST_SCORE, LARGEST_SCORE).T, weights.tolist())
    return score.clip(-LARGEST_SCORE, LARGEST_SCORE).astype(np.float32)


def unpack_ids(ids: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Stored ids -> token ids int64 [N], loss mask bool [N]."""
    stored = np.frombuffer(ids, np.int32).astype(np.int64)
    chosen = stored >= 0
    return np.where(chosen, stored, ~stored), chosen


def make_batch(chosen: Choice, samples_per_prompt: int, *, reward_names: Sequence[str]) -> Batch:
    """At least one and at most K responses of each prompt. Places beyond them repeat the first one with weight 0, which
    costs nothing: equal responses are computed once."""
    K = samples_per_prompt
    real_PK = np.arange(K) < np.array([len(positions) for _, positions in chosen])[:, None]
    padded = [(entry, np.concatenate([own, np.repeat(own[:1], K - len(own))])) for entry, own in chosen]

    def column(name: str) -> np.ndarray:
        values = np.concatenate([entry.columns[name][own] for entry, own in padded])
        return values.reshape(len(padded), K, *values.shape[1:])

    ids = [entry.ids[position] for entry, own in padded for position in own.tolist()]
    # Stored ids are int32, four bytes for each token.
    lengths = np.array([len(own) // 4 for own in ids], np.int64)
    ids_N, loss_mask_N = unpack_ids(b"".join(ids))
    joined = b"".join([entry.floats[position] for entry, own in padded for position in own.tolist()])
    floats = np.frombuffer(joined, np.float32).reshape(len(ids_N), -1)
    rewards_PKC = column("rewards")
    prompts = [entry.prompt_tokens for entry, _ in chosen]
    return Batch(
        prompt_ids=tuple(entry.prompt_id for entry, _ in chosen),
        prompt_tokens=torch.split(_tensor(np.concatenate(prompts), np.int64), [len(prompt) for prompt in prompts]),
        token_ids_N=torch.from_numpy(ids_N),
        offsets=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])),
        loss_mask_N=torch.from_numpy(loss_mask_N),
        log_ref_N=_tensor(floats[:, 0], np.float32),
        behaviour_N=_tensor(floats[:, 1], np.float32),
        policy_N=_tensor(floats[:, 2], np.float32),
        step_values_N=_tensor(floats[:, 3], np.float32) if floats.shape[1] > NUM_FLOATS else None,
        rewards={name: _tensor(rewards_PKC[:, :, c], np.float32) for c, name in enumerate(reward_names)},
        reward_PK=_tensor(column("score"), np.float32),
        weight_PK=_tensor(real_PK, np.float32),
        version_PK=_tensor(column("version"), np.int64),
        truncated_PK=_tensor(column("truncated"), np.bool_),
        rows_PK=_tensor(np.where(real_PK, column("arrival"), NO_ROW), np.int64),
        totals=Totals(
            prompts=len(chosen),
            responses=int(real_PK.sum()),
            # Tokens of the repeats have no part in the loss, so they do not count in its normalisation either.
            tokens=int((loss_mask_N & np.repeat(real_PK.ravel(), lengths)).sum()),
        ),
    )


def _tensor(values: np.ndarray, dtype: type) -> Tensor:
    """A contiguous copy, so that training cannot write into what is stored."""
    return torch.from_numpy(np.array(values, dtype=dtype, order="C"))
