"""Runs that are compared at equal wall clock, or after equally many steps: the budget of a run, and the table by budget."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, Literal

ANCHOR = "trl_"
"""Beginning of the settings of TRL's runs; the best of them, problem by problem, is what others are compared with."""


@dataclass(frozen=True)
class Budget:
    """How long a run trains: Budget(60.0, "seconds") or Budget(30, "steps")."""

    amount: float
    unit: Literal["seconds", "steps"]

    @property
    def label(self) -> str:
        return f"{self.amount:g} {'s' if self.unit == 'seconds' else 'steps'}"

    @property
    def overrides(self) -> tuple[str, ...]:
        """The settings of such a run. Its last checkpoint is evaluated afterwards: evaluations beside the training would
        take their time from it."""
        limit = (
            ("train.max_steps=null", f"train.max_seconds={self.amount:g}")
            if self.unit == "seconds"
            else (f"train.max_steps={self.amount:g}",)
        )
        few = ("evaluate.every=0", "evaluate.num_prompts=1", "evaluate.samples_per_prompt=0")
        return (*limit, *few, "train.keep_checkpoints=1")


def budgets_of(seconds: Sequence[float], steps: Sequence[int]) -> list[Budget]:
    return [*(Budget(amount, "seconds") for amount in seconds), *(Budget(amount, "steps") for amount in steps)]


@dataclass(frozen=True)
class Score:
    """Mean final score of a setting on a problem, and its standard error."""

    mean: float
    error: float
    seeds: int

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, Any]]) -> Score:
        """The standard error is that over the seeds; of one seed, that over the prompts of its evaluation."""
        finals = [line["final"] for line in lines]
        if len(finals) > 1:
            return cls(statistics.fmean(finals), statistics.stdev(finals) / sqrt(len(finals)), len(finals))
        own = lines[0]["final_scores"].get(f"{lines[0]['metric']}_standard_error", 0.0)
        return cls(finals[0], own, 1)

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.error:.3f}"

    def against(self, other: Score) -> str:
        """Whether the difference is more than its standard error."""
        difference, error = self.mean - other.mean, sqrt(self.error**2 + other.error**2)
        return "ahead" if difference > error else "behind" if difference < -error else "level"


def budget_tables(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """For each budget and setting a row per problem, beside TRL at the best of its rates there, and how often it is ahead,
    level or behind. Only runs that began with the same start model are compared."""
    found: dict[tuple[str, str], dict[tuple[str, str], list[Mapping[str, Any]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for line in lines:
        if line.get("budget"):
            found[line["budget"], line["setting"]][line["problem"], line.get("model", "unknown")].append(line)
    rows = []
    for budget in sorted({budget for budget, _ in found}, key=_order):
        anchors = {
            setting: problems
            for (own, setting), problems in found.items()
            if own == budget and setting.startswith(ANCHOR)
        }
        for (own, setting), problems in sorted(found.items()):
            if own == budget and setting not in anchors:
                rows += ["", *_table(budget, setting, problems, anchors)]
        if anchors and len(anchors) == sum(own == budget for own, _ in found):
            rows += ["", *_table(budget, None, {key: [] for own in anchors.values() for key in own}, anchors)]
    return rows[1:]


def _table(
    budget: str,
    setting: str | None,
    problems: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]],
    anchors: Mapping[str, Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]],
) -> list[str]:
    rows = [
        f"| {budget} | metric | start | {setting or '-'} | seeds | steps | TRL, best rate | seeds | steps | rate |  |",
        "|" + "---|" * 11,
    ]
    verdicts: Counter[str] = Counter()
    for key, own in sorted(problems.items()):
        rates = {name: lines[key] for name, lines in anchors.items() if lines.get(key)}
        best = max(rates, key=lambda name: Score.of(rates[name]).mean, default=None)
        verdict = "-"
        if own and best is not None:
            verdict = Score.of(own).against(Score.of(rates[best]))
            verdicts[verdict] += 1
        one = (own or rates[best or ""])[0]
        cells = [key[0], one["metric"], f"{one['start']:.3f}", *_cells(own), *_cells(rates.get(best or "", ()))]
        rows.append(f"| {' | '.join([*cells, '-' if best is None else best.removeprefix(ANCHOR), verdict])} |")
    if verdicts:
        counted = ", ".join(f"{verdicts[name]} {name}" for name in ("ahead", "level", "behind"))
        rows.append(f"{budget}, {setting}: {counted} of {sum(verdicts.values())} (by one standard error)")
    return rows


def _cells(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    if not lines:
        return ["-", "-", "-"]
    steps, seconds = (statistics.fmean(line[name] for line in lines) for name in ("steps", "seconds"))
    return [str(Score.of(lines)), str(len(lines)), f"{steps:.0f} in {seconds:.0f} s"]


def _order(label: str) -> tuple[str, float]:
    amount, unit = label.split()
    return unit, float(amount)
