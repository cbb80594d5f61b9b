"""What a script saves after a run, by the methods that it knows from transformers' Trainer: the trained model, metrics, and
the state of the trainer.

Files that go into the run folder itself are listed in a file there, so that `overwrite_output_dir` knows them as the run's.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tba.observe.contents import SAVED, saved_names
from tba.observe.files import RunFolder, write_json

logger = logging.getLogger("tba")

MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.md", "*.py")
NOT_OF_THE_MODEL = {"optimizer.safetensors", "state.safetensors", "state.json", "trainer.json", "manifest.json"}
STATE = "trainer_state.json"


def copy_model(checkpoint: Path, target: Path, run: Path) -> None:
    """Copy what `from_pretrained` loads, and the model's card, to a folder, which may be that of the run."""
    files = {file for pattern in MODEL_FILES for file in checkpoint.glob(pattern) if file.name not in NOT_OF_THE_MODEL}
    target.mkdir(parents=True, exist_ok=True)
    if target.resolve() == run.resolve():
        _list_as_saved(run, *(file.name for file in files))
    for file in files:
        shutil.copy2(file, target / file.name)


def link_checkpoints(run: Path) -> None:
    """Give the checkpoints of a run TRL's names, checkpoint-N in the run folder itself, as links; those of checkpoints that
    were dropped go."""
    for link in run.glob("checkpoint-*"):
        if link.is_symlink() and not link.exists():
            link.unlink()
    for step, path in RunFolder(run).checkpoints_by_step().items():
        link = run / f"checkpoint-{step}"
        try:
            if not link.is_symlink():
                link.symlink_to(path.relative_to(run))
        except OSError as error:  # a folder of somebody else's, or a disk without links
            _warn_once(f"{link} cannot be a link to {path} ({error.strerror}): the checkpoint is {path} alone.")


@cache
def _warn_once(words: str) -> None:
    logger.warning("%s", words)


def save_metrics(run: Path, split: str, metrics: Mapping[str, Any], *, combined: bool) -> None:
    """Write SPLIT_results.json into the run folder and, `combined`, add the metrics to all_results.json there."""
    run.mkdir(parents=True, exist_ok=True)
    own, together = run / f"{split}_results.json", run / "all_results.json"
    _list_as_saved(run, own.name, *([together.name] if combined else []))
    write_json(own, dict(metrics))
    if combined:
        before = json.loads(together.read_text(encoding="utf-8")) if together.is_file() else {}
        write_json(together, {**before, **metrics})


def save_state(run: Path, state: Any) -> None:
    """Write transformers' TrainerState into the run folder."""
    run.mkdir(parents=True, exist_ok=True)
    _list_as_saved(run, STATE)
    state.save_to_json(str(run / STATE))


def metric_lines(split: str, metrics: Mapping[str, Any]) -> Iterator[str]:
    """Metrics for people, sorted by name; those of a part of the summary are `final/reward`."""
    shown = {name: _shown(value) for name, value in _flat(metrics)}
    wide = max(map(len, shown), default=0), max(map(len, shown.values()), default=0)
    yield f"***** {split} metrics *****"
    for name in sorted(shown):
        yield f"  {name:<{wide[0]}} = {shown[name]:>{wide[1]}}"


def _flat(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _shown(value: Any) -> str:
    return f"{round(value, 4)}" if isinstance(value, float) else str(value)


def _list_as_saved(run: Path, *names: str) -> None:
    write_json(run / SAVED, sorted(saved_names(run) | set(names)))
