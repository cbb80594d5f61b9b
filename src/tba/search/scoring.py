"""Turn finished completions into trajectories: rewards from the task, log-probs from the frozen reference.

A reward that raises, or gives NaN, costs that sample only: it is dropped and counted, never scored 0. Too many in a row
stop the run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from tba.generate.engine import Scorer
from tba.tasks.base import Task
from tba.types import Completion, Prompt, Trajectory, TrajectoryGroup

logger = logging.getLogger("tba.search")


class TooManyRewardFailures(RuntimeError):
    """The reward fails on every sample: the run stops instead of training on an outage."""


class FailureCount:
    """Counts samples lost to a failing reward, and stops after too many in a row."""

    def __init__(self, max_in_a_row: int) -> None:
        self.max_in_a_row = max_in_a_row
        self.total = 0
        self.in_a_row = 0

    def success(self) -> None:
        self.in_a_row = 0

    def failure(self, reason: str) -> None:
        self.total += 1
        self.in_a_row += 1
        if self.total <= 3 or self.total % 100 == 0:
            logger.warning("reward failed, sample dropped (%d so far): %s", self.total, reason)
        if self.in_a_row >= self.max_in_a_row:
            raise TooManyRewardFailures(
                f"the reward failed on {self.in_a_row} samples in a row; the last: {reason} "
                "Fix the reward, or raise search.max_reward_failures."
            )


class GroupScorer:
    """Scores whole groups, several at once: the reference pass is cheaper in larger batches."""

    def __init__(
        self,
        *,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        reference: Scorer,
        temperature: float,
        failures: FailureCount,
        reference_version: int = 0,
    ) -> None:
        self.task = task
        self.tokenizer = tokenizer
        self.reference = reference
        self.temperature = temperature
        self.failures = failures
        self.reference_version = reference_version

    def score(self, groups: Sequence[tuple[Prompt, Sequence[Completion]]]) -> list[tuple[Trajectory, ...]]:
        """Trajectories of each group, without the samples whose reward failed."""
        samples = [
            (index, prompt, completion, rewards)
            for index, (prompt, completions) in enumerate(groups)
            for completion, rewards in zip(completions, self._rewards(prompt, completions))
            if rewards is not None
        ]
        log_refs = self.reference.score(
            [prompt.token_ids for _, prompt, _, _ in samples],
            [completion.token_ids for _, _, completion, _ in samples],
            self.temperature,
        )
        scored: list[list[Trajectory]] = [[] for _ in groups]
        for (index, _, completion, rewards), log_ref in zip(samples, log_refs):
            scored[index].append(self._trajectory(completion, rewards, log_ref))
        return [tuple(trajectories) for trajectories in scored]

    def texts(self, completions: Sequence[Completion]) -> list[str]:
        return self.tokenizer.batch_decode([c.token_ids.tolist() for c in completions], skip_special_tokens=True)

    def group_texts(self, group: TrajectoryGroup) -> list[str]:
        return self.texts([trajectory.completion for trajectory in group.trajectories])

    def _trajectory(self, completion: Completion, rewards: Mapping[str, float], log_ref: np.ndarray) -> Trajectory:
        return Trajectory(
            completion=completion,
            rewards=rewards,
            log_ref=log_ref,
            reference_version=self.reference_version,
            loss_mask=np.ones(len(completion.token_ids), dtype=bool),
        )

    def _rewards(self, prompt: Prompt, completions: Sequence[Completion]) -> list[dict[str, float] | None]:
        """Components of each sample; None = dropped."""
        outcomes = self.task.score(prompt, self.texts(completions), completions)
        return [self._checked(prompt, outcome) for outcome in outcomes]

    def _checked(self, prompt: Prompt, outcome: Mapping[str, float | None] | Exception) -> dict[str, float] | None:
        if isinstance(outcome, Exception):
            self.failures.failure(f"{outcome} (prompt {prompt.id!r})")
            return None
        for name, value in outcome.items():
            if value is not None and not math.isfinite(value):
                self.failures.failure(f"{name} returned {value} for prompt {prompt.id!r}.")
                return None
        if all(value is None for value in outcome.values()):
            return None
        self.failures.success()
        return {name: math.nan if value is None else float(value) for name, value in outcome.items()}
