"""transformers' callbacks for a run of ours: a TrainerCallback is called at the points where transformers' Trainer calls it,
and what it asks for through TrainerControl is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from tba.observe.listener import RunListener

EVALUATION = "eval_"
"""Beginning of the names of an evaluation's metrics in transformers."""


class Callbacks(RunListener):
    """Passes what happens on to callbacks."""

    def __init__(
        self, callbacks: Sequence[Any], *, args: Any, state: TrainerState, context: Callable[[], dict[str, Any]]
    ) -> None:
        """`context` gives what callbacks get besides: model, processing_class ..."""
        super().__init__()
        self.callbacks: list[TrainerCallback] = []
        self.state = state
        self.control = TrainerControl()
        self._args, self._context = args, context
        for callback in callbacks:
            self.add(callback)

    def add(self, callback: Any) -> None:
        made = callback() if isinstance(callback, type) else callback
        self.callbacks.append(made)
        self.call("on_init_end", [made])

    def remove(self, callback: Any) -> TrainerCallback | None:
        """Take out a callback, or the first of a class."""
        found = [c for c in self.callbacks if c is callback or (isinstance(callback, type) and isinstance(c, callback))]
        if found:
            self.callbacks.remove(found[0])
        return found[0] if found else None

    def call(self, event: str, callbacks: Sequence[TrainerCallback] | None = None, **values: Any) -> None:
        for callback in list(self.callbacks) if callbacks is None else callbacks:
            answer = getattr(callback, event)(self._args, self.state, self.control, **self._context(), **values)
            self.control = self.control if answer is None else answer
        self.stop |= self.control.should_training_stop
        self.save, self.evaluate = self.control.should_save, self.control.should_evaluate

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """A line of the history, as transformers keeps it."""
        record = {**values, "step": step}
        if self.state.epoch is not None:
            record["epoch"] = self.state.epoch
        self.state.log_history.append(record)
        self.call("on_log", logs=dict(values))

    # What is heard of the run

    def begins(self, step: int) -> None:
        self.state.global_step = step
        self.stop = False
        self.control = TrainerControl()
        self.call("on_train_begin")

    def step_begins(self, step: int) -> None:
        self.call("on_step_begin")

    def step_ends(self, step: int) -> None:
        self._come_to(step)
        self.control.should_save = self.control.should_evaluate = False
        self.call("on_step_end")

    def logged(self, step: int, metrics: Mapping[str, float]) -> None:
        self._come_to(step)
        self.log(step, metrics)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {f"{EVALUATION}{name}": value for name, value in metrics.items()}
        self.log(step, values)
        self.call("on_evaluate", metrics=values)

    def saved(self, step: int, path: Path) -> None:
        self._come_to(step)
        self.call("on_save")

    def ends(self, step: int) -> None:
        self.call("on_train_end")

    def _come_to(self, step: int) -> None:
        state = self.state
        state.global_step = step
        if state.max_steps and state.num_train_epochs:
            state.epoch = step / state.max_steps * state.num_train_epochs
