"""What a task is: prompts to solve, a reward for what was said, and when an answer counts as solved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:  # reward workers import this file, and need not wait for torch
    from tba.types import Completion, Prompt

Split = Literal["train", "validation", "held_out"]
"""Trained on, tuned on, reported on."""


class RewardFailed(Exception):
    """A reward could not be computed for a sample; it is dropped and counted, never scored 0."""


Outcome = Mapping[str, float | None] | RewardFailed
"""Reward components of one sample by name (None = not applicable), or why there are none."""


class Task(Protocol):
    """A problem to train on. `score` is called by searchers, one prompt's samples at a time."""

    name: str
    isolated: bool
    """Whether its rewards are a stranger's code, to be run in worker processes that can be killed."""

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """Names of the components and their factors in the sum."""
        ...

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """The prompts of a split, always the same; a ValueError in words where the task has no such split."""
        ...

    def score(self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]) -> list[Outcome]:
        """One outcome per sample; `texts` are the completions decoded without special tokens."""
        ...

    def solved(self, outcome: Outcome) -> bool:
        """Whether a sample counts as solved in evaluations."""
        ...
