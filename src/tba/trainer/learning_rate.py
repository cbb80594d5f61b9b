"""The learning rate of each update: a schedule that was given, or `auto`.

The effect of a rate depends on the model, the task and the state of Adam. The best size of an update in nats does not.
`auto` has each update move log_pi of a new response by

    train.target_drift x sqrt(signal x entropy)    nats.

The entropy is the entropy of a response, at most MOST_ENTROPY: log-probs of a policy's own samples differ by about its
square root. The signal is the correlation, within prompts, of the drift of new responses with their rewards. It is near 0
where updates follow noise. Measuring both costs nothing. A new batch was generated some updates ago and has not been trained
on, so its drift, log_pi now - log_pi when generated, comes from the updates in between.

1. No weight moves before the rewards of some prompt differ (trainer/updates.py). The first update has no drift to measure.
   It leaves a quarter of its batch out, and is scaled until it moves those responses by the size above. Later updates on
   equal rewards hardly move anything, and do not count.
2. The stiffness, drift per unit of rate, is averaged over the batches so far, at most MEMORY of them. The rate is the size
   above over the stiffness. It rises by at most RISE in a step.
3. A batch may have drifted further than the average explains. Its own update then uses its own stiffness, which stops a
   policy that runs away from its data at once.
4. Updates are longer in a run of few steps and shorter in a run of many, by the root of the number. In a run of n < STEPS
   steps the entropy counts up to STEPS / n times as much. Entropy beyond MOST_ENTROPY then counts in full, not by its root.
5. In the last half of the run the rate falls to zero.
6. A response is trained only while the policy has moved by at most MOST_DRIFT since. So the longer the updates, the fewer of
   them searchers may be behind (`most_lag`). A second update that would come too late is left out.

Where searcher and trainer take turns without a lag, nothing drifts. The change of the batch by its own update then replaces
the drift. It is divided by the ratio of the two in the first update, and the signal is USUAL_SIGNAL. The same holds where
responses are trained more than once, or drawn from all of replay: their drift includes their own push.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tba.config import Config

START = 1e-6  # rate of the first update before its scale is known: so low that it harms no model
USUAL_SIGNAL, LEAST_SIGNAL = 0.1, 0.03
"""The signal before the first batch shows it, and the least. It is known to .02 after 32 batches."""
LEAST_ENTROPY, MOST_ENTROPY = 0.01, 10.0
"""Nats per response. A surer policy has nothing left to learn by sampling. It hardly drifts, so the rate would grow without
end: it only falls. Over 200 steps, longer responses bear no longer updates: with 20 nats and more, most of what their root
asks for is noise (one_family: .92 instead of .98). In a run of few steps that noise costs less than what is not reached."""
MOST_DRIFT = 2.0  # nats that the policy may have moved since a response that is trained was begun
FIRST_STEPS = 8
"""Steps in which the first drift is waited for. A policy that has not moved by then is not learning."""
LAST_PART, LEAST_DECAY = 0.5, 0.1
"""Share of the run, at its end, in which the rate falls to zero. Below the second share of its height nothing is learned
about it any more: drifts become too small to measure."""
STEPS, MOST_HORIZON = 200, 5.0
"""Steps of a run for which train.target_drift holds, and the largest factor for shorter and longer runs."""
RISE, MEMORY = 2.0, 32
"""Largest factor by which the rate rises from one step to the next, and largest number of batches in an average."""
VERSIONS_KEPT = 1024  # number of versions whose rates are remembered; what is older counts as of the oldest


@dataclass
class LearningRate:
    config: Config
    rate: float = field(init=False)  # rate of `auto` before it falls at the end of the run
    stiffness: float = field(init=False, default=math.nan)
    """Log of the drift in nats that one update of rate 1 would make; NaN = not measured yet."""
    signal: float = field(init=False, default=USUAL_SIGNAL)
    entropy: float = field(init=False, default=math.nan)
    """Nats per response of the last batch, at least LEAST_ENTROPY; NaN = not measured yet."""
    batches: int = field(init=False, default=0)
    squares: float = field(init=False, default=0.0)
    """Sum of the squares of the rates of all updates: steps in directions of their own add up by their squares."""
    squares_before: deque[float] = field(init=False)  # the same before each of the last versions, the newest last
    own_factor: float = field(init=False, default=1.0)
    """How many times as far the first update moved its own batch as new responses."""
    horizon_factor: float = field(init=False, default=1.0)
    scale: float = field(init=False, default=1.0)
    """Factor of the given schedule, or of the size that `auto` aims at: less than 1 after a collapse."""

    def __post_init__(self) -> None:
        self.rate = START
        self.squares_before = deque([0.0], maxlen=VERSIONS_KEPT)

    @property
    def is_auto(self) -> bool:
        return self.config.train.learning_rate is None

    def at(self, step: int, progress: float) -> float:
        """For optimizer step `step` (0 is the first), before which `progress` (0 to 1) of the run is done."""
        if self.is_auto:
            return self.rate * self.decay(progress)
        return self.scale * self.config.learning_rate_at(step, progress)

    def decay(self, progress: float) -> float:
        """1, then in the last part of the run a straight line to 0."""
        return min(1.0, (1.0 - progress) / LAST_PART)

    def for_batch(
        self, step: int, progress: float, found: Mapping[str, float], *, entropy: float, now: float | None = None
    ) -> float:
        """The rate for a new batch, after what it shows of the updates before it. `now` is the share of the run that is done
        as its gradients are there; None = what was done before it."""
        self.horizon_factor = self.horizon(step, progress if now is None else now)
        if math.isfinite(entropy):
            self.entropy = max(LEAST_ENTROPY, entropy)
        # `squares` is of the updates between the generation of these responses and now, by their mean lag.
        drift, squares = found.get("off_policy/drift", 0.0), self._squares_since(found.get("off_policy/drift_lag", 0.0))
        if not (drift > 0.0 and squares > 0.0):
            return self.at(step, progress)
        # Only where no response of a batch was trained on before: the drift of one that was is its own push.
        train, replay = self.config.train, self.config.replay
        sees_new = train.updates_per_batch == replay.max_replay_ratio == replay.on_policy_probability == 1
        if sees_new and "off_policy/drift_reward_correlation" in found:
            self.signal += (found["off_policy/drift_reward_correlation"] - self.signal) / min(self.batches + 2, MEMORY)
        # log(drift / sqrt(sum of rate^2)): nats by an update of rate 1.
        stiffness = math.log(drift) - 0.5 * math.log(squares)
        self._follow(stiffness, progress)
        if not self.is_auto:
            return self.at(step, progress)
        # Point 3 above: the stiffness of a single batch may lower its rate, never raise it.
        return min(self.at(step, progress), self.size * math.exp(-stiffness) * self.decay(progress))

    def horizon(self, step: int, now: float) -> float:
        """Factor of the size of all updates. The fewer steps a run has, the longer its updates, by the root: noise averages
        out over many steps, and a run of few steps must get far in each."""
        train = self.config.train
        steps = math.inf if train.max_steps is None else float(train.max_steps)
        if train.max_seconds is not None and now > 0.0:
            steps = min(steps, (step + 1) / now)
        elif train.max_steps is None:
            return 1.0  # the number of steps is not known yet
        return min(MOST_HORIZON, max(1.0 / MOST_HORIZON, math.sqrt(STEPS / steps)))

    @property
    def size(self) -> float:
        """Nats that an update is to move log_pi of a new response by."""
        entropy = min(MOST_ENTROPY * max(1.0, self.horizon_factor**2), self.entropy)
        long = max(1.0, entropy / MOST_ENTROPY)
        target = self.scale * self.horizon_factor * self.config.train.target_drift
        return target * math.sqrt(max(LEAST_SIGNAL, self.signal) * entropy * long)

    def most_lag(self, step: int, progress: float) -> float:
        """Number of updates that the policy may be ahead of a response that is trained, by their length."""
        nats = self.next_drift(step, progress)
        if math.isnan(nats):
            # A prompt of each batch is one update behind: its drift measures the update. If it is not known after
            # FIRST_STEPS, no weight has moved yet.
            return 0.01 if step < FIRST_STEPS else math.inf
        return MOST_DRIFT / nats if nats > 0.0 else math.inf

    def next_drift(self, step: int, progress: float) -> float:
        """Nats that an update moves log_pi of a new response by; NaN = not known yet."""
        if self.is_auto and not math.isnan(self.stiffness):
            return self.size * self.decay(progress)  # the rate may still have to rise to it
        return self.at(step, progress) * math.exp(self.stiffness)

    def drift(self, progress: float) -> float:
        """Nats by which the next update will move it, as far as is known."""
        known = self.is_auto and not math.isnan(self.stiffness)
        return self.at(0, progress) * math.exp(self.stiffness) if known else 0.0

    def made(self, rate: float, *, of_new_batch: bool) -> None:
        self.squares += rate**2
        if of_new_batch:
            self.squares_before.append(self.squares)
        elif self.config.is_synchronous:
            self.squares_before[-1] = self.squares  # it is made before the version is published, otherwise after

    def moved(self, progress: float, *, new: float | None, own: float | None) -> None:
        """Take how far the last update moved new responses (known of the first update) and its own batch (known where
        nothing lags), in nats."""
        if new and own:
            self.own_factor = own / new
        nats, squares = new or (own or 0.0) / self.own_factor, self._squares_since(1.0)
        if nats > 0.0 and squares > 0.0:
            self._follow(math.log(nats) - 0.5 * math.log(squares), progress)

    def _follow(self, stiffness: float, progress: float) -> None:
        if self.decay(progress) < LEAST_DECAY or (self.entropy <= LEAST_ENTROPY and not stiffness > self.stiffness):
            return
        self.batches += 1
        before = stiffness if math.isnan(self.stiffness) else self.stiffness
        self.stiffness = before + (stiffness - before) / min(1 + self.batches / 3, MEMORY)
        # Only the rise is bounded: a rate that is too high falls at once.
        self.rate = min(RISE * self.rate, self.size * math.exp(-self.stiffness))

    def _squares_since(self, lag: float) -> float:
        """The sum over the updates of the last `lag` steps; of a mean lag between two numbers, in between."""
        kept, whole = len(self.squares_before) - 1, int(lag)
        newer, older = (self.squares_before[-1 - min(kept, steps)] for steps in (whole, whole + 1))
        return self.squares - (newer + (lag - whole) * (older - newer))

    def scale_down(self, scale: float) -> None:
        self.rate, self.scale = self.rate * scale / self.scale, scale

    def state(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in SAVED}, "squares_before": list(self.squares_before)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for name in SAVED:
            setattr(self, name, state[name])
        self.squares_before = deque(state["squares_before"], maxlen=VERSIONS_KEPT)


SAVED = ("rate", "stiffness", "signal", "entropy", "batches", "squares", "own_factor", "horizon_factor", "scale")
"""Attributes that a checkpoint holds, besides `squares_before`."""
