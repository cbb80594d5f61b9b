"""The rollouts of a searcher: their prompts, and the sampling of their responses.

Off-policy exploration samples some rollouts at another temperature, or adds responses of the reference, which does not
narrow as the policy does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tba.config import ExploreConfig
from tba.engine.contract import Engine
from tba.engine.sampling import response_key, uniforms
from tba.runtime.prompt_queue import RolloutRequest, RolloutSource
from tba.types import Completion, Prompt, Request, Sampling


class PromptStream:
    """Rollouts as requests to the engine. Sample indices of a prompt's rollouts follow on: no randomness comes twice."""

    def __init__(self, prompts: Sequence[Prompt], rollouts: RolloutSource, *, samples_per_prompt: int) -> None:
        self._prompts = prompts
        self._rollouts = rollouts
        self._samples_per_prompt = samples_per_prompt

    def peek(self) -> RolloutRequest | None:
        return self._rollouts.peek()

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        rollout = self._rollouts.take()
        return Request(
            prompt=self._prompts[rollout.prompt],
            first_sample=rollout.epoch * self._samples_per_prompt,
            rollout=rollout.number,
        )

    def take(self, count: int) -> list[Request]:
        return [next(self) for _ in range(count)]


def explore(request: Request, sampling: Sampling, config: ExploreConfig, *, seed: int) -> Request:
    """The request, with other sampling if this rollout explores."""
    if config.probability == 0.0:
        return request
    # By the same counter-based numbers as tokens are: which rollouts explore, and how, does not depend on timing.
    key = response_key(seed, f"explore/{request.prompt.id}", request.first_sample)
    chosen, temperature = uniforms(torch.full((2,), key), torch.arange(2)).tolist()
    if chosen >= config.probability:
        return request
    low, high = config.temperature
    exploring = replace(
        sampling,
        temperature=low + (high - low) * temperature,
        policy_temperature=sampling.training_temperature,
    )
    return replace(request, sampling=exploring)


@dataclass(frozen=True)
class ReferenceSamples:
    """`ReferenceSamples(engine, 16, sampling)(prompt, first_sample=112)` -> samples 112 to 127 of a rollout."""

    engine: Engine
    """An engine of its own with the reference's weights, not the one that searches."""
    count: int
    sampling: Sampling
    between_steps: Callable[[], None] | None = None

    def __call__(self, prompt: Prompt, *, first_sample: int) -> list[Completion]:
        found = self.engine.generate(
            [Request(prompt=prompt, first_sample=first_sample)],
            samples_per_prompt=self.count,
            sampling=self.sampling,
            between_steps=self.between_steps,
        )
        # The engine's policy is the reference, so the log-probs of the trained policy are not known.
        return [replace(each, policy_log_probs=np.full_like(each.policy_log_probs, np.nan)) for each in found]
