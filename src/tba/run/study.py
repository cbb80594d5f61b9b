"""The study file: rows (what is compared), columns (under which conditions), seeds, and how each row is tuned.

name: staleness
base:
  train: {max_steps: 500}
rows:
  tb: {objective.name: tb, objective.beta: 0.05}
  rloo: {objective.name: rloo}
columns:
  "0": {mode: sync}
  "10": {mode: fixed_lag, replay.max_lag: 10}
seeds: [0, 1, 2]
metric: accuracy
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from tba.config import ConfigError
from tba.config.reading import read_yaml, yaml_message
from tba.config.sections import Section

Label = Annotated[str, BeforeValidator(str)]
"""Name of a row or column; YAML reads an unquoted 10 as a number."""
Overrides = Annotated[dict[str, Any], BeforeValidator(lambda value: {} if value is None else value)]
"""Settings as in a config file, nested or dotted: {train: {max_steps: 5}} or {train.max_steps: 5}."""

SET_BY_STUDY = {
    "name": "run folders are named by row, column and seed",
    "output": "it is the option --output",
    "overwrite": "a run is replaced when its settings have changed",
    "seed": "list seeds under `seeds`",
}
"""Config keys that the study sets itself."""


class Tune(Section):
    """One setting, tuned for every row with the same effort: all values, in the same columns, with the same seed."""

    key: str
    """Dotted config key, for example train.learning_rate."""
    values: tuple[int | float, ...] = Field(min_length=1)
    columns: tuple[Label, ...] = Field(min_length=1)
    """Columns of the tuning runs; a row's value is the one with the best mean over them."""
    metric: str | None = None
    """Key of `final` that decides; None = the study's metric. Where two metrics pull against each other, take what the
    methods themselves maximise: regularised_reward."""
    seed: int = Field(default=100, ge=0)
    """Seed of the tuning runs; not one of the study's seeds, or the tuned runs would be reported too."""
    overrides: Overrides = Field(default_factory=dict)
    """Settings of the tuning runs only; evaluate.split: validation keeps the reported problems unseen."""


class Quick(Section):
    """Changes by `--quick`. Missing fields stay as in the study, but nothing is tuned."""

    seeds: tuple[int, ...] | None = Field(default=None, min_length=1)
    rows: tuple[Label, ...] | None = Field(default=None, min_length=1)
    columns: tuple[Label, ...] | None = Field(default=None, min_length=1)
    overrides: Overrides = Field(default_factory=dict)
    """Settings that win over those of base, rows and columns."""


class Study(Section):
    name: str = Field(pattern=r"^\w[\w.-]*$")
    """Name of the study's folder."""
    base: Overrides = Field(default_factory=dict)
    """Settings of every run; rows win over them, columns over rows."""
    rows: dict[Label, Overrides] = Field(min_length=1)
    """Rows of the comparison: settings by name of the row."""
    columns: dict[Label, Overrides] = Field(min_length=1)
    """Conditions of the comparison: settings by name of the column."""
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    """Seeds with which every row is run in every column."""
    metric: str = "accuracy"
    """Metric of the table, a key of the summary's `final`; more is better."""
    also: tuple[str, ...] = ()
    """Further keys of `final`, for a table each."""
    tune: Tune | None = None
    """Setting that is tuned for every row before its runs; None = nothing is tuned."""
    quick: Quick | None = None
    """Changes by `--quick`; None = the study has no quick form."""

    @model_validator(mode="after")
    def _check(self) -> Study:
        quick, tune = self.quick or Quick(), self.tune
        layers = {"base": self.base, "quick.overrides": quick.overrides}
        layers |= {f"rows.{label}": overrides for label, overrides in self.rows.items()}
        layers |= {f"columns.{label}": overrides for label, overrides in self.columns.items()}
        layers |= {} if tune is None else {"tune.overrides": tune.overrides}
        for name, overrides in layers.items():
            for key in flatten(overrides).keys() & SET_BY_STUDY.keys():
                raise ValueError(f"{name} sets {key}, which the study sets itself: {SET_BY_STUDY[key]}.")
        # Two labels in one folder would overwrite each other's runs.
        for name, own in (("rows", self.rows), ("columns", self.columns)):
            taken: dict[str, str] = {}
            for label in own:
                folder = folder_name(label)
                if (other := taken.setdefault(folder, label)) != label:
                    raise ValueError(f"{name} {other!r} and {label!r} would share the folder {folder}: rename one.")
        tuned = () if tune is None else tune.columns
        chosen = {"quick.rows": (quick.rows, self.rows), "quick.columns": (quick.columns, self.columns)}
        for name, (labels, known) in {**chosen, "tune.columns": (tuned, self.columns)}.items():
            for label in labels or ():
                if label not in known:
                    raise ValueError(f"{name} has {label!r}, which the study does not have: it has {', '.join(known)}.")
        for name, values in {"seeds": self.seeds, "tune.values": () if tune is None else tune.values}.items():
            if len(set(values)) < len(values):
                raise ValueError(f"{name}={list(values)} has a value twice: each is run once.")
        # A tuning run is recognised by its seed.
        if tune is not None and tune.seed in self.seeds:
            raise ValueError(f"tune.seed={tune.seed} is also one of seeds={list(self.seeds)}: take another one.")
        return self

    @property
    def tuning_metric(self) -> str:
        return self.metric if self.tune is None or self.tune.metric is None else self.tune.metric


def load_study(path: Path, *, quick: bool = False) -> Study:
    """Read and check a study file; with `quick`, the study that its `quick` section makes of it."""
    if not path.is_file():
        raise ConfigError(f"study file {path} does not exist: give a YAML file with name, rows, columns and seeds.")
    try:
        data = read_yaml(path.read_bytes())
    except yaml.YAMLError as error:
        raise ConfigError(f"study file {path} is not valid YAML: {yaml_message(error)}") from None
    study = make_study(data, where=f"study file {path}")
    return quick_study(study) if quick else study


def make_study(data: Any, *, where: str = "study") -> Study:
    """Check a plain mapping; every problem is listed."""
    try:
        return Study.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{where}: {_explain(problem)}" for problem in error.errors())) from None


def quick_study(study: Study) -> Study:
    """A smaller study of its own, named `<name>-quick`, so that quick results are never mistaken for the full ones."""
    if study.quick is None:
        raise ConfigError(
            f"study {study.name} has no `quick` section: add one with seeds and overrides, or drop --quick."
        )
    quick, rows, columns = study.quick, study.rows, study.columns
    chosen, more = quick.columns or columns, flatten(quick.overrides)
    changes = {
        "name": f"{study.name}-quick",
        "seeds": quick.seeds or study.seeds,
        "rows": {label: rows[label] for label in quick.rows or rows},
        "columns": {label: {**flatten(columns[label]), **more} for label in chosen},
        "tune": None,
        "quick": None,
    }
    return make_study({**dict(study), **changes}, where=f"study {study.name} with --quick")


def flatten(overrides: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested or dotted settings as dotted ones: {"train": {"max_steps": 5}} -> {"train.max_steps": 5}."""
    flat: dict[str, Any] = {}
    for key, value in overrides.items():
        own = flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
        if twice := flat.keys() & own.keys():
            raise ValueError(f"{min(twice)} is given twice, nested and dotted: keep one of them.")
        flat |= own
    return flat


def folder_name(label: str) -> str:
    """A label as a file name: `beta 0.05/long` -> `beta_0.05_long`."""
    name = re.sub(r"[^\w.=+-]", "_", label)
    return name if name.strip(".") else "_" * max(1, len(name))


def _explain(problem: Mapping[str, Any]) -> str:
    location = [str(part) for part in problem["loc"]]
    if problem["type"] == "extra_forbidden":
        sections: dict[str, type[Section]] = {"tune": Tune, "quick": Quick}
        known = sections.get(location[0], Study).model_fields
        return f"unknown key {'.'.join(location)}: allowed are {', '.join(known)}."
    if problem["type"] == "missing":
        needed = [name for name, field in Study.model_fields.items() if field.is_required()]
        return f"{'.'.join(location)} is missing: a study needs {', '.join(needed)} (columns: {{all: {{}}}} is one column)."
    if problem["type"] == "value_error":
        return str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "tuple_type":
        return f"{'.'.join(location)}: a list is needed, got {problem['input']!r}: write [{problem['input']}]."
    return f"{'.'.join(location) or 'the file'}: {problem['msg']}, got {problem['input']!r}."
