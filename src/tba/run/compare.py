"""`tba compare STUDY.yaml`: do what is left of a study's runs, then write and print the table of its results.

A run has its own folder, `runs/ROW/COLUMN/seed-N` or `tuning/ROW/COLUMN/KEY=VALUE`. In `.seed-N` beside it are the lock of
the process that does the run and, once it has ended, record.json. A run with a result is not done again. Several processes
that are started with one study share its runs.
"""

from __future__ import annotations

import json
import math
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
from tba.observe.display import SHARES
from tba.observe.files import check_new_folder, read_summary, write_atomic, write_json
from tba.observe.metrics import Evaluation, standard_error
from tba.observe.recorder import RunListener
from tba.observe.run_folder import Claim, FolderInUse, RunFolder, holder_of, remove_contents
from tba.run import train
from tba.run.memory import Machine
from tba.run.resolve import resolve
from tba.run.study import Study, flatten, folder_name, load_study

OUTPUT = Path("runs/studies")
"""Folder of study folders, where none is given."""
POLL_SECONDS = 1.0
"""Time between two looks at what other processes have done."""
GIT_SECONDS = 10.0
"""Deadline for git to say the commit."""
FAILURES = (RuntimeError, ValueError, FloatingPointError)
"""Errors that a run may raise without stopping the study."""
OF_ITS_PLACE = ("name", "output", "observe.progress", "train.second_update_after")
"""Settings that the folder, or the machine, decides: a study may be moved, and machines may share it."""
OF_EVERY_RUN: dict[str, Any] = {"runtime.threads": 1}
"""Settings of a study that says nothing else: results must not depend on how many cores there are."""
MOST_RUNS_NAMED = 4
"""Most runs that the message about one problem names."""
TITLES = {
    "seconds": "Seconds of training",
    "responses_generated": "Responses generated",
    "off_policy_kl": "Measured off-policy KL, nats per response, mean over steps",
    "lag": "Lag, optimizer steps, mean over steps",
}
"""Headings of the tables about how the runs went, by name."""
Scores = Mapping[float, Mapping[str, float | None]]
"""Metric of a row's tuning runs by tuned value and column; None = the run failed."""
State = Literal["done", "failed", "changed", "missing"]
"""State of a run on disk; changed = it was run before, with other settings."""


class UnknownMetric(ConfigError):
    """A metric of the study that no evaluation has: every run would be made in vain."""


@dataclass(frozen=True, eq=False)
class Cell:
    """One training run of a study: Cell("tb", "10", 0, 3e-4, "runs/tb/10/seed-0", {"seed": 0, ...}, config)"""

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

    def state(self, retry_before: float = 0.0) -> State:
        """State on disk; failures older than `retry_before` (seconds since 1970) count as missing."""
        record = self.read_record()
        if record is None:
            return "missing"
        if self.changes():
            return "changed"
        if record["error"] is not None:
            return "failed" if record["time"] >= retry_before else "missing"
        return "done" if is_result(read_summary(self.folder)) else "missing"

    def has_ended(self, retry_before: float = 0.0) -> bool:
        return self.state(retry_before) in ("done", "failed")

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


def numbers_of(folder: RunFolder) -> dict[str, float]:
    """The metrics of a finished run's last evaluation, and how the run went."""
    summary = read_summary(folder) or {}
    drift = {"off_policy_kl": summary["stability"]["drift_nats"]} if "drift_nats" in summary["stability"] else {}
    lengths = {name: summary[name] for name in ("seconds", "responses_generated")}
    return {**summary["final"], **lengths, **drift, "lag": summary["lag"]["mean"]}


@dataclass(frozen=True, eq=False)
class Plan:
    study: Study
    root: Path
    tuning: Mapping[str, list[Cell]]
    """Tuning runs by row; empty lists where nothing is tuned."""
    runs: Mapping[tuple[str, float | None], list[Cell]]
    """Reported runs by row and tuned value (None where nothing is tuned), seed by seed."""

    def scores(self, row: str) -> Scores:
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
            if all(cell.has_ended(retry_before) for cell in cells)
        }

    def open_cells(self, retry_before: float) -> list[Cell]:
        """Runs left to do that can be started: tuning first, then seed by seed, so that every cell soon has a number."""
        tuned = self.tuned_values(retry_before)
        tuning = [cell for row, cells in self.tuning.items() if row not in tuned for cell in cells]
        runs = [cell for row, value in tuned.items() for cell in self.runs[row, value]]
        runs.sort(key=lambda cell: self.study.seeds.index(cell.seed))
        return [cell for cell in [*tuning, *runs] if not cell.has_ended(retry_before)]


def choose_value(scores: Scores) -> float:
    """The value with the best mean; a failed run is worse than any number, of equal values the smaller one is taken."""

    def rank(value: float) -> tuple[int, float, float]:
        found = [score for score in scores[value].values() if score is not None]
        return len(scores[value]) - len(found), -fmean(found) if found else 0.0, value

    # Failures first: a rate that diverges in one column may have the best number in the other.
    return min(scores, key=rank)


def make_plan(study: Study, output: Path) -> Plan:
    """Resolve every run from base, row, column, tuning overrides, tuned value and seed; all problems are raised at once."""
    root, tune = output / study.name, study.tune
    problems: dict[str, list[str]] = {}

    def made(row: str, places: Iterable[tuple[float | None, int, str]]) -> list[Cell]:
        """The runs of a row with these values of the tuned setting, seeds and columns; problems are kept."""
        found = []
        for value, seed, column in places:
            layers = [OF_EVERY_RUN, study.base, study.rows[row], study.columns[column]]
            place = f"{folder_name(row)}/{folder_name(column)}"
            label = f"runs/{place}/seed-{seed}"
            if tune is not None and seed == tune.seed:
                layers.append(tune.overrides)
                label = f"tuning/{place}/{folder_name(f'{tune.key}={value:g}')}"
            layers += [{} if tune is None else {tune.key: value}, {"seed": seed}]
            try:
                # Flattened first: a nested section of a row would replace that of the base as a whole.
                given = {key: item for layer in layers for key, item in flatten(layer).items()}
                path = root / label
                own = {"name": path.name, "output": str(path.parent), "observe.progress": False}
                config = load_config(None, [f"{key}={json.dumps(item)}" for key, item in {**given, **own}.items()])
                # Without the model, which a plan of a hundred runs does not load: what follows from its size stays None.
                resolved = flatten(resolve(config, None, Machine.seen()).model_dump(mode="json"))
            except ConfigError as error:
                for message in dict.fromkeys(str(error).splitlines()):
                    problems.setdefault(message, []).append(label)
                continue
            settings = {key: item for key, item in resolved.items() if key in given or key not in OF_ITS_PLACE}
            found.append(Cell(row, column, seed, value, label, settings, config))
        return found

    tried = () if tune is None else tuple(product(tune.values, [tune.seed], tune.columns))
    tuning = {row: made(row, tried) for row in study.rows}
    values: tuple[float | None, ...] = (None,) if tune is None else tune.values
    runs = {(row, v): made(row, product([v], study.seeds, study.columns)) for row in study.rows for v in values}
    lines = []
    for message, labels in problems.items():
        more = [f"and {len(labels) - MOST_RUNS_NAMED} more"] if len(labels) > MOST_RUNS_NAMED else []
        lines.append(f"  {message}\n      in {', '.join([*labels[:MOST_RUNS_NAMED], *more])}")
    if lines:
        raise ConfigError("\n".join([f"study {study.name} has runs that cannot start:", *lines]))
    return Plan(study, root, tuning, runs)


def estimate(values: Iterable[float | None]) -> tuple[float | None, float | None]:
    """Mean, None = there is no number, and its standard error sqrt(sum (x - mean)^2 / (n - 1) / n), None below two numbers:
    (0.871, 0.004)."""
    # A run may lack a metric (no prompt had a reward), or have NaN for it: the others still have a mean.
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    return fmean(numbers) if numbers else None, standard_error(numbers)


@dataclass(frozen=True)
class Results:
    """The whole grid, finished or not."""

    study: Study
    runs: Mapping[str, Mapping[str, Mapping[int, Mapping[str, float]]]]
    """By row, column and seed: the metrics of a finished run's last evaluation, and how it went (TITLES).

    {"tb": {"10": {0: {"accuracy": 0.87, "seconds": 31.0, ...}, 1: {...}}, ...}, ...}
    """
    failures: Mapping[str, str]
    """Error messages of the runs that failed, by row/column/seed-N; failed tuning runs are in `tuning`."""
    tuned: Mapping[str, float | None]
    """Tuned value by row, where it is known; None = nothing is tuned."""
    tuning: Mapping[str, Scores]
    """Everything that was tried, by row; empty where nothing is tuned."""
    commits: Sequence[str]

    def over_seeds(self, row: str, column: str, name: str) -> tuple[float | None, float | None]:
        return estimate(run.get(name) for run in self.runs[row][column].values())


def compare(
    path: Path, *, output: Path, quick: bool = False, retry_failed: bool = False, wait_seconds: float = 3600.0
) -> Results:
    """Do the runs that are not done yet, and write results.json and results.md into the study's folder. `wait_seconds` is
    the longest wait for other processes in which none of them finishes a run."""
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
    return Results(study, runs, failures, tuned, tuning, sorted(commits))


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
        for cell in cells:
            # Or the claim would make it, and remove it at its end, while another process enters it.
            cell.record.parent.mkdir(parents=True, exist_ok=True)
            try:
                claim = Claim.take(cell.record.parent)
            except FolderInUse:
                continue
            try:
                if not cell.has_ended(retry_before):  # another process may just have ended it
                    do_run(plan, cell, num_left)
            finally:
                claim.release()
            break
        else:  # other processes have all that are left
            if time.monotonic() - waits_since < wait_seconds:
                time.sleep(POLL_SECONDS)
                continue
            holders = {cell.label: holder_of(cell.record.parent) for cell in cells}
            names = [f"{label} (process {holder.pid})" for label, holder in holders.items() if holder is not None]
            raise RuntimeError(
                f"waited {wait_seconds:g} s for runs that other processes have: {', '.join(names)}. Run the same command "
                "again for the table, or raise --wait-seconds."
            )


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


# --- tables ---------------------------------------------------------------------------------------------------------


def as_json(results: Results, *, command: str) -> dict[str, Any]:
    study = results.study
    means = {
        row: {c: dict(zip(("mean", "error"), results.over_seeds(row, c, study.metric))) for c in study.columns}
        for row in study.rows
    }
    made = {"command": command, "cpu_count": Machine.seen().cores, study.metric: means}
    return {**made, **vars(results), "study": study.model_dump(mode="json")}


def as_markdown(results: Results, *, command: str) -> str:
    study, num_seeds = results.study, len(results.study.seeds)
    seeds = "one seed" if num_seeds == 1 else f"{num_seeds} seeds"
    commits = ", ".join(results.commits) or "unknown"
    parts = [f"# {study.name}", f"Made by `{command}`, commit {commits}, {Machine.seen().cores} cores."]
    parts += [
        f"## {titled(study.metric)}: mean ± standard error over {seeds}",
        as_table(grid_of(results, study.metric)),
    ]
    for name in (*study.also, *TITLES):
        parts += [f"## {titled(name)}", as_table(grid_of(results, name))]
    if study.tune is not None:
        title = f"## Tuned: mean {titled(study.tuning_metric)} over {', '.join(study.tune.columns)}"
        parts += [title, as_table(tuning_grid(results))]
    if results.failures:
        failures = [[label, error.splitlines()[0]] for label, error in results.failures.items()]
        parts += ["## Failed runs", as_table([["run", "error"], *failures])]
    return "\n\n".join(parts) + "\n"


def grid_of(results: Results, name: str) -> list[list[str]]:
    """Means of a metric by row and column: `87.1 ± 0.4 (2/3)`, without the count once all seeds are there."""
    columns, num_seeds, scale = results.study.columns, len(results.study.seeds), scale_of(name)
    grid: list[list[str]] = [["", *columns]]
    for row in results.study.rows:
        grid.append([row])
        for column in columns:
            num_done = len(results.runs[row][column])
            # By label, because a failed run has no numbers and so no place among `runs`.
            num_failed = sum(label.startswith(f"{row}/{column}/") for label in results.failures)
            notes = [f"{num_done}/{num_seeds}"] if num_done < num_seeds and num_done + num_failed else []
            notes += [f"{num_failed} failed"] if num_failed else []
            parts = [scale * part for part in results.over_seeds(row, column, name) if part is not None]
            message = " ± ".join(f"{part:.1f}" if scale == 100.0 else f"{part:.4g}" for part in parts) or "-"
            grid[-1].append(message + (f" ({', '.join(notes)})" if notes else ""))
    return grid


def tuning_grid(results: Results) -> list[list[str]]:
    """The tuning as a table: one column per value tried with its mean metric, the chosen value last."""
    tune, scale = results.study.tune, scale_of(results.study.tuning_metric)
    assert tune is not None
    grid = [[tune.key, *(f"{value:g}" for value in tune.values), "chosen"]]
    for row, scores in results.tuning.items():
        found = [list(scores[value].values()) for value in tune.values]
        means = ["failed" if None in own else f"{scale * (estimate(own)[0] or 0.0):.4g}" for own in found]
        grid.append([row, *means, f"{results.tuned[row]:g}"])
    return grid


def scale_of(name: str) -> float:
    """Factor for reading: 100 for metrics that are shares, else 1."""
    return 100.0 if name.startswith(SHARES) else 1.0


def titled(name: str) -> str:
    return TITLES.get(name, name) + (", %" if scale_of(name) == 100.0 else "")


def as_table(grid: list[list[str]]) -> str:
    """A table in Markdown, padded so that it can be read as it stands."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in grid]
    widths = [max(3, *map(len, column)) for column in zip(*cells)]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, row, widths))} |" for row in cells)
