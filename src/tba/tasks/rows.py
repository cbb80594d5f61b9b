"""Rows of a dataset from where it lies: a JSONL file (also .gz), a folder with one file per split, or a hub name.

Every row comes with its place, the words that an error about it starts with: `data/train.jsonl line 17`.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

SUFFIXES = (".jsonl", ".jsonl.gz")


class Row(NamedTuple):
    """Row(place="data/train.jsonl line 17", line=17, value={"question": ...})"""

    place: str
    line: int
    """Counted from 1."""
    value: Any
    """Any JSON value: its reader checks that it is an object with the columns that it needs."""


def jsonl_rows(path: Path) -> Iterator[Row]:
    """Every line that is not blank."""
    if not path.is_file():
        raise ValueError(f"task.data: file {path} does not exist.")
    try:
        with _open(path) as file:
            for line, text in enumerate(file, start=1):
                if text.strip():
                    yield _parsed(text, f"{path} line {line}", line)
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"task.data: file {path} cannot be read as {'/'.join(SUFFIXES)}: {error}.") from None


def split_rows(data: str, split: str, *, hub_subset: str) -> Iterator[Row]:
    """Rows of one split ("train", "test") of a folder or a hub dataset."""
    folder = Path(data).expanduser()
    if folder.is_dir():
        return jsonl_rows(_split_file(folder, split))
    if not _may_be_hub_name(data):
        raise ValueError(f"task.data={data!r}: there is no such file or folder, and it is no hub name (owner/name).")
    rows = _load_from_hub(data, hub_subset, split)
    return (Row(f"{data} {split} row {number}", number, dict(row)) for number, row in enumerate(rows, start=1))


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return cast(IO[str], gzip.open(path, "rt", encoding="utf-8"))
    return path.open(encoding="utf-8")


def _parsed(text: str, place: str, line: int) -> Row:
    try:
        return Row(place, line, json.loads(text))
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not valid JSON: {error}.") from None


def _split_file(folder: Path, split: str) -> Path:
    for suffix in SUFFIXES:
        if (folder / f"{split}{suffix}").is_file():
            return folder / f"{split}{suffix}"
    raise ValueError(f"task.data: folder {folder} has no {' or '.join(split + suffix for suffix in SUFFIXES)}.")


def _may_be_hub_name(data: str) -> bool:
    return data.count("/") == 1 and not data.startswith((".", "/", "~")) and not data.endswith(SUFFIXES)


def _load_from_hub(name: str, subset: str, split: str) -> Sequence[Any]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(
            f"task.data={name!r} is no file or folder here, and loading it from the hub needs the `datasets` package: "
            "`pip install datasets`, or download its JSONL files and give their folder."
        ) from None
    try:
        return load_dataset(name, subset, split=split)
    except Exception as error:  # datasets, the hub's client and the HTTP client each have their own kinds
        raise ValueError(
            f"task.data={name!r} is no file or folder here and could not be loaded from the hub "
            f"({type(error).__name__}: {error}). Is the name right and the hub in reach (HF_HUB_OFFLINE=1 forbids "
            "downloads)? A folder with its JSONL files works without the hub."
        ) from error
