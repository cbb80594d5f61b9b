"""Asynchronous mode on one machine: searchers in processes of their own, the trainer in this one, no barrier."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from tba.config import Config
from tba.launch.inputs import RunInputs
from tba.launch.interrupt import Interrupt
from tba.models.weights import make_weights
from tba.observe.files import RunFolder
from tba.observe.recorder import Recorder
from tba.runtime.local import LocalRuntime
from tba.runtime.waiting import POLL_SECONDS, WaitedTooLong
from tba.search.role import run_searcher
from tba.search.scoring import group_texts
from tba.train.loop import Trainer
from tba.train.make import make_gate, make_trainer

logger = logging.getLogger("tba")


@dataclass
class AsyncRun:
    """The trainer's side of an asynchronous run; evaluations are asked for and taken as they come."""

    config: Config
    trainer: Trainer
    runtime: LocalRuntime
    interrupt: Interrupt
    has_held_out: bool

    @classmethod
    def make(cls, config: Config, folder: RunFolder, inputs: RunInputs) -> AsyncRun:
        """Publish version 0, then start the searchers."""
        loaded, task = inputs.loaded, inputs.task
        weights = make_weights(loaded.model, version=0)
        runtime = LocalRuntime(
            config.runtime,
            num_searchers=config.search.num_searchers,
            tensors=weights.tensors,
            dtype=loaded.model.dtype,
            canary=lambda published: trainer.train_step.policy.canary(published.tensors),
        )
        recorder = Recorder(
            config, folder, decode=lambda group: group_texts(loaded.tokenizer, group), roles=runtime.statuses
        )
        trainer = make_trainer(config, loaded, task, runtime, runtime, recorder)
        trainer.gate = make_gate(config, trainer, runtime.board.trainer, num_train_prompts=len(task.prompts("train")))
        run = cls(config, trainer, runtime, Interrupt(), has_held_out=len(task.prompts("held_out")) > 0)
        runtime.publish(weights)
        arguments = {"config": config, "functions": inputs.functions, "logs": folder.logs}
        runtime.start_searchers(run_searcher, arguments, logs=folder.logs)
        return run

    @property
    def recorder(self) -> Recorder:
        return self.trainer.recorder

    def run(self) -> None:
        """Train to the end, or until Ctrl-C; either way the last step is saved."""
        with self.interrupt:
            self.ask_for_evaluation()
            while not self.trainer.done and not self.interrupt.asked:
                self.step()
            if self.interrupt.asked:
                logger.warning("interrupted after step %d: saving and stopping.", self.trainer.step_index)
                self.trainer.save(self.trainer.step_index)
                self.recorder.finish()
                raise KeyboardInterrupt
            elif self.has_held_out:
                self.wait_for_evaluation(self.trainer.step_index)

    def step(self) -> None:
        self.trainer.step()
        step = self.trainer.step_index
        self.runtime.board.trainer["step"] = step
        every = self.config.evaluate.every
        if self.trainer.done or (every is not None and step % every == 0):
            self.ask_for_evaluation()
        self.take_evaluations()

    def ask_for_evaluation(self) -> None:
        if self.has_held_out:
            self.runtime.evaluate(self.trainer.step_index)

    def take_evaluations(self) -> None:
        for evaluation in self.runtime.take_evaluations():
            self.recorder.evaluation(evaluation.version, evaluation.metrics)

    def wait_for_evaluation(self, version: int) -> None:
        """The last evaluation: the run is over, nobody else waits for it."""
        deadline = time.monotonic() + self.config.runtime.wait_seconds
        while not any(evaluated >= version for evaluated, _ in self.recorder.evaluations):
            self.runtime.drain()
            self.take_evaluations()
            if time.monotonic() > deadline:
                raise WaitedTooLong(
                    f"no evaluation of version {version} from searcher 0 within {self.config.runtime.wait_seconds:g} s; "
                    "look at logs/searcher-0.log, or lower evaluate.num_prompts."
                )
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        self.runtime.stop()
        self.recorder.close()
