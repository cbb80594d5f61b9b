"""A run: what it is made from (the model and the task), how it goes in each mode, and
how it is interrupted.
"""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

from tba.config import Config
from tba.generate.engine import Engine
from tba.models.load import LoadedModel, adapt, load_model
from tba.models.weights import make_weights
from tba.observe.files import RunFolder, write_json
from tba.observe.recorder import Recorder
from tba.runtime.channels import POLL_SECONDS, LaggedWeights, LocalGroups, LocalWeights, WaitedTooLong
from tba.runtime.local import LocalRuntime
from tba.search.loop import Searcher, group_texts
from tba.search.make import (
    make_reference_engine,
    make_reference_samples,
    make_search_engine,
    make_search_state,
    make_searcher,
    make_start_scorer,
    make_step_values,
)
from tba.search.role import run_searcher
from tba.tasks.base import Task
from tba.tasks.evaluation import Evaluator, make_evaluator
from tba.tasks.registry import make_task_for
from tba.tasks.rewards.pool import make_rewards
from tba.train.gate import Gate, Interrupted
from tba.train.loop import Trainer
from tba.train.make import make_learner, make_trainer
from tba.types import ResponseCounts

STATUS_SECONDS = 1.0
"""Seconds between two writes of status.json."""
MAX_EMPTY_SEARCHES = 20
"""Number of searches in a row that may bring nothing to train on."""


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


@dataclass
class AsyncRun:
    """`mode=async` on one machine: searchers in processes of their own, the trainer in this one, no barrier. Evaluations are
    asked for and taken as they come."""

    config: Config
    trainer: Trainer
    runtime: LocalRuntime
    interrupt: Interrupt
    has_evaluation_prompts: bool
    _status_at: float = 0.0

    @classmethod
    def make(cls, config: Config, folder: RunFolder, inputs: RunInputs) -> AsyncRun:
        """Publish version 0, then start the searchers."""
        loaded, task, interrupt = inputs.loaded, inputs.task, Interrupt()
        adapt(loaded, config.model, seed=config.seed)
        weights = make_weights(loaded.model, version=0)
        learner, counts = make_learner(config, loaded), ResponseCounts()
        runtime = LocalRuntime(
            config.runtime,
            num_searchers=config.search.num_searchers,
            tensors=weights.tensors,
            dtype=loaded.model.dtype,
            canary=lambda published: learner.train_step.policy.canary(published.tensors),
            reference_resets=bool(config.reference.reset_every),
        )
        recorder = Recorder(
            config,
            folder,
            decode=partial(group_texts, loaded.tokenizer),
            reward_weights=task.reward_weights,
            counts=counts,
            roles=runtime.statuses,
            more_metrics=runtime.metrics,
        )
        trainer = make_trainer(
            config,
            loaded,
            task,
            learner,
            runtime,
            runtime,
            recorder,
            counts=counts,
            reference_publisher=runtime.reference_publisher,
            cursors=runtime.cursors,
            gate=Gate(config, runtime.board.trainer, len(task.prompts("train")), lambda: interrupt.asked),
        )
        evaluated = task.prompts(config.evaluate.split)
        run = cls(config, trainer, runtime, interrupt, has_evaluation_prompts=len(evaluated) > 0)
        try:
            runtime.publish(weights)
            arguments = {"config": config, "logs": folder.logs}
            runtime.start_searchers(run_searcher, arguments, logs=folder.logs)
        except BaseException:
            run.close()
            raise
        return run

    @property
    def recorder(self) -> Recorder:
        return self.trainer.recorder

    def run(self) -> None:
        """Train to the end, or until Ctrl-C."""
        with self.interrupt:
            self.ask_for_evaluation()
            try:
                while not self.trainer.done and not self.interrupt.asked:
                    self.step()
            except Interrupted:
                return
            if self.has_evaluation_prompts:
                self.wait_for_evaluation(self.trainer.step_index)

    def step(self) -> None:
        self.trainer.step()
        if self.config.evaluation_due(self.trainer.step_index):
            self.ask_for_evaluation()
        self.take_evaluations()
        self.write_status()

    def ask_for_evaluation(self) -> None:
        if self.has_evaluation_prompts:
            if self.trainer.step_index > 0:
                self.trainer.save_evaluated()
            self.runtime.evaluate(self.trainer.step_index)

    def take_evaluations(self) -> None:
        for evaluation in self.runtime.take_evaluations():
            self.trainer.evaluated(evaluation.version, evaluation.metrics)

    def wait_for_evaluation(self, version: int) -> None:
        """The last evaluation: the run is over, nobody else waits for it. Groups are still taken in, or a searcher whose
        channel is full would never come to evaluate."""
        deadline = time.monotonic() + self.config.runtime.wait_seconds
        while not any(evaluated >= version for evaluated, _ in self.recorder.evaluations) and not self.interrupt.asked:
            self.trainer.receive()
            self.take_evaluations()
            if time.monotonic() > deadline:
                raise WaitedTooLong(
                    f"no evaluation of version {version} from searcher 0 within {self.config.runtime.wait_seconds:g} s; "
                    "look at logs/searcher-0.log, or lower evaluate.num_prompts or evaluate.samples_per_prompt."
                )
            time.sleep(POLL_SECONDS)

    def write_status(self) -> None:
        now = time.monotonic()
        if now - self._status_at > STATUS_SECONDS:
            self._status_at = now
            roles = [vars(status) for status in self.runtime.statuses()]
            path = self.recorder.folder.status
            with self.recorder.failures.tolerated("status in", path):
                write_json(path, {"step": self.trainer.step_index, "time": time.time(), "roles": roles})

    def close(self) -> None:
        self.runtime.stop()
        self.recorder.close()


@dataclass
class SyncRun:
    """`mode=sync` and `mode=fixed_lag`: searcher and trainer take turns in this process, and every step trains on responses
    of the current weights, or of those exactly `lag_steps` steps ago."""

    config: Config
    searcher: Searcher
    trainer: Trainer
    evaluator: Evaluator
    evaluation_engine: Engine
    """The searcher's own, unless that one lags behind."""
    interrupt: Interrupt

    @classmethod
    def make(cls, config: Config, folder: RunFolder, inputs: RunInputs) -> SyncRun:
        """Build both roles around one model; engine and reference copy its weights as they are now."""
        loaded, task = inputs.loaded, inputs.task
        engine = make_search_engine(config, loaded)
        reference_engine = make_reference_engine(config, loaded)
        lags = config.mode == "fixed_lag"
        evaluation_engine = make_search_engine(config, loaded) if lags else engine
        adapt(loaded, config.model, seed=config.seed)
        rewards = make_rewards(task, config, log=folder.logs / "rewards.log")
        groups = LocalGroups()
        step_values = make_step_values(config, loaded, task, log=folder.logs / "rewards-values.log")
        searcher = make_searcher(
            config,
            loaded,
            task,
            engine=engine,
            state=make_search_state(config, task),
            reference_engine=reference_engine,
            rewards=rewards,
            sender=groups,
            step_values=step_values,
            reference_samples=make_reference_samples(config, reference_engine),
        )
        # Before the trainer changes the model: the start model may be copied here.
        start = partial(make_start_scorer, config, loaded, searcher)
        evaluator = make_evaluator(config, loaded, task, rewards, start=start)
        counts = ResponseCounts()
        recorder = Recorder(
            config,
            folder,
            decode=partial(group_texts, loaded.tokenizer),
            reward_weights=task.reward_weights,
            counts=counts,
        )
        trainer = make_trainer(
            config,
            loaded,
            task,
            make_learner(config, loaded),
            groups,
            LaggedWeights(engine.load, lag=config.lag_steps) if lags else LocalWeights(engine.load),
            recorder,
            counts=counts,
            reference_publisher=LocalWeights(searcher.load_reference),
            cursors=lambda: [searcher.prompts.cursor],
        )
        return cls(
            config,
            searcher,
            trainer,
            evaluator=evaluator,
            evaluation_engine=evaluation_engine,
            interrupt=Interrupt(),
        )

    @property
    def recorder(self) -> Recorder:
        return self.trainer.recorder

    def run(self) -> None:
        """Train to the end, or until Ctrl-C."""
        with self.interrupt:
            self.evaluate()
            while not self.trainer.done and not self.interrupt.asked:
                self.step()
                if self.config.evaluation_due(self.trainer.step_index):
                    self.evaluate()

    def step(self) -> None:
        self.recorder.training_starts()  # generation is part of every step here
        if not self.trainer.needs_batch:
            self.trainer.step()
            return
        empty = 0
        while empty < MAX_EMPTY_SEARCHES:
            self.searcher.step(self.config.train.prompts_per_step)
            self.trainer.receive()
            empty = 0 if self.trainer.received else empty + 1
            if self.trainer.received and self.trainer.counts.generated >= self.config.replay.initial_responses:
                self.trainer.expire()
                self.trainer.step()
                return
        raise RuntimeError(
            f"{MAX_EMPTY_SEARCHES} searches in a row brought no response with a reward: look at the reward functions."
        )

    def evaluate(self) -> None:
        if not self.evaluator.prompts:
            return
        if self.evaluation_engine is not self.searcher.engine:
            policy = self.trainer.train_step.policy
            self.evaluation_engine.load(make_weights(policy.model, version=self.trainer.step_index))
        if self.trainer.step_index > 0:
            self.trainer.save_evaluated()
        self.trainer.evaluated(self.trainer.step_index, self.evaluator(self.evaluation_engine))

    def close(self) -> None:
        self.searcher.close()
        self.recorder.close()


class Interrupt:
    """While active, SIGINT, SIGTERM and SIGHUP set `asked`; a second one raises KeyboardInterrupt at once. One that was
    ignored (SIGHUP under nohup) stays ignored.

    A step is never cut in the middle: half an optimizer update must not be saved.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            heeded = [number for number in self.SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._handle) for number in heeded}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
