"""From the config to how tokens are chosen."""

from __future__ import annotations

from tba.config import Config
from tba.types import Sampling


def training_sampling(config: Config) -> Sampling:
    """How searchers sample: the tempered policy, truncated only where asked."""
    generate = config.generate
    return Sampling(
        max_new_tokens=generate.max_new_tokens,
        min_new_tokens=generate.min_new_tokens,
        temperature=generate.temperature,
        top_p=generate.top_p,
        top_k=generate.top_k,
    )
