"""Preference pairs: a prompt, the response that was preferred and the one that was not.

{"prompt": "... TL;DR:", "chosen": "place harbour day friday", "rejected": "so day friday"}
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from tba.tasks.rows import BadRow, BadRows, Row, jsonl_rows, prompt_column, require_object, text_column


class Pair(NamedTuple):
    """Both responses ended by themselves."""

    prompt: str
    chosen: str
    rejected: str
    place: str = ""
    """Where it was read: `pairs.jsonl line 17`."""
    line: int = 0


def read_pairs(path: Path, *, on_bad_row: Literal["stop", "skip"] = "stop") -> list[Pair]:
    """The good rows of a JSONL file (also .gz)."""
    if not path.is_file():
        raise ValueError(f"pairs: file {path} does not exist. Give JSONL rows with `prompt`, `chosen` and `rejected`.")
    bad = BadRows(on_bad_row)
    pairs = bad.keep(jsonl_rows(path, bad), read_pair)
    bad.report()
    if not pairs:
        raise ValueError(f"pairs: file {path} has no usable row, {bad.total} are bad.")
    return pairs


def read_pair(row: Row) -> Pair:
    require_object(row, columns="a `prompt`, a `chosen` and a `rejected` response")
    return Pair(
        prompt=prompt_column(row, "prompt"),
        chosen=_response(row, "chosen"),
        rejected=_response(row, "rejected"),
        place=row.place,
        line=row.line,
    )


def write_pairs(path: Path, pairs: Iterable[Pair]) -> None:
    rows = ({"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected} for pair in pairs)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _response(row: Row, column: str) -> str:
    """As it stands, with the space before it that a tokenizer may need."""
    text = text_column(row, column)
    if not text.strip():
        raise BadRow("empty response", f"{row.place}: `{column}` is empty.")
    return text
