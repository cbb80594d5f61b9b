"""The trainer's two waits: for a buffer that fills a batch (at the start, and after replay.max_lag has emptied it), and for
new responses at the replay-ratio limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tba.config import Config
from tba.runtime.channels import wait_until
from tba.runtime.counters import RoleCounters
from tba.runtime.deadlines import Waiting

if TYPE_CHECKING:
    from tba.trainer.loop import Trainer


class Interrupted(Exception):
    """Training was asked to end while it waited."""


@dataclass(frozen=True)
class Gate:
    """Lets the trainer step when there is enough to train on; takes in groups while it waits."""

    config: Config
    row: RoleCounters
    num_train_prompts: int  # a task may have fewer prompts than a step takes; they then repeat within a step
    asked_to_stop: Callable[[], bool]
    progress: Callable[[], float] = lambda: 0.0
    """A number that changes while searchers work: deadlines count only while it does not."""
    heartbeats: Callable[[], Mapping[str, float]] = dict  # for each searcher a number that changes while it lives

    def wait(self, trainer: Trainer) -> float:
        """Returns the seconds waited, without those in which groups were taken in: the trainer worked then."""
        started, received = time.perf_counter(), trainer.receive_seconds
        is_first = trainer.counts.trained == 0

        def is_ready() -> bool:
            # Receiving is also the trainer's heartbeat: the supervisor kills a trainer that does not look for groups
            # (run/supervise.py).
            trainer.receive()
            # Before the look at the buffer: responses that are too old must not fill a batch.
            trainer.expire()
            # After `receive`: groups that have arrived are taken in, whatever ends the wait.
            if self.asked_to_stop():
                raise Interrupted
            # For the display and `tba status`: how far a batch is filled.
            self.row["batch_prompts"] = min(trainer.replay.num_prompts, self._wanted_prompts)
            self.row["prompts_wanted"] = self._wanted_prompts
            return self.is_open(trainer)

        waited = wait_until(
            is_ready,
            name="replay_ratio" if self._full_batch(trainer) and not is_first else "first_fill",
            row=self.row,
            deadline_seconds=self.config.runtime.wait_seconds,
            waiting=Waiting(
                waiter="the trainer",
                awaited=f"{self.config.search.count} searchers",
                setting="runtime.wait_seconds",
                heartbeats=self.heartbeats,
            ),
            explain=lambda: self._explain(trainer),
            progress=self.progress,
        )
        # All of it, and not `waited`: that leaves out the first look, which may have taken in most of the groups.
        return time.perf_counter() - started - (trainer.receive_seconds - received) if waited else 0.0

    @property
    def _wanted_prompts(self) -> int:
        return min(self.config.train.prompts_per_step, self.num_train_prompts)

    def is_open(self, trainer: Trainer) -> bool:
        return self._within_ratio(trainer) and self._full_batch(trainer)

    def _within_ratio(self, trainer: Trainer) -> bool:
        train, reuse = self.config.train, self.config.replay.max_replay_ratio
        assert reuse is not None, "filled in by tba.run.resolve"
        # All updates of the next batch count at once: they follow without another look.
        wanted = trainer.counts.trained + train.responses_per_step * train.updates_per_batch
        return wanted <= reuse * trainer.counts.generated

    def _full_batch(self, trainer: Trainer) -> bool:
        return trainer.replay.can_fill(
            self.config.train.prompts_per_step, prompts_of_task=self.num_train_prompts, lost=trainer.lost
        )

    def _explain(self, trainer: Trainer) -> str:
        lacking = []
        if not self._full_batch(trainer):
            lacking.append(f"{self._wanted_prompts} prompts and has {trainer.replay.num_prompts}")
        if not self._within_ratio(trainer):
            lacking.append(
                f"new responses, having trained {trainer.counts.trained} of {trainer.counts.generated} generated "
                f"(replay.max_replay_ratio={self.config.replay.max_replay_ratio:g})"
            )
        # Rewards of a user's may be the reason.
        names = ", ".join(repr(reward.label) for reward in self.config.task.rewards)
        seconds = self.config.search.reward_timeout_seconds
        call = f" (a call of {names} may take search.reward_timeout_seconds={seconds:g})" if names else ""
        return (
            f"the trainer waited for {' and for '.join(lacking)} from {self.config.search.count} searchers; look at "
            f"logs/searcher-*.log, or raise the deadline for large models and slow rewards{call}"
        )
