"""How far a policy has gone from the model it started as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

import numpy as np

from tba.evaluate.base import BetweenSteps, in_parts
from tba.generate.engine import Scorer
from tba.observe.metrics import mean_metrics
from tba.tasks.rewards.pool import FinishedGroup

RESPONSES_AT_ONCE = 256
"""Scored together, between two signs of life."""


@dataclass(frozen=True)
class Distance:
    """`Distance(start).kl(groups, temperature)`, with a scorer that holds the start model."""

    start: Scorer

    def kl(
        self, groups: Sequence[FinishedGroup], temperature: float, between_steps: BetweenSteps | None = None
    ) -> np.ndarray:
        """float64 [n], nats of each sampled response."""
        return kl_per_response(groups, self._log_probs(groups, temperature, between_steps))

    def perplexity(
        self, groups: Sequence[FinishedGroup], between_steps: BetweenSteps | None = None
    ) -> dict[str, float]:
        """The paper's, of any responses: `perplexity` of all of them as one text, `perplexity_per_sample` the mean of each
        response's own, as the official code has it."""
        log_start = self._log_probs(groups, 1.0, between_steps)
        per_sample = {"perplexity_per_sample": perplexity_per_sample(groups, log_start).tolist()}
        return {"perplexity": perplexity(groups, log_start), **mean_metrics(per_sample)}

    def _log_probs(
        self, groups: Sequence[FinishedGroup], temperature: float, between_steps: BetweenSteps | None
    ) -> list[np.ndarray]:
        """Of every response's tokens, group after group."""
        prompts = [group.prompt.token_ids for group in groups for _ in group.completions]
        responses = [completion.token_ids for group in groups for completion in group.completions]
        parts = in_parts(len(responses), RESPONSES_AT_ONCE, between_steps)
        return [scores for part in parts for scores in self.start.score(prompts[part], responses[part], temperature)]


def kl_per_response(groups: Sequence[FinishedGroup], log_start: Sequence[np.ndarray]) -> np.ndarray:
    """float64 [n]: for each sampled response log pi - log pi_start, summed over its tokens: nats."""
    completions = [completion for group in groups for completion in group.completions]
    return np.array([float((c.policy_log_probs - start).sum()) for c, start in zip(completions, log_start)])


def perplexity(groups: Sequence[FinishedGroup], log_start: Sequence[np.ndarray]) -> float:
    """exp(NLL of the responses under the start model / number of all tokens, prompts included)."""
    nll = -sum(float(start.sum()) for start in log_start)
    return exp(nll / max(1, sum(_num_tokens(groups))))


def perplexity_per_sample(groups: Sequence[FinishedGroup], log_start: Sequence[np.ndarray]) -> np.ndarray:
    """float64 [n]: for each response exp(its NLL under the start model / its tokens, its prompt's included)."""
    return np.array([exp(-float(start.sum()) / num) for start, num in zip(log_start, _num_tokens(groups))])


def _num_tokens(groups: Sequence[FinishedGroup]) -> list[int]:
    """Of each response with its prompt."""
    return [len(group.prompt.token_ids) + len(c.token_ids) for group in groups for c in group.completions]
