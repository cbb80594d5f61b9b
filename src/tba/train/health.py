"""What a trainer does about the collapse guard: healthy checkpoints, the warning, the stop, and when a run goes
back (`roll_back` in loop.py)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tba.config import Config
from tba.observe.recorder import Recorder
from tba.train.checkpoint import Checkpoints
from tba.train.collapse_guard import PERSISTENCE, RECENT, Alarm, CollapseGuard

logger = logging.getLogger("tba")

LEAST_EVERY = 20
"""Steps between healthy checkpoints, at least."""
MOST_ROLLBACKS = 2
"""A run that collapses again at a quarter of its learning rate has another trouble than the rate."""


class Collapsed(RuntimeError):
    """The guard's alarm under observe.on_collapse=stop, or under rollback where the run cannot go back (again)."""


@dataclass
class Health:
    """Shows the guard every batch, keeps the newest checkpoint from before a collapse, warns or stops."""

    config: Config
    recorder: Recorder
    checkpoints: Checkpoints
    guard: CollapseGuard = field(default_factory=CollapseGuard)

    @property
    def alarm(self) -> Alarm | None:
        """The one that lasts."""
        return self.guard.alarm

    def step(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """`metrics` are of all sampled responses. Returns them as guard/*, with guard/alarm."""
        # The same groups again are no news: their noise from step to step looks far too small.
        if (step - 1) % self.config.steps_per_batch == 0:
            self._heed(step, self.guard.alarm, self.guard.step(step, metrics))
        self._drop_outlived(step)
        if self.recorder.progress >= 1.0:
            self.finish()
        elif self._is_due(step) and not self.guard.suspects and self.checkpoints.keep > 0:
            self.checkpoints.held.add(step)  # before any checkpoint of this step is written: it has to know of it
        watched = {f"guard/{name.rpartition('/')[2]}": value for name, value in metrics.items()}
        rollbacks = float(len(self.recorder.rollbacks))
        return {"guard/alarm": float(self.alarm is not None), "guard/rollbacks": rollbacks, **watched}

    def save_if_due(self, step: int) -> None:
        """Write a healthy checkpoint on schedule, after everything else of the step: a run can resume from it."""
        if step in self.checkpoints.held:
            self.checkpoints.save_held(step)

    def state(self) -> dict[str, Any]:
        return {"guard": self.guard}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.guard = state["guard"]

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
            words = [self.alarm.words, self._kept_words()]
            if self.recorder.rollbacks:
                words.append(f"Rollbacks before this: {len(self.recorder.rollbacks)}.")
            raise Collapsed(f"stopped at step {self.recorder.steps}: {' '.join(words)}")

    def finish(self) -> None:
        """The last step is made: a run without a collapse needs no healthy checkpoint any more."""
        if self.recorder.collapse is None:
            self._release(self.checkpoints.held)

    def _is_due(self, step: int) -> bool:
        """After each tenth of the run, but LEAST_EVERY steps at least."""
        train = self.config.train
        if train.max_seconds is not None or train.max_steps is None:
            return self.recorder.passed_tenth and step - max(self.checkpoints.held, default=0) >= LEAST_EVERY
        return step % max(LEAST_EVERY, train.max_steps // 10) == 0

    def _heed(self, step: int, before: Alarm | None, alarm: Alarm | None) -> None:
        if alarm is not None and alarm is not before:
            kept = self._keep_from_before(alarm.since)
            path = None if kept is None else str(kept.relative_to(self.recorder.folder.path))
            self.recorder.collapse = {**vars(alarm), "recovered": None, "checkpoint": path}
            if self.config.observe.on_collapse == "warn":
                logger.warning("step %d: %s %s", step, alarm.words, self._kept_words())
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

    def _kept_words(self) -> str:
        path = (self.recorder.collapse or {}).get("checkpoint")
        if path is None:
            return "There is no checkpoint from before: it came too soon after the start."
        return f"The newest checkpoint from before is kept: {self.recorder.folder.path / path}."

    def _drop_outlived(self, step: int) -> None:
        """An older healthy checkpoint goes once a younger one can no longer turn out to be of a collapse."""
        if not self.guard.suspects:
            proven_after = (RECENT + PERSISTENCE) * self.config.steps_per_batch + self._margin
            proven = sorted(saved for saved in self.checkpoints.held if saved + proven_after <= step)
            self._release(proven[:-1])

    def _release(self, steps: Iterable[int]) -> None:
        for step in sorted(steps):
            self.checkpoints.release(step)
