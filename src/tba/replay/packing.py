"""From what arrives to columns, and from columns to what is trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from tba.replay.arena import BEHAVIOUR, ID, LOG_REF, POLICY, STEP_VALUE, WIDTH, Arena, pack_tokens, unpack_ids
from tba.replay.rows import RowTable
from tba.replay.shelf import Shelf
from tba.types import NO_ROW, Batch, Totals, Trajectory, TrajectoryGroup, total_reward

LARGEST_SCORE = float(np.finfo(np.float32).max)
LOG_IMPORTANCE = (-12.0, 0.5)
"""Range of the log of reference / behaviour probability: a response that the policy hardly ever says must not be drawn
again and again, one that it says too often still now and then."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedGroup:
    """The columns of a group of R responses with N tokens in all."""

    records: np.ndarray
    """int32 [N, 4 or 5], see arena.py."""
    lengths: np.ndarray
    """int64 [R]"""
    versions: np.ndarray
    truncated: np.ndarray
    rewards: np.ndarray
    """float32 [R, components], NaN = not applicable."""
    reference_version: int

    def __len__(self) -> int:
        return len(self.lengths)

    def stored_ids(self) -> list[np.ndarray]:
        """By response, as `Arena.stored_ids` returns them."""
        ids = np.ascontiguousarray(self.records[:, ID])
        ends = np.cumsum(self.lengths).tolist()
        return [ids[start:end] for start, end in zip([0, *ends], ends)]

    def has_lag(self) -> np.ndarray:
        """bool [R]: whether the policy of some version generated it, which its known log-probs tell."""
        starts = np.concatenate([[0], np.cumsum(self.lengths)[:-1]])
        return np.isfinite(np.add.reduceat(self.records.view(np.float32)[:, POLICY], starts))

    def log_importance(self) -> np.ndarray:
        """float32 [R]: clipped log of reference / behaviour probability of each response; 0 where that is unknown."""
        floats = self.records.view(np.float32)
        per_token = floats[:, LOG_REF].astype(np.float64) - floats[:, BEHAVIOUR]
        starts = np.concatenate([[0], np.cumsum(self.lengths)[:-1]])
        known = np.nan_to_num(np.add.reduceat(per_token, starts), nan=0.0)
        return known.clip(*LOG_IMPORTANCE).astype(np.float32)

    def take(self, keep: np.ndarray) -> PackedGroup:
        """Some of the responses, in order."""
        return PackedGroup(
            records=self.records[np.repeat(keep, self.lengths)],
            lengths=self.lengths[keep],
            versions=self.versions[keep],
            truncated=self.truncated[keep],
            rewards=self.rewards[keep],
            reference_version=self.reference_version,
        )


def pack_group(group: TrajectoryGroup, reward_names: Sequence[str], *, step_values: bool = False) -> PackedGroup:
    """Check and flatten a group; it holds at least one trajectory. `step_values` are kept if asked for."""
    trajectories, completions = group.trajectories, [t.completion for t in group.trajectories]
    known = set(reward_names)
    for trajectory in trajectories:
        _check(trajectory, group.id, known)
    reference_versions = {t.reference_version for t in trajectories}
    if len(reference_versions) > 1:
        raise ValueError(
            f"group {group.id} mixes reference versions {sorted(reference_versions)}: send one group for each."
        )
    records = pack_tokens(
        np.concatenate([c.token_ids for c in completions]),
        np.concatenate([t.loss_mask for t in trajectories]),
        np.concatenate([t.log_ref for t in trajectories]),
        np.concatenate([c.behaviour_log_probs for c in completions]),
        np.concatenate([c.policy_log_probs for c in completions]),
        np.concatenate([_step_values(t, group.id) for t in trajectories]) if step_values else None,
    )
    with np.errstate(over="ignore"):
        rewards = np.array([[t.rewards.get(name, np.nan) for name in reward_names] for t in trajectories], np.float32)
    return PackedGroup(
        records=records,
        lengths=np.array([len(c.token_ids) for c in completions]),
        versions=np.array([c.version for c in completions]),
        truncated=np.array([c.finish == "length" for c in completions]),
        rewards=rewards.reshape(len(trajectories), len(reward_names)),
        reference_version=reference_versions.pop(),
    )


def _step_values(trajectory: Trajectory, group_id: str) -> np.ndarray:
    values = trajectory.step_values
    if values is None or len(values) != len(trajectory.loss_mask) or not np.isfinite(values[0]):
        raise ValueError(
            f"group {group_id}: sample {trajectory.completion.sample_index} has no Monte-Carlo values of its steps, which "
            "the objective needs (one per token, NaN inside a step)."
        )
    return values


def _check(trajectory: Trajectory, group_id: str, reward_names: set[str]) -> None:
    completion = trajectory.completion
    columns = (trajectory.loss_mask, trajectory.log_ref, completion.behaviour_log_probs, completion.policy_log_probs)
    lengths = [len(column) for column in columns]
    num_tokens = len(completion.token_ids)
    if num_tokens == 0:
        raise ValueError(f"group {group_id}: sample {completion.sample_index} has no tokens; a response ends with EOS.")
    if lengths != [num_tokens] * len(columns):
        raise ValueError(
            f"group {group_id}: sample {completion.sample_index} has {num_tokens} tokens, but loss_mask, log_ref, "
            f"behaviour and policy log-probs of {lengths}: they must be as many."
        )
    if not trajectory.rewards.keys() <= reward_names:
        unknown = sorted(trajectory.rewards.keys() - reward_names)
        raise ValueError(f"group {group_id} has rewards {unknown}; the buffer knows {sorted(reward_names)}.")


def combine_rewards(rewards: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """[R, components] -> finite float32 [R]: the weighted sum, not-applicable components left out."""
    score = total_reward(rewards.astype(np.float64).clip(-LARGEST_SCORE, LARGEST_SCORE).T, weights.tolist())
    return score.clip(-LARGEST_SCORE, LARGEST_SCORE).astype(np.float32)


def token_key(stored_ids: np.ndarray, shelf: int) -> int:
    """64 bits from the tokens and the shelf, the same in every process."""
    digest = int.from_bytes(blake2b(stored_ids.tobytes(), digest_size=8).digest(), "little")
    return (digest + shelf * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF


def make_batch(
    chosen: Sequence[tuple[Shelf, np.ndarray]],
    samples_per_prompt: int,
    *,
    table: RowTable,
    arena: Arena,
    reward_names: Sequence[str],
) -> Batch:
    """Tensors of the sampled rows, at least one and at most K of each prompt. Places beyond a prompt's rows repeat its first
    response with weight 0, which costs nothing: equal responses are computed once."""
    shelves, K = [shelf for shelf, _ in chosen], samples_per_prompt
    real_PK = np.arange(K) < np.array([len(rows) for _, rows in chosen])[:, None]
    rows_PK = np.stack([np.concatenate([rows, np.repeat(rows[:1], K - len(rows))]) for _, rows in chosen])
    records, lengths = arena.read(rows_PK.ravel()), arena.length[rows_PK.ravel()]
    ids_N, loss_mask_N = unpack_ids(records)
    floats = records.view(np.float32)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return Batch(
        prompt_ids=tuple(shelf.prompt_id for shelf in shelves),
        prompt_tokens=_prompt_tokens(shelves),
        token_ids_N=torch.from_numpy(ids_N),
        offsets=torch.from_numpy(offsets),
        loss_mask_N=torch.from_numpy(loss_mask_N),
        log_ref_N=_tensor(floats[:, LOG_REF], np.float32),
        behaviour_N=_tensor(floats[:, BEHAVIOUR], np.float32),
        policy_N=_tensor(floats[:, POLICY], np.float32),
        step_values_N=_tensor(floats[:, STEP_VALUE], np.float32) if floats.shape[1] > WIDTH else None,
        rewards=_components(table.rewards[rows_PK], reward_names),
        reward_PK=_tensor(table.score[rows_PK], np.float32),
        weight_PK=_tensor(real_PK, np.float32),
        version_PK=_tensor(table.version[rows_PK], np.int64),
        truncated_PK=_tensor(table.truncated[rows_PK], np.bool_),
        rows_PK=_tensor(np.where(real_PK, rows_PK, NO_ROW), np.int64),
        totals=Totals(
            prompts=len(shelves),
            responses=int(real_PK.sum()),
            tokens=int((loss_mask_N & np.repeat(real_PK.ravel(), lengths)).sum()),
        ),
    )


def _prompt_tokens(shelves: Sequence[Shelf]) -> tuple[Tensor, ...]:
    """Views of one tensor: one conversion instead of P."""
    tokens = _tensor(np.concatenate([shelf.prompt_tokens for shelf in shelves]), np.int64)
    return torch.split(tokens, [len(shelf.prompt_tokens) for shelf in shelves])


def _components(rewards_PKC: np.ndarray, reward_names: Sequence[str]) -> Mapping[str, Tensor]:
    return {name: _tensor(rewards_PKC[:, :, c], np.float32) for c, name in enumerate(reward_names)}


def _tensor(values: np.ndarray, dtype: type) -> Tensor:
    """A fresh copy, contiguous."""
    return torch.from_numpy(np.array(values, dtype=dtype, order="C"))
