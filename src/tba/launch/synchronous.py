"""Modes in which searcher and trainer take turns in one process: sync (lag 0) and fixed_lag (exactly lag_steps)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from tba.config import Config
from tba.generate.engine import Engine
from tba.launch.run import Interrupt, RunInputs
from tba.models.load import adapt
from tba.models.weights import make_weights
from tba.observe.files import RunFolder
from tba.observe.recorder import Recorder
from tba.runtime.channels import LaggedWeights, LocalGroups, LocalWeights
from tba.search.loop import Searcher
from tba.search.make import (
    make_reference_engine,
    make_reference_samples,
    make_search_engine,
    make_searcher,
    make_start_scorer,
    make_step_values,
)
from tba.search.scoring import group_texts
from tba.tasks.evaluation import Evaluator, make_evaluator
from tba.tasks.rewards.pool import make_rewards
from tba.train.loop import Trainer
from tba.train.make import make_learner, make_trainer
from tba.types import ResponseCounts

MAX_EMPTY_SEARCHES = 20
"""Searches in a row that may bring nothing to train on."""


@dataclass
class SyncRun:
    """Every step trains on responses of the current weights, or of those `lag_steps` steps ago."""

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
        rewards = make_rewards(task, config, log=folder.logs / "rewards.log", functions=inputs.functions)
        groups = LocalGroups()
        step_values = make_step_values(
            config, loaded, task, log=folder.logs / "rewards-values.log", functions=inputs.functions
        )
        searcher = make_searcher(
            config,
            loaded,
            task,
            engine=engine,
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
            self.trainer.checkpoints.save_evaluated(self.trainer.step_index)
        self.trainer.evaluated(self.trainer.step_index, self.evaluator(self.evaluation_engine))

    def close(self) -> None:
        self.searcher.close()
        self.recorder.close()
        self.trainer.close()  # last: it raises where groups could not be written
