"""Stored groups for `tba replay RUN`: chosen by prompt, reward, version and time, shown as a table or written to a file.

An exported line is one response. The lines of a JSONL file are what replay.imports of another run reads (`id`,
`completion_ids`, `rewards`, `finish`); `completion` is its text, where the run's tokenizer is at hand, and the other keys
say where the response came from.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import typer

from tba.config import load_config
from tba.models.paths import resolve_path
from tba.observe.files import check_may_replace, one_line
from tba.observe.run_folder import RunFolder
from tba.replay.database import find_database, load_groups, reading

SHOWN_GROUPS = 20
"""Number of groups that a listing shows by default."""
ROWS_PER_BLOCK = 10_000
"""Number of responses that a parquet file is written by."""
LARGEST = 2**63 - 1
"""Largest number that SQLite compares with."""
EXPORTED = {"id", "prompt", "completion_ids", "rewards", "group", "reference_version"}
"""Columns by which an export is known."""
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
Bounds = tuple[float | None, float | None]
"""The least and the most that are wanted; None = no bound."""


@dataclass(frozen=True, kw_only=True)
class GroupFilter:
    """Which groups are wanted; None = any. GroupFilter(prompt="train-17", rewards=(0.5, None), limit=20)"""

    prompt: str | None = None
    rewards: Bounds = (None, None)
    """Of the mean reward of a group."""
    versions: Bounds = (None, None)
    """Of the oldest version of the weights behind a group."""
    times: Bounds = (None, None)
    """Of the time of arrival, in seconds since 1970."""
    limit: int | None = None
    """Most groups; the newest are taken."""

    def __post_init__(self) -> None:
        options = ("--min-reward and --max-reward", "--version", "--since and --until")
        for names, (least, most) in zip(options, (self.rewards, self.versions, self.times)):
            if least is not None and most is not None and least > most:
                raise ValueError(f"{names}: the first bound is above the second, so that no group is left. Swap them.")

    def arrivals(self, path: Path) -> list[int]:
        """Arrival numbers of the groups in a database, oldest first."""
        conditions: dict[str, Any] = {"prompt_id = ?": self.prompt}
        for column, (least, most) in {"reward": self.rewards, "version": self.versions, "time": self.times}.items():
            conditions |= {f"{column} >= ?": least, f"{column} <= ?": most}
        wanted = {condition: value for condition, value in conditions.items() if value is not None}
        query = f"SELECT arrival FROM groups WHERE {' AND '.join(wanted) or 'TRUE'} ORDER BY arrival DESC LIMIT ?"
        with reading(path) as database:
            found = database.execute(query, (*wanted.values(), LARGEST if self.limit is None else self.limit))
            # Newest first for the limit, oldest first for the reader.
            return [arrival for (arrival,) in found][::-1]


def database_of(target: Path) -> Path:
    """The database of a run folder, or a snapshot given by its own path."""
    if target.is_file():
        return target
    folder = RunFolder(target)
    if not folder.config.is_file():
        raise ValueError(f"{target} is no run folder (it has no config.yaml) and no SQLite file: give one of the two.")
    return find_database(folder.replay)


def table(path: Path, wanted: GroupFilter) -> Iterator[str]:
    """Lines of a table of groups, oldest first, and a line with their number."""

    def short(value: float | None) -> str:
        return "-" if value is None else f"{value:.3g}"

    header = ("arrival", "time", "group", "prompt", "step", "version", "responses", "reward", "components")
    lines: list[tuple[str, ...]] = [header]
    with reading(path) as database:
        # Row by row: one that is damaged must not cost the listing of the others.
        for arrival in wanted.arrivals(path):
            try:
                row = database.execute(
                    "SELECT time, incarnation || '/' || number, prompt_id, step, version, responses, lost, reward, "
                    "rewards FROM groups WHERE arrival = ?",
                    (arrival,),
                ).fetchone()
                if row is None:  # it has left meanwhile
                    continue
                at, group, prompt, step, version, responses, lost, reward, rewards = row
                lines.append(
                    (
                        str(arrival),
                        datetime.fromtimestamp(at).isoformat(sep=" ", timespec="seconds"),
                        *(group, prompt, str(step), "-" if version is None else str(version)),
                        f"{responses} ({lost} lost)" if lost else str(responses),
                        short(reward),
                        ", ".join(f"{name} {short(value)}" for name, value in json.loads(rewards).items()),
                    )
                )
            except Exception as error:  # damage shows in as many ways as a row has columns
                lines.append((str(arrival), f"corrupt: {error}"))
        groups, responses = database.execute("SELECT COUNT(*), TOTAL(responses) FROM groups").fetchone()
    whole = [line for line in lines if len(line) == len(header)]
    widths = [max(len(line[column]) for line in whole) for column in range(len(header))]
    for line in lines:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip()
    yield f"{len(lines) - 1} of {groups} groups ({responses:.0f} responses) in {path}"


def export(path: Path, target: Path, wanted: GroupFilter, *, decode: Callable[[list[int]], str] | None = None) -> int:
    """Write the responses of the wanted groups to a .jsonl or .parquet file, which is there whole or not at all; returns
    their number. `decode` makes text of token ids; None = the file has none."""
    if target.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"--export {target}: the name must end with .jsonl or .parquet.")
    if not target.parent.is_dir():
        raise ValueError(f"--export {target}: there is no folder {target.parent}. Make it, or give another file.")
    check_may_replace("--export", target, _is_export)
    # Beside the target, so that the rename is one move; hidden, so that no glob for exports finds half of one.
    temporary, count = target.with_name(f".{target.name}.{os.getpid()}"), 0
    try:
        lines = _lines(path, wanted, decode)
        if target.suffix == ".parquet":
            count = _write_parquet(temporary, lines)
        else:
            with temporary.open("w", encoding="utf-8") as file:
                for line in lines:
                    file.write(json.dumps(line) + "\n")
                    count += 1
        os.replace(temporary, target)
    except OSError as error:
        raise ValueError(f"--export {target} cannot be written: {error.strerror}. Give another file.") from None
    finally:
        temporary.unlink(missing_ok=True)
    return count


def _is_export(path: Path) -> bool:
    if path.suffix == ".parquet":
        from pyarrow import parquet

        return set(parquet.read_schema(path).names) >= EXPORTED
    with path.open(encoding="utf-8") as file:
        return json.loads(file.readline()).keys() >= EXPORTED


def _lines(path: Path, wanted: GroupFilter, decode: Callable[[list[int]], str] | None) -> Iterator[dict[str, Any]]:
    """One object for each response of the wanted groups, its tokens exactly as they were generated."""
    for stored in load_groups(path, arrivals=wanted.arrivals(path)):
        group = stored.group
        for trajectory in group.trajectories:
            completion = trajectory.completion
            ids = completion.token_ids.tolist()
            yield {
                "id": group.prompt.id,
                "prompt": group.prompt.text,
                **({} if decode is None else {"completion": decode(ids)}),
                "completion_ids": ids,
                "rewards": {name: None if math.isnan(value) else value for name, value in trajectory.rewards.items()},
                "finish": completion.finish,
                "group": group.id,
                "sample_index": completion.sample_index,
                "version": completion.version,
                "reference_version": trajectory.reference_version,
                "step": stored.step,
                "time": stored.time,
            }


def _write_parquet(path: Path, lines: Iterable[dict[str, Any]]) -> int:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(
            f"a parquet file needs a package: pip install pyarrow ({error}); or export to FILE.jsonl."
        ) from None
    text, integer, real = pyarrow.string(), pyarrow.int64(), pyarrow.float64()
    schema = pyarrow.schema(
        {
            **dict.fromkeys(("id", "prompt", "completion"), text),
            "completion_ids": pyarrow.list_(pyarrow.int32()),
            "rewards": pyarrow.map_(text, real),
            **dict.fromkeys(("finish", "group"), text),
            **dict.fromkeys(("sample_index", "version", "reference_version", "step"), integer),
            "time": real,
        }
    )
    count, remaining = 0, iter(lines)
    with parquet.ParquetWriter(path, schema) as writer:
        while block := list(islice(remaining, ROWS_PER_BLOCK)):
            # A column has one type: chat messages become JSON text.
            for line in block:
                line["prompt"] = line["prompt"] if isinstance(line["prompt"], str) else json.dumps(line["prompt"])
                line["rewards"] = list(line["rewards"].items())
            writer.write_table(pyarrow.Table.from_pylist(block, schema=schema))
            count += len(block)
    return count


def parse_versions(text: str) -> tuple[int | None, int | None]:
    """First and last version of `12`, `10:20`, `10:` or `:20`."""
    first, colon, last = text.partition(":")
    parts = (first, last if colon else first)
    if not all(part.isdecimal() or (colon and not part) for part in parts):
        raise ValueError(f"{text!r} is no version: write one (12) or a range (10:20, 10: or :20).")
    least, most = (min(int(part), LARGEST) if part else None for part in parts)
    return least, most


def parse_time(text: str) -> float:
    """Seconds since 1970 of a local time (2026-11-16T14:30) or of a time ago (90s, 30m, 2h, 1d)."""
    number, unit = text[:-1], text[-1:]
    if unit in UNITS and number.replace(".", "", 1).isdecimal():
        return time.time() - float(number) * UNITS[unit]
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise ValueError(f"{text!r} is no time: write 2026-11-16, 2026-11-16T14:30, or 30m, 2h, 1d for ago.") from None


def decoder_of_run(run: Path, *, trust_remote_code: bool) -> Callable[[list[int]], str] | None:
    """Makes text of a run's token ids; None, with a warning, where its tokenizer is not to be had. The run's own setting of
    trust_remote_code does not count: its folder may be a stranger's."""
    from transformers import AutoTokenizer

    from tba.models.load import friendly_errors

    folder = RunFolder(run if run.is_dir() else run.parent)
    try:
        if not folder.config.is_file():
            raise FileNotFoundError(f"there is no {folder.config}")
        model, saved = load_config(folder.config).model, folder.checkpoints_by_step()
        path = str(saved[max(saved)]) if saved else resolve_path(model.path)
        with friendly_errors(path, "has no tokenizer that can be loaded"):
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        typer.echo(f"the file has token ids without their text: {one_line(error)}", err=True)
        return None
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
