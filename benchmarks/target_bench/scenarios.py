"""What is trained, where generation is the bottleneck, and the arms that are compared. Only training and validation prompts
are read. Settings and targets of `judge` were fixed on seed 100, which no table reports. Those of `vineppo` had no pilot,
and the targets of `long` come from curves of its held-out rows in other runs (benchmarks/own_problems.py).

judge      arithmetic with a reward that waits two seconds for every visit, as a remote judge does
long       long_sums of the own problems: responses of 60 to 120 tokens, a model of 1M parameters
vineppo    arithmetic with VinePPO, whose searchers continue every step of every response
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

SEARCHERS = (4, 12, 1)
JUDGE_CALLS = 48
"""Calls that the judge answers at once, the same for every arm: three steps' worth of visits. A synchronous step has 16."""
NUM_VALIDATION = 300
PACED_LAG = 4
"""Steps that searchers of a paced arm may be ahead. By default a single searcher is paced; several are not, and what is
older than two steps' worth of groups leaves untrained."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Arm(name="async 4", overrides=("mode=async", "search.num_searchers=4"))"""

    name: str
    overrides: tuple[str, ...]
    busy_cores: int = 1
    """Number of cores that it can keep busy: one a process, or a thread of a synchronous run."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A problem, its targets, and how long it is trained."""

    name: str
    words: str
    """What a picture says above its curves."""
    make: Callable[[Path], list[str]]
    """Writes what the runs read into a folder and returns their settings."""
    metric: str
    targets: tuple[float, ...]
    steps: int
    evaluate_every: int
    arms: Sequence[Arm]


def arms(*, workers: int | None = None, sync_threads: int = 1) -> list[Arm]:
    """The arms, those first that say most where the time is short. A synchronous run, which would leave cores idle, is also
    tried with more threads; `workers` of the reward are shared by the searchers of an arm."""

    def arm(name: str, mode: str, searchers: int, threads: int = 1) -> Arm:
        judges = () if workers is None else (f"search.reward_workers={workers // searchers}",)
        count = () if mode == "sync" else (f"search.num_searchers={searchers}",)
        return Arm(
            name=name,
            overrides=(f"mode={mode}", *count, f"runtime.threads={threads}", *judges),
            busy_cores=threads if mode == "sync" else 1 + searchers,
        )

    def paced(own: Arm) -> Arm:
        limit = ("replay.lag=pace", f"replay.max_lag={PACED_LAG}")
        return replace(own, name=f"{own.name}, paced", overrides=(*own.overrides, *limit))

    several = [arm(f"async {count}", "async", count) for count in SEARCHERS]
    found = [arm("sync", "sync", 1), *several, *(paced(own) for own in several if own.busy_cores > 2)]
    threaded = [] if sync_threads == 1 else [arm(f"sync, {sync_threads} threads", "sync", 1, sync_threads)]
    return [*found, *threaded]


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def custom(folder: Path, reward: str) -> list[str]:
    """Settings of a task of the rows in a folder."""
    return [
        *("task.name=custom", f"task.data={folder / 'train.jsonl'}", f"task.eval_data={folder / 'validation.jsonl'}"),
        f"task.rewards={json.dumps([{'function': reward}])}",
        f"evaluate.num_prompts={NUM_VALIDATION}",
    ]


def make_judged(folder: Path) -> list[str]:
    """The arithmetic task as a user's own rows, whose reward waits."""
    from transformers import AutoTokenizer

    from tba.config import ModelConfig, TaskConfig
    from tba.models.names import resolve_path
    from tba.tasks.registry import make_task

    own = (folder / "judge").resolve()
    if not (own / "validation.jsonl").is_file():
        tokenizer = AutoTokenizer.from_pretrained(resolve_path(ModelConfig().path))
        task = make_task(TaskConfig(), tokenizer, max_prompt_tokens=256)
        for split, name, count in (("train", "train", None), ("validation", "validation", NUM_VALIDATION)):
            prompts = task.prompts(split)[:count]  # type: ignore[arg-type]
            rows = [
                {"prompt": prompt.text, "answer": prompt.columns["answer"], "waits": split == "train"}
                for prompt in prompts
            ]
            write_rows(own / f"{name}.jsonl", rows)
    return custom(own, f"{Path(__file__).with_name('judge.py')}:judged")


def make_long(folder: Path) -> list[str]:
    """long_sums, with validation rows taken from its training rows."""
    problem, own = (folder / "long_sums").resolve(), (folder / "long").resolve()
    if not (problem / "problem.json").is_file():
        raise SystemExit(
            f"{problem} is not there: `python benchmarks/own_problems.py make long_sums --folder {folder}` makes it."
        )
    rows = [json.loads(line) for line in (problem / "train.jsonl").read_text().splitlines()]
    write_rows(own / "validation.jsonl", rows[:NUM_VALIDATION])
    write_rows(own / "train.jsonl", rows[NUM_VALIDATION:])
    settings = (f"model.path={problem / 'model'}", "generate.max_new_tokens=144", "evaluate.samples_per_prompt=1")
    return [*custom(own, f"{problem / 'rewards.py'}:correct"), *settings]


def make_vineppo(folder: Path) -> list[str]:
    return [
        *("task.name=arithmetic", "objective.name=vineppo", "objective.continuations=3"),
        *("evaluate.split=validation", f"evaluate.num_prompts={NUM_VALIDATION}"),
    ]


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            name="judge",
            words="a reward that waits 2 s for every visit, 48 calls at once",
            make=make_judged,
            metric="eval/custom/accuracy",
            targets=(0.6, 0.7),
            steps=30,
            evaluate_every=5,
            arms=arms(workers=JUDGE_CALLS, sync_threads=2),
        ),
        Scenario(
            name="long",
            words="responses of 60 to 120 tokens",
            make=make_long,
            metric="eval/custom/avg@1",
            targets=(0.25, 0.3),
            steps=60,
            evaluate_every=10,
            arms=arms(sync_threads=4),
        ),
        Scenario(
            name="vineppo",
            words="VinePPO, 3 continuations of every step",
            make=make_vineppo,
            metric="eval/arithmetic/accuracy",
            targets=(0.6, 0.7),
            steps=60,
            evaluate_every=5,
            arms=arms(sync_threads=4),
        ),
    )
}
