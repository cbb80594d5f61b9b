"""Optional off-policy exploration: some visits sample at another temperature or top-p.

Which visits, and how, is decided by the same counter-based numbers as tokens are, so it does not depend on timing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tba.config import ExploreConfig
from tba.types import Request, Sampling


def explore(
    request: Request, sampling: Sampling, config: ExploreConfig, uniform: Callable[[str, int], float]
) -> Request:
    """The request, with other sampling if this visit explores. `uniform(key, position)` gives numbers in (0, 1)."""
    if config.probability == 0.0:
        return request
    key = f"explore/{request.prompt.id}/{request.first_sample}"
    if uniform(key, 0) >= config.probability:
        return request
    chosen = replace(
        sampling,
        temperature=_between(config.temperature, uniform(key, 1)),
        policy_temperature=sampling.training_temperature,
        top_p=_between(config.top_p, uniform(key, 2)),
    )
    return replace(request, sampling=chosen)


def _between(bounds: tuple[float, float], u: float) -> float:
    low, high = bounds
    return low + (high - low) * u
