"""What a run writes: its folder, whole files in one move, metrics to their sinks, samples to samples.jsonl."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from tba.config import Config
from tba.observe.metrics import metric
from tba.types import Trajectory, TrajectoryGroup, total_reward


class RunFolder:
    """Paths inside runs/<name>/: config.yaml, metrics.jsonl, samples.jsonl, checkpoints/step-N/, logs/, status.json,
    summary.json. The collapse guard keeps its checkpoint in checkpoints/healthy-step-N.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.status = path / "status.json"
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

    def newest_checkpoint(self) -> Path:
        """The checkpoint of the highest step, or the guard's healthy one where a collapse stopped the run before any other
        was written. A FileNotFoundError names the run folder when there is none."""
        found = self.checkpoints_by_step() or self.checkpoints_by_step("healthy-step-")
        if not found:
            raise FileNotFoundError(f"run folder {self.path} has no checkpoint yet.")
        return found[max(found)]

    def checkpoints_by_step(self, prefix: str = "step-") -> dict[int, Path]:
        """Folders of the checkpoints whose name begins with `prefix`, by their step."""
        return {int(path.name.removeprefix(prefix)): path for path in self.checkpoints.glob(f"{prefix}*")}


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


@dataclass(frozen=True, kw_only=True)
class SampleLog:
    """The file samples.jsonl: what the policy was asked, what it answered and what it got, of a group's best and its worst
    response by the reward that is trained on."""

    path: Path
    reward_weights: Mapping[str, float]
    """Factors of the reward components in the sum."""
    cut_off_reward: float | None = None
    """What training gives a response that was cut off; None = the reward that it got."""

    def write(self, step: int, group: TrajectoryGroup, texts: list[str]) -> None:
        rewards = [self._reward(trajectory) for trajectory in group.trajectories]
        chosen = sorted({rewards.index(max(rewards)), rewards.index(min(rewards))})
        record = {
            "step": step,
            "prompt_id": group.prompt.id,
            "version": group.version,
            "prompt": group.prompt.text,
            "responses": [
                {
                    "text": texts[i],
                    "reward": _null_for_nan(rewards[i]),
                    "rewards": {name: _null_for_nan(value) for name, value in group.trajectories[i].rewards.items()},
                    "tokens": len(group.trajectories[i].completion.token_ids),
                    "finish": group.trajectories[i].completion.finish,
                }
                for i in chosen
            ],
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")

    def _reward(self, trajectory: Trajectory) -> float:
        if self.cut_off_reward is not None and trajectory.completion.finish == "length":
            return self.cut_off_reward
        names, values = list(trajectory.rewards), list(trajectory.rewards.values())
        return float(total_reward(values, [self.reward_weights[name] for name in names]))


def _null_for_nan(value: float) -> float | None:
    return None if math.isnan(value) else value
