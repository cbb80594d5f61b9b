"""Between the types that others see and what is stored: a TrajectoryGroup becomes the columns of its responses, and sampled
rows become the Batch that is trained on.

Axis letters: P prompts, K places per prompt, R responses of a group, C reward components, N tokens of responses end to end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from tba.replay import storage
from tba.replay.columns import ResponseColumns, columns_of
from tba.replay.prompts import PromptEntry
from tba.replay.storage import RowTable, TokenStore
from tba.types import NO_ROW, Batch, Totals, TrajectoryGroup, total_reward

LARGEST_SCORE = float(np.finfo(np.float32).max)
"""Largest absolute value of a score: an infinite one would make the softmax of its prompt NaN."""
LOG_IMPORTANCE = (-12.0, 0.5)
"""Range that the log of reference / behaviour probability is clipped to. A response that the policy hardly ever says must
not be drawn again and again; one that it says too often is still drawn now and then."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedGroup:
    """The columns of a group of R responses with N tokens in all."""

    records: np.ndarray
    """Token records, int32 [N, 4 or 5], as storage.py describes them."""
    lengths: np.ndarray
    """Number of tokens of each response, int64 [R]."""
    versions: np.ndarray
    """Version of the weights that generated each response, int64 [R]."""
    truncated: np.ndarray
    """Whether each response was cut off at the length limit, bool [R]."""
    rewards: np.ndarray
    """Reward components, float32 [R, C], NaN = not applicable."""
    reference_version: int
    """Version of the reference that scored all of them."""

    def __len__(self) -> int:
        """Number of responses."""
        return len(self.lengths)

    def stored_bytes(self) -> list[bytes]:
        """Token ids of each response, as TokenStore.stored_ids has them, as bytes."""
        ids = self.records[:, storage.ID].tobytes()
        ends = (self.records.itemsize * np.cumsum(self.lengths)).tolist()
        return [ids[start:end] for start, end in zip([0, *ends], ends)]

    def has_lag(self) -> np.ndarray:
        """Whether the policy of some version generated each response, bool [R]. Its log-probs are known only then."""
        return np.isfinite(self._sums(self._floats(storage.POLICY)))

    def log_importance(self) -> np.ndarray:
        """Clipped log of reference / behaviour probability of each response, float32 [R]; 0 where that is unknown."""
        per_token = self._floats(storage.LOG_REF).astype(np.float64) - self._floats(storage.BEHAVIOUR)
        known = np.nan_to_num(self._sums(per_token), nan=0.0)
        return known.clip(*LOG_IMPORTANCE).astype(np.float32)

    def as_of(self, version: int) -> PackedGroup:
        """The same responses, those of later versions counted as of this one."""
        return replace(self, versions=np.minimum(self.versions, version))

    def take(self, keep: np.ndarray) -> PackedGroup:
        """The responses where `keep`, bool [R], is true, in order."""
        return PackedGroup(
            records=self.records[np.repeat(keep, self.lengths)],
            lengths=self.lengths[keep],
            versions=self.versions[keep],
            truncated=self.truncated[keep],
            rewards=self.rewards[keep],
            reference_version=self.reference_version,
        )

    def _floats(self, column: int) -> np.ndarray:
        return self.records.view(np.float32)[:, column]

    def _sums(self, per_token: np.ndarray) -> np.ndarray:
        """Sum over the tokens of each response; NaN where one of them is."""
        starts = np.concatenate([[0], np.cumsum(self.lengths)[:-1]])
        return np.add.reduceat(per_token, starts)


def pack_group(group: TrajectoryGroup, reward_names: Sequence[str], *, step_values: bool = False) -> PackedGroup:
    """Check a group, which holds at least one trajectory, and flatten it into columns. `step_values` says whether the
    Monte-Carlo values of its responses are kept."""
    columns = columns_of(group)
    _check(columns, group.id, reward_names)
    reference_versions = set(columns.reference_versions)
    if len(reference_versions) > 1:
        raise ValueError(
            f"group {group.id} mixes reference versions {sorted(reference_versions)}: send one group for each."
        )
    records = storage.pack_tokens(
        columns.token_ids,
        columns.loss_mask,
        columns.log_ref,
        columns.behaviour,
        columns.policy,
        _step_values(columns, group.id) if step_values else None,
    )
    # A reward beyond float32 becomes infinite here, without a warning; combine_rewards makes its score finite again.
    with np.errstate(over="ignore"):
        rewards = columns.components(reward_names).astype(np.float32)
    return PackedGroup(
        records=records,
        lengths=columns.lengths,
        versions=columns.versions,
        truncated=np.array([finish == "length" for finish in columns.finishes]),
        rewards=rewards,
        reference_version=reference_versions.pop(),
    )


def _check(columns: ResponseColumns, group_id: str, reward_names: Sequence[str]) -> None:
    if not columns.lengths.all():
        sample = columns.sample_indices[int(columns.lengths.argmin())]
        raise ValueError(f"group {group_id}: sample {sample} has no tokens; a response ends with EOS.")
    unknown = set().union(*set(columns.reward_names)) - set(reward_names)
    if unknown:
        raise ValueError(f"group {group_id} has rewards {sorted(unknown)}; the buffer knows {sorted(reward_names)}.")


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


def token_keys(stored_ids: Sequence[bytes], entry: int) -> list[int]:
    """64 bits for each response made from its tokens and the index of their prompt entry, the same in every process."""
    digests = b"".join([blake2b(ids, digest_size=8).digest() for ids in stored_ids])
    # The multiplier, 2^64 over the golden ratio, spreads the small indices of entries over all bits (Fibonacci hashing).
    offset = np.uint64(entry * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)
    return (np.frombuffer(digests, "<u8") + offset).tolist()


def make_batch(
    chosen: Sequence[tuple[PromptEntry, np.ndarray]],
    samples_per_prompt: int,
    *,
    table: RowTable,
    token_store: TokenStore,
    reward_names: Sequence[str],
) -> Batch:
    """Tensors of the sampled rows, at least one and at most K of each prompt. Places beyond a prompt's rows repeat its first
    response with weight 0, which costs nothing: equal responses are computed once."""
    entries, K = [entry for entry, _ in chosen], samples_per_prompt
    real_PK = np.arange(K) < np.array([len(rows) for _, rows in chosen])[:, None]
    rows_PK = np.stack([np.concatenate([rows, np.repeat(rows[:1], K - len(rows))]) for _, rows in chosen])
    records, lengths = token_store.read(rows_PK.ravel()), token_store.length[rows_PK.ravel()]
    ids_N, loss_mask_N = storage.unpack_ids(records)
    floats = records.view(np.float32)
    has_step_values = floats.shape[1] > storage.WIDTH
    return Batch(
        prompt_ids=tuple(entry.prompt_id for entry in entries),
        prompt_tokens=_prompt_tokens(entries),
        token_ids_N=torch.from_numpy(ids_N),
        offsets=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])),
        loss_mask_N=torch.from_numpy(loss_mask_N),
        log_ref_N=_tensor(floats[:, storage.LOG_REF], np.float32),
        behaviour_N=_tensor(floats[:, storage.BEHAVIOUR], np.float32),
        policy_N=_tensor(floats[:, storage.POLICY], np.float32),
        step_values_N=_tensor(floats[:, storage.STEP_VALUE], np.float32) if has_step_values else None,
        rewards=_components(table.rewards[rows_PK], reward_names),
        reward_PK=_tensor(table.score[rows_PK], np.float32),
        weight_PK=_tensor(real_PK, np.float32),
        version_PK=_tensor(table.version[rows_PK], np.int64),
        truncated_PK=_tensor(table.truncated[rows_PK], np.bool_),
        rows_PK=_tensor(np.where(real_PK, rows_PK, NO_ROW), np.int64),
        totals=Totals(
            prompts=len(entries),
            responses=int(real_PK.sum()),
            # Tokens of the repeats have no part in the loss, so they do not count in its normalisation either.
            tokens=int((loss_mask_N & np.repeat(real_PK.ravel(), lengths)).sum()),
        ),
    )


def _prompt_tokens(entries: Sequence[PromptEntry]) -> tuple[Tensor, ...]:
    """Views of one tensor: one conversion instead of P."""
    tokens = _tensor(np.concatenate([entry.prompt_tokens for entry in entries]), np.int64)
    return torch.split(tokens, [len(entry.prompt_tokens) for entry in entries])


def _components(rewards_PKC: np.ndarray, reward_names: Sequence[str]) -> Mapping[str, Tensor]:
    return {name: _tensor(rewards_PKC[:, :, c], np.float32) for c, name in enumerate(reward_names)}


def _tensor(values: np.ndarray, dtype: type) -> Tensor:
    """A contiguous copy, so that training cannot write into what is stored."""
    return torch.from_numpy(np.array(values, dtype=dtype, order="C"))
