"""The local runtime: what the trainer has of a run. Searchers are processes under the
supervisor, and everything that is said to them or by them goes through it.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from tba.config import RuntimeConfig
from tba.observe.display import RoleStatus
from tba.runtime.board import Row
from tba.runtime.channels import LocalWeights, WeightPublisher
from tba.runtime.leases import VisitLedger
from tba.runtime.links import (
    PARENT,
    REPLICA,
    Acknowledge,
    AskVisits,
    EndSearchers,
    EndsHandle,
    Evaluate,
    Evaluated,
    Failed,
    LeaseVisits,
    ReplaceSearcher,
    SearcherEnded,
    SearchersEnded,
    SearchersFailed,
    SearcherStarted,
    StartSearchers,
    pickled,
)
from tba.runtime.processes import STOP_SECONDS, RoleDied, may_fork
from tba.runtime.supervisor import Host
from tba.runtime.weight_slots import WeightSlots
from tba.types import TrajectoryGroup, Weights

logger = logging.getLogger("tba")

ALL_STOPPED_SECONDS = 30.0
"""Time beyond STOP_SECONDS for the supervisor to say that all searchers have ended."""


class LocalRuntime:
    """Receives the searchers' groups, hands out visits, publishes weights, asks for evaluations."""

    def __init__(
        self,
        config: RuntimeConfig,
        host: Host,
        *,
        num_searchers: int,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        canary: Callable[[Weights], np.ndarray],
        ledger: VisitLedger,
        reference_resets: bool = False,
        slots_in_host_memory: bool = False,
    ) -> None:
        """`slots_in_host_memory`: weight slots lie in host memory, not on the trainer's device."""
        self.config = config
        self.ledger = ledger
        self.board = host.board
        self.row: Row = host.board.trainer
        self._link = host.link
        self._num_searchers = num_searchers
        device = next(iter(tensors.values())).device
        if slots_in_host_memory or config.kind == "ray":  # from where they are passed on to other nodes
            device = torch.device("cpu")
        self._slots = WeightSlots.create(tensors, dtype, device=device)
        self._references = WeightSlots.create(tensors, dtype, device=device) if reference_resets else None
        """Where a new reference is published."""
        self._canary = canary
        self._searchers: list[str] = []
        """Addresses of the searchers there are."""
        self._senders: dict[str, str] = {}
        """By group: who has sent it and waits for its acknowledgement."""
        self._evaluations: list[Evaluated] = []
        self._wanted_evaluations: list[int] = []
        """Versions whose evaluation was asked for and has not come."""
        self._evaluator: str | None = None
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
        self._link.send(
            StartSearchers(
                recipe=cloudpickle.dumps((target, dict(arguments))),
                ends=pickled(ends),
                stored=stored or {},
                count=self._num_searchers,
                forked=may_fork(),
            )
        )

    def replace_searchers(self, go_on_from: Mapping[str, int]) -> None:
        """Go on with new searchers: what the present ones have sent is dropped. `go_on_from`: see links.EndSearchers."""
        self._end_searchers(EndSearchers(go_on_from=go_on_from))
        for holder in list(self._searchers):
            self._forget(holder)
        self._senders, self._evaluations, self._wanted_evaluations = {}, [], []

    def _end_searchers(self, message: EndSearchers) -> None:
        """Returns when they have ended; all that the supervisor passes on before its answer is dropped."""
        self._link.send(message)
        deadline = time.monotonic() + STOP_SECONDS + ALL_STOPPED_SECONDS
        while not self._link.closed and time.monotonic() < deadline:
            if isinstance(self._link.receive(timeout_seconds=0.1), SearchersEnded):
                break

    def _beat(self) -> None:
        self.row["beats"], self.row["seconds"] = self.row["beats"] + 1, time.monotonic() - self._began

    def drain(self) -> list[TrajectoryGroup]:
        """All groups that have arrived. Raises when there are no searchers any more and new ones would be of no use."""
        self._beat()
        self.row["lost"] = self.ledger.num_lost
        if self._failure is not None:  # not before the groups that came with it were stored
            raise RoleDied(self._failure)
        groups = []
        for sender, message in self._link.drain_addressed():
            if sender == PARENT:
                self._heed(message)
            elif sender == REPLICA:
                groups.append(self._from_replica(message))
            elif sender in self._searchers and (group := self._message(sender, message)) is not None:
                groups.append(group)
        if self._link.closed and not self._stopped:
            raise RoleDied("the supervisor of this run is gone.")
        return groups

    def _heed(self, message: Any) -> None:
        """A word of the supervisor's."""
        if isinstance(message, SearcherStarted):
            self._searchers.append(message.holder)
            self._searchers.sort()
            self._ask_for_evaluation()
        if isinstance(message, SearcherEnded) and message.holder in self._searchers:
            self._forget(message.holder)
            if not message.replaced:
                self._hand_to_others()
            self._ask_for_evaluation()
        if isinstance(message, SearchersFailed):
            self._failure = message.error

    def _message(self, sender: str, message: Any) -> TrajectoryGroup | None:
        """Deal with a searcher's message; returns it if it is a group."""
        if isinstance(message, TrajectoryGroup):
            self._senders[message.id] = sender
            # Here and not later: if this searcher is lost in the same moment, its other visits are handed out again.
            self.ledger.complete(message.visit, is_lost=not message.trajectories)
            return message
        if isinstance(message, Failed):
            self._link.send(ReplaceSearcher(holder=sender, why=message.error))
        elif isinstance(message, AskVisits):
            self._lease(sender, message.count)
        elif isinstance(message, Evaluated):
            self._evaluator = None
            self._evaluations.append(message)
            self._wanted_evaluations = [asked for asked in self._wanted_evaluations if asked > message.version]
            self._ask_for_evaluation()
        return None

    def _from_replica(self, message: Any) -> TrajectoryGroup:
        """A group that the trainer before had stored, on a disk that is gone: nobody waits for its acknowledgement."""
        if not isinstance(message, TrajectoryGroup):
            raise RoleDied(f"the replica holds something that is no group: {message!r:.500}")
        self.ledger.complete(message.visit, is_lost=not message.trajectories)
        return message

    def _lease(self, holder: str, count: int) -> None:
        self._link.send(LeaseVisits(visits=tuple(self.ledger.lease(holder, count))), to=holder)

    def _forget(self, holder: str) -> None:
        """A searcher is gone: others take its visits."""
        self._searchers.remove(holder)
        self.ledger.hand_back(holder)

    def _hand_to_others(self) -> None:
        """Visits that were handed back go to the searchers there are, now: they may have enough of their own, all of which
        wait for steps that need just these."""
        count, others = self.ledger.num_handed_back, self._searchers
        for place, other in enumerate(others):
            share = count // len(others) + (place < count % len(others))
            if share:
                self._lease(other, share)

    def acknowledge(self, group_ids: Sequence[str]) -> None:
        by_sender: dict[str, list[str]] = defaultdict(list)
        for group_id in group_ids:
            sender = self._senders.pop(group_id, None)  # none for imports, and for what was sent twice
            if sender is not None:
                by_sender[sender].append(group_id)
        for sender, ids in by_sender.items():
            self._link.send(
                Acknowledge(group_ids=tuple(ids)), to=sender
            )  # lost with one that is gone, which does no harm

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
        if self._wanted_evaluations and self._evaluator not in self._searchers and self._searchers:
            self._evaluator = self._searchers[0]
            self._link.send(Evaluate(version=self._wanted_evaluations[-1]), to=self._evaluator)

    def take_evaluations(self) -> list[Evaluated]:
        """Evaluations that have come since the last call."""
        taken, self._evaluations = self._evaluations, []
        return taken

    def progress(self) -> float:
        """A number that changes while any searcher works."""
        return self.board.searchers_progress()

    def heartbeats(self) -> dict[str, float]:
        """For each searcher a number that changes while it lives."""
        return self.board.heartbeats()

    def published(self, version: int) -> Weights | None:
        """What searchers see of a version; None = it was overwritten, or never published."""
        return self._slots.stored(version)

    def statuses(self) -> list[RoleStatus]:
        return self.board.statuses()

    def metrics(self) -> dict[str, float]:
        return self.board.metrics()

    def stop(self) -> None:
        """End all searchers; returns when they have ended."""
        if self._stopped:
            return
        self._stopped = True
        self._end_searchers(EndSearchers())
        self._slots.memory.close()
        if self._references is not None:
            self._references.memory.close()
