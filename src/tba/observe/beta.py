"""Does beta fit the rewards? Trajectory balance aims at pi_ref exp(r / beta): how far that is from the reference depends on
how far the rewards of one prompt lie apart, in units of beta, and beyond it nothing can be earned.

Told to the user: at the first rewards both numbers beside each other; during the run, once, when the policy has come near
the target and rewards still differ; at the end what was reached.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger("tba")

REACHED, SPREAD = "tb/target_reached", "tb/reward_spread"
FIRST = 4
"""Batches whose mean spread is told at the start: one batch of sparse rewards says little."""
RECENT = 20
"""Batches over which the share that was reached is averaged."""
FEW_NATS = 4.0
"""Spread of the rewards in units of beta below which the target is near: a normal reward has it at a KL of 4^2 / 2 nats."""
GOOD_NATS = 20.0
"""Spread of the rewards in units of beta that a proposed beta gives."""
NEAR = 0.4
"""Share of the way to the target from which on beta holds back what is earned (notes/)."""


@dataclass
class BetaWatch:
    """Puts beta beside the rewards' spread, batch by batch."""

    _spreads: list[float] = field(default_factory=list)
    """Spreads of the first batches."""
    _reached: list[tuple[float, float]] = field(default_factory=list)
    """Shares reached in the last batches, with the spread of their rewards."""
    _beta: float = 0.0
    """The last one."""
    _spread: float = 0.0
    """The last one."""
    _told_near: bool = False

    def step(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Take a step's metrics; without those of trajectory balance they say nothing. Returns a line for the screen, once,
        where all is well; what is not is a warning."""
        spread = metrics.get(SPREAD, 0.0)
        if not (math.isfinite(spread) and spread > 0.0 and math.isfinite(metrics[REACHED]) and metrics["beta"] > 0.0):
            return None
        self._beta, self._spread, line = metrics["beta"], metrics[SPREAD], None
        if len(self._spreads) < FIRST:
            self._spreads.append(self._spread)
            if len(self._spreads) == FIRST:
                line = self._start_line()
        self._reached = [*self._reached, (metrics[REACHED], spread)][-RECENT:]
        if len(self._reached) == RECENT and self.is_near and not self._told_near:
            self._told_near = True
            logger.warning("step %d: %s", step, self.words)
        return line

    @property
    def reached(self) -> float:
        """Share of the way from the reference to the target, over the last batches: each counts as the square of its spread,
        as the rewards of one large batch would."""
        squares = sum(spread**2 for _, spread in self._reached)
        return sum(share * spread**2 for share, spread in self._reached) / squares if squares else 0.0

    @property
    def is_near(self) -> bool:
        return self.reached > NEAR

    @property
    def words(self) -> str:
        return (
            f"the policy has come {min(1.0, self.reached):.0%} of the way to what objective.beta={self._beta:g} aims at, "
            f"while the rewards of one prompt still lie {self._spread:.2g} apart (standard deviation): a lower beta lets it "
            f"earn more, for example {self._beta / 5:.1g}."
        )

    def summary(self) -> dict[str, Any] | None:
        """{"beta": 0.05, "reward_spread": 0.11, "target_reached": 0.62, "words": "..."}, words where beta holds the run
        back; None where there is no target, or rewards never differed."""
        if not self._reached:
            return None
        return {
            "beta": self._beta,
            "reward_spread": float(f"{self._spread:.3g}"),
            "target_reached": round(self.reached, 3),
            "words": self.words if self.is_near and len(self._reached) == RECENT else None,
        }

    def _start_line(self) -> str | None:
        spread = sum(self._spreads) / len(self._spreads)
        nats = spread / self._beta
        words = (
            f"rewards of one prompt lie {spread:.2g} apart (standard deviation), which is {nats:.2g} times "
            f"objective.beta={self._beta:g}"
        )
        if nats >= FEW_NATS:
            return f"{words}."
        logger.warning(
            "%s: the target is near the reference, and little can be earned. Set objective.beta=%g or lower, or give the "
            "rewards a larger weight.",
            *(words, rounded_beta(spread / GOOD_NATS)),
        )
        return None


def rounded_beta(value: float) -> float:
    """The value rounded down to 1, 2 or 5 times a power of ten: rounded_beta(0.0078) == 0.005"""
    power = 10.0 ** math.floor(math.log10(value))
    return float(f"{max(digit for digit in (1, 2, 5) if digit * power <= value * (1 + 1e-9)) * power:.0e}")
