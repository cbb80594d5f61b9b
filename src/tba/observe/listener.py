"""What a caller of `train` hears of its run, and may ask of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PastLine:
    """A line of metrics.jsonl from before a run was resumed, with what a listener heard of it then.

    PastLine(step=20, metrics={"loss": 0.1, "reward": 0.5}, is_evaluation=False)
    """

    step: int
    metrics: Mapping[str, float]
    is_evaluation: bool


@dataclass
class RunListener:
    """Hears what happens, in the process of the trainer. Each method does nothing; override those you need. The wishes are
    looked at after every step."""

    stop: bool = False
    """Whether the run is to end after this step, as if it were the last."""
    save: bool = False
    """Whether a checkpoint is wanted."""
    evaluate: bool = False
    """Whether an evaluation is wanted."""
    model: Any = None
    """The model that is trained, as it stands; None before and after the run."""
    tokenizer: Any = None

    def begins(self, step: int, past: Callable[[], Sequence[PastLine]]) -> None:
        """Training goes on from this step, 0 for a new run; `past` reads the lines of the steps before, for who asks."""

    def step_begins(self, step: int) -> None:
        """Optimizer step `step`, counted from 0, is about to begin; an asynchronous trainer may wait for data first."""

    def step_ends(self, step: int) -> None:
        """So many optimizer steps are done."""

    def logged(self, step: int, metrics: Mapping[str, float]) -> None:
        """A line of metrics.jsonl was written."""

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """The evaluation of the weights of a step has come."""

    def saved(self, step: int, path: Path, wait: Callable[[], None]) -> None:
        """A checkpoint is being written; `wait` returns when it is there."""

    def ends(self, step: int) -> None:
        """The run is over."""
