"""The standing check on weights: do searchers compute what the trainer computes, at one version?

Two measures of it, in nats per token (`kl_estimate` in models/weights.py): `off_policy/mismatch_kl` of what searchers really
generate (train/mismatch.py), and `searcher/i/mismatch_kl` of the canary's tokens, for every version that a searcher
compares. Rounding makes both greater than zero, by how much depends on model, precision and kernels. So they are judged by
what they were at the first versions, where both sides surely hold the same weights, as the canary's own check does, which
ends the run at a larger gap.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

logger = logging.getLogger("tba")

NAME = "mismatch_kl"
"""Last part of the names of the metrics that are watched."""
FIRST = 5
"""Measurements whose largest is the yardstick, of the canaries of all searchers and of the responses."""
MULTIPLE = 10.0
"""The limit divided by the yardstick. A KL grows with the square of the gap: this is about 3 times the gap, where the
canary's own check ends the run at 5 times."""
LEAST_LIMITS = {"canary": 1e-6, "responses": 1e-4}
"""Least limits in nats per token: gaps of .001 nats do nothing to training, however exact the first versions were; and
responses may have keys and values of older weights in their prompts, which is no fault."""
LASTING = {"canary": 3, "responses": 1}
"""Measurements one after the other that have to be beyond the limit. The canary's tokens are chosen at random, and a policy
that has learned gives some of them next to no probability: in bf16 single ones are then far apart at one version and near at
the next, where an engine with wrong weights stays wrong."""


@dataclass
class MismatchWatch:
    """Warns once for each rise of a mismatch beyond its limit that lasts."""

    _first: dict[str, list[float]] = field(default_factory=dict)
    """The first measurements, by what they are of."""
    _last: dict[str, float] = field(default_factory=dict)
    """The newest measurement, by metric: one that stands on the board for several steps counts once."""
    _high: list[str] = field(default_factory=list)
    """Metrics that are beyond their limit, each as often as it was in a row, up to the warning."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        watched = {name: value for name, value in metrics.items() if name.endswith(f"/{NAME}")}
        for name, value in watched.items():
            if not math.isnan(value) and value != self._last.get(name):
                self._last[name] = value
                self._judge(step, name, value)

    def _judge(self, step: int, name: str, value: float) -> None:
        measure = "canary" if name.startswith("searcher/") else "responses"
        first = self._first.setdefault(measure, [])
        if len(first) < FIRST:
            first.append(value)
            return
        yardstick = max(first)
        limit = max(MULTIPLE * yardstick, LEAST_LIMITS[measure])
        in_a_row = self._high.count(name)
        if value <= limit:
            self._high = [other for other in self._high if other != name]
        elif in_a_row < LASTING[measure]:
            self._high.append(name)
        if value > limit and in_a_row + 1 == LASTING[measure]:
            logger.warning(
                "step %d: %s is %.3g nats per token, at the first versions it was at most %.3g, the limit is %.3g (%g times "
                "that, at least %g): searchers no longer compute what the trainer computes. Compare with a run of "
                "generate.engine=transformers or model.dtype=float32.",
                *(step, name, value, yardstick, limit, MULTIPLE, LEAST_LIMITS[measure]),
            )
