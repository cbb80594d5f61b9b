"""A searcher as a process: what it does between decode steps, and how it is put together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from tba.config import Config, RuntimeConfig
from tba.generate.engine import Engine
from tba.models.load import adapt, load_model
from tba.models.weights import CANARY_TOKENS, CanaryCheck, CanaryMismatch, canary_tokens
from tba.replay.payload import acknowledged_log
from tba.runtime.board import MAX_SEARCHERS, Board, Row, SharedMemory
from tba.runtime.channels import (
    Acknowledge,
    AskVisits,
    Evaluate,
    Evaluated,
    LeaseVisits,
    Link,
    RunCannotGoOn,
    Stop,
    WindowedSender,
)
from tba.runtime.leases import VisitStock
from tba.runtime.weight_slots import SlotsHandle, WeightSlots
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
from tba.search.prompts import PacedVisits
from tba.tasks.evaluation import Evaluator, make_evaluator
from tba.tasks.registry import make_task_for
from tba.tasks.rewards.pool import RewardUnusable, make_rewards

logger = logging.getLogger("tba.search")


class Stopped(Exception):
    """The trainer asked this searcher to end."""


STEPS_AT_HAND = 2
"""Visits that a searcher has at hand, in steps' worth: the trainer answers for more only between two steps."""
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

    def work(self) -> None:
        """A sign of work, which is one of life too."""
        self._row["work"] += 1
        self.beat()

    def beat(self) -> None:
        """A sign of life: deadlines of those who wait for this searcher go on."""
        row, state, counts = self._row, self._state, self._state.counts
        row["heartbeat"] += 1
        row["version"] = self._engine.version
        row["groups"], row["responses"], row["tokens"] = counts.sent, counts.responses, counts.tokens
        row["failures"] = state.failures.total


class Inbox:
    """Takes in the trainer's messages, between decode steps and while the searcher waits for room in the group channel."""

    def __init__(
        self,
        link: Link,
        row: Row,
        heartbeat: Heartbeat,
        config: RuntimeConfig,
        *,
        progress: Callable[[], float],
        stock: int,
    ) -> None:
        """`progress` changes while the trainer works; `stock` visits are kept at hand."""
        self._link = link
        self._heartbeat = heartbeat
        self.visits = VisitStock(self._ask_for_visits, size=stock)
        self._asked: list[int] = []
        """Versions whose evaluation was asked for and has not begun."""
        # Made here because each needs the other: the sender waits for acknowledgements, which arrive as messages.
        self.sender = WindowedSender(
            link,
            row,
            window=config.channel_groups,
            deadline_seconds=config.wait_seconds,
            handle_messages=self.handle_messages,
            progress=progress,
            note=acknowledged_log(),
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
            if isinstance(message, LeaseVisits):
                self.visits.add(message.visits)
            if isinstance(message, Evaluate):
                self._asked.append(message.version)

    def _ask_for_visits(self, count: int) -> None:
        self._link.send(AskVisits(count=count))

    def take_asked(self, version: int) -> bool:
        """Whether an evaluation of `version` or an earlier one was asked for; all such requests count as answered."""
        reached = any(asked <= version for asked in self._asked)
        self._asked = [asked for asked in self._asked if asked > version]
        return reached


class Evaluations:
    """Answers the trainer's requests for evaluations."""

    def __init__(
        self, link: Link, inbox: Inbox, heartbeat: Heartbeat, *, engine: Engine, make: Callable[[], Evaluator]
    ) -> None:
        """`make` makes the evaluator when the first request comes: most searchers are never asked."""
        self._link = link
        self._inbox = inbox
        self._heartbeat = heartbeat
        self._engine = engine
        self._make = make
        self._evaluator: Evaluator | None = None

    def evaluate_if_asked(self) -> None:
        """Once for all versions that were asked for and are reached; no weights are loaded meanwhile."""
        if self._inbox.take_asked(self._engine.version):
            if self._evaluator is None:
                self._evaluator = self._make()
            metrics = self._evaluator(self._engine.sibling(), self._heartbeat.work)
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
    evaluations: Evaluations
    heartbeat: Heartbeat

    def start(self) -> None:
        """What is done before the first decode step."""
        self.inbox.handle_messages()
        # Before newer weights are loaded: the start is evaluated with version 0, however late this searcher is.
        self.evaluations.evaluate_if_asked()
        self.loader.check_first()
        self.tick()

    def tick(self) -> None:
        """What is done between two decode steps."""
        self.heartbeat.work()
        self._tick()

    def idle_tick(self) -> None:
        """While waiting: nothing is held back, for the trainer may wait for just that."""
        self._tick()
        self.searcher.send_ready()

    def _tick(self) -> None:
        self.inbox.handle_messages()
        self.evaluations.evaluate_if_asked()  # before newer weights move on from the version that was asked for
        self.loader.load_newer()
        self.load_newer_reference()
        self.evaluations.evaluate_if_asked()
        self.searcher.send_ready(at_least=GROUPS_AT_ONCE)

    def load_newer_reference(self) -> None:
        """Never waits. A group is scored at once, so it never mixes references."""
        scorer = self.searcher.scorer
        if self.references is not None and self.references.newest_version > scorer.reference_version:
            self.searcher.load_reference(self.references.fetch())


FINAL = (CanaryMismatch, RewardUnusable, TooManyRewardFailures)
"""Errors that a new searcher would meet again: weights that do not arrive as they were sent, a reward that always fails."""


def run_searcher(
    link: Link,
    *,
    config: Config,
    index: int,
    incarnation: str,
    logs: Path,
    board_memory: tuple[int, int],
    weights: SlotsHandle,
    references: SlotsHandle | None,
) -> None:
    """The target of a searcher's process."""
    torch.set_num_threads(config.runtime.threads)
    board = Board(SharedMemory(*board_memory), MAX_SEARCHERS)
    row, trainer_works = board.searcher(index), partial(board.trainer.__getitem__, "beats")
    loaded = load_model(config.model)
    task = make_task_for(config, loaded)
    engine = make_search_engine(config, loaded)
    reference_engine = make_reference_engine(config, loaded)
    adapt(loaded, config.model, seed=config.seed)
    state = make_search_state(config)
    heartbeat = Heartbeat(row, engine, state)
    prompts_per_searcher = -(-config.train.prompts_per_step // config.search.num_searchers)
    inbox = Inbox(
        link,
        row,
        heartbeat,
        config.runtime,
        progress=trainer_works,
        stock=STEPS_AT_HAND * prompts_per_searcher,
    )
    searcher = make_searcher(
        config,
        loaded,
        task,
        engine=engine,
        state=state,
        visits=inbox.visits,
        reference_engine=reference_engine,
        rewards=make_rewards(task, config, log=logs / f"rewards-{index}.log"),
        sender=inbox.sender,
        step_values=make_step_values(
            config, loaded, task, log=logs / f"rewards-{index}-values.log", between_steps=heartbeat.work
        ),
        reference_samples=make_reference_samples(config, reference_engine, between_steps=heartbeat.work),
        index=index,
        incarnation=incarnation,
    )
    with ExitStack() as closing:
        closing.callback(searcher.close)

        def evaluator() -> Evaluator:
            rewards = make_rewards(task, config, log=logs / f"rewards-{index}-evaluate.log")
            closing.callback(rewards.close)
            return make_evaluator(
                config, loaded, task, rewards, start=partial(make_start_scorer, config, loaded, searcher)
            )

        role = SearcherRole(
            row=row,
            inbox=inbox,
            heartbeat=heartbeat,
            loader=WeightLoader(WeightSlots.attach(weights), engine),
            searcher=searcher,
            references=WeightSlots.attach(references) if references is not None else None,
            evaluations=Evaluations(link, inbox, heartbeat, engine=engine, make=evaluator),
        )
        try:
            role.start()
            searcher.run(make_visits(config, searcher, role, progress=trainer_works), role.tick)
        except Stopped:
            logger.info("stopped after %d groups", searcher.counts.sent)
        except FINAL as error:
            raise RunCannotGoOn(f"{type(error).__name__}: {error}") from error


def make_visits(
    config: Config, searcher: Searcher, role: SearcherRole, *, progress: Callable[[], float]
) -> PacedVisits:
    return PacedVisits(
        prompts=searcher.prompts,
        index=searcher.index,
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
        progress=progress,
    )
