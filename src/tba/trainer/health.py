"""The collapse guard: the trained batches watched against their own recent past, and the answers to an alarm:
healthy checkpoints, the warning, the stop, and the rollback (`roll_back` in loop.py).

A collapse seldom announces itself in the reward: responses shrink to a few tokens, run into the length limit, or leave the
reference, and the reward follows. The past is raw values of healthy steps; the present is the mean of the last RECENT, so
that one odd batch is silent, and so is a dip that is over by the time the mean shows it. A step enters the past only when it
has left the present and nothing was suspected meanwhile: a collapse never becomes its own yardstick.

Signs that a healthy run shows too are silent while the reward rises: fewer tokens, a lower entropy and a distance to the
reference then look like learning.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
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

RECENT = 8
"""Number of batches whose mean is the present."""
PAST = 80
"""Most healthy batches that the past holds."""
FIRST_PAST = 16
"""Number of healthy batches before anything is judged."""
SETTLED_PAST = 40
"""Number of healthy batches before small signs are judged: KL starts at 0 and has no usual value yet, and stale data make
some runs dip at first."""
PERSISTENCE = 3
"""Number of steps in a row that a rule must be broken to raise an alarm."""
NEWEST = 2
"""Number of batches, the last ones, by which a breach may be over while the mean of RECENT still shows it."""
BACK = 0.5
"""Share of the way back to the healthy values that the newest batches must have left at most for that."""
RECOVERY = 10
"""Number of steps in a row without a broken rule that end an alarm."""

SHORT, LONG = 1 / 3, 3.0
"""Length, as a factor of the past one, below or above which responses have shrunk or grown."""
MOSTLY_CLIPPED, CLIPPED_RISE = 0.5, 0.25
"""Share of cut-off responses that is too many, and the part of it that must be new."""
FLAT, WILD = 1 / 5, 3.0
"""Entropy, as a factor of the past one, below or above which it counts as a sign."""
KL_NATS = 0.5
"""Distance to the reference, in nats beyond the usual one, that is the least to count."""
KL_TIMES, KL_NOISE = 1.5, 4.0
"""Distance to the reference that counts beside a fall of the reward: as a factor of the usual one, in noise of one batch."""
KL_TIMES_HIGHEST = 1.1
"""Distance to the reference that counts, as a factor of the highest of the past: with stale weights distance and reward may
swing, again and again as far."""
FALLEN_NOISE, FALLEN_SHARE = 1.5, 0.05
"""Fall of the reward that counts beside another sign: in noise of one batch, and as a share of its best."""
RISEN_NOISE = 0.5
"""Rise of the reward, in noise of one batch, with which short or cut-off responses are no sign."""
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

LEAST_EVERY = 20
"""Steps between healthy checkpoints, at least."""
MOST_ROLLBACKS = 2
"""A run that collapses again at a quarter of its learning rate has another trouble than the rate."""


@dataclass(frozen=True, kw_only=True)
class Breach:
    """A rule that is broken now.

    Breach(rule="short", metric="completions/mean_length", value=8.1, healthy=27.5, words="mean length is 8.1 ...")
    """

    rule: str
    metric: str
    value: float
    """Mean of the last RECENT batches."""
    healthy: float
    """Median of the past; for the reward, its best."""
    message: str


@dataclass(frozen=True, kw_only=True)
class Alarm(Breach):
    """A breach that lasted. Its `message` is a message of whole sentences that end with what to try."""

    step: int
    """Step at which the alarm was raised."""
    since: int
    """First step of the batches that broke the rule: a checkpoint from before it is not of the collapse."""


class CollapseGuard:
    """Watches the metrics of every batch and raises an alarm while the run is collapsing."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, Mapping[str, float]]] = deque()
        self._past: deque[Mapping[str, float]] = deque(maxlen=PAST)
        self._streaks: dict[str, tuple[int, int]] = {}
        """Of each rule that is broken now the first step that counted, and the number of batches in a row."""
        self._quiet = 0
        self.alarm: Alarm | None = None
        """The one that lasts; None = healthy."""

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
        breaches = self._breaches()
        # The mean that breaks a rule is over all of RECENT: a checkpoint from within them is not from before.
        new = self._recent[0][0], 0
        streaks = [(breach.rule, self._streaks.get(breach.rule, new)) for breach in breaches]
        self._streaks = {rule: (since, batches + 1) for rule, (since, batches) in streaks}
        self._quiet = 0 if breaches else self._quiet + 1
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

    def _breaches(self) -> list[Breach]:
        if len(self._past) < FIRST_PAST:
            return []
        recent = [values for _, values in self._recent]
        view = View(recent, self._past)
        breaches = [breach for rule in RULES if (breach := rule(view)) is not None]
        return [breach for breach in breaches if not view.is_over(breach, recent[-NEWEST:])]


class View:
    """The present beside the past, as the rules see it. Most steps are healthy at a glance at the reward, the length and the
    entropy: what only a closer look needs is computed when a rule takes it."""

    def __init__(self, recent: Sequence[Mapping[str, float]], past: Sequence[Mapping[str, float]]) -> None:
        self.now = {name: statistics.fmean([values[name] for values in recent]) for name in WATCHED}
        """Mean of the recent batches, by metric."""
        self._past = {name: [values[name] for values in past] for name in WATCHED}
        self.settled = len(past) >= SETTLED_PAST
        """Whether the past is long enough to judge small signs."""

    @cached_property
    def usual(self) -> Mapping[str, float]:
        """Median of the past, by metric."""
        return {name: statistics.median(values) for name, values in self._past.items()}

    @cached_property
    def reward_noise(self) -> float:
        """Standard deviation of one batch's mean reward, from neighbours: a trend is not noise. It is that of
        most batches, or of all where most are equal."""
        return _usual_noise(self._past[REWARD]) or _counting_noise(self._past[REWARD])

    @cached_property
    def widest_reward_noise(self) -> float:
        """Standard deviation of one batch's mean reward with the rare batches that stand out, at least reward_noise: what a
        fall without another sign must exceed."""
        return max(_usual_noise(self._past[REWARD]), _counting_noise(self._past[REWARD]))

    @cached_property
    def kl_noise(self) -> float:
        """Standard deviation of one batch's KL, from neighbours."""
        return _usual_noise(self._past[KL])

    @cached_property
    def best_reward(self) -> float:
        """Best mean of 2 RECENT neighbours in the past: one lucky draw of prompts must not set it."""
        return _highest_mean(self._past[REWARD], 2 * RECENT)

    @cached_property
    def highest_kl(self) -> float:
        """Highest mean of RECENT neighbours in the past."""
        return _highest_mean(self._past[KL], RECENT)

    @property
    def reward_risen(self) -> bool:
        """Whether the reward is above the usual and not on its way down from its best. Being above the best is not
        asked: where responses become concise at once, the best has followed the reward long before the usual length has
        followed the length."""
        return self.now[REWARD] > self.usual[REWARD] + RISEN_NOISE * self.reward_noise and not self.reward_fell_a_little

    def reward_fell(self, *, by: float, share: float) -> bool:
        """Whether the reward is below its best by more than `by` and by more than `share` of the best."""
        return self.best_reward - self.now[REWARD] > max(by, share * abs(self.best_reward))

    @property
    def reward_fell_a_little(self) -> bool:
        return self.reward_fell(by=FALLEN_NOISE * self.reward_noise, share=FALLEN_SHARE)

    @property
    def reward_fell_far(self) -> bool:
        share = FAR_SHARE if self.settled else FIRST_FAR_SHARE
        return self.reward_fell(by=0.0, share=share) and self.reward_fell(
            by=FAR_NOISE * self.widest_reward_noise, share=share
        )

    def is_over(self, breach: Breach, newest: Sequence[Mapping[str, float]]) -> bool:
        """Whether the newest batches are back, in the metric of the breach and in the reward: a dip of a few steps would be
        called when there is nothing left to mend, and a run that goes back would lose what it has learned since."""
        healthy = {REWARD: self.best_reward, breach.metric: breach.healthy}
        return all(
            abs(statistics.fmean([values[name] for values in newest]) - value) < BACK * abs(self.now[name] - value)
            for name, value in healthy.items()
        )

    def breach(self, rule: str, metric: str, message: str) -> Breach:
        """A breach of a rule by this metric; `message` may name {now}, {usual} and {reward}."""
        now, usual = self.now[metric], self.best_reward if metric == REWARD else self.usual[metric]
        reward = f"the reward is {self.now[REWARD]:.3g} after {self.best_reward:.3g}"
        message = message.format(now=f"{now:.3g}", usual=f"{usual:.3g}", reward=reward)
        return Breach(rule=rule, metric=metric, value=now, healthy=usual, message=message)


def _short(view: View) -> Breach | None:
    """Shrinking responses whose reward rises are merely concise."""
    if view.now[LENGTH] >= SHORT * view.usual[LENGTH] or view.reward_risen:
        return None
    return view.breach("short", LENGTH, "responses have shrunk to {now} tokens, usual were {usual}; {reward}")


def _clipped(view: View) -> Breach | None:
    """Most responses are cut off now and were not, or they are three times as long and a good part is cut off."""
    now, rise = view.now[CLIPPED], view.now[CLIPPED] - view.usual[CLIPPED]
    long = view.now[LENGTH] > LONG * view.usual[LENGTH]
    if rise < CLIPPED_RISE or not (now >= MOSTLY_CLIPPED or long) or view.reward_risen:
        return None
    return view.breach("clipped", CLIPPED, "a share of {now} of the responses is cut off, usual was {usual}; {reward}")


def _entropy(view: View) -> Breach | None:
    """A learned task leaves little entropy and a high reward; only together with a falling one it is a collapse."""
    now, usual = view.now[ENTROPY], view.usual[ENTROPY]
    if FLAT * usual <= now <= WILD * usual or not view.reward_fell_a_little:
        return None
    return view.breach("entropy", ENTROPY, "entropy is {now} nats per token, usual was {usual}; {reward}")


def _kl(view: View) -> Breach | None:
    """A policy that leaves the reference and earns less. The fall must exceed the widest noise: where rewards are rare, the
    best of the past is mostly luck, and a distance alone is what any learning from noise looks like."""
    now, usual = view.now[KL], abs(view.usual[KL])
    if not view.settled or now <= max(usual + KL_NATS, KL_TIMES * usual):
        return None
    far = max(usual + KL_NOISE * view.kl_noise, KL_TIMES_HIGHEST * view.highest_kl)
    if now <= far or not view.reward_fell(by=FALLEN_NOISE * view.widest_reward_noise, share=FALLEN_SHARE):
        return None
    return view.breach(
        "kl", KL, "the policy is {now} nats per response from the reference, usual was {usual}; {reward}"
    )


def _reward(view: View) -> Breach | None:
    if not view.reward_fell_far:
        return None
    return view.breach("reward", REWARD, "the reward has fallen to {now}, its best was {usual}")


RULES = (_short, _clipped, _entropy, _kl, _reward)
"""Rules in order: the first that stays broken gives the alarm its words."""


def _usual_noise(values: Sequence[float]) -> float:
    """Robust standard deviation around a slow trend; differences of neighbours are sqrt(2) times as wide."""
    differences = [abs(after - before) for before, after in pairwise(values)]
    return statistics.median(differences) * 1.4826 / math.sqrt(2.0)


def _counting_noise(values: Sequence[float]) -> float:
    """Standard deviation around a slow trend, by the mean square of the differences of neighbours.

    A mean of n rewards of 0 or 1 is a count over n. Where most batches count none, most differences are 0 and so is the
    robust estimate, though the count's own standard deviation sqrt(p (1 - p) / n) is many times the mean p. The mean
    square has that expectation however rare the successes are, and grows where they come in bursts, as from one prompt's
    responses.
    """
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
    guard: CollapseGuard = field(default_factory=CollapseGuard)
    alarm: Alarm | None = field(default=None, init=False)
    """The one that lasts."""

    def step(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """`metrics` are of all sampled responses. Returns them as guard/*, with guard/alarm."""
        # The same groups again are no news: their noise from step to step looks far too small.
        if (step - 1) % self.config.steps_per_batch == 0:
            self._note_alarm(step, self.guard.step(step, metrics))
        self._drop_outlived(step)
        if self.recorder.progress >= 1.0:
            self.finish()
        elif self._is_due(step):
            self.checkpoints.held.add(step)  # before any checkpoint of this step is written: it has to know of it
        watched = {f"guard/{name.rpartition('/')[2]}": value for name, value in metrics.items()}
        rollbacks = float(len(self.recorder.rollbacks))
        return {"guard/alarm": float(self.alarm is not None), "guard/rollbacks": rollbacks, **watched}

    def _is_due(self, step: int) -> bool:
        """After each tenth of the run, but LEAST_EVERY steps at least, as long as nothing is suspected."""
        if self.checkpoints.keep == 0 or self.guard.suspects:
            return False
        return self.recorder.passed_tenth and step - max(self.checkpoints.held, default=0) >= LEAST_EVERY

    # The trainer calls `step` before it writes any checkpoint of a step, and `save_if_due` after it.

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
        newest = self._newest(on_disk, since)
        older = {step for step in self.checkpoints.held if self._goes_back and step < since}
        self._release(self.checkpoints.held - older - {newest})
        # One of the guard's own stays by `held`. A regular one needs the pin, or `keep` would drop it.
        if newest not in self.checkpoints.extra:
            self.checkpoints.pinned = newest if newest >= 0 else None
        return on_disk.get(newest)

    def _newest(self, steps: Iterable[int], since: int) -> int:
        """The newest step before `since`, -1 = none. To go back to, one is better whose last batches are all from before,
        and that the run has not gone back to yet: it collapsed again from there."""
        before = [step for step in steps if step < since]
        tried = {rollback["to"] for rollback in self.recorder.rollbacks}
        better = [step for step in before if step < since - self._margin and step not in tried]
        return max(better or before, default=-1)

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

    def _drop_outlived(self, step: int) -> None:
        """An older healthy checkpoint goes once a younger one can no longer turn out to be of a collapse."""
        if not self.guard.suspects:
            # An alarm dates the collapse back by fewer batches than these: an older checkpoint is from before any new
            # one.
            proven_after = (RECENT + PERSISTENCE) * self.config.steps_per_batch + self._margin
            proven = sorted(saved for saved in self.checkpoints.held if saved + proven_after <= step)
            # The newest that is proven is the one to go back to.
            self._release(proven[:-1])

    def _release(self, steps: Iterable[int]) -> None:
        for step in sorted(steps):
            self.checkpoints.release(step)
