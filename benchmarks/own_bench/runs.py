"""Runs of `tba train` on the bench's problems, one line of a JSONL file each, and the table of such a file.

A line: {"problem": "word_sums", "setting": "defaults", "overrides": [], "seed": 0, "metric": "avg@4", "start": 0.31,
"final": 0.55, "true_start": null, "true_final": null, "start_scores": {...}, "final_scores": {...}, "evaluations":
[[0, {...}], [20, {...}]], "seconds": 37.1, "steps": 200, "responses_generated": 25600, "responses_trained": 25600,
"alarm_steps": 0, "collapse": null, "lag": {"mean": 2.1, "max": 6}, "commit": "a3f54fe", "fingerprint": "9c51..."}
Of a run with a budget it has `budget`, "60 s" or "30 steps", besides; `final` is then what `tba evaluate` says of its last
checkpoint, and there are no evaluations on the way.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from math import sqrt
from pathlib import Path
from threading import Lock
from typing import Any

from own_bench.budgets import Budget, budget_tables
from own_bench.problem import Problem, fingerprint

CHECKOUT = Path(__file__).resolve().parents[2]
EVALUATIONS = 10
"""Evaluations after the start, evenly spaced."""
FAILED_TAIL = 2_000
"""Characters of a failed run's words that are shown."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Run(problem=..., setting="reuse 1", overrides=("replay.max_replay_ratio=1",), seed=0)"""

    problem: Problem
    setting: str
    overrides: tuple[str, ...]
    seed: int
    budget: Budget | None = None
    """How long it trains; None = the problem's number of steps, with evaluations on the way."""

    @property
    def key(self) -> tuple[str, str, int, str | None]:
        return self.problem.name, self.setting, self.seed, None if self.budget is None else self.budget.label

    @property
    def name(self) -> str:
        budget = "" if self.budget is None else f"-{self.budget.label.replace(' ', '-')}"
        return f"{self.problem.name}-{self.setting}-seed{self.seed}{budget}"

    def command(self, folder: Path, output: Path) -> list[str]:
        """`tba train` with what the problem needs, but for what the budget and the setting's overrides give."""
        problem = self.problem
        chosen = (*(() if self.budget is None else self.budget.overrides), *self.overrides)
        given = {override.partition("=")[0] for override in chosen}
        every = max(1, problem.steps // EVALUATIONS)
        own = [
            *problem.overrides(folder),
            f"model.path={(folder / problem.name / 'model').resolve()}",
            *(f"train.max_steps={problem.steps}", f"evaluate.every={every}", "train.keep_checkpoints=0"),
            *(f"seed={self.seed}", f"output={output.parent}", f"name={output.name}", "observe.progress=false"),
        ]
        own = [override for override in own if override.partition("=")[0] not in given]
        return [sys.executable, "-m", "tba", "train", *own, *chosen]


def parse_setting(text: str) -> tuple[str, tuple[str, ...]]:
    """`reuse1=replay.max_replay_ratio=1,train.learning_rate=1e-4`, or `paper=configs/paper.yaml`, or both; a bare
    name changes nothing."""
    name, _, overrides = text.partition("=")
    if not re.fullmatch(r"[\w.+-]+", name):
        raise SystemExit(
            f"--settings {text!r}: write NAME or NAME=key=value,key=value with a NAME of letters and digits."
        )
    # A comma inside a value ({kind: linear, start: 1}) is not followed by a dotted key and `=`.
    return name, tuple(part for part in re.split(r",(?=[a-z_.]+=)", overrides) if part)


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def runs_to_do(
    problems: Sequence[Problem],
    settings: Mapping[str, tuple[str, ...]],
    seeds: Sequence[int],
    done: Iterable[Mapping],
    budgets: Sequence[Budget] = (),
) -> Iterator[Run]:
    """Those without a line yet, seed by seed. A line of other overrides or of another edition of its problem is refused."""
    lines = {(line["problem"], line["setting"], line["seed"], line.get("budget")): line for line in done}
    editions = {problem.name: fingerprint(problem) for problem in problems}
    for seed, budget, (name, overrides), problem in product(seeds, budgets or [None], settings.items(), problems):
        run = Run(problem=problem, setting=name, overrides=overrides, seed=seed, budget=budget)
        line = lines.get(run.key)
        if line is None:
            yield run
        elif tuple(line["overrides"]) != overrides:
            raise SystemExit(
                f"setting {name!r} of {problem.name} was run with {line['overrides']}, now it is {list(overrides)}: "
                "give the new one another name, or write to another file."
            )
        elif line["fingerprint"] != editions[problem.name]:
            raise SystemExit(
                f"{problem.name} has changed since its runs with {name!r} (fingerprint {line['fingerprint']}, now "
                f"{editions[problem.name]}): write to another file."
            )


def run_all(runs: Sequence[Run], *, folder: Path, out: Path, jobs: int) -> int:
    """Run them, `jobs` at a time; returns how many failed (they have no line and are run again next time)."""
    out.parent.mkdir(parents=True, exist_ok=True)
    commit, lock = commit_of_checkout(), Lock()

    def do(run: Run) -> bool:
        output = out.with_suffix(".runs").resolve() / run.name
        shutil.rmtree(output, ignore_errors=True)
        own = environment() if run.budget is None else environment(threads=None)
        done = call(run.command(folder, output), own)
        evaluated = None
        if not done.returncode and run.budget is not None:
            (checkpoint,) = (output / "checkpoints").glob("step-*")
            evaluated = done = call(evaluation(run.problem, checkpoint, folder, seed=run.seed), environment())
        with lock:
            if done.returncode or not (output / "summary.json").is_file():
                print(
                    f"FAILED {' '.join(map(str, run.key))}: {done.stderr[-FAILED_TAIL:]}", file=sys.stderr, flush=True
                )
                return False
            description = json.loads((folder / run.problem.name / "problem.json").read_text())
            line = line_of(run, output)
            line |= {"commit": commit, "fingerprint": fingerprint(run.problem), "model": description["model"]}
            if evaluated is not None:
                line |= scores_at_ends(run.problem, description["start"], json.loads(evaluated.stdout))
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            shutil.rmtree(output)
            print(f"{' '.join(map(str, run.key))}: {shown_scores(line)}, {line['seconds']:.0f} s", flush=True)
        return True

    with ThreadPoolExecutor(jobs) as pool:
        return sum(not fine for fine in pool.map(do, runs))


def evaluation(problem: Problem, model: Path, folder: Path, *, seed: int) -> list[str]:
    """`tba evaluate` of a trained model, on the problem's held-out prompts, sampled as its start model was."""
    return [sys.executable, "-m", "tba", "evaluate", str(model), *problem.overrides(folder), f"seed={seed}"]


def call(command: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=CHECKOUT, check=False)


def environment(threads: int | None = 1) -> dict[str, str]:
    """So many threads per process (None = as many as it takes by itself), the checkout's sources first."""
    paths = [str(CHECKOUT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    fixed = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    if threads is not None:
        fixed["OMP_NUM_THREADS"] = str(threads)
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | fixed


def line_of(run: Run, output: Path) -> dict[str, Any]:
    """What a finished run folder says."""
    summary = json.loads((output / "summary.json").read_text())
    metrics = read_lines(output / "metrics.jsonl")
    return {
        "problem": run.problem.name,
        "setting": run.setting,
        "overrides": list(run.overrides),
        "seed": run.seed,
        **({} if run.budget is None else {"budget": run.budget.label}),
        **scores_at_ends(run.problem, summary["start"], summary["final"]),
        "evaluations": [[line["step"], scores_of(line)] for line in metrics if scores_of(line)],
        **{key: summary[key] for key in ("seconds", "steps", "responses_generated", "responses_trained", "lag")},
        "alarm_steps": sum(line.get("guard/alarm", 0.0) > 0 for line in metrics),
        "collapse": summary["collapse"],
        "thirds": {key: thirds(metrics, key) for key in MEASURED},
    }


def scores_at_ends(problem: Problem, start: Mapping[str, float], final: Mapping[str, float]) -> dict[str, Any]:
    """The problem's scores, and all others, at the start and at the end."""
    names = (("", problem.metric), ("true_", problem.true_metric))
    return {
        "metric": problem.metric,
        "true_metric": problem.true_metric,
        **{f"{prefix}start": start.get(name) if name else None for prefix, name in names},
        **{f"{prefix}final": final.get(name) if name else None for prefix, name in names},
        "start_scores": dict(start),
        "final_scores": dict(final),
    }


MEASURED = (
    "off_policy/drift", "off_policy/signal", "tb/masked_fraction", "off_policy/kl", "off_policy/ess", "learning_rate", "kl",
    "entropy", "grad_norm", "completions/mean_length", "reward",
)  # fmt: skip
"""Metrics of training that are kept, as means over the thirds of a run."""


def thirds(metrics: Sequence[Mapping[str, Any]], key: str) -> list[float | None]:
    values = [line[key] for line in metrics if key in line]
    size = max(1, len(values) // 3)
    parts = values[:size], values[size : 2 * size], values[2 * size :]
    return [statistics.fmean(part) if part else None for part in parts]


def scores_of(line: Mapping[str, Any]) -> dict[str, float]:
    prefix = "eval/custom/"
    return {key.removeprefix(prefix): value for key, value in line.items() if key.startswith(prefix)}


def shown_scores(line: Mapping[str, Any]) -> str:
    true = "" if line["true_metric"] is None else f" ({line['true_metric']} {line['true_final']:.3f})"
    alarm = "" if line["collapse"] is None else ", COLLAPSE called"
    return f"{line['metric']} {line['start']:.3f} -> {line['final']:.3f}{true}{alarm}"


def table_of(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """Mean and standard error over the seeds, a row for each problem, start model (by its checksum) and setting: only runs
    that began alike are compared. Runs with a budget have tables of their own."""
    lines = list(lines)
    by_budget, lines = budget_tables(lines), [line for line in lines if not line.get("budget")]
    if by_budget and not lines:
        return by_budget
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        groups[line["problem"], line.get("model", "unknown"), line["setting"]].append(line)
    head = (
        "| problem | from | setting | seeds | metric | start | final | true | collapses | seconds | generated | lag |"
    )
    rows = [head, "|" + "---|" * (head.count("|") - 1)]
    for (problem, model, setting), own in sorted(groups.items()):
        true = [line["true_final"] for line in own if line["true_final"] is not None]
        cells = [
            *(problem, model[:7], setting, str(len(own)), own[0]["metric"]),
            f"{statistics.mean(line['start'] for line in own):.3f}",
            mean_and_error([line["final"] for line in own]),
            mean_and_error(true) if true else "-",
            str(sum(line["collapse"] is not None for line in own)),
            f"{statistics.mean(line['seconds'] for line in own):.0f}",
            f"{statistics.mean(line['responses_generated'] for line in own):.0f}",
            f"{statistics.mean(line['lag']['mean'] for line in own):.1f}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return [*rows, *([""] if by_budget else []), *by_budget]


def mean_and_error(values: Sequence[float], digits: int = 3) -> str:
    """Mean and standard error; one value has none."""
    error = f" ± {statistics.stdev(values) / sqrt(len(values)):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{error}"


def commit_of_checkout() -> str:
    """The commit that ran, with `+` where files have changed since; `unknown` outside a checkout."""
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        return f"{commit}+" if _git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=CHECKOUT, check=True)
    return done.stdout.strip()
