"""Responses of the reference beside the policy's: off-policy exploration that does not narrow with the policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tba.generate.engine import Engine
from tba.types import Completion, Prompt, Request, Sampling, Weights


@dataclass(frozen=True)
class ReferenceSamples:
    """`ReferenceSamples(engine, 16, sampling)(prompt, first_sample=112)` -> samples 112 to 127 of a visit."""

    engine: Engine
    """With the reference's weights; its own, not the one that searches."""
    count: int
    """Responses of each visit."""
    sampling: Sampling
    between_steps: Callable[[], None] | None = None

    def __call__(self, prompt: Prompt, *, first_sample: int) -> list[Completion]:
        found = self.engine.generate(
            [Request(prompt=prompt, first_sample=first_sample)],
            samples_per_prompt=self.count,
            sampling=self.sampling,
            between_steps=self.between_steps,
        )
        return [_of_unknown_policy(completion) for completion in found]

    def load(self, weights: Weights) -> None:
        """Another reference."""
        self.engine.load(weights)


def _of_unknown_policy(completion: Completion) -> Completion:
    """What the engine calls its policy is the reference; what the trained policy would have said is not known."""
    return replace(completion, policy_log_probs=np.full_like(completion.policy_log_probs, np.nan))
