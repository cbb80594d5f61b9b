"""The canary: a few teacher-forced tokens whose log-probs tell whether published weights are the ones in use.

The trainer evaluates it on what it publishes, each searcher on what it has loaded. A weight bundle that never reaches the
engine, or reaches it wrongly, shows as a difference even when checksum and version look right.
"""

from __future__ import annotations

import numpy as np

CANARY_TOKENS = 64
"""Teacher-forced tokens."""
SAFETY_FACTOR = 5.0
"""Tolerance = this x the gap at version 0, where both sides surely hold the same weights."""
SMALLEST_GAP = 1e-5
"""Gap assumed at least at version 0: two fp32 implementations may agree by luck."""
LARGEST_FIRST_GAP = 0.1
"""A larger gap at the first version is no rounding: the engine computes something else."""


class CanaryMismatch(RuntimeError):
    """The engine does not compute with the weights that were published."""


def canary_tokens(vocabulary: int, length: int) -> np.ndarray:
    """Fixed pseudo-random token ids, the same in every process."""
    return ((np.arange(length + 1, dtype=np.int64) * 7919 + 17) * 104729 % vocabulary).astype(np.int32)


def distance(left: np.ndarray, right: np.ndarray) -> float:
    """Mean absolute difference of log-probs, in nats per token."""
    return float(np.mean(np.abs(np.asarray(left, np.float64) - np.asarray(right, np.float64))))


class CanaryCheck:
    """Judges later versions by the gap at the first.

    An engine that still holds its first weights is caught by the same bound: once the trainer's canary has moved by more
    than two tolerances, being within one of the current value and of the first value is impossible.
    """

    def __init__(self) -> None:
        self.tolerance = 0.0
        """Nats per token; set at the first check."""

    def check(self, *, published: np.ndarray, computed: np.ndarray, version: int) -> float:
        """Raise unless `computed` is the canary of the published weights; returns the gap."""
        gap = distance(published, computed)
        if self.tolerance == 0.0:
            self.tolerance = SAFETY_FACTOR * max(min(gap, LARGEST_FIRST_GAP), SMALLEST_GAP)
        if gap > self.tolerance:
            raise CanaryMismatch(
                f"canary of version {version} differs by {gap:.3g} nats per token between trainer and searcher, tolerance "
                f"{self.tolerance:.3g}: the engine does not compute with the published weights."
            )
        return gap
