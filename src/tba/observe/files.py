"""Where a run writes: its folder, whole files in one move, and the sinks of its metrics."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from tba.config import Config
from tba.observe.metrics import metric

MANIFEST = "manifest.json"
"""File of a checkpoint that is written last: a folder without it is not whole."""


class RunFolder:
    """Paths inside runs/<name>/: config.yaml, metrics.jsonl, samples.jsonl, replay.sqlite, checkpoints/step-N/, logs/,
    status.json, summary.json. The collapse guard keeps its checkpoint in checkpoints/healthy-step-N.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.replay = path / "replay.sqlite"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.status = path / "status.json"
        self.control = path / "control.json"
        self.summary = path / "summary.json"

    @classmethod
    def create(cls, path: Path, *, overwrite: bool) -> RunFolder:
        """Make an empty run folder. An earlier run of the same name is only replaced when asked for."""
        folder = cls(path)
        if path.exists() and any(path.iterdir()):
            if not overwrite:
                raise FileExistsError(
                    f"run folder {path} exists already: choose another name (name=...), or replace it with overwrite=true."
                )
            if not folder.config.exists():
                raise FileExistsError(f"{path} is not a run folder (it has no config.yaml) and is not replaced.")
            shutil.rmtree(path)
        folder.logs.mkdir(parents=True)
        folder.checkpoints.mkdir()
        return folder

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """The folder of a run that is to be resumed."""
        folder = cls(path)
        if not folder.config.is_file():
            raise FileNotFoundError(
                f"there is no run to resume in {path} (it has no config.yaml): give the config or the name of a run that "
                "was started before, or start it without --resume."
            )
        folder.logs.mkdir(exist_ok=True)
        folder.checkpoints.mkdir(exist_ok=True)
        return folder

    def newest_checkpoint(self) -> Path:
        """The checkpoint of the highest step, or the guard's healthy one where a collapse stopped the run before any other
        was written. A FileNotFoundError names the run folder when there is none."""
        found = self.checkpoints_by_step() or self.checkpoints_by_step("healthy-step-")
        if not found:
            raise FileNotFoundError(f"run folder {self.path} has no checkpoint yet.")
        return found[max(found)]

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


def write_atomic(path: Path, text: str) -> None:
    """Write a whole file so that a reader sees the old or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    # In the same folder: a rename is one move only within a file system.
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, so that a reader never sees a part of it."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def make_sinks(config: Config, folder: RunFolder) -> Sinks:
    """The sinks of a run: metrics.jsonl always, those of observe.sinks besides. A package that is missing is an error here,
    before training starts, not at the first record."""
    sinks: list[Sink] = [JsonlSink(folder.metrics)]
    for name in config.observe.sinks:
        try:
            sinks.append(TensorBoardSink(folder.path) if name == "tensorboard" else WandbSink(config, folder.path))
        except ImportError as error:
            raise ValueError(
                f"observe.sinks has {name!r}, which needs a package: pip install {name} ({error})."
            ) from None
    return Sinks(sinks)


class Sinks:
    """All sinks of a run as one. A metric that observe/metrics.py does not list is refused with a KeyError."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name in metrics:
            metric(name)
        for sink in self._sinks:
            sink.write(step, metrics)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


class Sink(Protocol):
    """A place where metrics go; it takes one flat record per step."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """A file with one JSON object per line, flushed, so that it can be read while the run goes on. NaN and infinity become
    null, which JSON has no numbers for."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Event files in the run folder: `tensorboard --logdir runs`."""

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

    def __init__(self, config: Config, folder: Path) -> None:
        import wandb

        self._run = wandb.init(
            project="tba", name=config.run_name, dir=str(folder), config=config.model_dump(mode="json")
        )
        # Evaluations arrive after later steps were logged; W&B drops records whose own step goes back.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()
