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

from tba.observe.files import check_may_replace
from tba.tasks.base import FinishedGroup
from tba.tasks.outcomes import Outcome, RewardFailed

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
        """Begin anew; says at once where the file cannot be written, or is something else."""
        check_may_replace("--responses", self.path, _is_responses)
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


def _is_responses(path: Path) -> bool:
    with path.open(encoding="utf-8") as file:
        return {"prompt_id", "kind", "responses"} <= json.loads(file.readline()).keys()


def _rewards(outcome: Outcome) -> dict[str, Any]:
    return {"reward_failed": str(outcome)} if isinstance(outcome, RewardFailed) else {"rewards": dict(outcome)}


def read_shares(path: Path) -> dict[str, dict[str, float]]:
    """By metric (accuracy, avg@k) and prompt id: the share of the prompt's responses that are solved."""
    return _read(path)[0]


def _read(path: Path) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, list[float]]]]:
    """The shares that are solved, and by metric (reward/NAME, reward@k/NAME) and prompt id the values of each reward."""
    found: dict[str, dict[str, float]] = {}
    rewards: dict[str, dict[str, list[float]]] = {}
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        for line in lines:
            solved = [bool(response["solved"]) for response in line["responses"]]
            is_greedy, count = line["kind"] == "greedy", len(solved)
            found.setdefault("accuracy" if is_greedy else f"avg@{count}", {})[line["prompt_id"]] = float(
                np.mean(solved)
            )
            for response in line["responses"]:
                for name, value in response.get("rewards", {}).items():
                    metric = f"{'reward' if is_greedy else f'reward@{count}'}/{name}"
                    if value is not None:
                        rewards.setdefault(metric, {}).setdefault(line["prompt_id"], []).append(float(value))
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror}. Give a file that --responses has written."
        ) from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{path} is not what --responses writes ({error!r}). Give a file that it has written."
        ) from None
    return found, rewards


def paired_differences(own: Path, other: Path) -> dict[str, dict[str, float]]:
    """For each metric that both files have: mean of own - other over the prompts of both, its standard error, and the
    interval that holds 95% of its bootstrap samples. Rewards that are all 0 or 1 are left out: the share that is solved says
    the same."""
    (ours, our_rewards), (theirs, their_rewards) = _read(own), _read(other)
    for name in sorted(our_rewards.keys() & their_rewards.keys()):
        both = (our_rewards[name], their_rewards[name])
        if any(value not in (0.0, 1.0) for values in both for of_prompt in values.values() for value in of_prompt):
            ours[name], theirs[name] = ({id: float(np.mean(of)) for id, of in values.items()} for values in both)
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
