"""The outcome of a sample: its reward components by name, or the reason why it has none.

Reward workers import this file, and a killed one must not wait for torch and transformers again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping


class RewardFailed(Exception):
    """A reward could not be computed for a sample; it is dropped and counted, never scored 0."""


class RewardBroken(RewardFailed):
    """A reward whose answers can never be used, whatever it is asked: the run stops at the first."""


Outcome = Mapping[str, float | None] | RewardFailed
"""Reward components of one sample by name (None = not applicable), or why there are none."""


def components_of(outcome: Outcome) -> Mapping[str, float | None] | None:
    """Reward components of a sample that has a reward; None = it has none, and neither training nor a mean over rewards
    counts it."""
    return None if isinstance(outcome, RewardFailed) or why_no_reward(outcome) else outcome


def why_no_reward(outcome: Outcome) -> str:
    """Why a sample has no reward; empty where it has one."""
    if isinstance(outcome, RewardFailed):
        return str(outcome)
    # all() of no components is True: an empty outcome is no reward either.
    if all(value is None for value in outcome.values()):
        return "every reward was None (not applicable)"
    for name, value in outcome.items():
        if value is not None and not math.isfinite(value):
            return f"{name} returned {value}"
    return ""
