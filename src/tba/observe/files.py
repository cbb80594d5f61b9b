"""Files of a run: the folder's layout, and writes that are never seen half done."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any


class RunFolder:
    """runs/<name>/: config.yaml, metrics.jsonl, samples.jsonl, checkpoints/step-N/, logs/, status.json, summary.json.

    checkpoints/healthy-step-N is the collapse guard's.
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
        """The checkpoint of the highest step, the guard's healthy one where a collapse stopped the run before any other; an
        error in words when there is none."""
        found = self.checkpoints_by_step() or self.checkpoints_by_step("healthy-step-")
        if not found:
            raise FileNotFoundError(f"run folder {self.path} has no checkpoint yet.")
        return found[max(found)]

    def checkpoints_by_step(self, prefix: str = "step-") -> dict[int, Path]:
        return {int(path.name.removeprefix(prefix)): path for path in self.checkpoints.glob(f"{prefix}*")}


def write_atomic(path: Path, text: str) -> None:
    """Write a whole file so that a reader sees the old or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
