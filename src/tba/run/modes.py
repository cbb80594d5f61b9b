"""A run: model and task, the roles of either mode, its steps, evaluations and interrupts.

`mode=async` has searchers in processes of their own, and no barrier. In `mode=sync` and `mode=fixed_lag` searcher and
trainer take turns in this process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tba.config import Config
from tba.engine.contract import Engine
from tba.engine.make_engine import stop_ids_of
from tba.models.load import LoadedModel, adapt, load_model
from tba.models.weights import make_weights
from tba.observe.recorder import Recorder, RunListener
from tba.observe.run_folder import RunFolder
from tba.run.memory import gpu_bytes, placement_of, published_on_gpu
from tba.run.supervise import Host, Interrupt
from tba.runtime.channels import POLL_SECONDS, Idleness, LaggedWeights, LocalGroups, LocalWeights
from tba.runtime.connection import LocalRuntime
from tba.runtime.counters import RoleCounters, SharedCounters
from tba.runtime.processes import RoleDied
from tba.runtime.prompt_queue import PromptQueue, RolloutSource
from tba.runtime.searcher_pool import start_local
from tba.searcher.loop import (
    SearchCounts,
    Searcher,
    group_texts,
    make_reference_engine,
    make_search_engine,
    make_searcher,
    make_start_scorer,
)
from tba.searcher.process import run_searcher
from tba.tasks.evaluation import CountedEngine, make_evaluator
from tba.tasks.registry import make_task_for
from tba.tasks.task import Evaluator, Split, Task, check_prompts
from tba.trainer.loop import Gate, Interrupted, Trainer
from tba.trainer.make_trainer import make_learner, make_trainer
from tba.trainer.sharded import Ranks
from tba.types import ResponseCounts

logger = logging.getLogger("tba")

MAX_EMPTY_SEARCHES = 20
"""Number of searches in a row that may bring nothing to train on, where the roles take turns."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RunInputs:
    loaded: LoadedModel
    task: Task

    def longest_prompt(self, *splits: Split) -> int:
        """Number of tokens of the longest prompt of these splits."""
        return max((len(prompt.token_ids) for split in splits for prompt in self.task.prompts(split)), default=1)


def load_inputs(config: Config, *, trains: bool = True) -> RunInputs:
    """Load model and data: what is wrong with them shows before a run folder exists. `trains` = not only evaluated."""
    loaded = load_model(config.model)
    stop_ids_of(loaded.model, loaded.tokenizer)  # refuses a model that could end no response
    task = make_task_for(config, loaded, trains=trains)
    if config.task.is_own_file:
        if trains:
            check_prompts(task, config.task, "train")
        check_prompts(task, config.task, config.evaluate.split)
    task.prompts(config.evaluate.split)  # or a split that the task lacks would only show when a searcher evaluates
    return RunInputs(loaded=loaded, task=task)


def make_recorder(
    config: Config,
    folder: RunFolder,
    inputs: RunInputs,
    counts: ResponseCounts,
    counters: SharedCounters,
    listener: RunListener,
    more_metrics: Callable[[], Mapping[str, float]] = dict,
) -> Recorder:
    return Recorder(
        config,
        folder,
        decode=partial(group_texts, inputs.loaded.tokenizer),
        reward_weights=inputs.task.reward_weights,
        counts=counts,
        roles=counters.statuses,
        more_metrics=more_metrics,
        listener=listener,
        report_height=partial(counters.trainer.__setitem__, "table_lines"),
    )


@contextmanager
def runtimes(config: Config, host: Host, counters: SharedCounters, logs: Path) -> Iterator[Callable[..., LocalRuntime]]:
    """Maker of the trainer's runtime, given what depends on its model. Its searchers are processes of this machine or, under
    runtime.kind=ray, actors of a cluster, which this process joins."""
    if config.runtime.kind == "local" or config.is_synchronous:
        yield partial(LocalRuntime, config.runtime, counters, partial(start_local, config, logs))
        return
    from tba.runtime.cluster import cluster

    with cluster(config.runtime, address=host.cluster):
        from tba.runtime.cluster.copies import RemoteReplica
        from tba.runtime.cluster.roles import ClusterSearchers

        copies = RemoteReplica(host.owner) if config.replay.durability == "node" else None
        with closing(ClusterSearchers(config, counters, logs)) as searchers:
            yield partial(LocalRuntime, config.runtime, counters, searchers.start, copies=copies)


@dataclass
class Run:
    """Base of both modes: the loop over steps, and the work before and after each."""

    config: Config
    trainer: Trainer
    row: RoleCounters
    """The trainer's numbers that the supervisor sees."""
    interrupt: Interrupt
    listener: RunListener

    @property
    def recorder(self) -> Recorder:
        return self.trainer.recorder

    def run(self) -> None:
        """Train to the end, or until Ctrl-C."""
        trainer, listener = self.trainer, self.listener
        self.interrupt.tell = self.recorder.stops
        with self.interrupt.active():
            listener.begins(trainer.step_index, self.recorder.past)
            if self.recorder.lacks_evaluation(trainer.step_index):
                self.evaluate()
            while not trainer.done and not self.interrupt.asked and not listener.stop:
                listener.step_begins(trainer.step_index)
                try:
                    self.step()
                # The run was asked to end, or its time was over, while the trainer waited: no batch was begun.
                except Interrupted:
                    break
                self.row["step"], self.row["made"] = trainer.step_index, self.row["made"] + 1
                listener.step_ends(trainer.step_index)
                is_last = trainer.done or listener.stop
                if listener.save or (is_last and not trainer.done):
                    trainer.save()
                if is_last:  # its evaluation comes at the end, where an error of it does not cost the summary
                    break
                if self.recorder.evaluation_due(trainer.step_index) or listener.evaluate:
                    self.evaluate()
                self.take_evaluations()
                if listener.save:  # asked for by what an evaluation has shown
                    trainer.save()
            self.end()

    def step(self) -> None:
        self.trainer.step()

    def evaluate(self) -> None:
        """Evaluate the policy as it is, or ask for that."""
        raise NotImplementedError

    def take_evaluations(self) -> None:
        """Take in the evaluations that have come of those that were asked for."""

    def end(self) -> None:
        """After the last step, or where the run was asked to end."""
        raise NotImplementedError


@dataclass
class AsyncRun(Run):
    """`mode=async`: searchers in processes of their own, the trainer in this one, no barrier, not for evaluations either."""

    runtime: LocalRuntime
    has_evaluation_prompts: bool
    asked_for: int | None = field(default=None, init=False)
    """Version whose evaluation was asked for last."""

    @classmethod
    def make(
        cls,
        config: Config,
        folder: RunFolder,
        inputs: RunInputs,
        make_runtime: Callable[..., LocalRuntime],
        checkpoint: Path | None,
        ranks: Ranks,
        listener: RunListener,
    ) -> AsyncRun:
        """Publish version 0, or the checkpoint's, then start searchers. What was made before a part fails is closed."""
        with ExitStack() as undo:
            loaded, task, interrupt = inputs.loaded, inputs.task, Interrupt()
            listener.model = adapt(loaded, config.model, seed=config.seed)
            weights = make_weights(loaded.model, version=0)  # before the learner may spread the model over ranks
            learner, counts = make_learner(config, loaded, ranks), ResponseCounts()
            num_prompts = len(task.prompts("train"))
            prompt_queue = PromptQueue(num_prompts, seed=config.seed, shuffle=config.search.shuffle)
            published_bytes = sum(tensor.numel() for tensor in weights.tensors.values()) * loaded.model.dtype.itemsize
            placement = placement_of(config)
            gpu = 0 if placement.shared_weights_device == "cpu" else gpu_bytes(placement.shared_weights_device)
            runtime = make_runtime(
                num_searchers=config.search.count,
                tensors=weights.tensors,
                dtype=loaded.model.dtype,
                canary=learner.train_step.canary,
                prompt_queue=prompt_queue,
                reference_resets=bool(config.reference.reset_every),
                weights_in_host_memory=published_on_gpu(placement, published_bytes, gpu=gpu) == 0,
                may_start=lambda: not interrupt.asked,
            )
            counters = runtime.counters
            undo.callback(runtime.stop)
            recorder = make_recorder(config, folder, inputs, counts, counters, listener, counters.metrics)
            undo.callback(recorder.close)
            gate = Gate(
                config,
                runtime.row,
                num_prompts,
                lambda: interrupt.asked or recorder.is_time_over,
                progress=counters.searchers_progress,
                heartbeats=counters.heartbeats,
            )
            trainer = make_trainer(
                config,
                loaded,
                task.reward_weights,
                learner,
                runtime,
                runtime,
                recorder,
                counts=counts,
                reference_publisher=runtime.reference_publisher,
                prompt_queue=prompt_queue,
                parts={},
                restart_searchers=runtime.replace_searchers,
                gate=gate,
                published=runtime.published,
            )
            undo.callback(trainer.close)
            evaluated = task.prompts(config.evaluate.split)
            run = cls(config, trainer, runtime.row, interrupt, listener, runtime, len(evaluated) > 0)
            trainer.resume(checkpoint)
            runtime.row["step"] = trainer.step_index
            # Before searchers start: each begins with the weights that it finds.
            runtime.publish(learner.train_step.weights(trainer.step_index))
            stored = None if trainer.durable is None else trainer.durable.marks
            runtime.start_searchers(run_searcher, {"config": config, "logs": folder.logs}, stored=stored)
            # Everything is made: from here on the run's own `close` ends it.
            undo.pop_all()
        return run

    def evaluate(self) -> None:
        """Ask a searcher for an evaluation, which comes later."""
        if self.has_evaluation_prompts:
            self.asked_for = self.trainer.step_index
            if self.trainer.step_index > 0:
                self.trainer.checkpoints.save_evaluated(self.trainer.step_index)
            self.runtime.evaluate(self.trainer.step_index)

    def take_evaluations(self) -> None:
        for version, metrics in self.runtime.take_evaluations():
            self.trainer.evaluated(version, metrics)

    def end(self) -> None:
        trainer, was_asked = self.trainer, self.interrupt.asked
        if not was_asked:
            if not trainer.done and not self.listener.stop:  # its time is over
                trainer.end()
            elif not trainer.done:
                self.runtime.publish(trainer.train_step.weights(trainer.step_index))
            # A run whose time was over in a wait may have asked for this version already.
            if self.asked_for != trainer.step_index:
                self.evaluate()
        if self.has_evaluation_prompts and not was_asked:
            if trainer.done:  # whatever becomes of the last evaluation
                self.recorder.write_summary()
            self.wait_for_evaluation(trainer.step_index)
        self.runtime.stop()  # before files are written, which may take long: groups are no longer needed

    def wait_for_evaluation(self, version: int) -> None:
        """Wait for the last evaluation, after the last step. Groups are still taken in, or a searcher whose channel is full
        would never evaluate. A run whose last evaluation never comes is finished all the same."""
        seconds, idleness = self.config.runtime.wait_seconds, Idleness()
        while not any(evaluated >= version for evaluated, _ in self.recorder.evaluations) and not self.interrupt.asked:
            try:
                self.trainer.receive()
            except RoleDied as error:
                logger.warning("no evaluation of version %d: %s", version, error)
                return
            self.take_evaluations()
            if idleness.look(self.runtime.counters.searchers_progress()) > seconds:
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
class SyncRun(Run):
    """`mode=sync` and `mode=fixed_lag`: searcher and trainer take turns in this process, and every step trains on responses
    of the current weights, or of those exactly `lag_steps` steps ago; second updates are on those of earlier steps."""

    searcher: Searcher
    evaluator: Evaluator
    evaluation_engine: Engine
    """The searcher's own, unless that one lags behind."""

    @classmethod
    def make(
        cls,
        config: Config,
        folder: RunFolder,
        inputs: RunInputs,
        counters: SharedCounters,
        checkpoint: Path | None = None,
        listener: RunListener | None = None,
    ) -> SyncRun:
        """Build both roles around one model; engine and reference copy its weights as they are before a resume."""
        loaded, task = inputs.loaded, inputs.task
        # Before `adapt`: engine and reference take the model as it is without an adapter.
        engine = make_search_engine(config, loaded)
        reference_engine = make_reference_engine(config, loaded)
        lags = config.mode == "fixed_lag"
        evaluation_engine = make_search_engine(config, loaded) if lags else engine
        listener = listener or RunListener()
        listener.model = adapt(loaded, config.model, seed=config.seed)
        groups, search_counts = LocalGroups(), SearchCounts()
        prompt_queue = PromptQueue(len(task.prompts("train")), seed=config.seed, shuffle=config.search.shuffle)
        searcher = make_searcher(
            config,
            loaded,
            task,
            engine=engine,
            reference_engine=reference_engine,
            counts=search_counts,
            rollouts=RolloutSource.of(prompt_queue),
            sender=groups,
            log=folder.logs / "rewards.log",
        )
        # Before the trainer changes the model: the start model may be copied here.
        start = partial(make_start_scorer, config, loaded, searcher)
        evaluator = make_evaluator(config, loaded, task, searcher.rewards, start=start)
        counts = ResponseCounts()
        recorder = make_recorder(config, folder, inputs, counts, counters, listener)
        lagged = LaggedWeights(engine.load, lag=config.lag_steps) if lags else None
        trainer = make_trainer(
            config,
            loaded,
            task.reward_weights,
            make_learner(config, loaded),
            groups,
            lagged or LocalWeights(engine.load),
            recorder,
            counts=counts,
            reference_publisher=LocalWeights(searcher.load_reference),
            prompt_queue=prompt_queue,
            parts={"search": search_counts} if lagged is None else {"search": search_counts, "weights": lagged},
        )
        trainer.resume(checkpoint)
        if checkpoint is not None and lagged is None:  # lagged weights load what is due themselves
            engine.load(make_weights(loaded.model, version=trainer.step_index))
        return cls(config, trainer, counters.trainer, Interrupt(), listener, searcher, evaluator, evaluation_engine)

    def step(self) -> None:
        self.recorder.clock.start()  # generation is part of every step here
        self.row["step"], self.row["beats"] = self.trainer.step_index, self.row["beats"] + 1
        if not self.trainer.needs_batch:
            self.trainer.step()
            return
        empty = 0
        while empty < MAX_EMPTY_SEARCHES:
            self.searcher.step(self.config.train.prompts_per_step)
            self.trainer.receive()
            empty = 0 if self.trainer.received else empty + 1
            if self.trainer.received:
                self.trainer.expire()
                self.trainer.step()
                return
        raise RuntimeError(
            f"{MAX_EMPTY_SEARCHES} searches in a row brought no response with a reward; the last: {self.recorder.why_lost}. "
            "Fix the reward."
        )

    def evaluate(self) -> None:
        if not self.evaluator.prompts:
            return
        # The searcher's engine lags behind, and evaluations are of the newest weights.
        if self.evaluation_engine is not self.searcher.engine:
            policy = self.trainer.train_step.policy
            self.evaluation_engine.load(make_weights(policy.model, version=self.trainer.step_index))
        if self.trainer.step_index > 0:
            self.trainer.checkpoints.save_evaluated(self.trainer.step_index)
        engine: Any = CountedEngine(self.evaluation_engine, self.row)
        with self.recorder.clock.paused():
            metrics = self.evaluator(engine)
        self.trainer.evaluated(self.trainer.step_index, metrics)

    def end(self) -> None:
        # Ctrl-C: the run ends without another evaluation.
        if not self.trainer.done and not self.listener.stop:
            return
        self.recorder.write_summary()  # the run is finished, whatever becomes of its last evaluation
        try:
            self.evaluate()
        except Exception as error:
            message = "no evaluation of version %d: %s: %s. The summary has the last evaluation that came."
            logger.warning(message, self.trainer.step_index, type(error).__name__, error)
        if self.listener.save:  # asked for by what the evaluation has shown
            self.trainer.save()

    def close(self) -> None:
        self.searcher.close()
        self.evaluation_engine.close()
        self.recorder.close()
        self.trainer.close()  # last: it raises where groups could not be written
