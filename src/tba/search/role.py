"""A searcher as a process: what it does between decode steps, and how it is put together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tba.config import Config, ConfigError
from tba.generate.contract import Engine, Scorer
from tba.models.cpu import use_cpu
from tba.models.load import LoadedModel, adapt, load_model
from tba.models.weights import CanaryMismatch
from tba.replay.payload import acknowledged_log
from tba.runtime.board import Row
from tba.runtime.channels import Stopped
from tba.runtime.ends import SearcherEnds
from tba.runtime.links import EndsHandle, Link, RunCannotGoOn
from tba.runtime.placement import must_hide, see_only, threads_of
from tba.search.loop import GROUPS_AT_ONCE, Searcher, SearchState, TooManyRewardFailures
from tba.search.make import (
    make_reference_engine,
    make_reference_samples,
    make_search_engine,
    make_search_state,
    make_searcher,
    make_start_scorer,
    make_step_values,
)
from tba.search.new_weights import ReferenceLoader, WeightLoader
from tba.search.prompts import PacedVisits
from tba.tasks.base import Evaluator
from tba.tasks.evaluation import CountedEngine, make_evaluator
from tba.tasks.registry import make_task_for
from tba.tasks.rewards.pool import RewardUnusable, make_rewards
from tba.tasks.user_task import WrongOutcomes

logger = logging.getLogger("tba.search")

STEPS_AT_HAND = 2
"""Visits that a searcher has at hand, in steps' worth: the trainer answers for more only between two steps."""


class Heartbeat:
    """Signs of work on the board, with the numbers that the trainer shows."""

    def __init__(self, row: Row, engine: Engine, state: SearchState) -> None:
        self._row = row
        self._engine = engine
        self._state = state

    def work(self) -> None:
        """A sign of work, which is one of life too."""
        self._row["work"] += 1
        self._row["heartbeat"] += 1
        self.show()

    def show(self) -> None:
        row, state, counts = self._row, self._state, self._state.counts
        row["version"] = self._engine.version
        row["groups"], row["responses"], row["tokens"] = counts.sent, counts.responses, counts.tokens
        row["failures"] = state.failures.total


class Evaluations:
    """Answers the trainer's requests for evaluations."""

    def __init__(
        self,
        ends: SearcherEnds,
        heartbeat: Heartbeat,
        *,
        engine: Engine,
        make: Callable[[], Evaluator],
    ) -> None:
        """`make` makes the evaluator when the first request comes: most searchers are never asked."""
        self._ends = ends
        self._heartbeat = heartbeat
        self._engine = engine
        self._make = make
        self._evaluator: Evaluator | None = None

    def evaluate_if_asked(self) -> None:
        """Once for all versions that were asked for and are reached; no weights are loaded meanwhile."""
        if self._ends.take_asked(self._engine.version):
            if self._evaluator is None:
                self._evaluator = self._make()
            engine: Any = CountedEngine(self._engine.sibling(), self._ends.row)
            metrics = self._evaluator(engine, self._between_steps)
            self._ends.evaluated(self._engine.version, metrics)

    def _between_steps(self) -> None:
        self._heartbeat.work()
        self._ends.handle_messages()  # one that is told to stop does not finish an evaluation first


@dataclass(frozen=True, kw_only=True)
class SearcherRole:
    """Owns what happens between decode steps: signs of life, messages, newer weights, evaluations."""

    ends: SearcherEnds
    loader: WeightLoader
    references: ReferenceLoader
    searcher: Searcher
    evaluations: Evaluations
    heartbeat: Heartbeat
    first_groups: int
    """Number of groups that come before an evaluation: with them the trainer takes its first step meanwhile."""

    def start(self) -> None:
        """What is done before the first decode step."""
        self.ends.handle_messages()
        if self.loader.sees_newer:
            # Before it is loaded: the start is evaluated with version 0, however late this searcher is.
            self.evaluations.evaluate_if_asked()
        self.loader.check_first()
        self.tick()

    def tick(self) -> None:
        """What is done between two decode steps."""
        self.heartbeat.work()
        self._tick(may_evaluate=self._has_sent_first)

    def idle_tick(self) -> None:
        """While waiting: nothing is held back, for the trainer may wait for just that."""
        # One that waits although it has a prompt has nothing better to do.
        self._tick(may_evaluate=self._has_sent_first or self.searcher.prompts.peek() is not None)
        self.searcher.send_ready()

    @property
    def _has_sent_first(self) -> bool:
        return self.searcher.counts.sent >= self.first_groups

    def _tick(self, *, may_evaluate: bool) -> None:
        self.ends.handle_messages()
        self.heartbeat.show()
        if may_evaluate or self.loader.sees_newer:
            self.evaluations.evaluate_if_asked()  # before newer weights move on from the version that was asked for
        self.loader.load_newer()
        self.references.load_newer()
        if may_evaluate:
            self.evaluations.evaluate_if_asked()
        self.searcher.send_ready(at_least=GROUPS_AT_ONCE)


FINAL = (CanaryMismatch, RewardUnusable, TooManyRewardFailures, WrongOutcomes)
"""Errors that a new searcher would meet again: weights that do not arrive as they were sent, a reward that always fails or
returns something else."""


def run_searcher(link: Link, *, config: Config, index: int, incarnation: str, logs: Path, ends: EndsHandle) -> None:
    """The target of a searcher's process."""
    local = SearcherEnds(
        link,
        ends,
        config.runtime,
        index=index,
        stock=STEPS_AT_HAND * prompts_per_searcher(config),
        note=acknowledged_log(),
    )
    search(local, config=config, index=index, incarnation=incarnation, logs=logs)


def prompts_per_searcher(config: Config) -> int:
    """A searcher's share of a step."""
    return -(-config.train.prompts_per_step // config.search.count)


def config_on_device(config: Config) -> Config:
    """A searcher's config with the name that its device has in this process."""
    if not must_hide(config):
        return config
    return config.model_copy(
        update={"model": config.model.model_copy(update={"device": see_only(config.model.device)})}
    )


def search(ends: SearcherEnds, *, config: Config, index: int, incarnation: str, logs: Path) -> None:
    """Load the model and search until this searcher is stopped."""
    use_cpu(threads_of(config).searcher)
    own = config_on_device(config.for_searcher(index))  # evaluations and the pace go by the run's own config
    loaded = load_model(own.model)
    task = make_task_for(own, loaded)
    try:
        engine = make_search_engine(own, loaded, beside_trainer=ends.weights.on_gpu)
        reference_engine = make_reference_engine(own, loaded)
    except ConfigError as error:  # a new searcher would meet it again
        raise RunCannotGoOn(str(error)) from error
    adapt(loaded, own.model, seed=own.seed)
    state = make_search_state()
    heartbeat = Heartbeat(ends.row, engine, state)
    searcher = make_searcher(
        own,
        loaded,
        task,
        engine=engine,
        state=state,
        visits=ends.visits,
        reference_engine=reference_engine,
        rewards=make_rewards(task, own, log=logs / f"rewards-{index}.log"),
        sender=ends,
        step_values=make_step_values(
            own, loaded, task, log=logs / f"rewards-{index}-values.log", between_steps=heartbeat.work
        ),
        reference_samples=make_reference_samples(own, reference_engine, between_steps=heartbeat.work),
        index=index,
        incarnation=incarnation,
    )
    # Engine and reference have copies of their own. Not so the base of an adapter, and start_scorer needs it after resets.
    if own.model.lora is None and not own.reference.reset_every:
        give_back(loaded)
    with ExitStack() as closing:
        closing.callback(searcher.close)

        def evaluator() -> Evaluator:
            rewards = make_rewards(task, config, log=logs / f"rewards-{index}-evaluate.log")
            closing.callback(rewards.close)
            start = partial(start_scorer, config, loaded, searcher)
            return make_evaluator(config, loaded, task, rewards, start=start)

        role = SearcherRole(
            ends=ends,
            heartbeat=heartbeat,
            loader=WeightLoader(ends, engine, report=partial(ends.row.__setitem__, "mismatch_kl")),
            references=ReferenceLoader(ends, searcher),
            searcher=searcher,
            evaluations=Evaluations(ends, heartbeat, engine=engine, make=evaluator),
            first_groups=prompts_per_searcher(config),
        )
        try:
            role.start()
            searcher.run(make_visits(config, searcher, role), role.tick)
        except Stopped:
            logger.info("stopped after %d groups", searcher.counts.sent)
        except FINAL as error:
            raise RunCannotGoOn(f"{type(error).__name__}: {error}") from error


def start_scorer(config: Config, loaded: LoadedModel, searcher: Searcher) -> Scorer:
    """What holds the start model for evaluations. Where the reference is reset it is a copy of the loaded model, which
    nobody needs after that."""
    found = make_start_scorer(config, loaded, searcher)
    if config.reference.reset_every:
        give_back(loaded)
    return found


def give_back(loaded: LoadedModel) -> None:
    """Free the memory of a model that nobody computes with any more: 15 GB of the GPU at 7B."""
    loaded.model.to("meta")
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # other processes use this GPU


def max_unscored(config: Config) -> int:
    """Visits of a searcher that may wait for their rewards. They grow stale meanwhile: enough to keep both sides and all
    workers of the rewards busy, otherwise no more than a step's worth."""
    busy = (config.search.reward_workers or 1) + GROUPS_AT_ONCE
    return max(2 * GROUPS_AT_ONCE, config.train.prompts_per_step // config.search.count, busy)


def make_visits(config: Config, searcher: Searcher, role: SearcherRole) -> PacedVisits:
    return PacedVisits(
        prompts=searcher.prompts,
        index=searcher.index,
        prompts_per_step=config.train.prompts_per_step,
        steps_per_batch=config.steps_per_batch,
        max_lag=config.replay.max_lag if config.keeps_pace else None,
        most_lag=role.ends.most_lag,
        spare_lag=config.spare_lag,
        visit_lag=lambda: searcher.visit_lag,
        trainer_waits=role.ends.trainer_waits,
        max_unscored=max_unscored(config),
        version=lambda: searcher.engine.version,
        generated=lambda: searcher.counts.generated,
        unscored=lambda: searcher.rewards.outstanding,
        lost=role.ends.lost_visits,
        tick=role.idle_tick,
        row=role.ends.row,
        deadline_seconds=config.runtime.wait_seconds,
        progress=role.ends.trainer_progress,
    )
