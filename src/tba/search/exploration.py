"""Optional off-policy exploration: visits that sample at another temperature or top-p, and responses of the reference beside
those of the policy, which do not narrow as the policy does.

Which visits explore, and how, is decided by the same counter-based numbers as tokens are, so it does not depend on timing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from tba.config import ExploreConfig
from tba.generate.engine import Engine
from tba.generate.sampling import response_key, uniforms
from tba.types import Completion, Prompt, Request, Sampling, Weights


def explore(request: Request, sampling: Sampling, config: ExploreConfig, *, seed: int) -> Request:
    """The request, with other sampling if this visit explores."""
    if config.probability == 0.0:
        return request
    key = response_key(seed, f"explore/{request.prompt.id}", request.first_sample)
    chosen, temperature, top_p = uniforms(torch.full((3,), key), torch.arange(3)).tolist()
    if chosen >= config.probability:
        return request
    exploring = replace(
        sampling,
        temperature=_between(config.temperature, temperature),
        policy_temperature=sampling.training_temperature,
        top_p=_between(config.top_p, top_p),
    )
    return replace(request, sampling=exploring)


def _between(bounds: tuple[float, float], u: float) -> float:
    low, high = bounds
    return low + (high - low) * u


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
