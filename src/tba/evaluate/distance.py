"""How far a policy has gone from the model it started as."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

import numpy as np

from tba.generate.engine import Scorer
from tba.tasks.rewards import FinishedGroup


def start_log_probs(start: Scorer, groups: Sequence[FinishedGroup], temperature: float) -> list[np.ndarray]:
    """Log-probs of every response's tokens under the start model, group after group."""
    samples = [(group.prompt.token_ids, completion.token_ids) for group in groups for completion in group.completions]
    return start.score([prompt for prompt, _ in samples], [response for _, response in samples], temperature)


def kl_per_response(groups: Sequence[FinishedGroup], log_start: Sequence[np.ndarray]) -> float:
    """Mean over sampled responses of log pi - log pi_start, summed over their tokens: nats."""
    completions = [completion for group in groups for completion in group.completions]
    gaps = [float((c.policy_log_probs - start).sum()) for c, start in zip(completions, log_start)]
    return sum(gaps) / max(1, len(gaps))


def perplexity(groups: Sequence[FinishedGroup], log_start: Sequence[np.ndarray]) -> float:
    """The paper's: exp(NLL of the responses under the start model / number of all tokens, prompts included)."""
    tokens = sum(len(group.prompt.token_ids) + len(c.token_ids) for group in groups for c in group.completions)
    return exp(-sum(float(start.sum()) for start in log_start) / max(1, tokens))
