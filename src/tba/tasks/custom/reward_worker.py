"""The process that runs a stranger's reward functions. It imports no torch, so that a killed one is back in a moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tba.config import RewardConfig
from tba.runtime.link import Link
from tba.tasks.custom.reward_functions import RewardSet

READY = "ready"
"""First word of a worker: its functions are loaded, the clock of its first call starts."""


def reward_worker(
    link: Link, *, configs: Sequence[RewardConfig], functions: Sequence[Callable[..., Any]] | None
) -> None:
    """Scores what it is sent until its parent is gone."""
    rewards = RewardSet(configs, functions)
    link.send(READY)
    while (job := link.receive(timeout_seconds=None)) is not None:
        link.send(rewards.score(*job))
