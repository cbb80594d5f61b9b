"""Where the metrics of a run go: metrics.jsonl always, TensorBoard and W&B where observe.sinks names them."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tba.config import Config
from tba.observe.files import WriteFailures, append_line
from tba.observe.metrics import metric
from tba.observe.run_folder import RunFolder


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
