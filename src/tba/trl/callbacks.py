"""transformers' callbacks for a run of ours: a TrainerCallback is called at the points where transformers' Trainer calls it,
and its requests through TrainerControl are met.

In a step the order is transformers' own: on_step_begin, on_step_end, on_log, and on_save where a checkpoint was due. The
metrics of an evaluation arrive later, so on_evaluate comes after on_save. An epoch is as many steps as draw every row to
train on once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from tba.observe.metrics import deciding_metric
from tba.observe.recorder import PastLine, RunListener
from tba.trl.files import check_kind, link_checkpoints


class Callbacks(RunListener):
    """Passes what happens on to callbacks."""

    def __init__(
        self,
        callbacks: Sequence[Any],
        *,
        args: Any,
        state: TrainerState,
        context: Callable[[], dict[str, Any]],
        steps_per_epoch: float | None = None,
    ) -> None:
        """`context` gives what callbacks get besides where no run goes on: model, processing_class; `steps_per_epoch` is the
        number of optimizer steps that draw every row to train on once, None = not known."""
        # Runs in the trainer's process, which waits while a callback runs.
        super().__init__()
        self.callbacks: list[TrainerCallback] = []
        self.state = state
        self.control = TrainerControl()
        self._args, self._context, self._steps_per_epoch = args, context, steps_per_epoch
        self._in_step: list[Callable[[], None]] | None = None
        """Calls that arrived since a step began, made after its on_step_end; None = no step is being made."""
        self._in_epoch = False
        """Whether on_epoch_begin was called, and not yet on_epoch_end."""
        self._saved: int | None = None
        """Step of the last checkpoint for which on_save was called."""
        self._first: Mapping[str, float] = {}
        """Metrics of the first evaluation."""
        for callback in callbacks:
            self.add(callback)

    def add(self, callback: Any) -> None:
        made = callback() if isinstance(callback, type) else callback
        check_kind("callbacks", made, "on_init_end", "a list of transformers' TrainerCallbacks")
        self.callbacks.append(made)
        self.call("on_init_end", [made])

    def remove(self, callback: Any) -> TrainerCallback | None:
        found = [c for c in self.callbacks if c is callback or (isinstance(callback, type) and isinstance(c, callback))]
        if found:
            self.callbacks.remove(found[0])
        return found[0] if found else None

    def call(self, event: str, callbacks: Sequence[TrainerCallback] | None = None, **values: Any) -> None:
        # The run's own model wins over the script's, which is stale or None while a run goes on.
        trained = {} if self.model is None else {"model": self.model, "processing_class": self.tokenizer}
        for callback in list(self.callbacks) if callbacks is None else callbacks:
            context = {**self._context(), **trained, **values}
            answer = getattr(callback, event)(self._args, self.state, self.control, **context)
            self.control = self.control if answer is None else answer
        # The run reads `stop`, `save` and `evaluate` after the step; a stop holds until the run ends.
        self.stop |= self.control.should_training_stop
        self.save, self.evaluate = self.control.should_save, self.control.should_evaluate

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """A line of the history, as transformers keeps it."""
        self._add_to_history(step, values)
        self.call("on_log", logs=dict(values))

    def _add_to_history(self, step: int, values: Mapping[str, float]) -> None:
        epoch = {} if self.state.epoch is None else {"epoch": self.state.epoch}
        self.state.log_history.append({**values, "step": step, **epoch})

    # What is heard of the run

    def begins(self, step: int, past: Callable[[], Sequence[PastLine]]) -> None:
        self.recall(past())
        self._come_to(step)
        # train() may be called twice on one trainer: nothing of the first run may stay.
        self.stop, self._in_step, self._saved, self._in_epoch = False, None, None, False
        self.control = TrainerControl()
        self.call("on_train_begin")

    def recall(self, past: Sequence[PastLine]) -> None:
        """Make the history and the best metric those of the steps before, as transformers does at a resume; a new run has
        none."""
        self._first = {}
        self.state.log_history, self.state.best_metric, self.state.best_global_step = [], None, None
        for line in past:
            self._come_to(line.step)
            self._add_to_history(line.step, _of_evaluation(line.metrics) if line.is_evaluation else line.metrics)
            if line.is_evaluation:
                self._count_evaluation(line.step, line.metrics)

    def step_begins(self, step: int) -> None:
        if not self._in_epoch and self._steps_per_epoch is not None:
            self._in_epoch = True
            self.call("on_epoch_begin")
        # Requests hold for one step, as in transformers.
        self.control.should_save = self.control.should_evaluate = self.control.should_log = False
        self.call("on_step_begin")
        # From here to step_ends what is heard is kept: transformers logs and saves after on_step_end.
        self._in_step = []

    def step_ends(self, step: int) -> None:
        self._come_to(step)
        # None before the calls: what they cause must be passed on at once.
        heard, self._in_step = self._in_step or [], None
        self.call("on_step_end")
        for tell in heard:
            tell()
        # After the step's own calls: on_epoch_end is the last of its last step.
        if self._epochs_at(step) > self._epochs_at(step - 1):
            self._end_epoch()

    def logged(self, step: int, metrics: Mapping[str, float]) -> None:
        self._after_the_step(partial(self.log, step, metrics))

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self.report_evaluation(step, metrics)
        self._count_evaluation(step, metrics)

    def _count_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the best metric, with which EarlyStoppingCallback compares. It sees an evaluation before that counts."""
        self._first = self._first or metrics
        if step == 0 or not metrics:  # transformers does not count an evaluation of the start model
            return
        evaluate, state = self._args.evaluate, self.state
        # The same rule as the run's best checkpoint: `_first` names the metric where none was chosen.
        value, best = metrics.get(deciding_metric(evaluate.metric, self._first, metrics)), state.best_metric
        is_better = value is not None and (best is None or (value < best if evaluate.lower_is_better else value > best))
        if is_better:
            state.best_metric, state.best_global_step = value, step

    def saved(self, step: int, path: Path, wait: Callable[[], None]) -> None:
        def tell() -> None:
            self._come_to(step)
            self.control.should_save = self.save = False
            if step == self._saved:  # on_save is called once for a checkpoint, also where it is asked for twice
                return
            self._saved = step
            if any(type(callback).on_save is not TrainerCallback.on_save for callback in self.callbacks):
                wait()  # they may read it
            # RUN/checkpoints/step-N: a callback looks for RUN/checkpoint-N, as TRL names it.
            link_checkpoints(path.parent.parent)
            self.call("on_save")

        self._after_the_step(tell)

    def report_evaluation(self, step: int, metrics: Mapping[str, float], *, prefix: str = "eval_") -> None:
        """Tell of an evaluation, of the run or one that a script has asked for. Meanwhile `state` is at the step that was
        evaluated, which in an asynchronous run is an earlier one."""
        # Not kept for after the step: callbacks see the evaluation with its own step.
        values, now = _of_evaluation(metrics, prefix), self.state.global_step
        self._come_to(step)
        self.log(step, values)
        self.control.should_evaluate = False
        self.call("on_evaluate", metrics=values)
        self._come_to(now)

    def _after_the_step(self, tell: Callable[[], None]) -> None:
        if self._in_step is None:
            tell()
        else:
            self._in_step.append(tell)

    def ends(self, step: int) -> None:
        self._end_epoch()
        self.call("on_train_end")

    def _end_epoch(self) -> None:
        if self._in_epoch:
            self._in_epoch = False
            self.call("on_epoch_end")

    def _epochs_at(self, step: int) -> int:
        """Number of whole epochs after so many steps."""
        # 1e-9: ten steps, at 10 / 3 steps an epoch, are three epochs in spite of rounding.
        return 0 if self._steps_per_epoch is None else math.floor(step / self._steps_per_epoch + 1e-9)

    def _come_to(self, step: int) -> None:
        self.state.global_step = step
        if self._steps_per_epoch is not None:
            self.state.epoch = step / self._steps_per_epoch


def _of_evaluation(metrics: Mapping[str, float], prefix: str = "eval_") -> dict[str, float]:
    """The metrics of an evaluation by transformers' names."""
    return {f"{prefix}{name}": value for name, value in metrics.items()}
