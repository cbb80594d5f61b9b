"""Optional off-policy exploration: some visits sample at another temperature or top-p.

Which visits, and how, is decided by the same counter-based numbers as tokens are, so it does not depend on timing.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tba.config import ExploreConfig
from tba.generate.sampling import response_key, uniforms
from tba.types import Request, Sampling


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
