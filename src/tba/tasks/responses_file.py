"""What a model answered in an evaluation, one JSON line a prompt, and how two models differ on the same prompts.

    tba evaluate RUN_A --samples 8 --responses a.jsonl
    tba evaluate RUN_B --samples 8 --responses b.jsonl --against a.jsonl

Most of the spread of an evaluation is between prompts, which are hard or easy for both models. A paired difference is free
of it, so that two models can be told apart by far fewer prompts than their own standard errors suggest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tba.tasks.base import Outcome, RewardFailed
from tba.tasks.rewards.pool import FinishedGroup

RESAMPLES = 10_000
"""Number of bootstrap samples behind an interval."""
RESAMPLES_AT_ONCE = 500
"""Bootstrap samples whose prompts are drawn together: 10 MB of indices for 2,000 prompts."""


@dataclass(frozen=True)
class ResponsesFile:
    """`ResponsesFile(path)("sampled", groups, outcomes, solved)` adds a line for each prompt."""

    path: Path

    @property
    def partial(self) -> Path:
        """Where lines go until all are there: what lay under the file's own name stays until then."""
        return self.path.with_name(f"{self.path.name}.partial")

    def begin(self) -> None:
        """Begin anew; says at once where the file cannot be written."""
        try:
            self.partial.write_text("")
        except OSError as error:
            raise ValueError(
                f"--responses {self.path} cannot be written: {error.strerror}. Give another file."
            ) from None

    def __call__(
        self,
        kind: str,
        groups: Sequence[FinishedGroup],
        outcomes: Sequence[Sequence[Outcome]],
        solved: Sequence[Sequence[bool]],
    ) -> None:
        """Add the responses of one pass over the prompts; `kind` is greedy or sampled."""
        with self.partial.open("a", encoding="utf-8") as file:
            for group, of_group, right in zip(groups, outcomes, solved, strict=True):
                responses = [
                    {"text": text, **_rewards(outcome), "solved": bool(own)}
                    for text, outcome, own in zip(group.texts, of_group, right, strict=True)
                ]
                line = {"prompt_id": group.prompt.id, "kind": kind, "prompt": group.prompt.text, "responses": responses}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def finish(self) -> None:
        """All responses are there."""
        os.replace(self.partial, self.path)

    def close(self) -> None:
        """Leave nothing behind of an evaluation that failed."""
        self.partial.unlink(missing_ok=True)


def _rewards(outcome: Outcome) -> dict[str, Any]:
    return {"reward_failed": str(outcome)} if isinstance(outcome, RewardFailed) else {"rewards": dict(outcome)}


def read_shares(path: Path) -> dict[str, dict[str, float]]:
    """By metric (accuracy, avg@k) and prompt id: the share of the prompt's responses that are solved."""
    found: dict[str, dict[str, float]] = {}
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        for line in lines:
            solved = [bool(response["solved"]) for response in line["responses"]]
            metric = "accuracy" if line["kind"] == "greedy" else f"avg@{len(solved)}"
            found.setdefault(metric, {})[line["prompt_id"]] = float(np.mean(solved))
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror}. Give a file that --responses has written."
        ) from None
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is not what --responses writes ({error!r}). Give a file that it has written."
        ) from None
    return found


def paired_differences(own: Path, other: Path) -> dict[str, dict[str, float]]:
    """For each metric that both files have: mean of own - other over the prompts of both, its standard error, and the
    interval that holds 95% of its bootstrap samples."""
    ours, theirs = read_shares(own), read_shares(other)
    metrics = {name: sorted(set(ours[name]) & set(theirs[name])) for name in ours if name in theirs}
    if not any(metrics.values()):
        raise ValueError(
            f"{own} and {other} have no prompt and metric in common ({_contents(ours)}; {_contents(theirs)}): evaluate both "
            "with the same task, split and number of samples."
        )
    return {
        name: difference([ours[name][prompt] - theirs[name][prompt] for prompt in prompts])
        for name, prompts in metrics.items()
        if prompts
    }


def _contents(shares: Mapping[str, Mapping[str, float]]) -> str:
    return ", ".join(f"{name} of {len(values)} prompts" for name, values in shares.items()) or "nothing"


def difference(gaps: Sequence[float]) -> dict[str, float]:
    """Mean, standard error (of one prompt there is none) and bootstrap interval of differences that were found on each
    prompt."""
    values = np.asarray(gaps, np.float64)
    draw = np.random.default_rng(0)
    parts = [
        values[draw.integers(0, len(values), (RESAMPLES_AT_ONCE, len(values)))].mean(axis=1)
        for _ in range(RESAMPLES // RESAMPLES_AT_ONCE)
    ]
    low, high = np.quantile(np.concatenate(parts), [0.025, 0.975])
    error = {"standard_error": float(values.std(ddof=1) / np.sqrt(len(values)))} if len(values) > 1 else {}
    return {
        "difference": float(values.mean()),
        **error,
        "low": float(low),
        "high": float(high),
        "num_prompts": float(len(values)),
    }
