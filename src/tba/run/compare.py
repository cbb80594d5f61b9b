"""`tba compare STUDY.yaml`: do what is left of a study's runs, then write and print its results.

A run has its own folder, `runs/ROW/COLUMN/seed-N` or `tuning/ROW/COLUMN/KEY=VALUE`. In `.seed-N` beside it are the lock of
the process that does the run and, once it has ended, record.json. A run with a result is not done again. Several processes
that are started with one study share its runs.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from tba.config import Config, ConfigError, load_config
from tba.observe.files import check_new_folder, read_summary, write_atomic, write_json
from tba.observe.metrics import Evaluation
from tba.observe.recorder import RunListener
from tba.observe.run_folder import Claim, FolderInUse, RunFolder, holder_of, remove_contents
from tba.run import train
from tba.run.compare.results import Results, Scores, as_json, as_markdown, numbers_of
from tba.run.compare.study import Study, flatten, folder_name, load_study
from tba.run.memory import Machine
from tba.run.resolve import resolve

OUTPUT = Path("runs/studies")
"""Folder of study folders, where none is given."""
WAIT_SECONDS = 3600.0
"""Longest wait for other processes in which none of them finishes a run."""
POLL_SECONDS = 1.0
"""Time between two looks at what other processes have done."""
GIT_SECONDS = 10.0
"""Deadline for git to say the commit."""
FAILURES = (RuntimeError, ValueError, FloatingPointError)
"""Errors that a run may raise without stopping the study."""
OF_ITS_PLACE = ("name", "output", "observe.progress", "train.second_update_after")
"""Settings that the folder, or the machine, decides: a study may be moved, and machines may share it."""
OF_EVERY_RUN: dict[str, Any] = {"runtime.threads": 1}
"""Settings of a study that says nothing else: several processes share its runs, one for each core, and what comes out must
not depend on how many cores there are."""
MOST_RUNS_NAMED = 4
"""Most runs that the message about one problem names."""
State = Literal["done", "failed", "changed", "missing"]
"""State of a run on disk; changed = it was run before, with other settings."""


class UnknownMetric(ConfigError):
    """A metric of the study that no evaluation has: every run would be made in vain."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Cell:
    """One training run of a study.

    Cell(row="tb", column="10", seed=0, value=3e-4, label="runs/tb/10/seed-0", settings={"seed": 0, ...}, config=config)
    """

    row: str
    column: str
    seed: int
    value: float | None
    """Value of the tuned setting; None = nothing is tuned."""
    label: str
    """Path of the run folder inside the study's folder."""
    settings: Mapping[str, Any]
    """All settings by dotted key, defaults included: a run with another default is another run."""
    config: Config

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.config.run_folder)

    @property
    def record(self) -> Path:
        """File that says how the run ended. Its folder holds the lock of the process that does the run."""
        return self.folder.path.with_name(f".{self.folder.path.name}") / "record.json"

    def read_record(self) -> dict[str, Any] | None:
        """How the run ended: {"settings": ..., "error": None, "commit": ..., "time": ...}; None = it has not ended."""
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

    def has_ended(self, *, retry_before: float = 0.0) -> bool:
        return self.state(retry_before=retry_before) in ("done", "failed")

    def changes(self) -> str:
        """Settings that the run on disk had otherwise: `train.max_steps 2 -> 3`."""
        record = self.read_record()
        before, now = self.settings if record is None else record["settings"], self.settings
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        return ", ".join(f"{name} {before.get(name)} -> {now.get(name)}" for name in names)


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
            score = numbers_of(cell.folder)[self.study.tuning_metric] if cell.state() == "done" else None
            scores.setdefault(cell.value, {})[cell.column] = score
        return scores

    def tuned_values(self, retry_before: float = 0.0) -> dict[str, float | None]:
        """Tuned value by row, for the rows whose tuning has ended; None = nothing is tuned."""
        return {
            row: None if self.study.tune is None else choose_value(self.scores(row))
            for row, cells in self.tuning.items()
            if all(cell.has_ended(retry_before=retry_before) for cell in cells)
        }

    def open_cells(self, retry_before: float) -> list[Cell]:
        """Runs left to do that can be started: tuning first, then seed by seed, so that every cell soon has a number."""
        tuned = self.tuned_values(retry_before)
        tuning = [cell for row, cells in self.tuning.items() if row not in tuned for cell in cells]
        runs = [cell for row, value in tuned.items() for cell in self.runs[row, value]]
        runs.sort(key=lambda cell: self.study.seeds.index(cell.seed))
        return [cell for cell in [*tuning, *runs] if not cell.has_ended(retry_before=retry_before)]


def choose_value(scores: Scores) -> float:
    """The value with the best mean; a failed run is worse than any number, of equal values the smaller one is taken."""

    def rank(value: float) -> tuple[int, float, float]:
        found = [score for score in scores[value].values() if score is not None]
        return len(scores[value]) - len(found), -fmean(found) if found else 0.0, value

    # Failures first: a rate that diverges in one column may have the best number in the other.
    return min(scores, key=rank)


def make_plan(study: Study, output: Path) -> Plan:
    """Resolve every run; all that is wrong with any of them is raised at once."""
    root, tune = output / study.name, study.tune
    problems: dict[str, list[str]] = {}

    def made(row: str, places: Iterable[tuple[float | None, int, str]]) -> list[Cell]:
        """The runs of a row with these values of the tuned setting, seeds and columns; problems are kept."""
        found = []
        for value, seed, column in places:
            label = label_of(study, row, column, seed, value)
            try:
                found.append(make_cell(study, root, label, row, column, seed, value))
            except ConfigError as error:
                for message in dict.fromkeys(str(error).splitlines()):
                    problems.setdefault(message, []).append(label)
        return found

    tried = () if tune is None else tuple(product(tune.values, [tune.seed], tune.columns))
    tuning = {row: made(row, tried) for row in study.rows}
    values: tuple[float | None, ...] = (None,) if tune is None else tune.values
    runs = {(row, v): made(row, product([v], study.seeds, study.columns)) for row in study.rows for v in values}
    if problems:
        found = "\n".join(f"  {message}\n      in {_named(labels)}" for message, labels in problems.items())
        raise ConfigError(f"study {study.name} has runs that cannot start:\n{found}")
    return Plan(study=study, root=root, tuning=tuning, runs=runs)


def _named(labels: Sequence[str]) -> str:
    more = len(labels) - MOST_RUNS_NAMED
    return ", ".join([*labels[:MOST_RUNS_NAMED], *([f"and {more} more"] if more > 0 else [])])


def label_of(study: Study, row: str, column: str, seed: int, value: float | None) -> str:
    place = f"{folder_name(row)}/{folder_name(column)}"
    if study.tune is not None and seed == study.tune.seed:
        return f"tuning/{place}/{folder_name(f'{study.tune.key}={value:g}')}"
    return f"runs/{place}/seed-{seed}"


def make_cell(study: Study, root: Path, label: str, row: str, column: str, seed: int, value: float | None) -> Cell:
    """Resolve the config of one run from base, row, column, tuning overrides, tuned value and seed; later ones win."""
    # Flattened first: a nested section of a row would replace that of the base as a whole.
    layers = [OF_EVERY_RUN, study.base, study.rows[row], study.columns[column]]
    if study.tune is not None:
        layers += [study.tune.overrides] if seed == study.tune.seed else []
        layers += [{study.tune.key: value}]
    given = {key: item for layer in [*layers, {"seed": seed}] for key, item in flatten(layer).items()}
    own = {"name": (root / label).name, "output": str((root / label).parent), "observe.progress": False}
    config = load_config(None, [f"{name}={json.dumps(value)}" for name, value in {**given, **own}.items()])
    # Without the model, which a plan of a hundred runs does not load: what follows from its size stays None.
    resolved = flatten(resolve(config, None, Machine.seen()).model_dump(mode="json"))
    settings = {key: item for key, item in resolved.items() if key in given or key not in OF_ITS_PLACE}
    return Cell(row=row, column=column, seed=seed, value=value, label=label, settings=settings, config=config)


def compare(
    path: Path,
    *,
    output: Path = OUTPUT,
    quick: bool = False,
    retry_failed: bool = False,
    wait_seconds: float = WAIT_SECONDS,
) -> Results:
    """Do the runs that are not done yet, and write results.json and results.md into the study's folder."""
    plan = make_plan(load_study(path, quick=quick), output)
    check_new_folder(plan.root, may_hold="*")
    do_runs(plan, retry_before=time.time() if retry_failed else 0.0, wait_seconds=wait_seconds)
    results = gather(plan)
    options = ["--output", str(output)] if output != OUTPUT else []
    command = shlex.join(["tba", "compare", str(path), *options, *(["--quick"] if quick else [])])
    write_json(plan.root / "results.json", as_json(results, command=command))
    write_atomic(plan.root / "results.md", as_markdown(results, command=command))
    print(as_markdown(results, command=command))
    print(f"{plan.root}/results.md, results.json")
    return results


def gather(plan: Plan) -> Results:
    """Read the results there are."""
    study, tuned = plan.study, plan.tuned_values()
    runs: dict[str, dict[str, dict[int, Mapping[str, float]]]]
    runs = {row: {column: {} for column in study.columns} for row in study.rows}
    failures: dict[str, str] = {}
    commits: set[str] = set()
    for cell in (cell for row, value in tuned.items() for cell in plan.runs[row, value]):
        state, record = cell.state(), cell.read_record() or {}
        if state == "done":
            runs[cell.row][cell.column][cell.seed] = numbers_of(cell.folder)
            commits.add(record["commit"])
        elif state == "failed":
            failures[f"{cell.row}/{cell.column}/seed-{cell.seed}"] = record["error"]
    tuning = {} if study.tune is None else {row: plan.scores(row) for row in tuned}
    return Results(study=study, runs=runs, failures=failures, tuned=tuned, tuning=tuning, commits=sorted(commits))


def do_runs(plan: Plan, *, retry_before: float, wait_seconds: float) -> None:
    """Do runs until every one is done or has failed.

    Consumes: the plan, and what is on disk about its runs.
    Waits for: other processes, when they have all the runs that are left; wait_seconds without any of them ending one.
    Produces: run folders and their records.
    Unblocked by: the other processes' records, or their end.
    """
    waits_since, num_left = time.monotonic(), -1
    while cells := plan.open_cells(retry_before):
        # A run has ended, in this process or another one: the wait begins anew.
        if len(cells) != num_left:
            waits_since, num_left = time.monotonic(), len(cells)
        claimed = claim_one(cells)
        if claimed is not None:
            cell, claim = claimed
            try:
                if not cell.has_ended(retry_before=retry_before):  # another process may just have ended it
                    do_run(plan, cell, num_left)
            finally:
                claim.release()
        elif time.monotonic() - waits_since < wait_seconds:
            time.sleep(POLL_SECONDS)
        else:
            holders = {cell.label: holder_of(cell.record.parent) for cell in cells}
            names = [f"{label} (process {holder.pid})" for label, holder in holders.items() if holder is not None]
            raise RuntimeError(
                f"waited {wait_seconds:g} s for runs that other processes have: {', '.join(names)}. Run the same command "
                "again for the table, or raise --wait-seconds."
            )


def claim_one(cells: Sequence[Cell]) -> tuple[Cell, Claim] | None:
    """The first run that no process has, claimed; None = others have all of them."""
    for cell in cells:
        # Or the claim would make it, and remove it at its end, while another process enters it.
        cell.record.parent.mkdir(parents=True, exist_ok=True)
        try:
            return cell, Claim.take(cell.record.parent)
        except FolderInUse:
            continue
    return None


class MetricCheck(RunListener):
    """Ends a run at its first evaluation where that lacks a metric of the study, which hours of runs would lack too."""

    def __init__(self, study: Study, label: str) -> None:
        self._names, self._label = {study.metric, study.tuning_metric}, label

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        has = Evaluation.of(metrics).values
        for name in self._names:
            if has and name not in has:
                raise UnknownMetric(
                    f"metric={name!r} is not in the first evaluation of {self._label}: it has {', '.join(has)}."
                )


def do_run(plan: Plan, cell: Cell, num_left: int) -> None:
    """Do one claimed run, and write down how it ended."""
    if changes := cell.changes():
        say(f"{cell.label} was run with other settings ({changes}): run again")
    say(f"{cell.label} starts ({num_left} left)")
    # First: a process that is killed from here on leaves a run that has not ended.
    cell.record.unlink(missing_ok=True)
    if cell.folder.path.exists():
        earlier = Claim.take(cell.folder.path)  # refuses a run that still goes on
        try:
            remove_contents(cell.folder.path)
        finally:
            earlier.release()
    error: str | None = None
    started = time.monotonic()
    try:
        summary = train(cell.config, listener=MetricCheck(plan.study, cell.label))
        if not is_result(summary):
            raise RuntimeError(f"its last evaluation is of step {summary['final_step']}, see the warning above.")
        if plan.study.metric not in summary["final"]:
            raise UnknownMetric(f"metric={plan.study.metric!r}: {cell.label} had no prompts to evaluate on.")
        metric = f"{plan.study.metric} {summary['final'][plan.study.metric]:.4g}"
    except UnknownMetric:  # the study is wrong, not the run: it has no record, and is made again
        raise
    except FAILURES as failure:
        error = f"{type(failure).__name__}: {failure}"
    record = {"settings": cell.settings, "error": error, "commit": commit_hash(), "time": time.time()}
    write_json(cell.record, record)
    say(f"{cell.label}: failed, {error}" if error else f"{cell.label}: {metric} in {time.monotonic() - started:.1f} s")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@cache
def commit_hash() -> str:
    """Commit of the package's own repository, with `-dirty` where files were changed since."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS).stdout.strip() or "unknown"
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
