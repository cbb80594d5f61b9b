"""What travels over a Link between trainer and searchers, besides TrajectoryGroup itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

EVALUATES = 0
"""The searcher that is asked for evaluations."""


@dataclass(frozen=True, kw_only=True)
class Acknowledge:
    """Trainer to searcher: these groups are stored; forget them. Acknowledge(group_ids=("searcher-0/41",))"""

    group_ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Trainer to searcher: score the held-out prompts with this version or a newer one. Evaluate(version=100)"""

    version: int


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """Searcher to trainer: Evaluated(version=102, metrics={"accuracy": 0.61})"""

    version: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Trainer to searcher: end now."""
