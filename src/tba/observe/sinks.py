"""Where metrics go. A sink takes one flat record per step."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, TextIO

from tba.config import Config
from tba.observe.files import RunFolder
from tba.observe.metrics import metric


class Sink(Protocol):
    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """One JSON object per line, flushed: readable while the run goes on. NaN and infinity become null."""

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
    """W&B; WANDB_MODE=offline keeps everything in the run folder."""

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


def make_sinks(config: Config, folder: RunFolder) -> Sinks:
    """metrics.jsonl always, the others as asked; a missing package is an error before training starts."""
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
    """All sinks as one; refuses metrics that are not listed."""

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
