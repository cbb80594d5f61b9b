"""How far a policy has gone from the model it started as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

import numpy as np

from tba.evaluate.base import BetweenSteps, in_parts
from tba.generate.engine import Scorer
from tba.tasks.rewards import FinishedGroup

RESPONSES_AT_ONCE = 256
"""Scored together, between two signs of life."""


@dataclass(frozen=True)
class Distance:
    """`Distance(start).kl(groups, temperature)`, with a scorer that holds the start model."""

    start: Scorer

    def kl(
        self, groups: Sequence[FinishedGroup], temperature: float, between_steps: BetweenSteps | None = None
    ) -> float:
        """Of sampled responses, nats per response."""
        return kl_per_response(groups, self._log_probs(groups, temperature, between_steps))

    def perplexity(self, groups: Sequence[FinishedGroup], between_steps: BetweenSteps | None = None) -> float:
        """The paper's, of any responses."""
        return perplexity(groups, self._log_probs(groups, 1.0, between_steps))

    def _log_probs(
        self, groups: Sequence[FinishedGroup], temperature: float, between_steps: BetweenSteps | None
    ) -> list[np.ndarray]:
        """Of every response's tokens, group after group."""
        prompts = [group.prompt.token_ids for group in groups for _ in group.completions]
        responses = [completion.token_ids for group in groups for completion in group.completions]
        parts = in_parts(len(responses), RESPONSES_AT_ONCE, between_steps)
        return [scores for part in parts for scores in self.start.score(prompts[part], responses[part], temperature)]


def kl_per_response(groups: Sequence[FinishedGroup], log_start: Sequence[np.ndarray]) -> float:
    """Mean over sampled responses of log pi - log pi_start, summed over their tokens: nats."""
    completions = [completion for group in groups for completion in group.completions]
    gaps = [float((c.policy_log_probs - start).sum()) for c, start in zip(completions, log_start)]
    return sum(gaps) / max(1, len(gaps))


def perplexity(groups: Sequence[FinishedGroup], log_start: Sequence[np.ndarray]) -> float:
    """exp(NLL of the responses under the start model / number of all tokens, prompts included)."""
    tokens = sum(len(group.prompt.token_ids) + len(c.token_ids) for group in groups for c in group.completions)
    return exp(-sum(float(start.sum()) for start in log_start) / max(1, tokens))
