"""Writing by a run: whole files in one move, lines at the end of files, metrics to every sink. Failed writes and output
without a reader are handled here too."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, Literal, TextIO, get_args

from safetensors import SafetensorError

from tba.config import Config
from tba.observe.metrics import metric
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
    """Failed writes of a run, because the disk is full or the folder is gone. Each kind is reported once, and that alone
    does not end the run. What must not be lost is named again in the end, with a non-zero exit status, unless it was written
    later."""

    def __init__(self) -> None:
        self.lost: dict[Path, None] = {}
        """Files and folders that must not be lost and could not be written, in their order."""
        self._told: set[str] = set()

    @contextmanager
    def tolerated(self, what: str, path: Path, *, must_not_be_lost: bool = False) -> Iterator[None]:
        """Go on where writing `path` fails; `what` is its kind, of which the first failure is reported."""
        try:
            yield
            # Written now, so that an earlier failure of this path has cost nothing.
            self.lost.pop(path, None)
        except (OSError, SafetensorError) as error:
            # What a checkpoint has come to before the disk was full: it would keep the next one from being written.
            shutil.rmtree(path.with_name(f".{path.name}.partial"), ignore_errors=True)
            if must_not_be_lost:
                self.lost[path] = None
            if what not in self._told:
                self._told.add(what)
                level = logging.ERROR if must_not_be_lost else logging.WARNING
                message = "%s %s cannot be written (%s). This alone does not end the run, and is not said again."
                logger.log(level, message, what, path, error)

    def raise_lost(self, *, interrupted: bool = False) -> None:
        """Raise at the end of a run that has not written all that it must; one that was `interrupted` logs it."""
        names = ", ".join(list(map(str, self.lost))[:5]) + (", ..." if len(self.lost) > 5 else "")
        lost = f"{len(self.lost)} of its files could not be written: {names}."
        if self.lost and interrupted:
            logger.error("the run was interrupted, and %s", lost)
        elif self.lost:
            raise OutputLost(
                f"training is done, but {lost} Free the disk and go on from the newest checkpoint (--resume), or choose "
                "another output=... and train again."
            )


class OutputLost(RuntimeError):
    """A run came to its end and could not write what it was for."""


def report_failure(folder: RunFolder, error: BaseException) -> None:
    """Have summary.json say that the run failed, also where the error came before there was anything to sum up, or after it
    was written: a run whose last files are lost is not finished."""
    summary = read_summary(folder) or {}
    # A summary that has an error or a collapse already was written by the run itself, and says more.
    if summary.get("outcome", "finished") == "finished":
        try:
            write_json(folder.summary, {**summary, "outcome": "failed", "error": one_line(error)})
        except OSError as lost:
            logger.error("%s cannot be written: %s", folder.summary, lost)


def one_line(error: BaseException) -> str:
    """An error as it stands in a file: RoleDied: searcher-0 ended (exit status -9)."""
    message = " ".join(f"{type(error).__name__}: {error}".split())
    return message if len(message) <= LONGEST_ERROR else f"{message[:LONGEST_ERROR]}..."


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
    """Refuse a folder for output that is a file, or that is not empty unless it holds what fits `may_hold`: then it is an
    earlier one of its kind."""
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not existing.is_dir():
        raise FileExistsError(f"{existing} is a file, not a folder: give a new folder.")
    if existing == path and any(path.iterdir()) and (may_hold is None or not any(path.glob(may_hold))):
        raise FileExistsError(f"{path} is not empty: give a new folder.")


def append_line(path: Path, text: str) -> None:
    """Append a line to a file, which is made again where it or its folder was deleted."""
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


def check_sinks(config: Config) -> None:
    """Refuse sinks whose package is not installed, without importing it."""
    for name in config.observe.sinks:
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"observe.sinks has {name!r}, which needs a package: pip install {name}.")


class Sinks:
    """Where the metrics of a run go, one record per step: metrics.jsonl always, TensorBoard (`tensorboard --logdir runs`)
    and W&B where observe.sinks names them. A sink that cannot be written is reported once.

    metrics.jsonl has one JSON object per line, which can be read while the run goes on. NaN and infinity become null, which
    JSON has no numbers for. WANDB_MODE=offline keeps everything of W&B in the run folder."""

    def __init__(self, config: Config, folder: RunFolder, failures: WriteFailures) -> None:
        # Packages are imported here, before training: a sink that fails later would cost a run its metrics.
        check_sinks(config)
        self._folder, self._failures = folder, failures
        self._tensorboard: Any = None
        self._wandb: Any = None
        if "tensorboard" in config.observe.sinks:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(folder.path / "tensorboard"))
        if "wandb" in config.observe.sinks:
            import wandb

            self._wandb = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "tba"),
                name=config.observe.label or config.run_name,
                dir=str(folder.path),
                config=config.model_dump(mode="json"),
            )
            # Evaluations arrive after later steps were logged; W&B drops records whose own step goes back.
            self._wandb.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        # Before any sink has the record: a name that is not listed is a bug of ours, and ends the run at its first step.
        for name in metrics:
            metric(name)
        with self._failures.tolerated("JSONL metrics in", self._folder.path):
            values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
            append_line(self._folder.metrics, json.dumps({"step": step, **values}))
        with self._failures.tolerated("tensorboard metrics in", self._folder.path):
            for name, value in metrics.items() if self._tensorboard is not None else ():
                self._tensorboard.add_scalar(name, value, step)
        with self._failures.tolerated("wandb metrics in", self._folder.path):
            if self._wandb is not None:
                self._wandb.log({"step": step, **metrics})

    def close(self) -> None:
        with self._failures.tolerated("tensorboard metrics in", self._folder.path):
            if self._tensorboard is not None:
                self._tensorboard.close()
        with self._failures.tolerated("wandb metrics in", self._folder.path):
            if self._wandb is not None:
                self._wandb.finish()


# Output that may vanish while a run goes on: `tba train ... | head -1`, a terminal that is closed, a log on a full disk.


class LastingStream:
    """A text stream that drops what is written once its reader is gone; everything else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.gone = False
        """Whether writing has failed."""

    def write(self, text: str) -> int:
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call: Callable[..., Any], *arguments: str) -> None:
        try:
            if not self.gone:
                call(*arguments)
        except (OSError, ValueError):
            self.gone = True
            # What is still buffered goes nowhere: Python would try to write it once more when it ends, and fail.
            with suppress(OSError, ValueError):
                descriptor, nowhere = self._stream.fileno(), os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def lasting(stream: TextIO) -> TextIO:
    """The stream in a form that never raises because its reader is gone."""
    return stream if isinstance(stream, LastingStream) else LastingStream(stream)  # type: ignore[return-value]


@contextmanager
def lasting_output() -> Iterator[None]:
    """While active, nothing that is printed raises because its reader is gone."""
    with redirect_stdout(lasting(sys.stdout)), redirect_stderr(lasting(sys.stderr)):
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
