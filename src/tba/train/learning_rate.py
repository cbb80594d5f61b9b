"""The learning rate of each update: a schedule that was given, or `auto`.

What a rate does depends on the model, the task and the state of Adam. What it should do can be said once. An update should
move log_pi of responses that it has not seen by

    SIZE x signal x sqrt(entropy)    nats,

where the entropy is that of a response, and the signal is the share of an update that is not noise: the correlation, within
prompts, of the drift of new responses with their rewards. (An update of length m gains in proportion to m x signal and
loses in proportion to m^2, so the best length is in proportion to the signal. Log-probs of a policy's own samples lie about
sqrt(entropy) apart.) Both drift and signal are measured for nothing: a new batch has been generated some updates ago, and
was not trained on since.

The first update has nothing to go by: it is made longer or shorter until it moves its own batch by FIRST x sqrt(entropy).
From then on the stiffness, drift per unit of rate, is a mean over batches that becomes longer as the run goes on; where one
batch has drifted further than the mean explains, the next update is shortened at once. At the end of the run
(train.settle) the rate falls to zero.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tba.config import Config

_X = json.loads(os.environ.get("TBA_X", "{}"))

FIRST = _X.get("first", 0.3)
SIZE = _X.get("size", 0.18)
USUAL, LEAST, MOST = _X.get("usual", 0.1), _X.get("least", 0.03), _X.get("most", 0.5)
RISE = _X.get("rise", 2.0)
MEMORY = _X.get("memory", 32)
LEAST_DECAY = 0.1


@dataclass
class LearningRate:
    """The rate in use; what it has learned is part of a checkpoint."""

    config: Config
    exact_drift: bool = True
    rate: float = field(init=False)
    stiffness: float = field(init=False, default=math.nan)
    """Log of the drift by one update over its rate."""
    signal: float = field(init=False, default=USUAL)
    entropy: float = field(init=False, default=0.0)
    measured: int = field(init=False, default=0)
    path: deque[float] = field(init=False, default_factory=lambda: deque([0.0], maxlen=1024))
    """Sum of the squares of all rates used before each version, the newest last."""
    used: float = field(init=False, default=0.0)
    drift: float = field(init=False, default=0.0)
    scale: float = field(init=False, default=1.0)

    def __post_init__(self) -> None:
        self.rate = self.config.train.first_learning_rate or 0.0

    @property
    def is_auto(self) -> bool:
        return self.config.train.learning_rate is None

    def at(self, step: int) -> float:
        """For optimizer step `step` (0 is the first)."""
        if self.is_auto:
            return self.rate * self.decay(step)
        return self.scale * self.config.learning_rate_at(step)

    def decay(self, step: int) -> float:
        """1, then in the last part of the run a straight line to 0."""
        train = self.config.train
        falling = train.settle * train.max_steps
        return min(1.0, (train.max_steps - step) / falling) if falling > 0 else 1.0

    def first_movement(self, step: int) -> float | None:
        return FIRST if self.is_auto and step == 0 else None

    def begin(self, step: int, rate: float, is_new: bool) -> None:
        """Takes the rate of an update that was made."""
        self.used += rate**2
        if is_new:
            self.path.append(self.used)
            if self.is_auto and step == 0:
                self.rate = rate

    def see_entropy(self, nats: float) -> None:
        self.entropy += (max(0.01, nats) - self.entropy) / (8 if self.entropy else 1)

    def _since(self, lag: float) -> float:
        """Sum of the squares of the rates used in the last `lag` steps."""
        low = min(len(self.path) - 1, int(lag))
        high = min(len(self.path) - 1, low + 1)
        then = self.path[-1 - low] + (lag - int(lag)) * (self.path[-1 - high] - self.path[-1 - low])
        return self.used - then

    def after(self, step: int, found: Mapping[str, float]) -> float:
        if not self.is_auto or not found.get("drift_lag") or self.decay(step) < LEAST_DECAY:
            return self.at(step)
        drift = found["off_policy/drift"]
        squares = self._since(found["drift_lag"])
        if drift <= 0.0 or squares <= 0.0 or not _X.get("follow", 1):
            return self.at(step)
        if self.exact_drift:
            agreement = found.get("off_policy/agreement", self.signal)
            self.signal += (agreement - self.signal) / min(self.measured + 2, MEMORY)
        else:
            noise = _X.get("noise", 0.016) * math.sqrt(found["tokens"])
            drift = math.sqrt(max(drift**2 - noise**2, (0.3 * drift) ** 2))
        return self.correct(step, math.log(drift) - 0.5 * math.log(squares))

    def correct(self, step: int, stiffness: float) -> float:
        if math.isnan(self.stiffness):
            self.stiffness = stiffness
        self.measured += 1
        self.stiffness += (stiffness - self.stiffness) / min(1 + self.measured / 3, MEMORY)
        target = self.scale * SIZE * min(MOST, max(LEAST, self.signal)) ** _X.get("power", 0.5) * math.sqrt(self.entropy)
        self.rate = min(RISE * self.rate, target * math.exp(-self.stiffness))
        self.drift = self.rate * self.decay(step) * math.exp(self.stiffness)
        return min(self.rate, target * math.exp(-stiffness)) * self.decay(step) if _X.get("brake", 1) else self.at(step)

    def soften(self, scale: float) -> None:
        self.rate, self.scale = self.rate * scale / self.scale, scale

    def state(self) -> dict[str, Any]:
        own = ("rate", "stiffness", "signal", "entropy", "measured", "used", "drift", "scale")
        return {"path": list(self.path), **{name: getattr(self, name) for name in own}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        vars(self).update({**state, "path": deque(state["path"], maxlen=1024)})
