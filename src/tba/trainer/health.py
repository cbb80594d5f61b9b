"""The collapse guard: the trained batches watched against their own recent past, and the answers to an alarm: healthy
checkpoints, the warning, the stop, and the rollback (`roll_back` in loop.py).

A collapse seldom announces itself in the reward: responses shrink to a few tokens, run into the length limit, or leave
the reference, and the reward follows. The present is the mean of the last RECENT batches, so that one odd batch is
silent. A step enters the past only when it has left the present and nothing was suspected meanwhile. Signs that a
healthy run shows too are silent while the reward rises: fewer tokens, a lower entropy and a distance to the reference
then look like learning.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from tba.config import Config
from tba.observe.recorder import Recorder
from tba.trainer.checkpoint import Checkpoints

logger = logging.getLogger("tba")

LENGTH, CLIPPED = "completions/mean_length", "completions/clipped_ratio"
ENTROPY, REWARD, KL = "entropy", "reward", "kl"
WATCHED = (LENGTH, CLIPPED, ENTROPY, REWARD, KL)

RECENT, PAST = 8, 80  # number of batches whose mean is the present, and most healthy batches that the past holds
FIRST_PAST, SETTLED_PAST = 16, 40
"""Number of healthy batches before anything is judged, and before small signs are: KL starts at 0 and has no usual value
yet, and stale data make some runs dip at first."""
PERSISTENCE, RECOVERY = 3, 10
"""Number of steps in a row that a rule must be broken to raise an alarm, and without a broken rule that end it."""
NEWEST, BACK = 2, 0.5
"""A breach is over if the last NEWEST batches have left at most this share of the way back to the healthy values."""

SHORT, LONG = 1 / 3, 3.0  # length, as a factor of the past one, below or above which responses have shrunk or grown
MOSTLY_CLIPPED, CLIPPED_RISE = 0.5, 0.25
"""Share of cut-off responses that is too many, and the part of it that must be new."""
FLAT, WILD = 1 / 5, 3.0  # entropy, as a factor of the past one, below or above which it counts as a sign
KL_NATS, KL_TIMES, KL_NOISE, KL_TIMES_HIGHEST = 0.5, 1.5, 4.0, 1.1
"""Distance to the reference that counts beside a fall of the reward: nats beyond the usual one, as a factor of that, in
noise of one batch, and as a factor of the highest (with stale weights distance and reward may swing again and again)."""
FALLEN_NOISE, FALLEN_SHARE = 1.5, 0.05
"""Fall of the reward that counts beside another sign: in noise of one batch, and as a share of its best."""
RISEN_NOISE = 0.5  # rise of the reward, in noise of one batch, with which short or cut-off responses are no sign
FAR_NOISE, FAR_SHARE, FIRST_FAR_SHARE = 3.0, 0.25, 0.5
"""Fall of the reward that counts alone: in noise of one batch, as a share of its best, and that share before the past is
settled."""

MEND = "Lower train.learning_rate or raise objective.beta, which pulls back to the reference"
ADVICE = {
    "short": f"{MEND}; allow longer responses before they are cut (generate.max_new_tokens).",
    "clipped": f"Allow longer responses (generate.max_new_tokens), or drop those cut off (train.truncated=drop). {MEND}.",
    "entropy": f"{MEND}.",
    "kl": f"{MEND}.",
    "reward": f"{MEND}; look at samples.jsonl for what the policy says now.",
}

LEAST_EVERY = 20  # steps between healthy checkpoints, at least
MOST_ROLLBACKS = 2  # a run that collapses again at a quarter of its learning rate has another trouble than the rate


@dataclass(frozen=True, kw_only=True)
class Breach:
    rule: str
    metric: str
    value: float  # mean of the last RECENT batches
    healthy: float  # median of the past; for the reward, its best
    message: str


@dataclass(frozen=True, kw_only=True)
class Alarm(Breach):
    """A breach that lasted. Its `message` is whole sentences that end with what to try."""

    step: int  # step at which the alarm was raised
    since: int  # first step of the batches that broke the rule: a checkpoint from before it is not of the collapse


class CollapseGuard:
    """Watches the metrics of every batch and raises an alarm while the run is collapsing."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, Mapping[str, float]]] = deque()
        self._past: deque[Mapping[str, float]] = deque(maxlen=PAST)
        self._streaks: dict[str, tuple[int, int]] = {}
        """Of each rule that is broken now the first step that counted, and the number of batches in a row."""
        self._quiet = 0
        self.alarm: Alarm | None = None  # the one that lasts; None = healthy

    def state(self) -> dict[str, Any]:
        return {**vars(self), "alarm": None if self.alarm is None else vars(self.alarm)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        vars(self).update({name: state[name] for name in vars(self)})
        self.alarm = None if state["alarm"] is None else Alarm(**state["alarm"])

    @property
    def suspects(self) -> bool:
        """Whether a rule is broken now or an alarm lasts; the weights are then not saved as healthy."""
        return bool(self._streaks) or self.alarm is not None

    def step(self, step: int, metrics: Mapping[str, float]) -> Alarm | None:
        """Take a step's metrics. Returns the alarm that lasts after it, the same object while it does."""
        values = {name: metrics[name] for name in WATCHED if math.isfinite(metrics.get(name, math.nan))}
        if len(values) < len(WATCHED):  # a step without responses says nothing
            return self.alarm
        self._recent.append((step, values))
        left = self._recent.popleft() if len(self._recent) > RECENT else None
        breaches: list[Breach] = []
        if len(self._past) >= FIRST_PAST:
            view = View([values for _, values in self._recent], self._past)
            breaches = [breach for breach in view.breaches() if not view.is_over(breach)]
        # The mean that breaks a rule is over all of RECENT: a checkpoint from within them is not from before.
        new = self._recent[0][0], 0
        streaks = [(breach.rule, self._streaks.get(breach.rule, new)) for breach in breaches]
        self._streaks = {rule: (since, batches + 1) for rule, (since, batches) in streaks}
        self._quiet = 0 if breaches else self._quiet + 1
        # The first rule that stays broken gives the alarm its words.
        lasting = [breach for breach in breaches if self._streaks[breach.rule][1] >= PERSISTENCE]
        if self.alarm is None and lasting:
            breach, since = lasting[0], self._streaks[lasting[0].rule][0]
            message = f"the run is collapsing, since about step {since}: {breach.message}. {ADVICE[breach.rule]}"
            self.alarm = Alarm(**{**vars(breach), "message": message}, step=step, since=since)
        elif self._quiet >= RECOVERY:
            self.alarm = None
        if left is not None and not self.suspects:  # a collapse never becomes its own yardstick
            self._past.append(left[1])
        return self.alarm


class View:
    def __init__(self, recent: Sequence[Mapping[str, float]], past: Sequence[Mapping[str, float]]) -> None:
        self._newest = recent[-NEWEST:]
        self._now = {name: statistics.fmean([values[name] for values in recent]) for name in WATCHED}
        self._past = {name: [values[name] for values in past] for name in WATCHED}
        self._settled = len(past) >= SETTLED_PAST

    @cached_property
    def _usual(self) -> Mapping[str, float]:
        return {name: statistics.median(values) for name, values in self._past.items()}

    @cached_property
    def _best_reward(self) -> float:
        """Best mean of 2 RECENT neighbours in the past: one lucky draw of prompts must not set it."""
        return _highest_mean(self._past[REWARD], 2 * RECENT)

    @cached_property
    def _reward_noise(self) -> tuple[float, float]:
        """Standard deviation of one batch's mean reward: of most batches (of all where most are equal), and with the rare
        batches that stand out, at least as large. A fall without another sign must exceed the second."""
        usual, counting = _usual_noise(self._past[REWARD]), _counting_noise(self._past[REWARD])
        return usual or counting, max(usual, counting)

    def _reward_fell(self, *, by: float, share: float) -> bool:
        """Whether the reward is below its best by more than `by` and by more than `share` of the best."""
        return self._best_reward - self._now[REWARD] > max(by, share * abs(self._best_reward))

    def breaches(self) -> Iterator[Breach]:
        now, usual, noise = self._now, self._usual, self._reward_noise[0]
        reward = f"the reward is {now[REWARD]:.3g} after {self._best_reward:.3g}"
        fell = self._reward_fell(by=FALLEN_NOISE * noise, share=FALLEN_SHARE)
        # Above the usual and not on its way down from its best. Being above the best is not asked: where responses become
        # concise at once, the best has followed the reward long before the usual length has followed the length.
        risen = now[REWARD] > usual[REWARD] + RISEN_NOISE * noise and not fell
        # Shrinking responses whose reward rises are merely concise.
        if now[LENGTH] < SHORT * usual[LENGTH] and not risen:
            message = f"responses have shrunk to {now[LENGTH]:.3g} tokens, usual were {usual[LENGTH]:.3g}; {reward}"
            yield self._breach("short", LENGTH, message)
        # Most responses are cut off now and were not, or they are three times as long and a good part is cut off.
        mostly = now[CLIPPED] >= MOSTLY_CLIPPED or now[LENGTH] > LONG * usual[LENGTH]
        if now[CLIPPED] - usual[CLIPPED] >= CLIPPED_RISE and mostly and not risen:
            shares = f"a share of {now[CLIPPED]:.3g} of the responses is cut off, usual was {usual[CLIPPED]:.3g}"
            yield self._breach("clipped", CLIPPED, f"{shares}; {reward}")
        # A learned task leaves little entropy and a high reward; only together with a falling one it is a collapse.
        if not FLAT * usual[ENTROPY] <= now[ENTROPY] <= WILD * usual[ENTROPY] and fell:
            message = f"entropy is {now[ENTROPY]:.3g} nats per token, usual was {usual[ENTROPY]:.3g}; {reward}"
            yield self._breach("entropy", ENTROPY, message)
        if self._left_reference():
            kl = f"the policy is {now[KL]:.3g} nats per response from the reference, usual was {usual[KL]:.3g}"
            yield self._breach("kl", KL, f"{kl}; {reward}")
        far = FAR_SHARE if self._settled else FIRST_FAR_SHARE
        if self._reward_fell(by=0.0, share=far) and self._reward_fell(by=FAR_NOISE * self._reward_noise[1], share=far):
            message = f"the reward has fallen to {now[REWARD]:.3g}, its best was {self._best_reward:.3g}"
            yield self._breach("reward", REWARD, message)

    def _left_reference(self) -> bool:
        """A policy that leaves the reference and earns less. The fall must exceed the widest noise: where rewards are rare,
        the best of the past is mostly luck, and a distance alone is what any learning from noise looks like."""
        now, usual = self._now[KL], abs(self._usual[KL])
        if not self._settled or now <= max(usual + KL_NATS, KL_TIMES * usual):
            return False
        highest = _highest_mean(self._past[KL], RECENT)
        far = now > max(usual + KL_NOISE * _usual_noise(self._past[KL]), KL_TIMES_HIGHEST * highest)
        return far and self._reward_fell(by=FALLEN_NOISE * self._reward_noise[1], share=FALLEN_SHARE)

    def _breach(self, rule: str, metric: str, message: str) -> Breach:
        healthy = self._best_reward if metric == REWARD else self._usual[metric]
        return Breach(rule=rule, metric=metric, value=self._now[metric], healthy=healthy, message=message)

    def is_over(self, breach: Breach) -> bool:
        """Whether the newest batches are back, in the metric of the breach and in the reward: a dip of a few steps would be
        called when there is nothing left to mend, and a run that goes back would lose what it has learned since."""
        healthy = {REWARD: self._best_reward, breach.metric: breach.healthy}
        return all(
            abs(statistics.fmean([values[name] for values in self._newest]) - value)
            < BACK * abs(self._now[name] - value)
            for name, value in healthy.items()
        )


def _usual_noise(values: Sequence[float]) -> float:
    """Robust standard deviation around a slow trend; differences of neighbours are sqrt(2) times as wide."""
    differences = [abs(after - before) for before, after in pairwise(values)]
    return statistics.median(differences) * 1.4826 / math.sqrt(2.0)


def _counting_noise(values: Sequence[float]) -> float:
    """Standard deviation around a slow trend, by the mean square of the differences of neighbours. Where rewards are 0 or 1
    and most batches have none, the robust estimate is 0; this one is right however rare the successes are."""
    squares = [(after - before) ** 2 for before, after in pairwise(values)]
    return math.sqrt(statistics.fmean(squares) / 2.0)


def _highest_mean(values: Sequence[float], width: int) -> float:
    """Highest mean of `width` neighbours, or of all where there are fewer."""
    width = min(width, len(values))
    return max(math.fsum(values[start : start + width]) for start in range(len(values) - width + 1)) / width


class Collapsed(RuntimeError):
    """The guard's alarm under observe.on_collapse=stop, or under rollback where the run cannot go back (again)."""


@dataclass
class Health:
    """Shows the guard every batch, keeps the newest checkpoint from before a collapse, warns or stops."""

    config: Config
    recorder: Recorder
    checkpoints: Checkpoints
    guard: CollapseGuard = field(default_factory=CollapseGuard, init=False)
    alarm: Alarm | None = field(default=None, init=False)  # the one that lasts

    def step(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """`metrics` are of all sampled responses. Returns them as guard/*, with guard/alarm. It comes before any checkpoint
        of the step is written, and `save_if_due` after it."""
        # The same groups again are no news: their noise from step to step looks far too small.
        if (step - 1) % self.config.steps_per_batch == 0:
            self._note_alarm(step, self.guard.step(step, metrics))
        held = self.checkpoints.held
        if not self.guard.suspects:
            # An older healthy checkpoint goes once a younger one can no longer turn out to be of a collapse: an alarm
            # dates the collapse back by fewer batches than these.
            proven_after = (RECENT + PERSISTENCE) * self.config.steps_per_batch + self._margin
            self._release(sorted(saved for saved in held if saved + proven_after <= step)[:-1])
        may_keep = self.checkpoints.keep > 0 and not self.guard.suspects
        if self.recorder.progress >= 1.0:
            self.finish()
        elif may_keep and self.recorder.passed_tenth and step - max(held, default=0) >= LEAST_EVERY:
            held.add(step)  # before any checkpoint of this step is written: it has to know of it
        watched = {f"guard/{name.rpartition('/')[2]}": value for name, value in metrics.items()}
        rollbacks = float(len(self.recorder.rollbacks))
        return {"guard/alarm": float(self.alarm is not None), "guard/rollbacks": rollbacks, **watched}

    def save_if_due(self, step: int) -> None:
        """Write a healthy checkpoint on schedule, after everything else of the step: a run can resume from it."""
        if step in self.checkpoints.held:
            self.checkpoints.save_held(step)

    def state(self) -> dict[str, Any]:
        return self.guard.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.guard.load_state(state)
        self.alarm = self.guard.alarm

    @property
    def rolls_back(self) -> bool:
        """Whether the run goes back now: it is asked to, it may once more, and there is a checkpoint to go back to."""
        may_go_back = self._goes_back and len(self.recorder.rollbacks) < MOST_ROLLBACKS
        return self.alarm is not None and may_go_back and self.kept is not None

    @property
    def kept(self) -> Path | None:
        """The newest checkpoint from before the collapse; None = there is none that the run could go on from."""
        kept = (self.recorder.collapse or {}).get("checkpoint")
        path = None if kept is None else self.recorder.folder.path / kept
        if path is None or not path.is_dir():
            return None
        # Of the first steps with a fixed lag it lacks the weights in use: they were those of the start.
        lacking = self.config.lag_steps if self.config.mode == "fixed_lag" else 0
        return path if int(path.name.rpartition("-")[2]) > lacking else None

    def stop_if_asked(self) -> None:
        """Raise while an alarm lasts, where it stops the run or the run could not go back."""
        if self.alarm is not None and self.config.observe.on_collapse in ("stop", "rollback"):
            message = [self.alarm.message, self._kept_message()]
            if self.recorder.rollbacks:
                message.append(f"Rollbacks before this: {len(self.recorder.rollbacks)}.")
            raise Collapsed(f"stopped at step {self.recorder.steps}: {' '.join(message)}")

    def finish(self) -> None:
        """The last step is made: a run without a collapse needs no healthy checkpoint any more."""
        if self.recorder.collapse is None:
            self._release(self.checkpoints.held)

    def _note_alarm(self, step: int, alarm: Alarm | None) -> None:
        before, self.alarm = self.alarm, alarm
        # The guard returns the same object while an alarm lasts: another one is new.
        if alarm is not None and alarm is not before:
            kept = self._keep_from_before(alarm.since)
            path = None if kept is None else str(kept.relative_to(self.recorder.folder.path))
            self.recorder.collapse = {**vars(alarm), "recovered": None, "checkpoint": path}
            if self.config.observe.on_collapse == "warn":
                logger.warning("step %d: %s %s", step, alarm.message, self._kept_message())
        elif alarm is None and before is not None:
            self.recorder.collapse = {**(self.recorder.collapse or {}), "recovered": step}
            logger.warning("step %d: the run has recovered from the collapse of step %d.", step, before.since)

    def _keep_from_before(self, since: int) -> Path | None:
        """The newest checkpoint from before that step stays, whatever is saved later; younger healthy ones were none. A run
        that goes back may need an older one too, when it collapses again."""
        on_disk = self.checkpoints.by_step()
        before = [step for step in on_disk if step < since]
        # To go back to, one is better whose last batches are all from before, and that the run has not gone back to yet:
        # it collapsed again from there.
        tried = {rollback["to"] for rollback in self.recorder.rollbacks}
        better = [step for step in before if step < since - self._margin and step not in tried]
        newest = max(better or before, default=-1)
        older = {step for step in self.checkpoints.held if self._goes_back and step < since}
        self._release(self.checkpoints.held - older - {newest})
        # One of the guard's own stays by `held`. A regular one needs the pin, or `keep` would drop it.
        if newest not in self.checkpoints.extra:
            self.checkpoints.pinned = newest if newest >= 0 else None
        return on_disk.get(newest)

    @property
    def _goes_back(self) -> bool:
        return self.config.observe.on_collapse == "rollback"

    @property
    def _margin(self) -> int:
        """Steps before a collapse that a checkpoint to go back to had better be from: a slow one begins before it shows."""
        return RECENT * self.config.steps_per_batch if self._goes_back else 0

    def _kept_message(self) -> str:
        path = (self.recorder.collapse or {}).get("checkpoint")
        if path is None:
            return "There is no checkpoint from before: it came too soon after the start."
        return f"The newest checkpoint from before is kept: {self.recorder.folder.path / path}."

    def _release(self, steps: Iterable[int]) -> None:
        for step in sorted(steps):
            self.checkpoints.release(step)
