"""The responses of a group as columns: one array, or list, per field instead of an object per response.

A searcher packs a group once. So it is sent, taken into the buffer and written to disk, each in a tenth of the time that
small objects would take. Columns are also a sequence of trajectories, each made when it is asked for.

Axis letters: R responses of a group, C reward components, N tokens of responses end to end.

In the durable replay a group is bytes, its payload, with every field of a TrajectoryGroup and without pickle:

    bytes 0-3     b"TBA1"
    bytes 4-7     length H of the header, uint32
    H bytes       header: ASCII JSON
    the rest      arrays end to end, in the order of ARRAYS; every number is little-endian

The header holds `id`, `searcher`, `lost`, `rollout`, the prompt and, as lists with an entry per response, the other fields;
`tokens` are the lengths of the responses and `rewards` the names of their reward components. Values of a prompt's columns
come back as JSON holds them. Columns that JSON cannot hold (an image, say) are named in `left_out`; the task has them.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, overload

import numpy as np

from tba.types import Completion, Finish, Prompt, Trajectory, TrajectoryGroup, total_reward

MAGIC = b"TBA1"
PREFIX = struct.Struct("<4sI")
ARRAYS: dict[str, np.dtype[Any]] = {
    "prompt": np.dtype("<i4"),
    "rewards": np.dtype("<f8"),
    "token_ids": np.dtype("<i4"),
    "behaviour": np.dtype("<f4"),
    "policy": np.dtype("<f4"),
    "log_ref": np.dtype("<f4"),
    "step_values": np.dtype("<f4"),
    "loss_mask": np.dtype(np.bool_),
}
"""step_values are there only for responses that have them."""
LISTS = {
    "prompt_id": "prompt_ids",
    "sample_index": "sample_indices",
    "finish": "finishes",
    "num_prefix_tokens": "num_prefix_tokens",
    "reference_version": "reference_versions",
    "has_step_values": "has_step_values",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class ResponseColumns(Sequence[Trajectory]):
    """R responses with N tokens in all. Lists have an entry per response, arrays of N lie end to end."""

    prompt_ids: list[str]
    sample_indices: list[int]
    lengths: np.ndarray
    """Number of tokens of each response, int64 [R]."""
    version_spans: list[tuple[tuple[int, int], ...]]
    versions: np.ndarray
    """Oldest version in the spans of each response, int64 [R]."""
    finishes: list[Finish]
    num_prefix_tokens: list[int]
    reference_versions: list[int]
    reward_names: list[tuple[str, ...]]
    rewards: np.ndarray
    """Values of the reward components, response after response, float64."""
    token_ids: np.ndarray
    """int32 [N]; log-probs are float32 [N], loss_mask bool [N]."""
    behaviour: np.ndarray
    policy: np.ndarray
    log_ref: np.ndarray
    loss_mask: np.ndarray
    has_step_values: list[bool]
    step_values: np.ndarray
    """float32, of the tokens of those responses that have them."""

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Trajectory]: ...
    def __getitem__(self, index: int | slice) -> Trajectory | Sequence[Trajectory]:
        # A single response is asked for now and then only (a sample for the log): all are cut out anew.
        return tuple(self)[index]

    def __iter__(self) -> Iterator[Trajectory]:
        lengths = self.lengths.tolist()
        # Tokens, step values and rewards of a response differ in number, so each has offsets of its own.
        tokens = pairwise(accumulate(lengths, initial=0))
        with_values = (length if has else 0 for length, has in zip(lengths, self.has_step_values))
        values = pairwise(accumulate(with_values, initial=0))
        rewards = pairwise(accumulate(map(len, self.reward_names), initial=0))
        for response, (own, own_values, own_rewards) in enumerate(zip(tokens, values, rewards)):
            at = slice(*own)
            completion = Completion(
                prompt_id=self.prompt_ids[response],
                sample_index=self.sample_indices[response],
                token_ids=self.token_ids[at],
                behaviour_log_probs=self.behaviour[at],
                policy_log_probs=self.policy[at],
                version_spans=self.version_spans[response],
                finish=self.finishes[response],
                num_prefix_tokens=self.num_prefix_tokens[response],
            )
            yield Trajectory(
                completion=completion,
                rewards=dict(zip(self.reward_names[response], self.rewards[slice(*own_rewards)].tolist())),
                log_ref=self.log_ref[at],
                reference_version=self.reference_versions[response],
                loss_mask=self.loss_mask[at],
                step_values=self.step_values[slice(*own_values)] if self.has_step_values[response] else None,
            )

    @property
    def starts(self) -> np.ndarray:
        return np.cumsum(self.lengths) - self.lengths

    def components(self, names: Sequence[str]) -> np.ndarray:
        """Reward components by name, float64 [R, C], NaN where they are not applicable or a response has none of a name."""
        if set(self.reward_names) == {tuple(names)}:  # the values are a table already
            return self.rewards.reshape(len(self), len(names))
        own_rewards = pairwise(accumulate(map(len, self.reward_names), initial=0))
        found = [dict(zip(own, self.rewards[slice(*ends)])) for own, ends in zip(self.reward_names, own_rewards)]
        return np.array([[own.get(name, np.nan) for name in names] for own in found], np.float64).reshape(
            -1, len(names)
        )

    def combined_rewards(self, weights: Mapping[str, float]) -> list[float]:
        return total_reward(list(self.components(list(weights)).T), list(weights.values())).tolist()


def columns_of(group: TrajectoryGroup) -> ResponseColumns:
    responses = group.trajectories
    return responses if isinstance(responses, ResponseColumns) else pack_responses(responses, group.id)


def pack_responses(trajectories: Sequence[Trajectory], group_id: str) -> ResponseColumns:
    """The columns of trajectories, whose arrays are checked to be as long as their tokens; the id is for the error."""
    completions = [trajectory.completion for trajectory in trajectories]
    for trajectory in trajectories:
        own, count = trajectory.completion, len(trajectory.completion.token_ids)
        columns = (trajectory.loss_mask, trajectory.log_ref, own.behaviour_log_probs, own.policy_log_probs)
        if any(len(column) != count for column in columns):
            raise ValueError(
                f"group {group_id}: sample {own.sample_index} has {count} tokens, but loss_mask, log_ref, behaviour and "
                f"policy log-probs of {[len(column) for column in columns]}: they must be as many."
            )
        if trajectory.step_values is not None and len(trajectory.step_values) != count:
            raise ValueError(
                f"group {group_id}: sample {own.sample_index} has {count} tokens, but Monte-Carlo values of "
                f"{len(trajectory.step_values)}: they must be as many."
            )
    values = [trajectory.step_values for trajectory in trajectories]
    names: dict[tuple[str, ...], tuple[str, ...]] = {}
    plain_spans = (tuple((int(first), int(version)) for first, version in own.version_spans) for own in completions)
    spans: dict[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]] = {}
    return ResponseColumns(
        prompt_ids=[completion.prompt_id for completion in completions],
        sample_indices=[int(completion.sample_index) for completion in completions],
        lengths=np.array([len(completion.token_ids) for completion in completions], np.int64),
        # Equal tuples become one: pickle then writes it once.
        version_spans=[spans.setdefault(own, own) for own in plain_spans],
        versions=np.array([completion.version for completion in completions], np.int64),
        finishes=[completion.finish for completion in completions],
        num_prefix_tokens=[int(completion.num_prefix_tokens) for completion in completions],
        reference_versions=[int(trajectory.reference_version) for trajectory in trajectories],
        reward_names=[names.setdefault(own, own) for own in (tuple(t.rewards) for t in trajectories)],
        rewards=np.array([value for t in trajectories for value in t.rewards.values()], np.float64),
        token_ids=_joined([completion.token_ids for completion in completions], np.int32),
        behaviour=_joined([completion.behaviour_log_probs for completion in completions], np.float32),
        policy=_joined([completion.policy_log_probs for completion in completions], np.float32),
        log_ref=_joined([trajectory.log_ref for trajectory in trajectories], np.float32),
        loss_mask=_joined([trajectory.loss_mask for trajectory in trajectories], np.bool_),
        has_step_values=[own is not None for own in values],
        step_values=_joined([own for own in values if own is not None], np.float32),
    )


def _joined(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays, dtype=dtype, casting="unsafe") if arrays else np.zeros(0, dtype)


def encode(group: TrajectoryGroup) -> bytes:
    """The payload of a group."""
    columns, prompt = columns_of(group), group.prompt
    header: dict[str, Any] = {
        "id": group.id,
        "searcher": group.searcher,
        "lost": group.num_lost,
        **({"why_lost": group.why_lost} if group.why_lost else {}),
        "rollout": group.rollout,
        "prompt": {"id": prompt.id, "text": prompt.text, "columns": prompt.columns, "tokens": len(prompt.token_ids)},
        "tokens": columns.lengths.tolist(),
        "version_spans": columns.version_spans,
        "rewards": columns.reward_names,
        **{key: getattr(columns, name) for key, name in LISTS.items()},
    }
    try:
        text = ENCODER.encode(header).encode("ascii")
    except (TypeError, ValueError):
        # Columns are tried one by one only after a failure: trying them always would encode every group twice.
        kept = {name: value for name, value in prompt.columns.items() if _is_json(value)}
        own = {**header["prompt"], "columns": kept, "left_out": sorted(set(prompt.columns) - set(kept))}
        text = ENCODER.encode({**header, "prompt": own}).encode("ascii")
    # This order is the format: `decode` reads the arrays in the order of ARRAYS.
    arrays = [prompt.token_ids, *(getattr(columns, name) for name in ARRAYS if name != "prompt")]
    parts = [array.astype(dtype, copy=False).tobytes() for array, dtype in zip(arrays, ARRAYS.values())]
    return b"".join([PREFIX.pack(MAGIC, len(text)), text, *parts])


def decode(payload: bytes) -> TrajectoryGroup:
    """The group of a payload; a ValueError where it is none."""
    magic, length = PREFIX.unpack_from(payload)
    if magic != MAGIC:
        raise ValueError(f"begins with {magic!r} instead of {MAGIC!r}")
    header = json.loads(payload[PREFIX.size : PREFIX.size + length])
    tokens, prompt = header["tokens"], header["prompt"]
    # Every length follows from the header, so the arrays have no separators.
    lengths = dict.fromkeys(ARRAYS, sum(tokens)) | {
        "prompt": prompt["tokens"],
        "rewards": sum(len(names) for names in header["rewards"]),
        "step_values": sum(count for count, has in zip(tokens, header["has_step_values"]) if has),
    }
    arrays, offset = {}, PREFIX.size + length
    for name, dtype in ARRAYS.items():
        # Copied once: views of the payload could not be written to, and would keep all of it in memory.
        arrays[name] = np.frombuffer(payload, dtype, lengths[name], offset).copy()
        offset += arrays[name].nbytes
    prompt_tokens = arrays.pop("prompt")
    spans = [tuple((first, version) for first, version in own) for own in header["version_spans"]]
    fields: dict[str, Any] = {**{name: header[key] for key, name in LISTS.items()}, **arrays}
    columns = ResponseColumns(
        lengths=np.array(tokens, np.int64),
        version_spans=spans,
        versions=np.array([min(version for _, version in own) for own in spans], np.int64),
        reward_names=[tuple(names) for names in header["rewards"]],
        **fields,
    )
    return TrajectoryGroup(
        id=header["id"],
        prompt=Prompt(id=prompt["id"], token_ids=prompt_tokens, text=prompt["text"], columns=prompt["columns"]),
        trajectories=columns,
        num_lost=header["lost"],
        why_lost=header.get("why_lost", ""),
        rollout=header["rollout"],
        searcher=header["searcher"],
    )


def _mapping(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"JSON cannot hold a {type(value).__name__}")


ENCODER = json.JSONEncoder(separators=(",", ":"), default=_mapping)


def _is_json(value: Any) -> bool:
    try:
        ENCODER.encode(value)
    except (TypeError, ValueError):
        return False
    return True


def acknowledged_log() -> Callable[[TrajectoryGroup], None] | None:
    """Function that logs each acknowledged group, by id and CRC-32 of its payload, to a file of this process in the
    folder TBA_ACKNOWLEDGED_LOG; None without that variable. An audit compares it with the durable replay."""
    folder = os.environ.get("TBA_ACKNOWLEDGED_LOG")
    if folder is None:
        return None
    file = os.open(os.path.join(folder, f"{os.getpid()}.log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def note(group: TrajectoryGroup) -> None:
        # One system call a line: a kill leaves whole lines.
        os.write(file, f"{group.id} {zlib.crc32(encode(group)):08x}\n".encode())

    return note
