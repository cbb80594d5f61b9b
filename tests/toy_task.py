"""A task for tests that a random model can learn in seconds: say token 7 as often as you can."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tba.tasks.base import Outcome, Split
from tba.types import Completion, Prompt


class ToyTask:
    """Reward = share of the response's tokens that are 7."""

    name = "toy"
    isolated = False
    reward_weights = {"sevens": 1.0}  # noqa: RUF012

    def __init__(self, num_prompts: int = 12, vocabulary: int = 40) -> None:
        rng = np.random.default_rng(0)
        self._prompts = [
            Prompt(
                id=f"toy-{i}", token_ids=rng.integers(3, vocabulary, rng.integers(2, 7)).astype(np.int32), text=f"p{i}"
            )
            for i in range(num_prompts)
        ]

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return self._prompts if split == "train" else self._prompts[:4]

    def score(self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]) -> list[Outcome]:
        return [{"sevens": float(np.mean(c.token_ids == 7))} for c in completions]

    def solved(self, outcome: Outcome) -> bool:
        return isinstance(outcome, dict) and outcome["sevens"] > 0.5
