"""Tiny studies of the shipped model, and run folders written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tba.run.compare import Cell, Plan, Results, compare, make_plan
from tba.run.study import make_study

BASE = {
    "mode": "sync",
    "train": {"max_steps": 2, "responses_per_step": 8, "samples_per_prompt": 4},
    "evaluate": {"num_prompts": 4, "every": 0},  # before the first step and after the last one
    "task": {"num_train_prompts": 50},
    "generate": {"max_new_tokens": 40, "temperature": 2.0},  # long and varied enough that there is something to learn
}
STUDY = {
    "name": "tiny",
    "base": BASE,
    "rows": {"slow": {"train.learning_rate": 1e-5}, "fast": {"train.learning_rate": 1e-3}},
    "columns": {"1": {}, "1.2": {"generate.temperature": 1.2}},
    "seeds": [0, 1],
}
TUNE = {"key": "train.learning_rate", "values": [1e-4, 1e-3], "columns": ["1"], "overrides": {"train.max_steps": 1}}


def write_study(folder: Path, **changes: Any) -> Path:
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump({**STUDY, **changes}, sort_keys=False))
    return path


def run_study(folder: Path, *, changes: dict[str, Any] | None = None, **options: Any) -> Results:
    return compare(write_study(folder, **(changes or {})), output=folder / "studies", **options)


def plan_study(folder: Path, **changes: Any) -> Plan:
    return make_plan(make_study({**STUDY, **changes}), folder / "studies")


def write_run(cell: Cell, accuracy: float, *, kl: float = 1.0, seconds: float = 1.0, **final: float) -> None:
    """A finished run; `kl` is its mean off-policy KL, `final` are further metrics of its last evaluation."""
    summary = {
        "outcome": "finished",
        "final": {"accuracy": accuracy, **final},
        "seconds": seconds,
        "responses_generated": 16,
        "lag": {"mean": 2.0},
        "stability": {"drift_nats": kl},
    }
    cell.folder.path.mkdir(parents=True)
    cell.folder.summary.write_text(json.dumps(summary))
    write_record(cell, error=None)


def write_record(cell: Cell, *, error: str | None) -> None:
    cell.record.parent.mkdir(parents=True)
    record = {"settings": cell.settings, "error": error, "commit": "abc", "time": 0.0}
    cell.record.write_text(json.dumps(record))
