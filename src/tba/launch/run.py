"""A run: what it is made from (the model and the task), how it goes in each mode, and
how it is interrupted.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from tba.config import Config
from tba.generate.engine import Engine, stop_ids_of
from tba.launch.devices import placement_of
from tba.launch.supervise import ENDING_SIGNALS
from tba.models.load import LoadedModel, adapt, load_model
from tba.models.weights import make_weights
from tba.observe.display import RoleStatus
from tba.observe.files import RunFolder
from tba.observe.listener import RunListener
from tba.observe.recorder import Recorder
from tba.runtime.board import Board, Row
from tba.runtime.channels import POLL_SECONDS, Idleness, LaggedWeights, LocalGroups, LocalWeights, Runtime
from tba.runtime.leases import LedgerVisits, VisitLedger
from tba.runtime.local import LocalRuntime
from tba.runtime.processes import RoleDied
from tba.runtime.seats import Host
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
from tba.tasks.base import Split, Task
from tba.tasks.evaluation import Evaluator, make_evaluator
from tba.tasks.registry import make_task_for
from tba.tasks.rewards.pool import make_rewards
from tba.train.gate import Gate, Interrupted
from tba.train.loop import Trainer
from tba.train.make import make_learner, make_trainer
from tba.train.ranks import ALONE, Ranks
from tba.types import ResponseCounts

logger = logging.getLogger("tba")

MAX_EMPTY_SEARCHES = 20
"""Number of searches in a row that may bring nothing to train on."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RunInputs:
    """RunInputs(loaded=..., task=...)"""

    loaded: LoadedModel
    task: Task

    def longest_prompt(self, *splits: Split) -> int:
        """Number of tokens of the longest prompt of these splits."""
        return max((len(prompt.token_ids) for split in splits for prompt in self.task.prompts(split)), default=1)


def load_inputs(config: Config) -> RunInputs:
    """Load model and data: what can be wrong with them shows before a run folder exists."""
    loaded = load_model(config.trainer_model)
    stop_ids_of(loaded.model, loaded.tokenizer)  # refuses a model that could end no response
    task = make_task_for(config, loaded)
    task.prompts(config.evaluate.split)  # or a split that the task lacks would only show when a searcher evaluates
    return RunInputs(loaded=loaded, task=task)


def make_ledger(config: Config, task: Task) -> VisitLedger:
    """The run's visits to the prompts of the train split."""
    return VisitLedger(
        len(task.prompts("train")),
        seed=config.seed,
        shuffle=config.search.shuffle,
        skip_solved_after=config.search.skip_solved_after,
        skip_unsolved_after=config.search.skip_unsolved_after,
    )


def make_recorder(
    config: Config,
    folder: RunFolder,
    inputs: RunInputs,
    counts: ResponseCounts,
    *,
    roles: Callable[[], Sequence[RoleStatus]] = list,
    more_metrics: Callable[[], Mapping[str, float]] = dict,
    listener: RunListener | None = None,
) -> Recorder:
    return Recorder(
        config,
        folder,
        decode=partial(group_texts, inputs.loaded.tokenizer),
        reward_weights=inputs.task.reward_weights,
        counts=counts,
        roles=roles,
        more_metrics=more_metrics,
        listener=listener,
    )


@dataclass
class AsyncRun:
    """`mode=async`: searchers in processes of their own, the trainer in this one, no barrier. Evaluations are asked for and
    taken as they come."""

    config: Config
    trainer: Trainer
    runtime: Runtime
    interrupt: Interrupt
    has_evaluation_prompts: bool
    listener: RunListener

    @classmethod
    def make(
        cls,
        config: Config,
        folder: RunFolder,
        inputs: RunInputs,
        host: Host,
        checkpoint: Path | None = None,
        ranks: Ranks = ALONE,
        listener: RunListener | None = None,
    ) -> AsyncRun:
        """Publish version 0, or that of the checkpoint to resume from, then have searchers started. What was made before a
        part fails is closed."""
        with ExitStack() as undo:
            run = cls._make(config, folder, inputs, host, checkpoint, ranks, listener or RunListener(), undo)
            undo.pop_all()
            return run

    @classmethod
    def _make(
        cls,
        config: Config,
        folder: RunFolder,
        inputs: RunInputs,
        host: Host,
        checkpoint: Path | None,
        ranks: Ranks,
        listener: RunListener,
        undo: ExitStack,
    ) -> AsyncRun:
        loaded, task, interrupt = inputs.loaded, inputs.task, Interrupt()
        adapt(loaded, config.model, seed=config.seed)
        weights = make_weights(loaded.model, version=0)
        learner, counts, ledger = make_learner(config, loaded, ranks), ResponseCounts(), make_ledger(config, task)
        runtime = LocalRuntime(
            config.runtime,
            host,
            num_searchers=config.search.num_searchers,
            tensors=weights.tensors,
            dtype=loaded.model.dtype,
            canary=learner.train_step.canary,
            ledger=ledger,
            reference_resets=bool(config.reference.reset_every),
            slots_in_host_memory=placement_of(config).slots_device == "cpu",
            kind_of=config.search.kind_at,
        )
        undo.callback(runtime.stop)
        recorder = make_recorder(
            config, folder, inputs, counts, roles=runtime.statuses, more_metrics=runtime.metrics, listener=listener
        )
        undo.callback(recorder.close)
        gate = Gate(
            config,
            runtime.row,
            len(task.prompts("train")),
            lambda: interrupt.asked,
            progress=runtime.progress,
            heartbeats=runtime.heartbeats,
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
            ledger=ledger,
            parts={},
            restart_searchers=partial(runtime.replace_searchers, "the trainer went back to an earlier version"),
            gate=gate,
            published=runtime.published,
        )
        undo.callback(trainer.close)
        evaluated = task.prompts(config.evaluate.split)
        run = cls(config, trainer, runtime, interrupt, has_evaluation_prompts=len(evaluated) > 0, listener=listener)
        trainer.resume(checkpoint)
        runtime.row["step"] = trainer.step_index
        runtime.publish(learner.train_step.weights(trainer.step_index))
        runtime.start_searchers(run_searcher, {"config": config, "logs": folder.logs})
        return run

    @property
    def recorder(self) -> Recorder:
        return self.trainer.recorder

    def run(self) -> None:
        """Train to the end, or until Ctrl-C."""
        with self.interrupt:
            self.listener.begins(self.trainer.step_index)
            if self.recorder.lacks_evaluation(self.trainer.step_index):
                self.ask_for_evaluation()
            try:
                while not self.trainer.done and not self.interrupt.asked and not self.listener.stop:
                    self.step()
            except Interrupted:
                self.runtime.stop()
                return
            if self.listener.stop and not self.trainer.done:
                self.trainer.save()
                self.runtime.publish(self.trainer.train_step.weights(self.trainer.step_index))
                self.ask_for_evaluation()
            if self.has_evaluation_prompts:
                if self.trainer.done:  # whatever becomes of the last evaluation
                    self.recorder.write_summary()
                self.wait_for_evaluation(self.trainer.step_index)
        self.runtime.stop()  # before files are written, which may take long: nobody waits for groups any more

    def step(self) -> None:
        self.listener.step_begins(self.trainer.step_index)
        self.trainer.step()
        step = self.trainer.step_index
        self.runtime.row["step"] = step
        self.listener.step_ends(step)
        if self.listener.save:
            self.trainer.save()
        if self.config.evaluation_due(step) or self.listener.evaluate:
            self.ask_for_evaluation()
        self.take_evaluations()

    def ask_for_evaluation(self) -> None:
        if self.has_evaluation_prompts:
            if self.trainer.step_index > 0:
                self.trainer.checkpoints.save_evaluated(self.trainer.step_index)
            self.runtime.evaluate(self.trainer.step_index)

    def take_evaluations(self) -> None:
        for evaluation in self.runtime.take_evaluations():
            self.trainer.evaluated(evaluation.version, evaluation.metrics)

    def wait_for_evaluation(self, version: int) -> None:
        """The last evaluation: the run is over, nobody else waits for it. Groups are still taken in, or a searcher whose
        channel is full would never come to evaluate. A run whose last evaluation never comes is finished all the same."""
        seconds, idleness = self.config.runtime.wait_seconds, Idleness()
        while not any(evaluated >= version for evaluated, _ in self.recorder.evaluations) and not self.interrupt.asked:
            try:
                self.trainer.receive()
            except RoleDied as error:
                logger.warning("no evaluation of version %d: %s", version, error)
                return
            self.take_evaluations()
            if idleness.look(self.runtime.progress()) > seconds:
                logger.warning(
                    "no evaluation of version %d: no searcher has worked for %g s; look at logs/searcher-*.log. The summary "
                    "has the last evaluation that came.",
                    version,
                    seconds,
                )
                return
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        self.runtime.stop()
        self.recorder.close()
        self.trainer.close()  # last: it raises where groups could not be written


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
    row: Row
    """The trainer's numbers that the supervisor sees."""
    listener: RunListener

    @classmethod
    def make(
        cls,
        config: Config,
        folder: RunFolder,
        inputs: RunInputs,
        board: Board,
        checkpoint: Path | None = None,
        listener: RunListener | None = None,
    ) -> SyncRun:
        """Build both roles around one model; engine and reference copy its weights as they are now. Then load the checkpoint
        to resume from, if there is one."""
        loaded, task = inputs.loaded, inputs.task
        engine = make_search_engine(config, loaded)
        reference_engine = make_reference_engine(config, loaded)
        lags = config.mode == "fixed_lag"
        evaluation_engine = make_search_engine(config, loaded) if lags else engine
        adapt(loaded, config.model, seed=config.seed)
        rewards = make_rewards(task, config, log=folder.logs / "rewards.log")
        groups, ledger = LocalGroups(), make_ledger(config, task)
        step_values = make_step_values(config, loaded, task, log=folder.logs / "rewards-values.log")
        state = make_search_state(config)
        searcher = make_searcher(
            config,
            loaded,
            task,
            engine=engine,
            state=state,
            visits=LedgerVisits(ledger),
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
        listener = listener or RunListener()
        recorder = make_recorder(config, folder, inputs, counts, listener=listener)
        lagged = LaggedWeights(engine.load, lag=config.lag_steps) if lags else None
        trainer = make_trainer(
            config,
            loaded,
            task,
            make_learner(config, loaded),
            groups,
            lagged or LocalWeights(engine.load),
            recorder,
            counts=counts,
            reference_publisher=LocalWeights(searcher.load_reference),
            ledger=ledger,
            parts={"search": state} if lagged is None else {"search": state, "weights": lagged},
        )
        trainer.resume(checkpoint)
        if checkpoint is not None and lagged is None:  # lagged weights load what is due themselves
            engine.load(make_weights(loaded.model, version=trainer.step_index))
        return cls(
            config,
            searcher,
            trainer,
            evaluator=evaluator,
            evaluation_engine=evaluation_engine,
            interrupt=Interrupt(),
            row=board.trainer,
            listener=listener,
        )

    @property
    def recorder(self) -> Recorder:
        return self.trainer.recorder

    def run(self) -> None:
        """Train to the end, or until Ctrl-C."""
        with self.interrupt:
            self.listener.begins(self.trainer.step_index)
            if self.recorder.lacks_evaluation(self.trainer.step_index):
                self.evaluate()
            while not self.trainer.done and not self.interrupt.asked and not self.listener.stop:
                self.listener.step_begins(self.trainer.step_index)
                self.step()
                self.listener.step_ends(self.trainer.step_index)
                if self.listener.save or (self.listener.stop and not self.trainer.done):
                    self.trainer.save()
                if self.trainer.done or self.listener.stop:
                    self.evaluate_last()
                elif self.config.evaluation_due(self.trainer.step_index) or self.listener.evaluate:
                    self.evaluate()

    def step(self) -> None:
        self.recorder.training_starts()  # generation is part of every step here
        self.row["step"], self.row["beats"] = self.trainer.step_index, self.row["beats"] + 1
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
            self.trainer.checkpoints.save_evaluated(self.trainer.step_index)
        self.trainer.evaluated(self.trainer.step_index, self.evaluator(self.evaluation_engine))

    def evaluate_last(self) -> None:
        """The run is finished, whatever becomes of its last evaluation."""
        self.recorder.write_summary()
        try:
            self.evaluate()
        except Exception as error:
            words = "no evaluation of version %d: %s: %s. The summary has the last evaluation that came."
            logger.warning(words, self.trainer.step_index, type(error).__name__, error)

    def close(self) -> None:
        self.searcher.close()
        self.recorder.close()
        self.trainer.close()  # last: it raises where groups could not be written


class Interrupt:
    """While active, SIGINT, SIGTERM and SIGHUP set `asked`; a second one raises KeyboardInterrupt at once. One that was
    ignored (SIGHUP under nohup) stays ignored.

    A step is never cut in the middle: half an optimizer update must not be saved.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            heeded = [number for number in ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
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
