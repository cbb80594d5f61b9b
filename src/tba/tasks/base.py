"""What a task is: prompts to solve, a reward for what was said, and when an answer counts as solved."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:  # reward workers import this file, and a killed one must not wait for torch and transformers again
    from transformers import PreTrainedTokenizerBase

    from tba.config import RewardConfig, TaskConfig
    from tba.tasks.evaluation import EvaluationInputs, Evaluator
    from tba.types import Completion, Prompt

Split = Literal["train", "validation", "held_out"]
"""Name of a split: prompts that are trained on, tuned on, or reported on."""


class RewardFailed(Exception):
    """A reward could not be computed for a sample; it is dropped and counted, never scored 0."""


class RewardBroken(RewardFailed):
    """A reward whose answers can never be used, whatever it is asked: the run stops at the first."""


Outcome = Mapping[str, float | None] | RewardFailed
"""Reward components of one sample by name (None = not applicable), or why there are none."""


def components_of(outcome: Outcome) -> Mapping[str, float | None] | None:
    """Reward components of a sample that has a reward; None = it has none, and neither training nor a mean over rewards
    counts it."""
    return None if isinstance(outcome, RewardFailed) or why_no_reward(outcome) else outcome


def why_no_reward(outcome: Outcome) -> str:
    """Why a sample has no reward; empty where it has one."""
    if isinstance(outcome, RewardFailed):
        return str(outcome)
    if all(value is None for value in outcome.values()):
        return "every reward was None (not applicable)"
    for name, value in outcome.items():
        if value is not None and not math.isfinite(value):
            return f"{name} returned {value}"
    return ""


class Task(Protocol):
    """A problem to train on. `score` is called by searchers, one prompt's samples at a time."""

    @property
    def isolated_rewards(self) -> Sequence[RewardConfig]:
        """Reward functions of a user, called in worker processes that can be killed when they hang; empty = the searcher
        itself calls `score`."""
        ...

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """Names of the components and their factors in the sum."""
        ...

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """The prompts of a split, always the same; a ValueError that says what to do where the task has no such split."""
        ...

    def score(self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]) -> list[Outcome]:
        """One outcome per sample; `texts` are the completions decoded without special tokens."""
        ...

    def solved(self, outcome: Outcome) -> bool:
        """Whether a sample counts as solved in evaluations."""
        ...

    def make_evaluator(self, inputs: EvaluationInputs) -> Evaluator:
        """Evaluator that says how good a policy is at this task; AnswerEvaluator.of_task where accuracy says it."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskInputs:
    """What every task is made from: TaskInputs(config=TaskConfig(), tokenizer=tokenizer, max_prompt_tokens=200)"""

    config: TaskConfig
    tokenizer: PreTrainedTokenizerBase
    max_prompt_tokens: int
    settings: Any = None
    """The task's own settings, task.settings: an instance of the task's class attribute `Settings`, a pydantic model; None
    for a task without that attribute."""
    trains: bool = True
    """Whether the task is to be trained on; False = it is made for an evaluation alone."""
    device: str = "auto"
    """Device of models that score, the policy's; auto = cuda where there is one, else cpu."""
