"""The runs of a study: their resolved configs, which process has each of them, and how each ended.

All configs are made and checked before the first run starts. A run's folder holds its summary.json and, once it is done,
cell.json with the config it was made with, or failed.json. Beside the folder lies the claim of the process that does the
run: several `tba compare` of one study share its runs.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from tba.compare.study import Study, flatten, folder_name
from tba.config import Config, ConfigError, load_config
from tba.launch.defaults import with_objective_defaults
from tba.observe.claim import Claim
from tba.observe.contents import remove_contents
from tba.observe.files import RunFolder, write_json
from tba.observe.files import read_summary as recorded_summary

State = Literal["done", "failed", "claimed", "changed", "missing"]
"""State of a run on disk; changed = it was run before, with another config."""

MOST_RUNS_NAMED = 4
"""Most runs that the message about one problem names."""
MOST_CHANGES_NAMED = 3
"""Most settings that the message about a changed config names."""
OF_EVERY_RUN = {"runtime": {"threads": 1}}
"""Settings of a study that says nothing else: several processes share its runs, one for each core, and what comes out must
not depend on how many cores there are."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Cell:
    """One training run of a study.

    Cell(row="tb", column="10", seed=0, value=3e-4, tuning=False, label="runs/tb/10/seed-0", config=...)
    """

    row: str
    column: str
    seed: int
    value: float | None
    """Value of the tuned setting; None = nothing is tuned."""
    tuning: bool
    """Whether the run only serves to choose the value."""
    label: str
    """Path of the run folder inside the study's folder."""
    config: Config

    @property
    def folder(self) -> Path:
        return self.config.run_folder

    @property
    def claim(self) -> Path:
        """File that names the process doing the run; beside the run folder, which the run itself makes."""
        return self.folder.with_name(f"{self.folder.name}.claim.json")

    @property
    def recorded_config(self) -> dict[str, Any]:
        """The part of the config that decides whether an earlier run is still the same: all except where it lies."""
        return self.config.model_dump(mode="json", exclude={"name", "output", "overwrite"})

    @cached_property
    def recorded_defaults(self) -> dict[str, Any]:
        """What the objective decides where the study gives nothing, by name: another version of this package may decide
        otherwise, and runs of both would be no seeds of one cell."""
        given, filled = (
            flatten(c.model_dump(mode="json")) for c in (self.config, with_objective_defaults(self.config))
        )
        return {name: value for name, value in filled.items() if given.get(name) != value}


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Every run that a study may come to, by row and, for reported runs, tuned value."""

    study: Study
    root: Path
    tuning: Mapping[str, list[Cell]]
    """Tuning runs by row; empty lists where nothing is tuned."""
    runs: Mapping[tuple[str, float | None], list[Cell]]
    """Reported runs by row and tuned value (None where nothing is tuned), seed by seed."""


def make_plan(study: Study, output: Path, check: Callable[[Config], object] = lambda _: None) -> Plan:
    """Resolve every run; all that is wrong with any of them, also by `check`, is raised at once."""
    root, problems = output / study.name, PlanProblems(check)
    values = study.tune.values if study.tune is not None else (None,)
    tuning = {row: list(problems.collect(_tuning_keys(study, row), study, root)) for row in study.rows}
    runs = {(r, v): list(problems.collect(_run_keys(study, r, v), study, root)) for r in study.rows for v in values}
    problems.raise_if_any(study)
    return Plan(study=study, root=root, tuning=tuning, runs=runs)


@dataclass(frozen=True, kw_only=True)
class CellKey:
    """What tells a run from the others of its study."""

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
    """Resolve the config of one run from base, row, column, tuning overrides, tuned value and seed; later ones win."""
    layers = [OF_EVERY_RUN, study.base, study.rows[key.row], study.columns[key.column]]
    if study.tune is not None:
        layers += [study.tune.overrides] if key.tuning else []
        layers += [{study.tune.key: key.value}]
    label = label_of(study, key)
    folder = root / label
    own = {"seed": key.seed, "name": folder.name, "output": str(folder.parent), "observe.progress": False}
    overrides = [f"{name}={json.dumps(value)}" for layer in [*layers, own] for name, value in flatten(layer).items()]
    return Cell(**vars(key), label=label, config=load_config(None, overrides))


class PlanProblems:
    """What is wrong with the runs of a study, and in which of them."""

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


def state_of(cell: Cell, *, retry_before: float = 0.0) -> State:
    """State of a run on disk; failures older than `retry_before` (seconds since the epoch) count as missing."""
    record = read_record(cell)
    same = record is not None and not differences(cell, record)
    if same and record is not None:
        if "error" not in record:
            return "done"
        if record["time"] >= retry_before:
            return "failed"
    if read_holder(cell.claim) is not None:
        return "claimed"
    return "missing" if record is None or same else "changed"


def read_record(cell: Cell) -> dict[str, Any] | None:
    """Content of cell.json of a finished run or failed.json of a failed one; None = neither."""
    if is_result(recorded_summary(RunFolder(cell.folder))):
        record = _read(cell, "cell.json")
        if record is not None:
            return record
    return _read(cell, "failed.json")


def is_result(summary: Mapping[str, Any] | None) -> bool:
    """Whether a summary is of a finished run whose last weights were evaluated: one that failed or was interrupted has a
    summary too, and `final` is of earlier weights where the last evaluation never came."""
    if summary is None or summary.get("outcome", "finished") != "finished":
        return False
    return summary.get("final_step") is None or summary["final_step"] >= summary["steps"]


def write_done(cell: Cell, *, seconds: float, commit: str | None) -> None:
    """Write cell.json, after summary.json: an interrupted run has a summary too, and must not count as done."""
    record = {"config": cell.recorded_config, "defaults": cell.recorded_defaults, "seconds": seconds, "commit": commit}
    write_json(cell.folder / "cell.json", record)


def write_failed(cell: Cell, error: BaseException) -> None:
    cell.folder.mkdir(parents=True, exist_ok=True)
    message = f"{type(error).__name__}: {error}"
    write_json(cell.folder / "failed.json", {"error": message, "time": time.time(), "config": cell.recorded_config})


def clear(cell: Cell) -> None:
    """Remove the folder of an earlier run, which must have come to its end."""
    if cell.folder.exists():
        claim = Claim.take(cell.folder)
        try:
            remove_contents(cell.folder)
        finally:
            claim.release()
        shutil.rmtree(cell.folder)


def changes(cell: Cell) -> str:
    """Settings that differ from those of the run on disk, as `train.max_steps 2 -> 3`; empty = none, or there is no run."""
    record = read_record(cell)
    if record is None:
        return ""
    found = differences(cell, record)
    return ", ".join(found[:MOST_CHANGES_NAMED]) + (
        f" and {len(found) - MOST_CHANGES_NAMED} more" if len(found) > MOST_CHANGES_NAMED else ""
    )


def differences(cell: Cell, record: Mapping[str, Any]) -> list[str]:
    """Settings of a run on disk that are others now, as `train.max_steps 2 -> 3`: those of the study, and the defaults of
    its objective, where the version that made the run wrote them down. A setting that it did not know, and that is off now
    (0), was off then."""
    before, now = flatten(record["config"]), flatten(cell.recorded_config)
    found = [f"{key} {before.get(key)} -> {now.get(key)}" for key in changed_settings(before, now)]
    decided, decides = record.get("defaults"), cell.recorded_defaults
    if found or decided is None:
        return found
    return [
        f"the default of {key} {decided.get(key)} -> {decides.get(key)}"
        for key in {**decided, **decides}
        if decided.get(key) != decides.get(key) and (key in before or decides.get(key))
    ]


@cache
def default_settings() -> Mapping[str, Any]:
    """Made once: the states of all runs are looked at every second."""
    return flatten(Config().model_dump(mode="json"))


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Names of the settings that differ. One that did not exist when a run was made, and has its default now, does not: a
    new setting must not make finished studies run again."""
    defaults = default_settings()
    return [key for key in {**before, **now} if (before[key] if key in before else defaults.get(key)) != now.get(key)]


def read_summary(cell: Cell) -> dict[str, Any]:
    """Content of a finished run's summary.json."""
    return json.loads(RunFolder(cell.folder).summary.read_text(encoding="utf-8"))


def read_metric(cell: Cell, metric: str) -> float:
    """A metric of the last evaluation of a finished run."""
    final = read_summary(cell)["final"]
    if metric not in final:
        has = (
            f"it has {', '.join(final)}, and the study's `metric` is one of these"
            if final
            else "the run had no prompts to evaluate on"
        )
        raise ConfigError(f"metric={metric!r} is not in `final` of {RunFolder(cell.folder).summary}: {has}.")
    return float(final[metric])


def read_steps(cell: Cell) -> list[dict[str, Any]]:
    """The records of metrics.jsonl that belong to optimizer steps, not to evaluations."""
    lines = RunFolder(cell.folder).metrics.read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]


def _read(cell: Cell, name: str) -> dict[str, Any] | None:
    try:
        return json.loads((cell.folder / name).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None


class Claims:
    """The claims that this process has, each on one run.

    A claim is a file made exclusively, so that of two processes one gets it; the claim of a process that is gone is taken
    over. `lock` is a file that all processes of a study share.
    """

    def __init__(self, lock: Path) -> None:
        self._lock = lock
        self._pid = os.getpid()

    def take(self, claim: Path) -> bool:
        """Try to claim a run; returns whether it is now ours. A live claim is respected whoever holds it, this process
        included."""
        claim.parent.mkdir(parents=True, exist_ok=True)
        content = {"pid": self._pid, "process_started": process_started(self._pid), "time": time.time()}
        with self._locked():  # or two processes could both remove a dead claim, one of them the other's new one
            if read_holder(claim) is not None:
                return False
            claim.unlink(missing_ok=True)
            return _create(claim, json.dumps(content))

    def release(self, claim: Path) -> None:
        claim.unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._lock.parent.mkdir(parents=True, exist_ok=True)
        with self._lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # goes with the file, so a killed process cannot keep it
            yield


def read_holder(claim: Path) -> int | None:
    """Process id of the living holder; None where there is no claim, or its process is gone."""
    try:
        content: dict[str, Any] = json.loads(claim.read_text(encoding="utf-8"))
        pid, started = int(content["pid"]), content["process_started"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return pid if is_alive(pid) and process_started(pid) == started else None


def is_alive(pid: int) -> bool:
    """Whether there is a process with this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's, but there
        return True
    return True


def process_started(pid: int) -> int | None:
    """Time at which a process began, in clock ticks since the machine's start: process ids are used again, so the id alone
    does not name it. None = not known, or it has ended and only its parent has not noticed."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()  # the name before them may hold spaces
    return None if state == "Z" else int(fields[18])


def _create(claim: Path, text: str) -> bool:
    """Make the file with its content in one move, unless it is there."""
    temporary = claim.with_name(f".{claim.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    try:
        os.link(temporary, claim)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True
