"""What tasks of other packages have in common: problems that are drawn by their place, and scores of the package's own rule.

Scores are computed in reward workers: a rule may compute for hours over a line of babble.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, ClassVar

from tba.config import RewardConfig
from tba.tasks.data.make_prompt import LazyPrompts, question_key
from tba.tasks.data.rows import BadRow
from tba.tasks.evaluation import AnswerEvaluator
from tba.tasks.outcomes import Outcome, RewardFailed
from tba.tasks.rewards.functions import RewardSet
from tba.tasks.task import EvaluationInputs, Evaluator, Split
from tba.types import Completion, Prompt, combined_reward

logger = logging.getLogger("tba.tasks")

Problem = Mapping[str, Any]
"""A problem with its `question`, text or chat messages."""
MOST_TRIES = 1000
"""Problems that are looked at for one that may be asked."""


class PackageTask:
    """Base of a task with one reward, `score`. `solved` means that it reaches 1."""

    reward_weights: ClassVar[Mapping[str, float]] = {"score": 1.0}

    def __init__(self, scorer: Callable[..., list[Any]], prompts: Mapping[Split, LazyPrompts]) -> None:
        self._scorer, self._prompts = scorer, prompts

    @property
    def isolated_rewards(self) -> Sequence[RewardConfig]:
        return (RewardConfig(function=self._scorer, name="score"),)

    def prompts(self, split: Split) -> Sequence[Prompt]:
        self._prompts["held_out"].at(0)  # whether prompts fit the model's context shows at once
        return self._prompts[split]

    def score(self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]) -> list[Outcome]:
        ids = [completion.token_ids.tolist() for completion in completions]
        return RewardSet({"score": self._scorer}).score(prompt.text, prompt.columns, texts, ids)

    def solved(self, outcome: Outcome) -> bool:
        if isinstance(outcome, RewardFailed):
            return False
        return combined_reward(outcome, self.reward_weights) >= 1.0 - 1e-9

    def make_evaluator(self, inputs: EvaluationInputs) -> Evaluator:
        return AnswerEvaluator(self, inputs, mean_rewards=True)


class DrawnPrompts(LazyPrompts):
    """The prompts of a split. A problem is replaced by the next where its prompt is too long for the model, or where another
    split (`without`) has its question."""

    def __init__(
        self,
        draw: Callable[[int], Problem],
        make: Callable[[str, Problem], Prompt],
        split: Split,
        count: int,
        *,
        without: Sequence[DrawnPrompts] = (),
    ) -> None:
        self._make, self._split, self._count, self._without = make, split, count, without
        # Held-out problems are few and asked again by every evaluation; some take a second to make.
        self._problem = draw if split == "train" else cache(draw)
        self._has_warned = False

    def __len__(self) -> int:
        return self._count

    def at(self, place: int) -> Prompt:
        too_long: BadRow | None = None
        for tried in range(min(self._count, MOST_TRIES)):
            problem = self._problem((place + tried) % self._count)
            if question_key(problem["question"]) in self._others:
                continue
            try:
                return self._make(f"{self._split}-{place}", problem)
            except BadRow as error:
                self._warn(error)
                too_long = error
        raise too_long or ValueError(
            f"task.settings.num_held_out: the generator has too few different questions for the split {self._split}: all "
            "of them are held out. Lower it, or give the generator options with more questions (task.settings.options)."
        )

    @cached_property
    def keys(self) -> frozenset[int]:
        """Keys of the questions that a prompt of this split may have."""
        return frozenset(question_key(self._problem(place)["question"]) for place in range(self._count))

    @cached_property
    def _others(self) -> frozenset[int]:
        # Drawn with the first prompt, and not in processes that only count prompts: slow generators take seconds.
        return frozenset[int]().union(*(other.keys for other in self._without))

    def _warn(self, error: BadRow) -> None:
        if not self._has_warned:
            logger.warning("%s Such problems are replaced by the next. Reported for the first only.", error)
        self._has_warned = True
