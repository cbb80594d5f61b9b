"""The run of `mode=sync` and `mode=fixed_lag`: how it is made, its steps, in which searcher and trainer take turns, and its
evaluations.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tba.config import Config
from tba.generate.contract import Engine
from tba.launch.run import Interrupt, RunInputs, make_ledger, make_recorder
from tba.models.load import adapt
from tba.models.weights import make_weights
from tba.observe.recorder import Recorder, RunListener
from tba.observe.run_folder import RunFolder
from tba.runtime.board import Board, Row
from tba.runtime.channels import LaggedWeights, LocalGroups, LocalWeights
from tba.runtime.leases import LedgerVisits
from tba.search.loop import (
    SearchCounts,
    Searcher,
    make_reference_engine,
    make_search_engine,
    make_searcher,
    make_start_scorer,
)
from tba.tasks.base import Evaluator
from tba.tasks.evaluation import CountedEngine, make_evaluator
from tba.train.loop import Trainer
from tba.train.make import make_learner, make_trainer
from tba.types import ResponseCounts

logger = logging.getLogger("tba")

MAX_EMPTY_SEARCHES = 20
"""Number of searches in a row that may bring nothing to train on."""


@dataclass
class SyncRun:
    """`mode=sync` and `mode=fixed_lag`: searcher and trainer take turns in this process, and every step trains on responses
    of the current weights, or of those exactly `lag_steps` steps ago; second updates are on those of earlier steps."""

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
        listener = listener or RunListener()
        listener.model = adapt(loaded, config.model, seed=config.seed)
        groups, ledger, search_counts = LocalGroups(), make_ledger(config, task), SearchCounts()
        searcher = make_searcher(
            config,
            loaded,
            task,
            engine=engine,
            reference_engine=reference_engine,
            counts=search_counts,
            visits=LedgerVisits(ledger),
            sender=groups,
            log=folder.logs / "rewards.log",
        )
        # Before the trainer changes the model: the start model may be copied here.
        start = partial(make_start_scorer, config, loaded, searcher)
        evaluator = make_evaluator(config, loaded, task, searcher.rewards, start=start)
        counts = ResponseCounts()
        recorder = make_recorder(
            config, folder, inputs, counts, roles=board.statuses, listener=listener, row=board.trainer
        )
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
            ledger=ledger,
            parts={"search": search_counts} if lagged is None else {"search": search_counts, "weights": lagged},
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
        self.interrupt.tell = self.recorder.stops
        with self.interrupt:
            self.listener.begins(self.trainer.step_index, self.recorder.past)
            if self.recorder.lacks_evaluation(self.trainer.step_index):
                self.evaluate()
            while not self.trainer.done and not self.interrupt.asked and not self.listener.stop:
                self.listener.step_begins(self.trainer.step_index)
                self.step()
                self.row["step"], self.row["made"] = self.trainer.step_index, self.row["made"] + 1
                self.listener.step_ends(self.trainer.step_index)
                if self.listener.save or (self.listener.stop and not self.trainer.done):
                    self.trainer.save()
                if self.trainer.done or self.listener.stop:
                    self.evaluate_last()
                elif self.recorder.evaluation_due(self.trainer.step_index) or self.listener.evaluate:
                    self.evaluate()
                if self.listener.save:  # asked for by what the evaluation has shown
                    self.trainer.save()

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
            if self.trainer.received:
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
        engine: Any = CountedEngine(self.evaluation_engine, self.row)
        with self.recorder.clock.paused():
            metrics = self.evaluator(engine)
        self.trainer.evaluated(self.trainer.step_index, metrics)

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
