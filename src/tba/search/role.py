"""A searcher as a process: what it does between decode steps, and how it is put together."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from tba.config import Config, RuntimeConfig
from tba.generate.engine import Engine
from tba.models.load import adapt, load_model
from tba.models.weights import CANARY_TOKENS, CanaryCheck, canary_tokens
from tba.runtime.board import Board, Row, SharedMemory
from tba.runtime.channels import EVALUATES, Acknowledge, Evaluate, Evaluated, Link, Stop, WindowedSender
from tba.runtime.weight_slots import SlotsHandle, WeightSlots
from tba.search.loop import GROUPS_AT_ONCE, Searcher, SearchState
from tba.search.make import (
    make_reference_engine,
    make_reference_samples,
    make_search_engine,
    make_search_state,
    make_searcher,
    make_start_scorer,
    make_step_values,
)
from tba.search.prompts import PacedVisits
from tba.tasks.evaluation import Evaluator, make_evaluator
from tba.tasks.registry import make_task_for
from tba.tasks.rewards.pool import Rewards, make_rewards

logger = logging.getLogger("tba.search")


class Stopped(Exception):
    """The trainer asked this searcher to end."""


MAX_UNCHECKED = 4
"""Versions in a row that may be used and overtaken before their canary comes."""


class WeightLoader:
    """Loads newer weights into the engine and makes sure that they arrived."""

    def __init__(self, slots: WeightSlots, engine: Engine) -> None:
        self._slots = slots
        self._engine = engine
        self._canary = CanaryCheck()
        self._tokens = canary_tokens(engine.vocabulary, CANARY_TOKENS)
        self._loaded = -1
        """The version given to the engine last; under `drain` it may not be in use yet."""
        self._checked = -1
        """The version whose canary was compared last."""
        self._unchecked = 0
        """Versions given to the engine since then."""

    def load_newer(self) -> None:
        """Never waits: under `drain` the engine loads later, and a version's canary comes a little after its weights."""
        newest = self._slots.newest_version
        if newest > self._loaded and self._engine.version >= self._loaded and self._may_load(newest):
            self._load()
        self._check_when_there()

    def check_first(self) -> None:
        """Both sides' canaries set the tolerance. A searcher that starts late begins with a later version."""
        self._load()
        self._check_when_there()

    def _may_load(self, version: int) -> bool:
        """After too many versions in a row without a comparison only one whose canary is there."""
        return self._unchecked < MAX_UNCHECKED or self._slots.canary(version) is not None

    def _load(self) -> None:
        weights = self._slots.fetch()
        self._loaded = weights.version
        self._unchecked += 1
        if weights.version > self._engine.version:
            self._engine.load(weights)

    def _check_when_there(self) -> None:
        """A version that is overtaken before its canary comes goes unchecked; the next one's is compared."""
        version = self._engine.version
        if version == self._checked or version != self._loaded:
            return
        published = self._slots.canary(version)
        if published is not None:
            computed = self._engine.score([self._tokens[:1]], [self._tokens[1:]], 1.0)[0]
            self._canary.check(published=published, computed=computed, version=version)
            self._checked, self._unchecked = version, 0


class Heartbeat:
    """Signs of life on the board, with the numbers the trainer shows."""

    def __init__(self, row: Row, engine: Engine, state: SearchState) -> None:
        self._row = row
        self._engine = engine
        self._state = state

    def beat(self) -> None:
        row, state, counts = self._row, self._state, self._state.counts
        row["heartbeat"] = time.monotonic()
        row["version"] = self._engine.version
        row["groups"], row["responses"], row["tokens"] = counts.sent, counts.responses, counts.tokens
        row["failures"] = state.failures.total
        row["skipped"] = sum(state.difficulty.skipped.values())
        row["cursor"] = state.prompts.cursor


class Inbox:
    """Takes in the trainer's messages, between decode steps and while the searcher waits for room in the group channel."""

    def __init__(self, link: Link, row: Row, heartbeat: Heartbeat, config: RuntimeConfig) -> None:
        self._link = link
        self._heartbeat = heartbeat
        self._asked: list[int] = []
        """Versions whose evaluation was asked for and has not begun."""
        # Made here because each needs the other: the sender waits for acknowledgements, which arrive as messages.
        self.sender = WindowedSender(
            link,
            row,
            window=config.channel_groups,
            deadline_seconds=config.wait_seconds,
            handle_messages=self.handle_messages,
        )

    @property
    def asked(self) -> Sequence[int]:
        return self._asked

    def handle_messages(self) -> None:
        """Never waits; beats too, so that a searcher that only waits is seen to live."""
        self._heartbeat.beat()
        for message in self._link.drain():
            if isinstance(message, Stop):
                raise Stopped
            if isinstance(message, Acknowledge):
                self.sender.acknowledge(message)
            if isinstance(message, Evaluate):
                self._asked.append(message.version)

    def take_asked(self, version: int) -> bool:
        """Whether an evaluation of `version` or an earlier one was asked for; all such requests count as answered."""
        reached = any(asked <= version for asked in self._asked)
        self._asked = [asked for asked in self._asked if asked > version]
        return reached


class Evaluations:
    """Answers the trainer's requests for evaluations."""

    def __init__(self, link: Link, inbox: Inbox, heartbeat: Heartbeat, *, engine: Engine, evaluator: Evaluator) -> None:
        self._link = link
        self._inbox = inbox
        self._heartbeat = heartbeat
        self._engine = engine
        self._evaluator = evaluator

    def evaluate_if_asked(self) -> None:
        """Once for all versions that were asked for and are reached; no weights are loaded meanwhile."""
        if self._inbox.take_asked(self._engine.version):
            metrics = self._evaluator(self._engine.sibling(), self._heartbeat.beat)
            self._link.send(Evaluated(version=self._engine.version, metrics=metrics))


@dataclass(frozen=True, kw_only=True)
class SearcherRole:
    """Owns what happens between decode steps: signs of life, messages, newer weights, evaluations."""

    row: Row
    inbox: Inbox
    loader: WeightLoader
    searcher: Searcher
    references: WeightSlots | None
    """Where new references are published; None = they never are."""
    evaluations: Evaluations | None
    """What answers requests for evaluations; None for a searcher that is not asked."""

    def start(self) -> None:
        """What is done before the first decode step."""
        self.inbox.handle_messages()
        self.evaluate_if_asked()  # the start is evaluated with the weights of version 0, however late this searcher is
        self.loader.check_first()
        self.tick()

    def tick(self) -> None:
        """What is done between two decode steps."""
        self.inbox.handle_messages()
        self.evaluate_if_asked()  # before newer weights move on from the version that was asked for
        self.loader.load_newer()
        self.load_newer_reference()
        self.evaluate_if_asked()
        self.searcher.send_ready(at_least=GROUPS_AT_ONCE)

    def idle_tick(self) -> None:
        """While waiting: nothing is held back, for the trainer may wait for just that."""
        self.tick()
        self.searcher.send_ready()

    def evaluate_if_asked(self) -> None:
        if self.evaluations is not None:
            self.evaluations.evaluate_if_asked()

    def load_newer_reference(self) -> None:
        """Never waits. A group is scored at once, so it never mixes references."""
        scorer = self.searcher.scorer
        if self.references is not None and self.references.newest_version > scorer.reference_version:
            self.searcher.load_reference(self.references.fetch())


def run_searcher(
    link: Link,
    *,
    config: Config,
    index: int,
    logs: Path,
    board_memory: tuple[int, int],
    weights: SlotsHandle,
    references: SlotsHandle | None,
    cursors: Sequence[int] = (),
    first_visit: int = 0,
) -> None:
    """The target of a searcher's process. In a run that is resumed, `cursors` say how far each searcher had come, and
    `first_visit` is the number of visits of all of them that the trainer has used or holds."""
    torch.set_num_threads(config.runtime.threads)
    row = Board(SharedMemory(*board_memory), config.search.num_searchers).searcher(index)
    loaded = load_model(config.model)
    task = make_task_for(config, loaded)
    engine = make_search_engine(config, loaded)
    reference_engine = make_reference_engine(config, loaded)
    adapt(loaded, config.model, seed=config.seed)
    loader = WeightLoader(WeightSlots.attach(weights), engine)
    reference_slots = WeightSlots.attach(references) if references is not None else None
    state = make_search_state(config, task, index=index)
    if cursors:
        # No group id comes twice: at most as many groups were sent as visits begun.
        state.prompts.cursor = state.counts.sent = cursors[index]
    heartbeat = Heartbeat(row, engine, state)
    inbox = Inbox(link, row, heartbeat, config.runtime)
    step_values = make_step_values(
        config,
        loaded,
        task,
        log=logs / f"rewards-{index}-values.log",
        between_steps=heartbeat.beat,
    )
    searcher = make_searcher(
        config,
        loaded,
        task,
        engine=engine,
        state=state,
        reference_engine=reference_engine,
        rewards=make_rewards(task, config, log=logs / f"rewards-{index}.log"),
        sender=inbox.sender,
        step_values=step_values,
        reference_samples=make_reference_samples(config, reference_engine, between_steps=heartbeat.beat),
        index=index,
    )
    evaluation_rewards: Rewards | None = None
    evaluations: Evaluations | None = None
    if index == EVALUATES:
        evaluation_rewards = make_rewards(task, config, log=logs / f"rewards-{index}-evaluate.log")
        start = partial(make_start_scorer, config, loaded, searcher)
        evaluator = make_evaluator(config, loaded, task, evaluation_rewards, start=start)
        evaluations = Evaluations(link, inbox, heartbeat, engine=engine, evaluator=evaluator)
    role = SearcherRole(
        row=row,
        inbox=inbox,
        loader=loader,
        searcher=searcher,
        references=reference_slots,
        evaluations=evaluations,
    )
    try:
        role.start()
        searcher.run(make_visits(config, searcher, role, first_visit=first_visit), role.tick)
    except Stopped:
        logger.info("stopped after %d groups", searcher.counts.sent)
    finally:
        searcher.close()
        if evaluation_rewards is not None:
            evaluation_rewards.close()


def make_visits(config: Config, searcher: Searcher, role: SearcherRole, *, first_visit: int = 0) -> PacedVisits:
    return PacedVisits(
        prompts=searcher.prompts,
        index=searcher.index,
        num_searchers=config.search.num_searchers,
        prompts_per_step=config.train.prompts_per_step,
        steps_per_batch=config.steps_per_batch,
        max_lag=config.max_lag if config.replay.lag == "pace" else None,
        # What waits for its reward grows stale: enough to keep both sides busy, no more than a step's worth.
        max_unscored=max(2 * GROUPS_AT_ONCE, config.train.prompts_per_step // config.search.num_searchers),
        version=lambda: searcher.engine.version,
        generated=lambda: searcher.counts.generated,
        unscored=lambda: searcher.rewards.outstanding,
        tick=role.idle_tick,
        row=role.row,
        deadline_seconds=config.runtime.wait_seconds,
        first=first_visit // config.search.num_searchers,
    )
