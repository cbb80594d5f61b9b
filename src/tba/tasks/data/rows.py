"""Rows of a dataset from where it lies: a JSONL file (also .gz), a folder with one file per split, or a hub name.

Every row comes with its place, the words that an error about it starts with: `data/train.jsonl line 17`. Files are read
line by line in binary: a file may be larger than memory, and broken UTF-8 costs one row.

A row that cannot be used is never trained on in silence. Its reader raises BadRow, and BadRows counts it. When all rows are
seen, BadRows stops the run or warns, as task.on_bad_row says.
"""

from __future__ import annotations

import codecs
import gzip
import json
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeVar, cast

from tba.models.paths import LFS_POINTER

logger = logging.getLogger("tba.tasks")

OnBadRow = Literal["stop", "skip"]
SUFFIXES = (".jsonl", ".jsonl.gz")
LONGEST_LINE = 64 * 2**20
"""Longest line in bytes. A longer one is no row (but perhaps a file without line breaks) and is not taken into memory."""
LINES_NAMED = 5
"""Number of line numbers that are shown for each reason."""
PACKERS = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"(\xb5/\xfd": "zstd"}
"""What has packed a file, by its first bytes."""
SCRIPT_FOLDER = ".inputs"
"""Ending of the folder, beside a run folder, with the datasets that a script gave TBATrainer, as SCRIPT_FILES."""
SCRIPT_FILES = {"train.jsonl": "train_dataset", "eval.jsonl": "eval_dataset", "evaluate.jsonl": "eval_dataset"}


class RowNames(NamedTuple):
    """How messages name the rows of a file: by its lines, or by the rows of the dataset that a script has in its place."""

    dataset: str | None = None
    """Name of the script's dataset, whose rows count from 0; None = the user gave the file."""

    @classmethod
    def of(cls, path: Path) -> RowNames:
        # Two levels: dataset_file in trl/files.py puts another dataset of that name one folder deeper.
        is_scripts = any(folder.name.endswith(SCRIPT_FOLDER) for folder in list(path.absolute().parents)[:2])
        return cls(SCRIPT_FILES.get(path.name) if is_scripts else None)

    def place(self, path: Path, line: int) -> str:
        own = f"{path} line {line}"
        return own if self.dataset is None else f"row {line - 1} of {self.dataset} ({own})"

    def numbers(self, lines: Sequence[int]) -> str:
        word, first = ("line", 0) if self.dataset is None else ("row", 1)
        return f"{word}{'s' if len(lines) > 1 else ''} {', '.join(str(line - first) for line in lines)}"


class DataRow(NamedTuple):
    """DataRow(place="data/train.jsonl line 17", line=17, value={"question": ...})"""

    place: str
    line: int
    """Number of the line in its file, counted from 1."""
    value: Any
    """Any JSON value: its reader checks that it is an object with the columns that it needs."""
    offset: int | None = None
    """Byte of the file where its line begins; None = it cannot be read again from there (compressed, or from the hub)."""


Kept = TypeVar("Kept")


class BadRow(ValueError):
    """A row that cannot be used: BadRow("missing column", "train.jsonl line 2 has no `answer` column.")"""

    def __init__(self, reason: str, message: str) -> None:
        """`reason` is what such rows are counted under, `message` the whole message about this one."""
        super().__init__(message)
        self.reason = reason


class BadRows:
    """The bad rows of one source, counted. It holds a few line numbers, however many there are."""

    def __init__(self, on_bad_row: OnBadRow, *, skip_by: str | None = None, names: RowNames | None = None) -> None:
        """`skip_by` is what a user writes to leave bad rows out; None = the setting."""
        self.names, self._on_bad_row = names or RowNames(), on_bad_row
        setting = 'TBAConfig(task={"on_bad_row": "skip"})' if self.names.dataset else "task.on_bad_row=skip"
        self._skip_by = skip_by or setting
        self._first: BadRow | None = None
        self._counts: dict[str, int] = {}
        self._lines: dict[str, list[int]] = {}

    @property
    def total(self) -> int:
        return sum(self._counts.values())

    def add(self, line: int, error: BadRow) -> None:
        # The first in full, of the others the counts: a broken file may have millions.
        self._first = self._first or error
        self._counts[error.reason] = self._counts.get(error.reason, 0) + 1
        lines = self._lines.setdefault(error.reason, [])
        if len(lines) < LINES_NAMED:
            lines.append(line)

    def keep(self, items: Iterable[Any], read: Callable[[Any], Kept]) -> list[Kept]:
        """Results of `read` for rows, or for problems with a `line`. Items that it calls bad are left out and counted."""
        kept = []
        for item in items:
            try:
                # BadRow alone is caught: any other error is a fault of the reader, not of the row.
                kept.append(read(item))
            except BadRow as error:
                self.add(item.line, error)
        return kept

    def report(self) -> None:
        """Report the bad rows after the last row: by nothing, by one warning, or by the error that stops."""
        if self._first is None:
            return
        reasons = []
        for reason, count in self._counts.items():
            lines = self._lines[reason]
            reasons.append(f"{count} x {reason} ({self.names.numbers(lines)}{', ...' if count > len(lines) else ''})")
        # `3 bad rows: 2 x missing column (lines 4, 9), 1 x not JSON (line 7)`
        summary = f"{self.total} bad row{'s' if self.total > 1 else ''}: {', '.join(reasons)}"
        if self._on_bad_row == "skip":
            logger.warning("%s", f"{self._skip_by} left out {summary}. The first: {self._first}")
            return
        more = "" if self.total == 1 else f" And {self.total - 1} more: in all {summary}."
        advice = f" Correct or remove it, or leave such rows out by {self._skip_by}."
        raise ValueError(f"{self._first}{more}{advice}") from self._first


def jsonl_rows(path: Path, bad: BadRows) -> Iterator[DataRow]:
    """Every line that is not blank, one at a time; lines that are no JSON are counted as bad."""
    if not path.is_file():
        raise ValueError(f"task.data: file {path} does not exist.")
    # Before the first line: a table would otherwise give one error for each of its lines.
    refuse_other_formats(path)
    try:
        with _open(path) as file:
            seekable = path.suffix != ".gz"
            for line, (offset, raw) in enumerate(_lines(file), start=1):
                try:
                    if raw.strip():
                        row = parsed_row(raw, bad.names.place(path, line), line)
                        yield row._replace(offset=offset) if seekable else row
                except BadRow as error:
                    bad.add(line, error)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        advice = "pack it again, or leave .gz out of its name if it is not packed"
        raise ValueError(f"file {path} cannot be read as gzip: {str(error).rstrip('.')}: {advice}.") from None


def split_rows(data: str, names: Sequence[str], bad: BadRows, *, hub_subset: str) -> Iterator[DataRow]:
    """Rows of one split of a folder, the first of these names that it has, or of a hub dataset, the first of them."""
    folder = Path(data).expanduser()
    if folder.is_dir():
        # Names before suffixes: validation.jsonl.gz comes before test.jsonl.
        files = [f"{name}{suffix}" for name in names for suffix in SUFFIXES]
        for file in files:
            if (folder / file).is_file():
                return jsonl_rows(folder / file, bad)
        raise ValueError(f"task.data: folder {folder} has no {' or '.join(files)}.")
    if not may_be_hub_name(data):
        raise ValueError(f"task.data={data!r}: there is no such file or folder, and it is no hub name (owner/name).")
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(
            f"task.data={data!r} is no file or folder here, and loading it from the hub needs the `datasets` package: "
            "`pip install datasets`, or download its JSONL files and give their folder."
        ) from None
    try:
        rows: Sequence[Any] = load_dataset(data, hub_subset, split=names[0])
    except Exception as error:  # datasets, the hub's client and the HTTP client each have their own kinds
        raise ValueError(
            f"task.data={data!r} is no file or folder here and could not be loaded from the hub "
            f"({type(error).__name__}: {error}). Is the name right and the hub in reach (HF_HUB_OFFLINE=1 forbids "
            "downloads)? A folder with its JSONL files works without the hub."
        ) from error
    return (DataRow(f"{data} {names[0]} row {number}", number, dict(row)) for number, row in enumerate(rows, start=1))


def require_object(row: DataRow, *, columns: str) -> None:
    """Refuses a row that is no JSON object; `columns` says in the error which ones it should have."""
    if not isinstance(row.value, dict):
        raise BadRow("no object", f"{row.place} is no object with {columns}.")


def text_column(row: DataRow, column: str) -> str:
    """A column that must be there and must be text."""
    if column not in row.value:
        raise BadRow(
            "missing column", f"{row.place} has no `{column}` column; it has {', '.join(row.value) or 'none'}."
        )
    value = row.value[column]
    if not isinstance(value, str):
        shown = repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:80]}..."
        raise BadRow("wrong type", f"{row.place}: `{column}` is {shown}, it must be text.")
    return value


def prompt_column(row: DataRow, column: str) -> str:
    """A text column to ask the model: without the space around it, and not empty."""
    text = text_column(row, column).strip()
    if not text:
        raise BadRow("empty prompt", f"{row.place}: `{column}` is empty.")
    return text


def refuse_other_formats(path: Path) -> None:
    """Refuse a file whose first line is no JSON Lines. The error has the command that makes them."""
    try:
        with _open(path) as file:
            start = file.readline(LONGEST_LINE).removeprefix(codecs.BOM_UTF8).strip()
    except (OSError, EOFError, zlib.error):
        return  # reported when its lines are read
    if (packer := next((name for magic, name in PACKERS.items() if start.startswith(magic)), None)) is not None:
        advice = "name it .jsonl.gz" if packer == "gzip" else "unpack it first; only gzip is read as it is (.jsonl.gz)"
        raise ValueError(f"{path} is packed by {packer}: {advice}.")
    if start.startswith(LFS_POINTER):
        raise ValueError(f"{path} is a pointer of git-lfs to the data: `git lfs pull` in its folder gets them.")
    # What old Macs, or PowerShell's `>`, write shows as broken JSON or UTF-8 in line 1, which is no remedy.
    if b"}\r{" in start:
        raise ValueError(
            f"{path} ends its lines with \\r alone, and \\n is needed: tr '\\r' '\\n' < {path} > rows.jsonl"
        )
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and not start.startswith(codecs.BOM_UTF32_LE):
        raise ValueError(f"{path} is in UTF-16, and UTF-8 is needed: iconv -f UTF-16 -t UTF-8 {path} > rows.jsonl")
    if b"\0" in start and start[:4] != b"PAR1":
        raise ValueError(
            f"{path} is no text in UTF-8, which has no zero bytes: give JSON Lines, one object on each line."
        )
    readers = {b"PAR1": "read_parquet", b".csv": "read_csv", b".tsv": "read_table"}
    reader = readers.get(start[:4]) or (None if start[:1] == b"{" else readers.get(path.suffix.encode()))
    if reader is not None:
        raise ValueError(
            f"{path} is a table, and JSON Lines are needed, one object on each line: python -c 'import pandas; "
            f"""pandas.{reader}("{path}").to_json("rows.jsonl", orient="records", lines=True)' writes them."""
        )
    if not start.startswith(b"[") and start != b"{":
        return
    with _open(path) as file:
        text = file.read(LONGEST_LINE)
    try:
        whole = json.loads(text.removeprefix(codecs.BOM_UTF8))
    except ValueError:
        return  # its lines are reported one by one
    if isinstance(whole, dict) or (isinstance(whole, list) and all(isinstance(row, dict) for row in whole)):
        raise ValueError(
            f"{path} is one JSON {'object' if isinstance(whole, dict) else 'array'}, and JSON Lines are needed: one object "
            f"on each line, no brackets or commas around them. `jq -c '.[]' {path} > rows.jsonl` makes them of an array."
        )


def _open(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines of a file with the place of their first byte; of a line beyond LONGEST_LINE only the start, which is longer than
    any line may be."""
    offset = 0
    while raw := file.readline(LONGEST_LINE + 1):
        # The rest of an over-long line is read and thrown away: the next line has its right number.
        rest, length = raw, len(raw)
        while len(rest) > LONGEST_LINE and not rest.endswith(b"\n"):
            rest = file.readline(LONGEST_LINE + 1)
            length += len(rest)
        yield offset, raw
        offset += length


def parsed_row(raw: bytes, place: str, line: int) -> DataRow:
    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):  # json keeps the last value in silence
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise BadRow("a key twice", f"{place} has the key {twice!r} twice: which value counts?")
        return found

    if len(raw) > LONGEST_LINE:
        raise BadRow(
            "line too long", f"{place} is longer than {LONGEST_LINE // 2**20} MiB: write one row on each line."
        )
    try:
        value = json.loads(raw.removeprefix(codecs.BOM_UTF8).decode("utf-8"), object_pairs_hook=object_of)
        if b"\\u" in raw:
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # half a character, "\ud83d", has no UTF-8
    except BadRow:
        raise
    except UnicodeError as error:
        raise BadRow("broken UTF-8", f"{place} is not valid UTF-8: {error}.") from None
    except (ValueError, RecursionError) as error:
        raise BadRow("not JSON", f"{place} is not valid JSON: {error}.") from None
    return DataRow(place, line, value)


def may_be_hub_name(data: str) -> bool:
    # A path that is not there must not be asked of the hub: the error would be about the network.
    return data.count("/") == 1 and not data.startswith((".", "/", "~")) and not data.endswith(SUFFIXES)
