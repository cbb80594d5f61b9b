"""`tba compare STUDY.yaml`: do what is left of a study's runs, then write and print its results.

A run with a result is not done again. Several processes that are started with one study share its runs.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from tba.compare.plan import ENDED, Cell, Plan, UnknownMetric, check_metric, is_result, make_plan
from tba.compare.plot import save_plot
from tba.compare.results import Results, as_json, as_markdown, gather
from tba.compare.study import Study, load_study
from tba.config import ConfigError
from tba.launch import train
from tba.observe.files import check_new_folder, write_atomic, write_json
from tba.observe.metrics import Evaluation
from tba.observe.recorder import RunListener
from tba.observe.run_folder import Claim, FolderInUse, holder_of, remove_contents

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


def compare(
    path: Path,
    *,
    output: Path = OUTPUT,
    quick: bool = False,
    retry_failed: bool = False,
    wait_seconds: float = WAIT_SECONDS,
) -> Results:
    """Do the runs that are not done yet, and write results.json, results.md and plot.png into the study's folder."""
    plan = make_plan(load_study(path, quick=quick), output)
    check_new_folder(plan.root, may_hold="*")
    refuse_earlier_version(plan.root)
    do_runs(plan, retry_before=time.time() if retry_failed else 0.0, wait_seconds=wait_seconds)
    results = gather(plan)
    options = ["--output", str(output)] if output != OUTPUT else []
    command = shlex.join(["tba", "compare", str(path), *options, *(["--quick"] if quick else [])])
    write_json(plan.root / "results.json", as_json(results, command=command))
    write_atomic(plan.root / "results.md", as_markdown(results, command=command))
    save_plot(results, plan.root / "plot.png")
    print(as_markdown(results, command=command))
    print(f"{plan.root}/results.md, results.json, plot.png")
    return results


def refuse_earlier_version(root: Path) -> None:
    """Refuse a study's folder of a version that kept its records inside of the run folders."""
    if (old := next(root.glob("*/*/*/*/cell.json"), None) or next(root.glob("*/*/*/*/failed.json"), None)) is not None:
        raise ConfigError(
            f"{root} was made by an earlier version of tba ({old.relative_to(root)}): name another --output, or delete it."
        )


def do_runs(plan: Plan, *, retry_before: float, wait_seconds: float) -> None:
    """Do runs until every one is done or has failed.

    Consumes: the plan, and what is on disk about its runs.
    Waits for: other processes, when they have all the runs that are left; wait_seconds without any of them ending one.
    Produces: run folders and their records.
    Unblocked by: the other processes' records, or their end.
    """
    waits_since, num_left = time.monotonic(), -1
    while cells := open_cells(plan, retry_before):
        if len(cells) != num_left:
            waits_since, num_left = time.monotonic(), len(cells)
        claimed = claim_one(cells)
        if claimed is None:
            wait(cells, waits_since, wait_seconds)
            continue
        cell, claim = claimed
        try:
            if cell.state(retry_before=retry_before) not in ENDED:  # another process may just have ended it
                do_run(plan, cell, num_left)
        finally:
            claim.release()


def open_cells(plan: Plan, retry_before: float) -> list[Cell]:
    """Runs left to do that can be started: tuning first, then seed by seed, so that every cell soon has a number."""

    def has_ended(cell: Cell) -> bool:
        return cell.state(retry_before=retry_before) in ENDED

    tuned = plan.tuned_values(has_ended)
    tuning = [cell for row, cells in plan.tuning.items() if row not in tuned for cell in cells]
    runs = [cell for row, value in tuned.items() for cell in plan.runs[row, value]]
    runs.sort(key=lambda cell: plan.study.seeds.index(cell.seed))
    return [cell for cell in [*tuning, *runs] if not has_ended(cell)]


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


def wait(cells: Sequence[Cell], since: float, wait_seconds: float) -> None:
    """Wait a little for other processes, which have all these runs."""
    if time.monotonic() - since < wait_seconds:
        time.sleep(POLL_SECONDS)
        return
    holders = {cell.label: holder_of(cell.record.parent) for cell in cells}
    names = [f"{label} (process {holder.pid})" for label, holder in holders.items() if holder is not None]
    raise RuntimeError(
        f"waited {wait_seconds:g} s for runs that other processes have: {', '.join(names)}. Run the same command again for "
        "the table, or raise --wait-seconds."
    )


class MetricCheck(RunListener):
    """Ends a run at its first evaluation where that lacks a metric of the study, which hours of runs would lack too."""

    def __init__(self, study: Study, label: str) -> None:
        self._names, self._label = dict.fromkeys([study.metric, study.tuning_metric]), label

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        if metrics:
            for name in self._names:
                check_metric(name, Evaluation.of(metrics).values, where=f"the first evaluation of {self._label}")
            self._names.clear()


def do_run(plan: Plan, cell: Cell, num_left: int) -> None:
    """Do one claimed run, and write down how it ended."""
    if changes := cell.changes():
        say(f"{cell.label} was run with other settings ({changes}): run again")
    say(f"{cell.label} starts ({num_left} left)")
    cell.record.unlink(missing_ok=True)
    if cell.folder.path.exists():
        earlier = Claim.take(cell.folder.path)  # refuses a run that still goes on
        try:
            remove_contents(cell.folder.path)
        finally:
            earlier.release()
    record = {"settings": cell.settings, "defaults": cell.defaults, "error": None, "commit": commit_hash()}
    started = time.monotonic()
    try:
        summary = train(cell.config, listener=MetricCheck(plan.study, cell.label))
        if not is_result(summary):
            raise RuntimeError(f"its last evaluation is of step {summary['final_step']}, see the warning above.")
    except UnknownMetric:
        raise
    except FAILURES as error:
        record["error"] = f"{type(error).__name__}: {error}"
        say(f"{cell.label}: failed, {record['error']}")
    write_json(cell.record, {**record, "time": time.time()})
    if record["error"] is None:
        metric = cell.metric(plan.study.metric)
        say(f"{cell.label}: {plan.study.metric} {metric:.4g} in {time.monotonic() - started:.1f} s")


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
