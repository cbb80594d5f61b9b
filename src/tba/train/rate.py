"""The learning rate of each step: a schedule, or one that follows how far the policy moves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tba.config import Config

MAX_FACTOR = 1.25
GAIN = 0.3


@dataclass
class LearningRate:
    """The rate in use; state of the trainer."""

    config: Config
    scale: float = field(default=1.0, init=False)
    """Times the schedule."""

    def __post_init__(self) -> None:
        self.scale = self.config.train.rate_scale
        if self.config.train.rate_target is not None:
            self.scale *= 0.1

    def shape(self, step: int) -> float:
        kind, done = self.config.train.rate_shape, step / self.config.train.max_steps
        warm = min(1.0, (step + 1) / 10) if kind != "constant" else 1.0
        if kind == "linear":
            return warm * (1.0 - done)
        if kind == "wsd":
            return warm * min(1.0, 2.0 * (1.0 - done))
        return 1.0

    def at(self, step: int) -> float:
        return self.scale * self.shape(step) * self.config.learning_rate_at(step)

    def observe(self, step: int, movement: float) -> None:
        target, shape = self.config.train.rate_target, self.shape(step)
        if target is None or movement <= 0.0 or shape < 0.3:
            return
        factor = math.sqrt(target * shape**2 / movement) ** GAIN
        self.scale *= min(MAX_FACTOR, max(1.0 / MAX_FACTOR, factor))
