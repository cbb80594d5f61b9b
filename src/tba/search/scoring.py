"""Turn rewarded completions into trajectories: log-probs from the frozen reference, failed samples dropped and counted."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from tba.generate.engine import Scorer
from tba.tasks.base import Outcome, RewardFailed
from tba.tasks.rewards.pool import FinishedGroup, texts_of
from tba.types import Completion, Prompt, Trajectory, TrajectoryGroup, Weights

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
            logger.warning("sample dropped (%d so far): %s", self.total, reason)
        if self.in_a_row >= self.max_in_a_row:
            raise TooManyRewardFailures(
                f"the reward failed on {self.in_a_row} samples in a row; the last: {reason}. "
                "Fix the reward, or raise search.max_reward_failures."
            )


class GroupScorer:
    """Scores whole groups, several at once: the reference pass is cheaper in larger batches."""

    def __init__(
        self, *, reference: Scorer, temperature: float, failures: FailureCount, reference_version: int = 0
    ) -> None:
        self.reference = reference
        self.temperature = temperature
        self.failures = failures
        self.reference_version = reference_version

    def load_reference(self, weights: Weights) -> None:
        """From now on groups are scored by these weights; one group is always scored by one reference."""
        self.reference.load(weights)
        self.reference_version = weights.version

    def trajectories(self, groups: Sequence[tuple[FinishedGroup, list[Outcome]]]) -> list[tuple[Trajectory, ...]]:
        """Trajectories of each group, without the samples whose reward failed."""
        samples = [
            (index, group.prompt, completion, rewards, values)
            for index, (group, outcomes) in enumerate(groups)
            for completion, outcome, values in zip(group.completions, outcomes, group.values_of_samples())
            if (rewards := self._checked(group, outcome)) is not None
        ]
        if not samples:
            return [() for _ in groups]
        log_refs = self._log_refs([(prompt, completion) for _, prompt, completion, _, _ in samples])
        scored: list[list[Trajectory]] = [[] for _ in groups]
        for (index, _, completion, rewards, values), log_ref in zip(samples, log_refs):
            scored[index].append(self._trajectory(completion, rewards, log_ref, values))
        return [tuple(trajectories) for trajectories in scored]

    def _log_refs(self, samples: Sequence[tuple[Prompt, Completion]]) -> list[np.ndarray]:
        """Reference log-probs of each sample; equal responses to a prompt are computed once."""
        distinct = {(prompt.id, completion.token_ids.tobytes()): (prompt, completion) for prompt, completion in samples}
        scores = self.reference.score(
            [prompt.token_ids for prompt, _ in distinct.values()],
            [completion.token_ids for _, completion in distinct.values()],
            self.temperature,
        )
        by_response = dict(zip(distinct, scores))
        return [by_response[prompt.id, completion.token_ids.tobytes()] for prompt, completion in samples]

    def _trajectory(
        self, completion: Completion, rewards: Mapping[str, float], log_ref: np.ndarray, values: np.ndarray | None
    ) -> Trajectory:
        return Trajectory(
            completion=completion,
            rewards=rewards,
            log_ref=log_ref,
            reference_version=self.reference_version,
            loss_mask=np.ones(len(completion.token_ids), dtype=bool),
            step_values=values,
        )

    def _checked(self, group: FinishedGroup, outcome: Outcome) -> dict[str, float] | None:
        """Components of a sample with NaN for not-applicable ones; None = dropped, counted if its reward failed."""
        if isinstance(outcome, RewardFailed):
            self.failures.failure(f"{outcome} (prompt {group.prompt.id!r})")
            return None
        for name, value in outcome.items():
            if value is not None and not math.isfinite(value):
                self.failures.failure(f"{name} returned {value} (prompt {group.prompt.id!r})")
                return None
        self.failures.success()
        if all(value is None for value in outcome.values()):
            return None
        return {name: math.nan if value is None else float(value) for name, value in outcome.items()}


def group_texts(tokenizer: PreTrainedTokenizerBase, group: TrajectoryGroup) -> list[str]:
    return texts_of(tokenizer, [trajectory.completion for trajectory in group.trajectories])
