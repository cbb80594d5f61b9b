"""What is on disk about a run of a study: cell.json (done, with which config) or failed.json beside its summary.json."""

from __future__ import annotations

import json
import shutil
import time
from typing import Any, Literal

from tba.compare.claims import read_holder
from tba.compare.plan import Cell
from tba.compare.study import flatten
from tba.config import ConfigError
from tba.observe.files import RunFolder, write_json

State = Literal["done", "failed", "claimed", "changed", "missing"]
"""changed = run before, with another config."""

MOST_CHANGES_NAMED = 3


def state_of(cell: Cell, *, retry_before: float = 0.0) -> State:
    """Failures older than `retry_before` (seconds since the epoch) count as missing."""
    record = read_record(cell)
    same = record is not None and record["config"] == cell.recorded_config
    if same and record is not None:
        if "error" not in record:
            return "done"
        if record["time"] >= retry_before:
            return "failed"
    if read_holder(cell.claim) is not None:
        return "claimed"
    return "missing" if record is None or same else "changed"


def read_record(cell: Cell) -> dict[str, Any] | None:
    """cell.json of a finished run or failed.json of a failed one; None = neither."""
    if RunFolder(cell.folder).summary.is_file():
        record = _read(cell, "cell.json")
        if record is not None:
            return record
    return _read(cell, "failed.json")


def write_done(cell: Cell, *, seconds: float, commit: str | None) -> None:
    """After summary.json: an interrupted run has a summary too, but no cell.json."""
    write_json(cell.folder / "cell.json", {"config": cell.recorded_config, "seconds": seconds, "commit": commit})


def write_failed(cell: Cell, error: BaseException) -> None:
    cell.folder.mkdir(parents=True, exist_ok=True)
    words = f"{type(error).__name__}: {error}"
    write_json(cell.folder / "failed.json", {"error": words, "time": time.time(), "config": cell.recorded_config})


def clear(cell: Cell) -> None:
    """Make room for a new run."""
    if cell.folder.exists():
        shutil.rmtree(cell.folder)


def changes(cell: Cell) -> str:
    """How the config differs from that of the run on disk: `train.max_steps 2 -> 3`; empty = not, or there is none."""
    record = read_record(cell)
    if record is None:
        return ""
    before, now = flatten(record["config"]), flatten(cell.recorded_config)
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    named = [f"{key} {before.get(key)} -> {now.get(key)}" for key in keys[:MOST_CHANGES_NAMED]]
    return ", ".join(named) + (f" and {len(keys) - len(named)} more" if len(keys) > len(named) else "")


def read_summary(cell: Cell) -> dict[str, Any]:
    return json.loads(RunFolder(cell.folder).summary.read_text(encoding="utf-8"))


def read_metric(cell: Cell, metric: str) -> float:
    """The study's metric of a finished run."""
    final = read_summary(cell)["final"]
    if metric not in final:
        has = f"it has {', '.join(final)}" if final else "the run had no prompts to evaluate on"
        raise ConfigError(f"metric={metric!r} is not in `final` of {RunFolder(cell.folder).summary}: {has}.")
    return float(final[metric])


def read_steps(cell: Cell) -> list[dict[str, Any]]:
    """One record per logged optimizer step."""
    lines = RunFolder(cell.folder).metrics.read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]


def _read(cell: Cell, name: str) -> dict[str, Any] | None:
    try:
        return json.loads((cell.folder / name).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
