"""The learning rate of each step: a schedule that was given, or `auto`, which follows how far the policy moves.

What a rate does depends on the model's size, on LoRA, on Adam's state, on the length of responses and on how sure the policy
is; what can be chosen once for all of them is the movement. After an update some responses of its batch are scored again,
and their mean |change of log_pi|, in units of the square root of their entropy, is compared with train.movement: the rate is
multiplied so that the next steps come nearer to it. It begins at a tenth of a guess from the model's size, so that a guess
ten times too high does no harm, and in the last part of the run (train.settle) it falls to zero, so that the noise of single
steps averages out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from tba.config import Config

FIRST_SHARE = 0.1
"""Of the guess: Adam's first steps are full ones, whatever the gradient."""
MAX_RISE, MAX_FALL = 1.25, 0.67
"""Factors in one step: a hundredfold rise takes 21 steps, a tenfold fall 6."""
GAIN = 0.3
"""Exponent of the correction: the movement of a few responses is a noisy measure."""
FURTHEST = 30.0
"""The rate stays within this factor of the guess: where nothing is left to learn there is no movement to follow."""
LEAST_SHAPE = 0.2
"""Below this share of its height the rate only falls: movements become too small to measure well."""
MEASURED_STEPS, MEASURED_EVERY = 40, 4
"""The movement is measured after every one of the first steps, later after every fourth: it costs a forward pass over a few
responses."""


@dataclass
class LearningRate:
    """The rate in use; what it has learned is part of a checkpoint."""

    config: Config
    rate: float = field(init=False)
    """Of `auto` before it falls at the end."""

    def __post_init__(self) -> None:
        self.rate = FIRST_SHARE * self.guess

    @property
    def is_auto(self) -> bool:
        return self.config.train.learning_rate is None

    @property
    def guess(self) -> float:
        return self.config.train.first_learning_rate or 0.0

    def at(self, step: int) -> float:
        """For optimizer step `step` (0 is the first)."""
        return self.rate * self.shape(step) if self.is_auto else self.config.learning_rate_at(step)

    def shape(self, step: int) -> float:
        """1, then in the last part of the run a straight line to 0."""
        train = self.config.train
        falling = train.settle * train.max_steps
        return min(1.0, (train.max_steps - step) / falling) if falling > 0 else 1.0

    def measures(self, step: int) -> bool:
        """Whether this step's movement is asked for."""
        due = step < MEASURED_STEPS or step % MEASURED_EVERY == 0
        return self.is_auto and due and self.shape(step) >= LEAST_SHAPE

    def follow(self, step: int, moved: float) -> None:
        """`moved` is what `TrainStep.movement` measured of this step."""
        wanted = self.wanted * self.shape(step)
        factor = (wanted / max(moved, 1e-12)) ** GAIN
        rate = self.rate * min(MAX_RISE, max(MAX_FALL, factor))
        self.rate = min(FURTHEST * self.guess, max(self.guess / FURTHEST, rate))

    @property
    def wanted(self) -> float:
        """train.movement, less where each response is trained several times: what the policy moves between generating and
        training a response grows with the steps between them."""
        return self.config.train.movement / math.sqrt(max(1.0, self.config.replay.max_trained_per_generated or 1.0))

    def state(self) -> dict[str, Any]:
        return {"rate": self.rate}
