"""The trainer's two waits: for a buffer that fills a batch (first of all, and after replay.lag=drop has emptied it), and for
new responses at the replay-ratio limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tba.config import Config
from tba.replay.buffer import ReplayBuffer
from tba.runtime.board import Row, wait_until


class Interrupted(Exception):
    """Training was asked to end while it waited."""


@dataclass
class Gate:
    """Lets the trainer step when there is enough to train on; takes in groups while it waits."""

    config: Config
    replay: ReplayBuffer
    receive: Callable[[], None]
    expire: Callable[[], None]
    """Removes the responses that are too old to train on."""
    row: Row
    generated: Callable[[], int]
    """Responses received so far, those lost to failing rewards included."""
    trained: Callable[[], int]
    lost_prompts: Callable[[], int]
    """Visits since the last step of which every response was lost: nothing more will come of them."""
    num_train_prompts: int
    """A task may have fewer prompts than a step takes; they then repeat within a step."""
    asked_to_stop: Callable[[], bool]

    def wait(self) -> float:
        """Returns the seconds waited."""
        first = self.trained() == 0
        runtime = self.config.runtime
        return wait_until(
            self._ready,
            name="replay_ratio" if self._full_batch() and not first else "first_fill",
            row=self.row,
            deadline_seconds=runtime.start_seconds if first else runtime.wait_seconds,
            explain=self._explain,
        )

    def _ready(self) -> bool:
        self.receive()
        self.expire()
        if self.asked_to_stop():
            raise Interrupted
        return self._within_ratio() and self._full_batch() and self._first_fill()

    def _within_ratio(self) -> bool:
        train = self.config.train
        wanted = self.trained() + train.responses_per_step * train.updates_per_batch
        return wanted <= self._reuse * self.generated()

    def _full_batch(self) -> bool:
        return self.replay.can_fill(
            self.config.train.prompts_per_step, prompts_of_task=self.num_train_prompts, lost=self.lost_prompts()
        )

    def _first_fill(self) -> bool:
        return self.generated() >= self.config.replay.initial_responses

    @property
    def _reuse(self) -> float:
        reuse = self.config.replay.max_trained_per_generated
        assert reuse is not None, "filled in by tba.launch.defaults"
        return reuse

    def _explain(self) -> str:
        lacking = []
        if not self._full_batch():
            wanted = min(self.config.train.prompts_per_step, self.num_train_prompts)
            lacking.append(f"{wanted} prompts and has {self.replay.num_prompts}")
        if not self._first_fill():
            wanted = self.config.replay.initial_responses
            lacking.append(f"replay.initial_responses={wanted} and has {self.generated()}")
        if not self._within_ratio():
            lacking.append(
                f"new responses, having trained {self.trained()} of {self.generated()} generated "
                f"(replay.max_trained_per_generated={self._reuse:g})"
            )
        return (
            f"the trainer waited for {' and for '.join(lacking)} from {self.config.search.num_searchers} searchers; look at "
            "logs/searcher-*.log, or raise runtime.start_seconds for large models"
        )
