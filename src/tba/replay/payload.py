"""The bytes of one group in the durable replay: every field of a TrajectoryGroup, without pickle.

    bytes 0-3     b"TBA1"
    bytes 4-7     length H of the header, uint32
    H bytes       header: ASCII JSON
    the rest      arrays end to end, in the order of ARRAYS; every number is little-endian

The header holds `id`, `searcher`, `lost`, `visit`, `solved`, the prompt (`id`, `text`, `columns`, number of `tokens`) and,
as lists with an entry per response, the other fields; `tokens` are the lengths of the responses and `rewards` the names
of their reward components, whose values are an array. Values of a prompt's columns come back as JSON holds them: a tuple
becomes a list, NaN is written as Python's JSON writes it. Columns that JSON cannot hold (an image, say) are left out and
named in `left_out`; the task has them under the prompt's id.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from tba.types import Completion, Prompt, Trajectory, TrajectoryGroup

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
"""Arrays of a payload: token ids of the prompt; reward components, response after response; the columns of all responses'
tokens, of which step_values are there only for responses that have them."""


def encode(group: TrajectoryGroup) -> bytes:
    """The payload of a group."""
    trajectories, completions = group.trajectories, [t.completion for t in group.trajectories]
    tokens = [len(completion.token_ids) for completion in completions]
    rewards = [value for trajectory in trajectories for value in trajectory.rewards.values()]
    arrays: dict[str, Sequence[np.ndarray]] = {
        "prompt": [group.prompt.token_ids],
        "rewards": [np.array(rewards, np.float64)],
        "token_ids": [completion.token_ids for completion in completions],
        "behaviour": [completion.behaviour_log_probs for completion in completions],
        "policy": [completion.policy_log_probs for completion in completions],
        "log_ref": [trajectory.log_ref for trajectory in trajectories],
        "step_values": [t.step_values for t in trajectories if t.step_values is not None],
        "loss_mask": [trajectory.loss_mask for trajectory in trajectories],
    }
    for name in ("behaviour", "policy", "log_ref", "loss_mask"):
        if [len(values) for values in arrays[name]] != tokens:
            raise ValueError(f"group {group.id}: {name} has other lengths than the responses' {tokens} tokens.")
    header = {
        "id": group.id,
        "searcher": group.searcher,
        "lost": group.num_lost,
        **({"why_lost": group.why_lost} if group.why_lost else {}),
        "visit": group.visit,
        "solved": list(group.solved),
        "prompt": {
            "id": group.prompt.id,
            "text": group.prompt.text,
            "columns": group.prompt.columns,
            "tokens": len(group.prompt.token_ids),
        },
        "prompt_id": [completion.prompt_id for completion in completions],
        "sample_index": [int(completion.sample_index) for completion in completions],
        "tokens": tokens,
        "version_spans": [[[int(n) for n in span] for span in c.version_spans] for c in completions],
        "finish": [completion.finish for completion in completions],
        "num_prefix_tokens": [int(completion.num_prefix_tokens) for completion in completions],
        "rewards": [list(trajectory.rewards) for trajectory in trajectories],
        "reference_version": [int(trajectory.reference_version) for trajectory in trajectories],
        "has_step_values": [trajectory.step_values is not None for trajectory in trajectories],
    }
    text = _header(header)
    parts = [PREFIX.pack(MAGIC, len(text)), text]
    for name, column in arrays.items():
        dtype = ARRAYS[name]
        # Nothing is converted or laid end to end first: most arrays are short, and each NumPy call costs more than its copy.
        parts += [(array if array.dtype == dtype else array.astype(dtype)).tobytes() for array in column]
    return b"".join(parts)


def decode(payload: bytes) -> TrajectoryGroup:
    """The group of a payload; a ValueError where it is none."""
    magic, length = PREFIX.unpack_from(payload)
    if magic != MAGIC:
        raise ValueError(f"begins with {magic!r} instead of {MAGIC!r}")
    header = json.loads(payload[PREFIX.size : PREFIX.size + length])
    tokens = header["tokens"]
    with_values = [count if has else 0 for count, has in zip(tokens, header["has_step_values"])]
    lengths = dict.fromkeys(ARRAYS, tokens) | {
        "prompt": [header["prompt"]["tokens"]],
        "rewards": [len(names) for names in header["rewards"]],
        "step_values": with_values,
    }
    columns, offset = {}, PREFIX.size + length
    for name, dtype in ARRAYS.items():
        ends = list(accumulate(lengths[name], initial=0))
        # Copied once: views of the payload could not be written to, and would keep all of it in memory.
        values = np.frombuffer(payload, dtype, ends[-1], offset).copy()
        columns[name] = [values[start:end] for start, end in pairwise(ends)]
        offset += ends[-1] * dtype.itemsize
    return TrajectoryGroup(
        id=header["id"],
        prompt=Prompt(
            id=header["prompt"]["id"],
            token_ids=columns["prompt"][0],
            text=header["prompt"]["text"],
            columns=header["prompt"]["columns"],
        ),
        trajectories=tuple(_trajectory(header, columns, response) for response in range(len(tokens))),
        num_lost=header["lost"],
        why_lost=header.get("why_lost", ""),
        visit=header["visit"],
        solved=tuple(header["solved"]),
        searcher=header["searcher"],
    )


def acknowledged_log() -> Callable[[TrajectoryGroup], None] | None:
    """Notes each group that this process has been told is stored, by id and CRC-32 of its payload, in a file of its own in
    the folder TBA_ACKNOWLEDGED_LOG; None where that is not set. An audit compares the notes with the durable replay."""
    folder = os.environ.get("TBA_ACKNOWLEDGED_LOG")
    if folder is None:
        return None
    file = os.open(os.path.join(folder, f"{os.getpid()}.log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def note(group: TrajectoryGroup) -> None:
        # One system call a line: a kill leaves whole lines.
        os.write(file, f"{group.id} {zlib.crc32(encode(group)):08x}\n".encode())

    return note


def _trajectory(header: Mapping[str, Any], columns: Mapping[str, list[np.ndarray]], response: int) -> Trajectory:
    completion = Completion(
        prompt_id=header["prompt_id"][response],
        sample_index=header["sample_index"][response],
        token_ids=columns["token_ids"][response],
        behaviour_log_probs=columns["behaviour"][response],
        policy_log_probs=columns["policy"][response],
        version_spans=tuple((first, version) for first, version in header["version_spans"][response]),
        finish=header["finish"][response],
        num_prefix_tokens=header["num_prefix_tokens"][response],
    )
    return Trajectory(
        completion=completion,
        rewards=dict(zip(header["rewards"][response], columns["rewards"][response].tolist())),
        log_ref=columns["log_ref"][response],
        reference_version=header["reference_version"][response],
        loss_mask=columns["loss_mask"][response],
        step_values=columns["step_values"][response] if header["has_step_values"][response] else None,
    )


def _header(header: dict[str, Any]) -> bytes:
    try:
        return ENCODER.encode(header).encode("ascii")
    except (TypeError, ValueError):
        prompt = header["prompt"]
        kept = {name: value for name, value in prompt["columns"].items() if _is_json(value)}
        left_out = sorted(set(prompt["columns"]) - set(kept))
        return ENCODER.encode({**header, "prompt": {**prompt, "columns": kept, "left_out": left_out}}).encode("ascii")


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
