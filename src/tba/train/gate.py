"""The trainer's two waits: for the buffer's first fill, and for new responses at the replay-ratio limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tba.config import Config
from tba.replay.buffer import ReplayBuffer
from tba.runtime.board import Row
from tba.runtime.waiting import wait_until


@dataclass
class Gate:
    """Lets the trainer step when there is enough to train on; takes in groups while it waits."""

    config: Config
    replay: ReplayBuffer
    receive: Callable[[], None]
    row: Row
    generated: Callable[[], int]
    """Responses received so far, those lost to failing rewards included."""
    trained: Callable[[], int]
    num_train_prompts: int
    """A task may have fewer prompts than a step takes; they then repeat within a step."""

    def wait(self) -> float:
        """Returns the seconds waited."""
        first = self.trained() == 0
        runtime = self.config.runtime
        return wait_until(
            self._ready,
            name="first_fill" if first else "replay_ratio",
            row=self.row,
            deadline_seconds=runtime.start_seconds if first else runtime.wait_seconds,
            explain=self._explain_fill if first else self._explain_ratio,
        )

    def _ready(self) -> bool:
        self.receive()
        wanted = self.trained() + self.config.train.responses_per_step
        within_ratio = wanted <= self.config.replay.max_trained_per_generated * self.generated()
        return within_ratio and self.replay.num_prompts >= self._prompts_needed

    @property
    def _prompts_needed(self) -> int:
        return min(self.config.train.prompts_per_step, self.num_train_prompts)

    def _explain_fill(self) -> str:
        return (
            f"the trainer waited for {self._prompts_needed} prompts and has {self.replay.num_prompts} from "
            f"{self.config.search.num_searchers} searchers; look at logs/searcher-*.log, or raise runtime.start_seconds "
            "for large models"
        )

    def _explain_ratio(self) -> str:
        return (
            f"the trainer has trained {self.trained()} responses of {self.generated()} generated "
            f"(replay.max_trained_per_generated={self.config.replay.max_trained_per_generated:g}) and waited for new ones "
            f"from {self.config.search.num_searchers} searchers; look at logs/searcher-*.log"
        )
