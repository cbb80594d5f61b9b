"""A searcher as a process: how it is put together, and what it does between decode steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tba.config import Config, ConfigError
from tba.engine.contract import Engine, Scorer
from tba.models.load import LoadedModel, adapt, load_model, use_cpu
from tba.models.weights import CANARY_TOKENS, CanaryCheck, CanaryMismatch, canary_tokens, kl_estimate
from tba.runtime.channels import Stopped
from tba.runtime.columns import acknowledged_log
from tba.runtime.connection import TrainerConnection
from tba.runtime.counters import RoleCounters
from tba.runtime.links import ConnectionHandle, Link, RunCannotGoOn
from tba.runtime.placement import must_hide, see_only, threads_of
from tba.searcher.loop import (
    GROUPS_AT_ONCE,
    SearchCounts,
    Searcher,
    TooManyRewardFailures,
    make_reference_engine,
    make_search_engine,
    make_searcher,
    make_start_scorer,
)
from tba.searcher.pace import PacedRollouts
from tba.tasks.evaluation import CountedEngine, make_evaluator
from tba.tasks.registry import make_task_for
from tba.tasks.rewards.pool import RewardUnusable, make_rewards
from tba.tasks.task import Evaluator, WrongOutcomes
from tba.types import Weights

logger = logging.getLogger("tba.searcher")

STEPS_AT_HAND = 2
"""Stock of rollouts of a searcher, in batches. The trainer hands out more only between two steps."""
MAX_UNCHECKED = 4
"""Versions in a row that may be used and overtaken before their canary comes."""


class WeightLoader:
    """Loads newer weights into the engine and makes sure that they arrived."""

    def __init__(
        self, connection: TrainerConnection, engine: Engine, report: Callable[[float], None] = lambda mismatch_kl: None
    ) -> None:
        """`report` is called with the distance of engine and trainer at each version that is compared."""
        self._engine = engine
        self._report = report
        self._canary = CanaryCheck()
        self._tokens = canary_tokens(engine.vocabulary, CANARY_TOKENS)
        self._source = connection.weights
        self._loaded = -1
        """The version given to the engine last; under `drain` it may not be in use yet."""
        self._checked, self._unchecked = -1, 0
        """The version whose canary was compared last; number of versions given to the engine since then."""
        self._canaries: dict[int, np.ndarray] = {}
        """Canaries of versions that the engine may come to use. The trainer may write over one before that."""
        self._thread: ThreadPoolExecutor | None = None
        self._fetching: Future[Weights] | None = None

    def load_newer(self) -> None:
        """Never waits: under `drain` the engine loads later, a version's canary comes a little after its weights, and
        large weights are copied and checked beside the decode steps."""
        newest = self._source.newest_version
        self._note_canary(newest)
        self._check_when_there()  # what is in use, before newer weights wait for their turn
        # After too many versions in a row without a comparison only one whose canary is there.
        may_load = self._unchecked < MAX_UNCHECKED or newest in self._canaries
        if newest > self._loaded and self._is_in_use and may_load:
            if not self._source.takes_long:
                self._give(self._source.fetch())
            elif self._fetching is None:  # the engine has read the private copy before, so it may be written
                self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="weights")
                self._fetching = self._thread.submit(self._source.fetch)
            elif self._fetching.done():
                fetched, self._fetching = self._fetching, None
                self._give(fetched.result())
        self._check_when_there()

    @property
    def sees_newer(self) -> bool:
        return self._source.newest_version > self._engine.version

    @property
    def _is_in_use(self) -> bool:
        """Whether the engine computes with what it was given last."""
        return self._engine.version == self._loaded and not self._engine.has_pending

    def check_first(self) -> None:
        """Fetch in this thread, however long it takes: nothing is decoded yet. Both sides' canaries set the tolerance."""
        self._give(self._source.fetch())
        self._check_when_there()

    def _note_canary(self, version: int) -> None:
        if version not in self._canaries and (found := self._source.canary(version)) is not None:
            # Canaries before the version loaded last are dropped: no earlier version is compared any more.
            self._canaries = {known: canary for known, canary in self._canaries.items() if known >= self._loaded}
            self._canaries[version] = found

    def _give(self, weights: Weights) -> None:
        self._loaded = weights.version
        self._unchecked += 1
        # A version that the engine has already, such as the start model as version 0, is not loaded again.
        if weights.version > self._engine.version:
            self._engine.load(weights)
            if self._is_in_use:  # under `drain` it will read them later
                self._source.loaded()

    def _check_when_there(self) -> None:
        """A version that is overtaken before its canary comes goes unchecked; the next one's is compared. Nothing is
        while newer weights wait for the engine: those in use were compared before."""
        version = self._engine.version
        if version == self._checked or not self._is_in_use:
            return
        self._note_canary(version)
        published = self._canaries.get(version)
        if published is not None:
            computed = self._engine.score([self._tokens[:1]], [self._tokens[1:]], 1.0)[0]
            self._report(kl_estimate(computed, published))  # first: what is too much is seen too
            self._canary.check(published=published, computed=computed, version=version)
            # These change only after the check, which raises: a version that failed never counts as checked.
            self._checked, self._unchecked = version, 0


@dataclass(kw_only=True)
class SearcherRole:
    """The work of a searcher between decode steps: heartbeats, messages, newer weights, evaluations."""

    connection: TrainerConnection
    searcher: Searcher
    loader: WeightLoader
    make_evaluator: Callable[[], Evaluator]
    """Called once, when the first request for an evaluation comes: most searchers are never asked."""
    first_groups: int
    """Number of groups that come before an evaluation: with them the trainer takes its first step meanwhile."""

    def start(self) -> None:
        """Work before the first decode step."""
        self.connection.handle_messages()
        if self.loader.sees_newer:
            # Before it is loaded: the start is evaluated with version 0, however late this searcher is.
            self.evaluate_if_asked()
        self.loader.check_first()
        self.tick()

    def tick(self) -> None:
        show_work(self.connection.row, self.searcher.engine, self.searcher.counts)
        self._tick(may_evaluate=self._has_sent_first)

    def idle_tick(self) -> None:
        """The tick while the searcher waits: every finished group is sent, for the trainer may wait for it."""
        # A searcher that has a prompt and still waits is free to evaluate.
        self._tick(may_evaluate=self._has_sent_first or self.searcher.prompts.peek() is not None)
        self.searcher.send_ready()

    @property
    def _has_sent_first(self) -> bool:
        return self.searcher.counts.sent >= self.first_groups

    def _tick(self, *, may_evaluate: bool) -> None:
        # Messages come first: a request to stop must not wait until weights are loaded.
        self.connection.handle_messages()
        show(self.connection.row, self.searcher.engine, self.searcher.counts)
        if may_evaluate or self.loader.sees_newer:
            self.evaluate_if_asked()  # before newer weights move on from the version that was asked for
        self.loader.load_newer()
        references = self.connection.references
        if references is not None and references.newest_version > self.searcher.reference_version:
            self.searcher.load_reference(references.fetch())  # a group is scored at once: it never mixes references
        if may_evaluate:
            self.evaluate_if_asked()
        self.searcher.send_ready(at_least=GROUPS_AT_ONCE)

    def evaluate_if_asked(self) -> None:
        """Once for all versions that were asked for and are reached; no weights are loaded meanwhile."""
        version = self.searcher.engine.version
        if self.connection.take_asked(version):
            engine: Any = CountedEngine(self.searcher.engine.clone_for_evaluation(), self.connection.row)
            self.connection.evaluated(version, self._evaluator(engine, self._between_steps_of_evaluations))

    @cached_property
    def _evaluator(self) -> Evaluator:
        return self.make_evaluator()

    def _between_steps_of_evaluations(self) -> None:
        show_work(self.connection.row, self.searcher.engine, self.searcher.counts)
        self.connection.handle_messages()  # a request to stop comes before an evaluation


def show_work(row: RoleCounters, engine: Engine, counts: SearchCounts) -> None:
    """A sign of work on the shared counters, which is one of life too."""
    row["work"] += 1
    row["heartbeat"] += 1
    show(row, engine, counts)


def show(row: RoleCounters, engine: Engine, counts: SearchCounts) -> None:
    row["version"], row["failures"] = engine.version, counts.failures
    row["groups"], row["responses"], row["tokens"] = counts.sent, counts.responses, counts.tokens
    row["tool_calls"], row["tool_errors"] = counts.tool_calls, counts.tool_errors


FINAL = (CanaryMismatch, RewardUnusable, TooManyRewardFailures, WrongOutcomes)
"""Errors that a new searcher would meet again."""


def run_searcher(
    link: Link, *, config: Config, index: int, incarnation: str, logs: Path, connection: ConnectionHandle
) -> None:
    """The target of a searcher's process: load the model and search until this searcher is stopped."""
    share = -(-config.train.prompts_per_step // config.search.count)  # of a step
    local = TrainerConnection(
        link, connection, config.runtime, index=index, stock=STEPS_AT_HAND * share, note=acknowledged_log()
    )
    use_cpu(threads_of(config).searcher)
    own = config.for_searcher(index)  # evaluations and the pace go by the run's own config
    if must_hide(own):  # the device has another name in this process
        # The other GPUs are hidden before the model is loaded: CUDA reads the variable once, at its first use.
        model = own.model.model_copy(update={"device": see_only(own.model.device)})
        own = own.model_copy(update={"model": model})
    loaded = load_model(own.model)
    task = make_task_for(own, loaded)
    try:
        engine = make_search_engine(own, loaded)
        reference_engine = make_reference_engine(own, loaded)
    except ConfigError as error:  # a new searcher would meet it again
        raise RunCannotGoOn(str(error)) from error
    adapt(loaded, own.model, seed=own.seed)  # after the engines have copied the weights, which are the base's own
    counts = SearchCounts()
    searcher = make_searcher(
        own,
        loaded,
        task,
        engine=engine,
        reference_engine=reference_engine,
        counts=counts,
        rollouts=local.rollouts,
        sender=local,
        log=logs / f"rewards-{index}.log",
        between_steps=partial(show_work, local.row, engine, counts),
        index=index,
        incarnation=incarnation,
    )
    # Engine and reference have copies of their own. Not so the base of an adapter, and evaluations need it after resets.
    if own.model.lora is None and not own.reference.reset_every:
        give_back(loaded)
    with ExitStack() as closing:  # workers of the rewards end however the search ends
        closing.callback(searcher.close)

        def start_scorer() -> Scorer:
            found = make_start_scorer(config, loaded, searcher)
            if config.reference.reset_every:
                give_back(loaded)  # the reference is a copy, so the loaded model is not needed any more
            return found

        def evaluator() -> Evaluator:
            rewards = make_rewards(task, config, log=logs / f"rewards-{index}-evaluate.log")
            closing.callback(rewards.close)
            return make_evaluator(config, loaded, task, rewards, start=start_scorer)

        role = SearcherRole(
            connection=local,
            searcher=searcher,
            loader=WeightLoader(local, engine, report=partial(local.row.__setitem__, "mismatch_kl")),
            make_evaluator=evaluator,
            first_groups=share,
        )
        try:
            role.start()
            paced = PacedRollouts(searcher, local.counters, role.idle_tick, config, max_unscored(config))
            searcher.run(paced, role.tick)
        except Stopped:
            logger.info("stopped after %d groups", counts.sent)
        except FINAL as error:
            raise RunCannotGoOn(f"{type(error).__name__}: {error}") from error


def give_back(loaded: LoadedModel) -> None:
    """Free the memory of a model that is not used any more: 15 GB of the GPU at 7B."""
    loaded.model.to("meta")
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # other processes use this GPU


def max_unscored(config: Config) -> int:
    """Rollouts of a searcher that may wait for their rewards: enough to keep both sides and all workers of the rewards
    busy, otherwise no more than a step's worth, for they grow stale."""
    busy = (config.search.reward_workers or 1) + GROUPS_AT_ONCE
    return max(2 * GROUPS_AT_ONCE, config.train.prompts_per_step // config.search.count, busy)
