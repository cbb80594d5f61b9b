"""Where a run writes: its folder, whole files in one move, and the sinks of its metrics."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from safetensors import SafetensorError

from tba.config import Config
from tba.observe.claim import Claim, Holder
from tba.observe.contents import MANIFEST as MANIFEST
from tba.observe.contents import SOURCES, is_begun, move_aside, refuse_foreign, remove_contents
from tba.observe.metrics import metric

logger = logging.getLogger("tba")
LONGEST_ERROR = 500
"""Characters of an error in summary.json, which is one line."""
TAIL_BYTES = 65_536
"""Bytes read from the end of metrics.jsonl, enough for its last lines."""
PROBE_BYTES = 2**20
"""Bytes that must fit into the output folder before a run starts."""


RunOutcome = Literal["finished", "interrupted", "collapsed", "failed"]
"""How a run ended: it made all its steps; was asked to end; was stopped by the collapse guard; met an error."""


class RunFolder:
    """Paths inside runs/<name>/: config.yaml, metrics.jsonl, samples.jsonl, replay.sqlite, checkpoints/step-N/, logs/,
    sources/, status.json, summary.json. checkpoint-N are TBATrainer's links to checkpoints/step-N, earlier-N/ the runs that
    it has moved aside. The collapse guard keeps its checkpoint in checkpoints/healthy-step-N.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.replay = path / "replay.sqlite"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.sources = path / SOURCES
        self.status = path / "status.json"
        self.control = path / "control.json"
        self.summary = path / "summary.json"
        self._claim: Claim | None = None

    @classmethod
    def check(cls, path: Path, *, overwrite: bool, keep_earlier: bool = False) -> None:
        """Refuse a folder that `create` would refuse, and an output that cannot be written, before anything is loaded or
        made."""
        folder = cls(path)
        above = (path, *path.absolute().parents)
        if broken := next((parent for parent in above if parent.is_symlink() and not parent.exists()), None):
            raise FileExistsError(
                f"{broken} is a link to {os.readlink(broken)}, which is not there: choose another output=..., or correct it."
            )
        existing = next(parent for parent in above if parent.exists())
        if not existing.is_dir():
            raise FileExistsError(f"{existing} is a file, not a folder: choose another output=... or name=...")
        if existing == path and not keep_earlier:
            folder._refuse_replacing(overwrite)
        cls.check_writable(path, existing)

    @classmethod
    def check_writable(cls, path: Path, existing: Path | None = None) -> None:
        """Refuse a run folder that cannot be written; `existing` is the folder above it that is there, None = itself."""
        existing = existing or path
        try:
            with tempfile.TemporaryFile(dir=existing) as probe:
                probe.write(bytes(PROBE_BYTES))
                probe.flush()
        except OSError as error:
            raise ValueError(
                f"run folder {path} cannot be written: {error.strerror} ({existing}). Choose another output=..., or free it."
            ) from None

    @classmethod
    def create(cls, path: Path, *, overwrite: bool) -> RunFolder:
        """Claim a run folder and make it empty, see `clear`."""
        folder = cls(path)
        folder.claim()
        try:
            folder.clear(overwrite=overwrite)
        except BaseException:
            folder.release()
            raise
        return folder

    def clear(self, *, overwrite: bool, keep_earlier: bool = False) -> None:
        """Make a claimed folder that of a new run. An earlier run of the same name is only replaced, or moved aside, when
        asked for."""
        if keep_earlier:
            move_aside(self.path)
        else:
            self._refuse_replacing(overwrite)
            if is_begun(self.path):
                remove_contents(self.path)
        self.logs.mkdir()
        self.checkpoints.mkdir()

    def reopen(self) -> None:
        """Go on in a claimed folder whose run is to be resumed."""
        if not self.config.is_file() or not self.config.stat().st_size:
            lacks = "its config.yaml is empty" if self.config.is_file() else "it has no config.yaml"
            raise FileNotFoundError(
                f"there is no run to resume in {self.path} ({lacks}): give the config or the name of a run "
                "that was started before, or start it without --resume."
            )
        for folder in (self.logs, self.checkpoints):
            if folder.exists() and not folder.is_dir():
                raise FileExistsError(f"{folder} is a file, and a run has a folder there: move it away, then --resume.")
            folder.mkdir(exist_ok=True)

    def claim(self, *, holder: Holder | None = None) -> None:
        """Lock the folder for this process, or for its supervisor, until `release`; see `Claim.take`."""
        self._claim = Claim.take(self.path, holder=holder)

    def release(self) -> None:
        """The run is over: the folder may be used by another."""
        if self._claim is not None:
            self._claim.release()

    def _refuse_replacing(self, overwrite: bool) -> None:
        if not is_begun(self.path):
            return
        if not overwrite:
            raise FileExistsError(
                f"run folder {self.path} exists already: choose another name (name=...), or replace it with overwrite=true."
            )
        if not self.config.exists():
            raise FileExistsError(f"{self.path} is not a run folder (it has no config.yaml) and is not replaced.")
        refuse_foreign(self.path)

    def last_step(self) -> dict[str, Any]:
        """The last line of metrics.jsonl that is of an optimizer step; {"step": 0} where there is none."""
        try:
            with self.metrics.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
                lines = file.read().decode("utf-8", errors="replace").splitlines()
        except OSError:
            return {"step": 0}
        for line in reversed(lines):
            try:
                record = json.loads(line)
            except ValueError:  # cut off at either end
                continue
            if "loss" in record:
                return dict(record)
        return {"step": 0}

    def newest_checkpoint(self) -> Path:
        """The checkpoint of the highest step, or the guard's healthy one where a collapse stopped the run before any other
        was written. A FileNotFoundError names the run folder when there is none."""
        found = self.checkpoints_by_step() or self.checkpoints_by_step("healthy-step-")
        if not found:
            raise FileNotFoundError(f"run folder {self.path} has no checkpoint yet.")
        return found[max(found)]

    def resumable(self) -> list[tuple[int, Path]]:
        """Steps and folders of the whole checkpoints that a run can go on from: its own and the guard's healthy ones."""
        return [item for prefix in ("step-", "healthy-step-") for item in self.checkpoints_by_step(prefix).items()]

    def checkpoints_by_step(self, prefix: str = "step-") -> dict[int, Path]:
        """Folders of the whole checkpoints whose name is `prefix` and a step, by their step; others in there are ignored."""
        named = [(re.fullmatch(rf"{prefix}(\d+)", path.name), path) for path in self.checkpoints.glob(f"{prefix}*")]
        # Without a manifest it is not one of ours, or not whole.
        return {int(match[1]): path for match, path in named if match is not None and (path / MANIFEST).is_file()}


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


def check_sinks(config: Config) -> None:
    """Refuse sinks whose package is not installed, without importing it."""
    for name in config.observe.sinks:
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"observe.sinks has {name!r}, which needs a package: pip install {name}.")


def make_sinks(config: Config, folder: RunFolder, failures: WriteFailures | None = None) -> Sinks:
    """The sinks of a run: metrics.jsonl always, those of observe.sinks besides. A package that is missing is an error here,
    before training starts, not at the first record."""
    check_sinks(config)
    sinks: list[Sink] = [JsonlSink(folder.metrics)]
    for name in config.observe.sinks:
        sinks.append(TensorBoardSink(folder.path) if name == "tensorboard" else WandbSink(config, folder.path))
    return Sinks(sinks, folder.path, failures or WriteFailures())


class Sinks:
    """All sinks of a run as one. A metric that observe/metrics.py does not list is refused with a KeyError; one that cannot
    be written is told once."""

    def __init__(self, sinks: Sequence[Sink], folder: Path, failures: WriteFailures) -> None:
        self._sinks = sinks
        self._folder = folder
        self._failures = failures

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name in metrics:
            metric(name)
        for sink in self._sinks:
            with self._failures.tolerated(f"{sink.name} metrics in", self._folder):
                sink.write(step, metrics)

    def close(self) -> None:
        for sink in self._sinks:
            with self._failures.tolerated(f"{sink.name} metrics in", self._folder):
                sink.close()


class Sink(Protocol):
    """A place where metrics go; it takes one flat record per step."""

    name: str

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """A file with one JSON object per line, which can be read while the run goes on. NaN and infinity become null, which
    JSON has no numbers for."""

    name = "JSONL"

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        append_line(self._path, json.dumps({"step": step, **values}))

    def close(self) -> None:
        """Close: nothing is open between two lines."""


class TensorBoardSink:
    """Event files in the run folder: `tensorboard --logdir runs`."""

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A W&B run; WANDB_MODE=offline keeps everything in the run folder."""

    name = "wandb"

    def __init__(self, config: Config, folder: Path) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "tba"),
            name=config.observe.label or config.run_name,
            dir=str(folder),
            config=config.model_dump(mode="json"),
        )
        # Evaluations arrive after later steps were logged; W&B drops records whose own step goes back.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()
