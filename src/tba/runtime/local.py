"""What the trainer has of a run: it receives groups of its searchers, hands out visits, publishes weights and asks for
evaluations. Each searcher has a link to the trainer's process; those on other machines are the business of cluster/roles.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tba.config import RuntimeConfig
from tba.runtime.board import Board, Row
from tba.runtime.channels import LocalWeights, WeightPublisher
from tba.runtime.leases import VisitLedger
from tba.runtime.links import EndsHandle
from tba.runtime.processes import Role, RoleDied
from tba.runtime.searchers import Incarnation, SearcherPool, StartSearcher
from tba.runtime.weight_slots import WeightSlots
from tba.types import TrajectoryGroup, Weights

COPIES_AT_ONCE = 1000
"""Groups of a second copy that are taken in at a time."""


class GroupCopies(Protocol):
    """A second copy of groups on another node (cluster/copies.py)."""

    def add(self, group: TrajectoryGroup) -> None: ...

    def stored(self) -> set[str]:
        """Ids of those that are stored since the last call."""
        ...

    def groups(self, *, after: Mapping[str, int]) -> Iterator[TrajectoryGroup]:
        """Those with a higher number than their source has in `after`."""
        ...

    def return_to(self, marks: Mapping[str, int]) -> None:
        """Forget those after the highest number of each source."""
        ...


class LocalRuntime:
    """Receives the searchers' groups, hands out visits, publishes weights, asks for evaluations."""

    def __init__(
        self,
        config: RuntimeConfig,
        board: Board,
        start: StartSearcher,
        *,
        num_searchers: int,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        canary: Callable[[Weights], np.ndarray],
        ledger: VisitLedger,
        reference_resets: bool = False,
        slots_in_host_memory: bool = False,
        may_start: Callable[[], bool] = lambda: True,
        copies: GroupCopies | None = None,
    ) -> None:
        """`slots_in_host_memory`: weight slots lie in host memory, not on the trainer's device. `may_start` is False when
        searchers that end are not replaced any more. `copies` gets every group before it is acknowledged."""
        self.config = config
        self.ledger = ledger
        self.board = board
        self.row: Row = board.trainer
        self.pool = SearcherPool(config, board, may_start=may_start)
        self._start_one: Callable[..., Role] = start
        self._num_searchers = num_searchers
        device = next(iter(tensors.values())).device
        if slots_in_host_memory or config.kind == "ray":  # from where they are passed on to other nodes
            device = torch.device("cpu")
        self._slots = WeightSlots.create(tensors, dtype, device=device)
        self._references = WeightSlots.create(tensors, dtype, device=device) if reference_resets else None
        """Where a new reference is published."""
        self._canary = canary
        self._copies = copies
        self._not_copied: set[str] = set()
        """Groups whose copy is not stored yet."""
        self._copied: Iterator[TrajectoryGroup] = iter(())
        """Groups of the second copy that the trainer does not have."""
        self._senders: dict[str, Incarnation] = {}
        """By group: who has sent it and waits for its acknowledgement."""
        self._stored: list[str] = []
        """Groups that the trainer has stored and that are not acknowledged yet."""
        self._evaluations: list[tuple[int, Mapping[str, float]]] = []
        """Versions and their metrics."""
        self._wanted_evaluations: list[int] = []
        """Versions whose evaluation was asked for and has not come."""
        self._evaluator: Incarnation | None = None
        """Who was asked for them."""
        self._failure: str | None = None
        """Why there are no searchers any more."""
        self._stopped = False
        self.row["pid"], self._began = os.getpid(), time.monotonic()

    def start_searchers(
        self, target: Callable[..., None], arguments: Mapping[str, Any], *, stored: Mapping[str, int] | None = None
    ) -> None:
        """Have searchers run `target(link, index=i, incarnation=..., ends=..., **arguments)`, in processes of their own.
        `stored` is the highest number of each source whose groups are on disk."""
        ends = EndsHandle(
            board=self.board.memory.handle(),
            weights=self._slots.handle(),
            references=None if self._references is None else self._references.handle(),
        )
        if self._copies is not None:
            self._copied = self._copies.groups(after=stored or {})
        self._start_one = partial(self._start_one, target, arguments, ends)
        self.pool.begin(self._start_one, self._num_searchers)

    def replace_searchers(self, go_on_from: Mapping[str, int]) -> None:
        """Go on with new searchers where the trainer has gone back: what the present ones have sent is dropped. `go_on_from`
        is the highest number of each source whose groups it still has."""
        for incarnation in self.pool.incarnations():
            self.ledger.hand_back(incarnation.holder)
        self.pool.stop(timeout_seconds=0.0)
        if self._copies is not None:
            self._copies.return_to(go_on_from)
        self._senders, self._stored, self._not_copied, self._copied = {}, [], set(), iter(())
        self._evaluations, self._wanted_evaluations, self._evaluator = [], [], None
        self.pool.begin(self._start_one, self._num_searchers)

    def _beat(self) -> None:
        self.row["beats"], self.row["seconds"] = self.row["beats"] + 1, time.monotonic() - self._began

    def drain(self) -> list[TrajectoryGroup]:
        """All groups that have arrived. Raises when there are no searchers any more and new ones would be of no use."""
        self._beat()
        self.row["lost"] = self.ledger.num_lost
        if self._failure is not None:
            raise RoleDied(self._failure)
        failure, groups = self.pool.failure, [self._completed(group) for group in islice(self._copied, COPIES_AT_ONCE)]
        for incarnation in self.pool.incarnations():
            gone = incarnation.gone  # looked at before its messages: none comes after them
            for message in incarnation.process.link.drain():
                if isinstance(message, TrajectoryGroup):
                    groups.append(self._completed(message))
                    self._senders[message.id] = incarnation
                    if self._copies is not None:
                        self._not_copied.add(message.id)
                        self._copies.add(message)
                    continue
                match message:
                    case ("ask", count):
                        self._lease(incarnation, count)
                    case ("evaluated", (version, metrics)):
                        self._evaluator = None
                        self._evaluations.append((version, metrics))
                        self._wanted_evaluations = [asked for asked in self._wanted_evaluations if asked > version]
            if gone:
                self._forget(incarnation)
        self._ask_for_evaluation()
        self._failure = failure  # raised at the next call: first the groups that came before it are stored
        return groups

    def _completed(self, group: TrajectoryGroup) -> TrajectoryGroup:
        """A group has arrived. The ledger hears of it at once: if its searcher is lost in the same moment, only its other
        visits are handed out again."""
        self.ledger.complete(group.visit, is_lost=not group.trajectories)
        return group

    def _lease(self, incarnation: Incarnation, count: int) -> None:
        incarnation.process.link.send(("visits", self.ledger.lease(incarnation.holder, count)))

    def _forget(self, incarnation: Incarnation) -> None:
        """A searcher is gone: others take its visits."""
        self.pool.forget(incarnation)
        self.ledger.hand_back(incarnation.holder)
        if not incarnation.replaced:
            self._hand_to_others()

    def _hand_to_others(self) -> None:
        """Visits that were handed back go to the searchers there are, now: they may have enough of their own, all of which
        wait for steps that need just these."""
        count, others = self.ledger.num_handed_back, self._running()
        for place, other in enumerate(others):
            share = count // len(others) + (place < count % len(others))
            if share:
                self._lease(other, share)

    def _running(self) -> list[Incarnation]:
        return [incarnation for incarnation in self.pool.incarnations() if not incarnation.gone]

    def acknowledge(self, group_ids: Sequence[str]) -> None:
        """The trainer has stored these groups. Their searchers hear of it when a second copy, if there is one, is stored
        too."""
        self._stored += group_ids
        if self._copies is not None:
            self._not_copied -= self._copies.stored()
        told: dict[Incarnation, list[str]] = {}
        for group_id in self._stored:
            sender = None if group_id in self._not_copied else self._senders.pop(group_id, None)
            if sender is not None:  # imports and what came twice have none
                told.setdefault(sender, []).append(group_id)
        self._stored = [group_id for group_id in self._stored if group_id in self._not_copied]
        for incarnation, ids in told.items():
            incarnation.process.link.send(("stored", ids))  # lost with one that is gone: no harm

    def publish(self, weights: Weights) -> None:
        """Let searchers see the weights, then evaluate the canary on what lies in the slot: they check it when it comes."""
        self._beat()
        self._publish(self._slots, weights)

    @property
    def reference_publisher(self) -> WeightPublisher | None:
        """Publishes references; None where they are never reset."""
        references = self._references
        return None if references is None else LocalWeights(lambda weights: self._publish(references, weights))

    def _publish(self, slots: WeightSlots, weights: Weights) -> None:
        slots.add_canary(self._canary(slots.publish(weights.tensors, version=weights.version)))

    def evaluate(self, version: int) -> None:
        """Ask one searcher; if it dies, another is asked."""
        self._wanted_evaluations.append(version)
        self._evaluator = None
        self._ask_for_evaluation()

    def _ask_for_evaluation(self) -> None:
        running = self._running() if self._wanted_evaluations else []
        if running and self._evaluator not in running:
            self._evaluator = running[0]
            self._evaluator.process.link.send(("evaluate", self._wanted_evaluations[-1]))

    def take_evaluations(self) -> list[tuple[int, Mapping[str, float]]]:
        """Versions whose evaluation has come since the last call, with its metrics."""
        taken, self._evaluations = self._evaluations, []
        return taken

    def published(self, version: int) -> Weights | None:
        """What searchers see of a version; None = it was overwritten, or never published."""
        return self._slots.stored(version)

    def stop(self) -> None:
        """End all searchers; returns when they have ended."""
        if self._stopped:
            return
        self.pool.stop()
        self._stopped = True
        self._slots.memory.close()
        if self._references is not None:
            self._references.memory.close()
