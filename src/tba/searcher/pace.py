"""The pace of a searcher: the moment at which its next rollout may start, so that the lag stays within replay.max_lag."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tba.config import Config
from tba.runtime.channels import wait_until
from tba.runtime.counters import SharedCounters
from tba.runtime.deadlines import Idleness
from tba.runtime.prompt_queue import RolloutRequest
from tba.searcher.loop import Searcher
from tba.types import Request

STALL_SECONDS = 1.0
"""Time that the trainer waits, and this searcher has nothing to do, after which another one is taken to hold both up."""


@dataclass
class PacedRollouts:
    """Prompts in order. Each starts as soon as the searcher's weights are new enough for it.

    Rollout n of the run is trained at step U (n // P) or later, where U steps train on the same groups, so its
    weights must be of version U (n // P) - limit at least. Rollouts whose responses were all lost to their reward do not
    count: later rollouts fill their batches. Without a limit every rollout may start at once.

    The limit is spare_lag plus the versions that passed during recent rollouts, so that a batch is complete as the step
    before it begins: complete earlier, it would only be older when it is trained. Of a limit of 1.3 a rollout may use 2 if
    it is in the first .3 of its batch, otherwise 1. While the trainer waits for responses the limit is a step more, so that
    the pace never delays it. If it goes on waiting and this searcher is idle, the limit is the largest: another searcher may
    be slow, or dead, with the rollouts that the trainer waits for. The largest is max_lag, or the trainer's most_lag where
    long updates allow less.
    """

    searcher: Searcher
    counters: SharedCounters
    tick: Callable[[], None]
    """Handles messages and loads newer weights."""
    config: Config
    max_unscored: int
    """Most rollouts that may wait for their rewards: a slow reward slows the searcher down instead of filling its memory."""
    started: int = 0
    _both_wait: Idleness = field(default_factory=Idleness)
    """How long trainer and searcher have been waiting for the same version."""

    def __iter__(self) -> Iterator[Request | None]:
        return self

    def __next__(self) -> Request | None:
        """None = nothing may start now, but responses are still running."""
        if not self._may_start():
            if self.started > self.searcher.counts.generated:
                # The engine goes on with the responses that run and asks again, so nothing waits here.
                return None

            def may_start_after_tick() -> bool:
                self.tick()
                return self._may_start()

            wait_until(
                may_start_after_tick,
                name="pace",
                row=self.counters.searcher(self.searcher.index),
                deadline_seconds=self.config.runtime.wait_seconds,
                waiter=f"searcher {self.searcher.index}",
                awaited="the trainer",
                explain=self._explain,
                progress=self.counters.trainer_progress,
            )
        self.started += 1
        return next(self.searcher.prompts)

    def _may_start(self) -> bool:
        rollout, searcher = self.searcher.prompts.peek(), self.searcher
        if rollout is None or searcher.engine.version < self._needed(rollout):
            return False
        return searcher.rewards.outstanding < self.max_unscored

    def _needed(self, rollout: RolloutRequest) -> int:
        config, trainer, max_lag = self.config, self.counters.trainer, self.config.replay.max_lag
        if not config.keeps_pace or max_lag is None:
            return 0
        P = config.train.prompts_per_step
        # With P = 64, U = 2 and limit 1.3, rollout 200 is at place 8 of batch 3, which is early: it needs version 6 - 2 = 4.
        batch, place = divmod(max(0, rollout.number - int(trainer["lost"])), P)
        # Between two publications there is no newer version to wait for.
        limit = self._limit(min(max_lag, max(config.spare_lag - 1, trainer["most_lag"])))
        is_early = place < (limit % 1.0) * P
        return config.steps_per_batch * batch - math.floor(limit) - is_early

    def _limit(self, most: float) -> float:
        searcher, waits = self.searcher, self.counters.trainer.wait in ("first_fill", "replay_ratio")
        both = waits and self.started == searcher.counts.generated
        # -1 stands for not waiting: the change from it to a version starts the clock at zero.
        if self._both_wait.look(searcher.engine.version if both else -1) > STALL_SECONDS and both:
            return most
        # `waits` counts as one version.
        return min(most, self.config.spare_lag + searcher.rollout_lag + waits)

    def _explain(self) -> str:
        rollout, searcher = self.searcher.prompts.peek(), self.searcher
        waited = "a prompt" if rollout is None else f"version {self._needed(rollout)}"
        return (
            f"searcher {searcher.index} has weights of version {searcher.engine.version}, waited for {waited} from the "
            f"trainer, and has {searcher.rewards.outstanding} groups without rewards yet"
        )
