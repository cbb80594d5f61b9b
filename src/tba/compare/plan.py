"""All runs of a study with their resolved configs, made and checked before the first one starts."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tba.compare.study import Study, flatten, folder_name
from tba.config import Config, ConfigError, load_config

MOST_RUNS_NAMED = 4
"""In the message about one problem."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Cell:
    """One training run of a study.

    Cell(row="tb", column="10", seed=0, value=3e-4, tuning=False, label="runs/tb/10/seed-0", config=...)
    """

    row: str
    column: str
    seed: int
    value: float | None
    """Of the tuned setting; None = nothing is tuned."""
    tuning: bool
    """True = only there to choose the value."""
    label: str
    """Its folder inside the study's folder."""
    config: Config

    @property
    def folder(self) -> Path:
        return self.config.run_folder

    @property
    def claim(self) -> Path:
        """Beside the run folder, which the run itself makes."""
        return self.folder.with_name(f"{self.folder.name}.claim.json")

    @property
    def recorded_config(self) -> dict[str, Any]:
        """What decides whether an earlier run is still the same: everything except where it lies."""
        return self.config.model_dump(mode="json", exclude={"name", "output", "overwrite"})


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Every run that a study may come to, by row and, for reported runs, tuned value."""

    study: Study
    root: Path
    tuning: Mapping[str, list[Cell]]
    """By row; empty lists where nothing is tuned."""
    runs: Mapping[tuple[str, float | None], list[Cell]]
    """By row and tuned value (None where nothing is tuned), seed by seed."""


def make_plan(study: Study, output: Path, check: Callable[[Config], object] = lambda _: None) -> Plan:
    """Resolve every run; all that is wrong with any of them, also by `check`, is raised at once."""
    root, problems = output / study.name, Problems(check)
    values = study.tune.values if study.tune is not None else (None,)
    tuning = {row: list(problems.collect(_tuning_keys(study, row), study, root)) for row in study.rows}
    runs = {(r, v): list(problems.collect(_run_keys(study, r, v), study, root)) for r in study.rows for v in values}
    problems.raise_if_any(study)
    return Plan(study=study, root=root, tuning=tuning, runs=runs)


@dataclass(frozen=True, kw_only=True)
class CellKey:
    """What a run is made of besides the study."""

    row: str
    column: str
    seed: int
    value: float | None
    tuning: bool


def _tuning_keys(study: Study, row: str) -> Iterator[CellKey]:
    if study.tune is not None:
        for value in study.tune.values:
            for column in study.tune.columns:
                yield CellKey(row=row, column=column, seed=study.tune.seed, value=value, tuning=True)


def _run_keys(study: Study, row: str, value: float | None) -> Iterator[CellKey]:
    for seed in study.seeds:
        for column in study.columns:
            yield CellKey(row=row, column=column, seed=seed, value=value, tuning=False)


def label_of(study: Study, key: CellKey) -> str:
    place = f"{folder_name(key.row)}/{folder_name(key.column)}"
    if key.tuning:
        assert study.tune is not None
        return f"tuning/{place}/{folder_name(f'{study.tune.key}={key.value:g}')}"
    return f"runs/{place}/seed-{key.seed}"


def make_cell(study: Study, key: CellKey, root: Path) -> Cell:
    """Base, row, column, tuning overrides, tuned value, seed: later ones win."""
    layers = [study.base, study.rows[key.row], study.columns[key.column]]
    if study.tune is not None:
        layers += [study.tune.overrides] if key.tuning else []
        layers += [{study.tune.key: key.value}]
    label = label_of(study, key)
    folder = root / label
    own = {"seed": key.seed, "name": folder.name, "output": str(folder.parent), "observe.progress": False}
    overrides = [f"{name}={json.dumps(value)}" for layer in [*layers, own] for name, value in flatten(layer).items()]
    return Cell(**vars(key), label=label, config=load_config(None, overrides))


class Problems:
    """What is wrong with runs, and in which."""

    def __init__(self, check: Callable[[Config], object]) -> None:
        self._check = check
        self._runs: dict[str, dict[str, None]] = defaultdict(dict)

    def collect(self, keys: Iterator[CellKey], study: Study, root: Path) -> Iterator[Cell]:
        """The cells that can be made; the problems of the others are kept."""
        for key in keys:
            try:
                cell = make_cell(study, key, root)
                self._check(cell.config)
                yield cell
            except ConfigError as error:
                for message in str(error).splitlines():
                    self._runs[message][label_of(study, key)] = None

    def raise_if_any(self, study: Study) -> None:
        if self._runs:
            found = "\n".join(f"  {message}\n      in {_named(list(runs))}" for message, runs in self._runs.items())
            raise ConfigError(f"study {study.name} has runs that cannot start:\n{found}")


def _named(runs: list[str]) -> str:
    more = f" and {len(runs) - MOST_RUNS_NAMED} more" if len(runs) > MOST_RUNS_NAMED else ""
    return ", ".join(runs[:MOST_RUNS_NAMED]) + more
