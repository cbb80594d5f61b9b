"""How a run writes: whole files in one move, lines at the end, and what becomes of a write that fails."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

from safetensors import SafetensorError

from tba.observe.run_folder import RunFolder

logger = logging.getLogger("tba")
LONGEST_ERROR = 500
"""Characters of an error in summary.json, which is one line."""

RunOutcome = Literal["finished", "interrupted", "collapsed", "failed"]
"""How a run ended: it made all its steps; was asked to end; was stopped by the collapse guard; met an error."""


def keep_lines(path: Path, count: int) -> None:
    """Cut a file off after its first lines: what a run wrote after the checkpoint that it resumes from is made again. A
    last line that a killed process left unfinished does not count."""
    if not path.is_file():
        return
    with path.open("rb+") as file:
        end = 0
        for _ in range(count):
            line = file.readline()
            if not line.endswith(b"\n"):
                break
            end += len(line)
        file.truncate(end)


class WriteFailures:
    """What a run could not write, because the disk is full or the folder is gone: each kind is told once, and that alone
    does not end the run. What must not be lost is named again in the end, with a non-zero exit status, unless it was written
    later."""

    def __init__(self) -> None:
        self.lost: dict[Path, None] = {}
        """Files and folders that must not be lost and could not be written, in their order."""
        self._told: set[str] = set()

    @contextmanager
    def tolerated(self, what: str, path: Path, *, must_not_be_lost: bool = False) -> Iterator[None]:
        """Go on where writing `path` fails; `what` is its kind, of which the first failure is told."""
        try:
            yield
            self.lost.pop(path, None)
        except (OSError, SafetensorError) as error:
            # What a checkpoint has come to before the disk was full: it would keep the next one from being written.
            shutil.rmtree(path.with_name(f".{path.name}.partial"), ignore_errors=True)
            if must_not_be_lost:
                self.lost[path] = None
            if what not in self._told:
                self._told.add(what)
                level = logging.ERROR if must_not_be_lost else logging.WARNING
                words = "%s %s cannot be written (%s). This alone does not end the run, and is not said again."
                logger.log(level, words, what, path, error)

    def raise_lost(self) -> None:
        """Raise at the end of a run that has not written all that it must."""
        lost = self._lost_words()
        if lost:
            raise OutputLost(
                f"training is done, but {lost} Free the disk and go on from the newest checkpoint (--resume), or choose "
                "another output=... and train again."
            )

    def tell_lost(self) -> None:
        """Say so at the end of a run that was interrupted."""
        lost = self._lost_words()
        if lost:
            logger.error("the run was interrupted, and %s", lost)

    def _lost_words(self) -> str:
        """2 of its files could not be written: runs/a/step-10, runs/a/step-20. Empty = nothing is lost."""
        lost = [str(path) for path in self.lost]
        names = ", ".join(lost[:5]) + (", ..." if len(lost) > 5 else "")
        return f"{len(lost)} of its files could not be written: {names}." if lost else ""


class OutputLost(RuntimeError):
    """A run came to its end and could not write what it was for."""


def tell_failure(folder: RunFolder, error: BaseException) -> None:
    """Have summary.json say that the run failed, also where the error came before there was anything to sum up, or after it
    was written: a run whose last files are lost is not finished."""
    summary = read_summary(folder) or {}
    if summary.get("outcome", "finished") == "finished":
        try:
            write_json(folder.summary, {**summary, "outcome": "failed", "error": one_line(error)})
        except OSError as lost:
            logger.error("%s cannot be written: %s", folder.summary, lost)


def one_line(error: BaseException) -> str:
    """An error as it stands in a file: RoleDied: searcher-0 ended (exit status -9)."""
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return words if len(words) <= LONGEST_ERROR else f"{words[:LONGEST_ERROR]}..."


def read_summary(folder: RunFolder) -> dict[str, Any] | None:
    """Content of summary.json; None = there is none that can be read."""
    try:
        summary = json.loads(folder.summary.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) and summary.get("outcome") in get_args(RunOutcome) else None


def write_atomic(path: Path, text: str) -> None:
    """Write a whole file so that a reader sees the old or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    # In the same folder: a rename is one move only within a file system.
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def check_may_replace(option: str, path: Path, is_own: Callable[[Path], bool]) -> None:
    """Refuse a file to write that is there and of another kind: a slip in its name must not cost anybody their data.
    `is_own` says whether the file is an earlier one of this kind; it may raise what comes of reading another."""
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder: give the name of a file.")
    if not path.is_file() or path.stat().st_size == 0:
        return
    try:
        own = is_own(path)
    except Exception:  # whatever reading a file of any kind may raise
        own = False
    if not own:
        raise ValueError(f"{option} {path} is there and holds something else, which would be lost: give another file.")


def check_new_folder(path: Path, *, may_hold: str | None = None) -> None:
    """Refuse a folder for output that is a file, or that is not empty, before anything is made. One that holds what fits
    `may_hold` may be written into: it is an earlier one of its kind."""
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not existing.is_dir():
        raise FileExistsError(f"{existing} is a file, not a folder: give a new folder.")
    if existing == path and any(path.iterdir()) and (may_hold is None or not any(path.glob(may_hold))):
        raise FileExistsError(f"{path} is not empty: give a new folder.")


def append_line(path: Path, text: str) -> None:
    """Append a line to a file, which is made again where somebody has deleted it or its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(text + "\n")


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, so that a reader never sees a part of it."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
