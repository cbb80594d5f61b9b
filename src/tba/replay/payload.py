"""The bytes of one group in the durable replay: every field of a TrajectoryGroup, without pickle.

    bytes 0-3     b"TBA1"
    bytes 4-7     length H of the header, uint32
    H bytes       header: ASCII JSON
    the rest      arrays end to end, in the order of ARRAYS; every number is little-endian

The header holds `id`, `searcher`, `lost`, `visit`, the prompt (`id`, `text`, `columns`, number of `tokens`) and,
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
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tba.replay.columns import ResponseColumns, columns_of
from tba.types import Prompt, TrajectoryGroup

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
    columns = columns_of(group)
    header = {
        "id": group.id,
        "searcher": group.searcher,
        "lost": group.num_lost,
        **({"why_lost": group.why_lost} if group.why_lost else {}),
        "visit": group.visit,
        "prompt": {
            "id": group.prompt.id,
            "text": group.prompt.text,
            "columns": group.prompt.columns,
            "tokens": len(group.prompt.token_ids),
        },
        "prompt_id": columns.prompt_ids,
        "sample_index": columns.sample_indices,
        "tokens": columns.lengths.tolist(),
        "version_spans": columns.version_spans,
        "finish": columns.finishes,
        "num_prefix_tokens": columns.num_prefix_tokens,
        "rewards": columns.reward_names,
        "reference_version": columns.reference_versions,
        "has_step_values": columns.has_step_values,
    }
    text = _header(header)
    arrays = [group.prompt.token_ids, *(getattr(columns, name) for name in ARRAYS if name != "prompt")]
    parts = [array.astype(dtype, copy=False).tobytes() for array, dtype in zip(arrays, ARRAYS.values())]
    return b"".join([PREFIX.pack(MAGIC, len(text)), text, *parts])


def decode(payload: bytes) -> TrajectoryGroup:
    """The group of a payload; a ValueError where it is none."""
    magic, length = PREFIX.unpack_from(payload)
    if magic != MAGIC:
        raise ValueError(f"begins with {magic!r} instead of {MAGIC!r}")
    header = json.loads(payload[PREFIX.size : PREFIX.size + length])
    tokens = header["tokens"]
    lengths = dict.fromkeys(ARRAYS, sum(tokens)) | {
        "prompt": header["prompt"]["tokens"],
        "rewards": sum(len(names) for names in header["rewards"]),
        "step_values": sum(count for count, has in zip(tokens, header["has_step_values"]) if has),
    }
    arrays, offset = {}, PREFIX.size + length
    for name, dtype in ARRAYS.items():
        # Copied once: views of the payload could not be written to, and would keep all of it in memory.
        arrays[name] = np.frombuffer(payload, dtype, lengths[name], offset).copy()
        offset += arrays[name].nbytes
    return TrajectoryGroup(
        id=header["id"],
        prompt=Prompt(
            id=header["prompt"]["id"],
            token_ids=arrays.pop("prompt"),
            text=header["prompt"]["text"],
            columns=header["prompt"]["columns"],
        ),
        trajectories=_columns(header, arrays),
        num_lost=header["lost"],
        why_lost=header.get("why_lost", ""),
        visit=header["visit"],
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


def _columns(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> ResponseColumns:
    spans = [tuple((first, version) for first, version in own) for own in header["version_spans"]]
    return ResponseColumns(
        prompt_ids=header["prompt_id"],
        sample_indices=header["sample_index"],
        lengths=np.array(header["tokens"], np.int64),
        version_spans=spans,
        versions=np.array([min(version for _, version in own) for own in spans], np.int64),
        finishes=header["finish"],
        num_prefix_tokens=header["num_prefix_tokens"],
        reference_versions=header["reference_version"],
        reward_names=[tuple(names) for names in header["rewards"]],
        has_step_values=header["has_step_values"],
        **arrays,
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
