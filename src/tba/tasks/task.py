"""The interface of a task: its prompts, the reward of a response, the rule by which it counts as solved, and its evaluation.
The types that a task takes and returns are here. `rewards/` and `evaluation.py` compute with them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from tba.config import Config, RewardConfig, TaskConfig
from tba.engine.contract import Engine, Scorer
from tba.engine.sampling import training_sampling
from tba.tasks.outcomes import Outcome
from tba.tasks.outcomes import RewardFailed as RewardFailed  # what a user's task imports from here
from tba.types import Completion, Prompt, Sampling

Split = Literal["train", "validation", "held_out"]
"""Name of a split: prompts that are trained on, tuned on, or reported on."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FinishedGroup:
    """A rollout whose responses are complete: FinishedGroup(prompt=..., completions=[...], texts=[...])"""

    prompt: Prompt
    completions: Sequence[Completion]
    texts: Sequence[str]
    rollout: int = -1
    """Number of the rollout among all rollouts of the run; -1 = it is not one of them."""
    step_values: Sequence[np.ndarray] | None = None
    """Monte-Carlo values of each response's steps, see Trajectory; None = not estimated."""

    def values_of_samples(self) -> Sequence[np.ndarray | None]:
        return [None] * len(self.completions) if self.step_values is None else self.step_values


class Rewards(Protocol):
    """Takes groups to score, hands them back with one outcome per sample, in any order."""

    @property
    def outstanding(self) -> int:
        """Number of groups submitted and not handed back yet."""
        ...

    def submit(self, group: FinishedGroup) -> None: ...

    def ready(self, wait_seconds: float = 0.0) -> list[tuple[FinishedGroup, list[Outcome]]]:
        """Groups that are scored; waits for an answer of a worker, but not longer than the time."""
        ...

    def close(self) -> None: ...


BetweenSteps = Callable[[], None]
"""Function called between decode steps and between parts of a long scoring: a heartbeat for processes that wait."""

KeepResponses = Callable[[str, Sequence[FinishedGroup], Sequence[Sequence[Outcome]], Sequence[Sequence[bool]]], None]
"""Function that is given the responses of an evaluation: (greedy or sampled, groups, their outcomes, whether solved)."""


class Evaluator(Protocol):
    """Says how good an engine's weights are, by metrics; the first one is the headline."""

    @property
    def prompts(self) -> Sequence[Prompt]:
        """Prompts that are evaluated on; empty = there is nothing to evaluate on."""
        ...

    def __call__(self, engine: Engine, between_steps: BetweenSteps | None = None) -> dict[str, float]: ...


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
        """Evaluator that says how good a policy is at this task; AnswerEvaluator where accuracy says it."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskInputs:
    """Arguments from which every task is made: TaskInputs(config=TaskConfig(), tokenizer=tokenizer,
    max_prompt_tokens=200)"""

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


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationInputs:
    """Arguments from which an evaluator is made: EvaluationInputs(config=config, tokenizer=tokenizer,
    rewards=DirectRewards(task))"""

    config: Config
    tokenizer: PreTrainedTokenizerBase
    rewards: Rewards
    """Rewards of the evaluator's own, not shared with a running search."""
    start: Callable[[], Scorer] | None = None
    """Function that gives a scorer with the start model, for KL; called only where KL is measured. None = it is not."""
    keep: KeepResponses | None = None
    """For tasks whose responses are right or wrong; None = responses are forgotten."""

    @property
    def sampling(self) -> Sampling:
        """Sampling of training."""
        return training_sampling(self.config)

    def prompts(self, task: Task) -> Sequence[Prompt]:
        """The first evaluate.num_prompts prompts of evaluate.split."""
        # The first ones and no draw: two runs are evaluated on the same prompts.
        return task.prompts(self.config.evaluate.split)[: self.config.evaluate.num_prompts]

    @property
    def final_beta(self) -> float | None:
        """Value of beta at the end of training; None where the target is shaped and reward - beta x KL not maximised."""
        last = self.config.train.max_steps or sys.maxsize  # a schedule in steps has reached its last value
        return self.config.beta_at(last, 1.0) if self.config.has_plain_target_at(last, 1.0) else None
