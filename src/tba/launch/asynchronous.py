"""Asynchronous mode on one machine: searchers in processes of their own, the trainer in this one, no barrier."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

from tba.config import Config
from tba.launch.run import Interrupt, RunInputs
from tba.models.load import adapt
from tba.models.weights import make_weights
from tba.observe.files import RunFolder, write_json
from tba.observe.recorder import Recorder
from tba.runtime.board import POLL_SECONDS, WaitedTooLong
from tba.runtime.local import LocalRuntime
from tba.search.role import run_searcher
from tba.search.scoring import group_texts
from tba.train.gate import Gate, Interrupted
from tba.train.loop import Trainer
from tba.train.make import make_learner, make_trainer
from tba.types import ResponseCounts

STATUS_SECONDS = 1.0
"""Between two writes of status.json."""


@dataclass
class AsyncRun:
    """The trainer's side of an asynchronous run; evaluations are asked for and taken as they come."""

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
            arguments = {"config": config, "functions": inputs.functions, "logs": folder.logs}
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
                self.trainer.checkpoints.save_evaluated(self.trainer.step_index)
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
            write_json(
                self.recorder.folder.status, {"step": self.trainer.step_index, "time": time.time(), "roles": roles}
            )

    def close(self) -> None:
        self.runtime.stop()
        self.recorder.close()
        self.trainer.close()  # last: it raises where groups could not be written
