"""The run of `mode=async`: how it is made, its steps, and its evaluations, which searchers do meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tba.config import Config
from tba.launch.memory import gpu_bytes, placement_of, published_on_gpu
from tba.launch.run import Interrupt, RunInputs, make_ledger, make_recorder
from tba.launch.supervise import Host
from tba.models.load import adapt
from tba.models.weights import make_weights
from tba.observe.recorder import Recorder, RunListener
from tba.observe.run_folder import RunFolder
from tba.runtime.board import Board
from tba.runtime.channels import POLL_SECONDS, Idleness
from tba.runtime.local import LocalRuntime
from tba.runtime.processes import RoleDied
from tba.runtime.searchers import local_starter
from tba.search.role import run_searcher
from tba.train.gate import Gate, Interrupted
from tba.train.loop import Trainer
from tba.train.make import make_learner, make_trainer
from tba.train.ranks import Ranks
from tba.types import ResponseCounts

logger = logging.getLogger("tba")

MakeRuntime = Callable[..., LocalRuntime]
"""Makes the runtime of the trainer in this process, given what depends on its model."""


@contextmanager
def runtimes(config: Config, host: Host, board: Board, logs: Path) -> Iterator[MakeRuntime]:
    """What makes the trainer's runtime: its searchers are processes of this machine or, under runtime.kind=ray, actors of a
    cluster, which this process joins."""
    if config.runtime.kind == "local" or config.takes_turns:
        yield partial(LocalRuntime, config.runtime, board, local_starter(config, logs))
        return
    from tba.runtime.cluster.connect import cluster

    with cluster(config.runtime, address=host.cluster):
        from tba.runtime.cluster.copies import RemoteReplica
        from tba.runtime.cluster.roles import ClusterSearchers

        copies = RemoteReplica(host.owner) if config.replay.durability == "node" else None
        with closing(ClusterSearchers(config, board, logs)) as searchers:
            yield partial(LocalRuntime, config.runtime, board, searchers.start, copies=copies)


@dataclass
class AsyncRun:
    """`mode=async`: searchers in processes of their own, the trainer in this one, no barrier. Evaluations are asked for and
    taken as they come."""

    config: Config
    trainer: Trainer
    runtime: LocalRuntime
    interrupt: Interrupt
    has_evaluation_prompts: bool
    listener: RunListener
    asked_for: int | None = field(default=None, init=False)
    """Version whose evaluation was asked for last."""

    @classmethod
    def make(
        cls,
        config: Config,
        folder: RunFolder,
        inputs: RunInputs,
        make_runtime: MakeRuntime,
        checkpoint: Path | None,
        ranks: Ranks,
        listener: RunListener,
    ) -> AsyncRun:
        """Publish version 0, or that of the checkpoint to resume from, then start searchers. What was made before a part
        fails is closed."""
        with ExitStack() as undo:
            loaded, task, interrupt = inputs.loaded, inputs.task, Interrupt()
            listener.model = adapt(loaded, config.model, seed=config.seed)
            weights = make_weights(loaded.model, version=0)  # before the learner may spread the model over ranks
            learner, counts, ledger = make_learner(config, loaded, ranks), ResponseCounts(), make_ledger(config, task)
            published_bytes = sum(tensor.numel() for tensor in weights.tensors.values()) * loaded.model.dtype.itemsize
            placement = placement_of(config)
            gpu = 0 if placement.slots_device == "cpu" else gpu_bytes(placement.slots_device)
            runtime = make_runtime(
                num_searchers=config.search.count,
                tensors=weights.tensors,
                dtype=loaded.model.dtype,
                canary=learner.train_step.canary,
                ledger=ledger,
                reference_resets=bool(config.reference.reset_every),
                slots_in_host_memory=published_on_gpu(placement, published_bytes, gpu=gpu) == 0,
                may_start=lambda: not interrupt.asked,
            )
            board = runtime.board
            undo.callback(runtime.stop)
            recorder = make_recorder(
                config,
                folder,
                inputs,
                counts,
                roles=board.statuses,
                more_metrics=board.metrics,
                listener=listener,
                row=runtime.row,
            )
            undo.callback(recorder.close)
            gate = Gate(
                config,
                runtime.row,
                len(task.prompts("train")),
                lambda: interrupt.asked or recorder.is_time_over,
                progress=board.searchers_progress,
                heartbeats=board.heartbeats,
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
                restart_searchers=runtime.replace_searchers,
                gate=gate,
                published=runtime.published,
            )
            undo.callback(trainer.close)
            evaluated = task.prompts(config.evaluate.split)
            run = cls(config, trainer, runtime, interrupt, has_evaluation_prompts=len(evaluated) > 0, listener=listener)
            trainer.resume(checkpoint)
            runtime.row["step"] = trainer.step_index
            runtime.publish(learner.train_step.weights(trainer.step_index))
            stored = None if trainer.durable is None else trainer.durable.marks
            runtime.start_searchers(run_searcher, {"config": config, "logs": folder.logs}, stored=stored)
            undo.pop_all()
        return run

    @property
    def recorder(self) -> Recorder:
        return self.trainer.recorder

    def run(self) -> None:
        """Train to the end, or until Ctrl-C."""
        self.interrupt.tell = self.recorder.stops
        with self.interrupt:
            self.listener.begins(self.trainer.step_index, self.recorder.past)
            if self.recorder.lacks_evaluation(self.trainer.step_index):
                self.ask_for_evaluation()
            try:
                while not self.trainer.done and not self.interrupt.asked and not self.listener.stop:
                    self.step()
            except Interrupted:
                if self.interrupt.asked:
                    self.runtime.stop()
                    return
                self.trainer.end()
                if self.asked_for != self.trainer.step_index:
                    self.ask_for_evaluation()
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
        self.runtime.row["step"], self.runtime.row["made"] = step, self.runtime.row["made"] + 1
        self.listener.step_ends(step)
        if self.listener.save:
            self.trainer.save()
        if self.recorder.evaluation_due(step) or self.listener.evaluate:
            self.ask_for_evaluation()
        self.take_evaluations()
        if self.listener.save:  # asked for by what an evaluation has shown
            self.trainer.save()

    def ask_for_evaluation(self) -> None:
        if self.has_evaluation_prompts:
            self.asked_for = self.trainer.step_index
            if self.trainer.step_index > 0:
                self.trainer.checkpoints.save_evaluated(self.trainer.step_index)
            self.runtime.evaluate(self.trainer.step_index)

    def take_evaluations(self) -> None:
        for version, metrics in self.runtime.take_evaluations():
            self.trainer.evaluated(version, metrics)

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
            if idleness.look(self.runtime.board.searchers_progress()) > seconds:
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
