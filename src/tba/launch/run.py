"""What every run is made from (the model and the task), and how it is interrupted."""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass
from types import FrameType
from typing import Any

from tba.config import Config
from tba.models.load import LoadedModel, load_model
from tba.tasks.base import Task
from tba.tasks.registry import make_task_for


@dataclass(frozen=True, kw_only=True, eq=False)
class RunInputs:
    """RunInputs(loaded=..., task=...)"""

    loaded: LoadedModel
    task: Task


def load_inputs(config: Config) -> RunInputs:
    """Load model and data: what can be wrong with them shows before a run folder exists."""
    loaded = load_model(config.model)
    task = make_task_for(config, loaded)
    task.prompts(config.evaluate.split)  # or a split that the task lacks would only show when a searcher evaluates
    return RunInputs(loaded=loaded, task=task)


class Interrupt:
    """While active, SIGINT and SIGTERM set `asked`; a second one raises KeyboardInterrupt at once.

    A step is never cut in the middle: half an optimizer update must not be saved.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
