"""The runs of a study: their configs, all made and checked before the first one starts, and how each ended.

A run has its own folder, `runs/ROW/COLUMN/seed-N` or `tuning/ROW/COLUMN/KEY=VALUE`. In `.seed-N` beside it are the lock of
the process that does the run and, once it has ended, record.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from tba.compare.study import Study, flatten, folder_name
from tba.config import Config, ConfigError, load_config
from tba.launch.memory import Machine
from tba.launch.resolve import resolve
from tba.observe.files import read_summary
from tba.observe.run_folder import RunFolder

OF_ITS_PLACE = ("name", "output", "observe.progress", "train.second_update_after")
"""Settings that the folder, or the machine, decides: a study may be moved, and machines may share it."""
State = Literal["done", "failed", "changed", "missing"]
"""State of a run on disk; changed = it was run before, with other settings."""
ENDED: tuple[State, State] = ("done", "failed")
Scores = Mapping[float, Mapping[str, float | None]]
"""Metric of a row's tuning runs by tuned value and column; None = the run failed."""

MOST_RUNS_NAMED = 4
"""Most runs that the message about one problem names."""
OF_EVERY_RUN: dict[str, Any] = {"runtime.threads": 1}
"""Settings of a study that says nothing else: several processes share its runs, one for each core, and what comes out must
not depend on how many cores there are."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Cell:
    """One training run of a study.

    Cell(row="tb", column="10", seed=0, value=3e-4, label="runs/tb/10/seed-0", settings={"seed": 0, ...}, ...)
    """

    row: str
    column: str
    seed: int
    value: float | None
    """Value of the tuned setting; None = nothing is tuned."""
    label: str
    """Path of the run folder inside the study's folder."""
    settings: Mapping[str, Any]
    """What the study sets, by dotted key. A run with other settings is another run."""
    defaults: Mapping[str, Any]
    """What the package decides for all the others, by dotted key: a run with other defaults is another run too."""
    config: Config

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.config.run_folder)

    @property
    def record(self) -> Path:
        """File that says how the run ended. Its folder holds the lock of the process that does the run."""
        return self.folder.path.with_name(f".{self.folder.path.name}") / "record.json"

    def read_record(self) -> dict[str, Any] | None:
        """How the run ended: {"settings": ..., "defaults": ..., "error": None, "time": ...}; None = it has not ended."""
        try:
            record: dict[str, Any] = json.loads(self.record.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return record

    def state(self, *, retry_before: float = 0.0) -> State:
        """State on disk; failures older than `retry_before` (seconds since 1970) count as missing."""
        record = self.read_record()
        if record is None:
            return "missing"
        if self.changes():
            return "changed"
        if record["error"] is not None:
            return "failed" if record["time"] >= retry_before else "missing"
        return "done" if is_result(read_summary(self.folder)) else "missing"

    def changes(self) -> str:
        """Settings that the run on disk had otherwise: `train.max_steps 2 -> 3`."""
        record = self.read_record()
        if record is None:
            return ""
        if "defaults" not in record:
            return "it was made by an earlier version"
        is_set = record["settings"] != self.settings
        before, now = (record["settings"], self.settings) if is_set else (record["defaults"], self.defaults)
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        return ", ".join(f"{name} {before.get(name)} -> {now.get(name)}" for name in names)

    def metric(self, name: str) -> float:
        """A metric of the last evaluation of a finished run."""
        final = (read_summary(self.folder) or {"final": {}})["final"]
        check_metric(name, final, where=f"`final` of {self.folder.summary}")
        return float(final[name])


class UnknownMetric(ConfigError):
    """A metric of the study that no evaluation has: every run would be made in vain."""


def check_metric(name: str, measured: Mapping[str, float], *, where: str) -> None:
    """Refuse a metric of a study that was not measured."""
    if name not in measured:
        has = f"it has {', '.join(measured)}" if measured else "the run had no prompts to evaluate on"
        raise UnknownMetric(f"metric={name!r} is not in {where}: {has}.")


def is_result(summary: Mapping[str, Any] | None) -> bool:
    """Whether a summary is of a finished run whose last weights were evaluated: one that failed or was interrupted has a
    summary too, and `final` is of earlier weights where the last evaluation never came."""
    if summary is None or summary["outcome"] != "finished":
        return False
    return summary.get("final_step") is None or bool(summary["final_step"] >= summary["steps"])


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Every run that a study may come to."""

    study: Study
    root: Path
    tuning: Mapping[str, list[Cell]]
    """Tuning runs by row; empty lists where nothing is tuned."""
    runs: Mapping[tuple[str, float | None], list[Cell]]
    """Reported runs by row and tuned value (None where nothing is tuned), seed by seed."""

    def scores(self, row: str) -> Scores:
        """Scores of a row whose tuning runs have all ended."""
        scores: dict[float, dict[str, float | None]] = {}
        for cell in self.tuning[row]:
            assert cell.value is not None
            score = cell.metric(self.study.tuning_metric) if cell.state() == "done" else None
            scores.setdefault(cell.value, {})[cell.column] = score
        return scores

    def tuned_values(self, has_ended: Callable[[Cell], bool]) -> dict[str, float | None]:
        """Tuned value by row, for the rows whose tuning has ended; None = nothing is tuned."""
        return {
            row: None if self.study.tune is None else choose_value(self.scores(row))
            for row, cells in self.tuning.items()
            if all(map(has_ended, cells))
        }


def choose_value(scores: Scores) -> float:
    """The value with the best mean; a failed run is worse than any number, of equal values the smaller one is taken."""

    def rank(value: float) -> tuple[int, float, float]:
        found = [score for score in scores[value].values() if score is not None]
        return len(scores[value]) - len(found), -fmean(found) if found else 0.0, value

    return min(scores, key=rank)


def make_plan(study: Study, output: Path) -> Plan:
    """Resolve every run; all that is wrong with any of them is raised at once."""
    root, tune = output / study.name, study.tune
    problems: dict[str, dict[str, None]] = {}

    def made(row: str, places: Iterable[tuple[float | None, int, str]]) -> list[Cell]:
        """The runs of a row with these values of the tuned setting, seeds and columns; problems are kept."""
        found = []
        for value, seed, column in places:
            label = label_of(study, row, column, seed, value)
            try:
                found.append(make_cell(study, root / label, row, column, seed, value))
            except ConfigError as error:
                for message in str(error).splitlines():
                    problems.setdefault(message, {})[label] = None
        return found

    tried = () if tune is None else tuple(product(tune.values, [tune.seed], tune.columns))
    tuning = {row: made(row, tried) for row in study.rows}
    values: tuple[float | None, ...] = (None,) if tune is None else tune.values
    runs = {(row, v): made(row, product([v], study.seeds, study.columns)) for row in study.rows for v in values}
    if problems:
        found = "\n".join(f"  {message}\n      in {_named(labels)}" for message, labels in problems.items())
        raise ConfigError(f"study {study.name} has runs that cannot start:\n{found}")
    return Plan(study=study, root=root, tuning=tuning, runs=runs)


def label_of(study: Study, row: str, column: str, seed: int, value: float | None) -> str:
    place = f"{folder_name(row)}/{folder_name(column)}"
    if study.tune is not None and seed == study.tune.seed:
        return f"tuning/{place}/{folder_name(f'{study.tune.key}={value:g}')}"
    return f"runs/{place}/seed-{seed}"


def make_cell(study: Study, folder: Path, row: str, column: str, seed: int, value: float | None) -> Cell:
    """Resolve the config of one run from base, row, column, tuning overrides, tuned value and seed; later ones win."""
    layers = [OF_EVERY_RUN, study.base, study.rows[row], study.columns[column]]
    if study.tune is not None:
        layers += [study.tune.overrides] if seed == study.tune.seed else []
        layers += [{study.tune.key: value}]
    settings = [item for layer in [*layers, {"seed": seed}] for item in flatten(layer).items()]
    own = [("name", folder.name), ("output", str(folder.parent)), ("observe.progress", False)]
    config = load_config(None, [f"{name}={json.dumps(value)}" for name, value in [*settings, *own]])
    resolved = flatten(resolve(config, None, Machine.seen()).model_dump(mode="json"))
    given = json.loads(json.dumps(dict(settings)))  # as a record holds them
    defaults = {key: value for key, value in resolved.items() if key not in given and key not in OF_ITS_PLACE}
    return Cell(
        row=row,
        column=column,
        seed=seed,
        value=value,
        label=label_of(study, row, column, seed, value),
        settings=given,
        defaults=defaults,
        config=config,
    )


def _named(labels: Iterable[str]) -> str:
    first, more = [*labels][:MOST_RUNS_NAMED], len([*labels]) - MOST_RUNS_NAMED
    return ", ".join([*first, *([f"and {more} more"] if more > 0 else [])])
