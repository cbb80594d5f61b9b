"""The connection between the trainer and its searchers, with both its ends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tba.config import RuntimeConfig
from tba.runtime.channels import LocalWeights, Stopped, WeightPublisher, wait_until
from tba.runtime.counters import RoleCounters, SharedCounters, SharedMemory
from tba.runtime.links import ConnectionHandle, Link
from tba.runtime.processes import Role, RoleDied
from tba.runtime.prompt_queue import PromptQueue, RolloutSource
from tba.runtime.searcher_pool import Incarnation, SearcherPool, StartSearcher
from tba.runtime.shared_weights import SharedWeights
from tba.types import TrajectoryGroup, Weights

if TYPE_CHECKING:
    from tba.runtime.cluster.copies import RemoteReplica

COPIES_AT_ONCE = 1000
"""Groups of a second copy that are taken in at a time."""
WINDOW = 64
"""Groups that a searcher may have sent and the trainer not yet stored before the searcher waits."""


class LocalRuntime:
    """The trainer's end. Receives the searchers' groups, hands out rollouts, publishes weights, asks for evaluations."""

    def __init__(
        self,
        config: RuntimeConfig,
        counters: SharedCounters,
        start: StartSearcher,
        *,
        num_searchers: int,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        canary: Callable[[Weights], np.ndarray],
        prompt_queue: PromptQueue,
        reference_resets: bool = False,
        weights_in_host_memory: bool = False,
        may_start: Callable[[], bool] = lambda: True,
        copies: RemoteReplica | None = None,
    ) -> None:
        """`weights_in_host_memory`: not on the trainer's device. `may_start` is False when searchers that end are not
        replaced any more. `copies` gets every group before it is acknowledged."""
        self.config = config
        self.prompt_queue = prompt_queue
        self.counters = counters
        self.row: RoleCounters = counters.trainer
        self.pool = SearcherPool(config, counters, may_start=may_start)
        self._start_one: Callable[..., Role] = start
        self._num_searchers = num_searchers
        device = next(iter(tensors.values())).device
        if weights_in_host_memory or config.kind == "ray":  # from where they are passed on to other nodes
            device = torch.device("cpu")
        self._buffers = SharedWeights.create(tensors, dtype, device=device)
        self._references = SharedWeights.create(tensors, dtype, device=device) if reference_resets else None
        self._canary = canary
        self._copies = copies
        self._not_copied: set[str] = set()
        self._copied: Iterator[TrajectoryGroup] = iter(())
        """Groups of the second copy that the trainer does not have."""
        self._senders: dict[str, Incarnation] = {}
        """Sender of each group that waits for its acknowledgement."""
        self._stored: list[str] = []
        """Groups that the trainer has stored and that are not acknowledged yet."""
        self._evaluations: list[tuple[int, Mapping[str, float]]] = []
        self._wanted_evaluations: list[int] = []
        self._evaluator: Incarnation | None = None
        self._failure: str | None = None
        self.row["pid"], self._began = os.getpid(), time.monotonic()

    def start_searchers(
        self, target: Callable[..., None], arguments: Mapping[str, Any], *, stored: Mapping[str, int] | None = None
    ) -> None:
        """`target`: see StartSearcher. `stored` is the highest number of each source whose groups are on disk."""
        connection = ConnectionHandle(
            counters=self.counters.memory.handle,
            weights=self._buffers.handle(),
            references=None if self._references is None else self._references.handle(),
        )
        if self._copies is not None:
            # Nothing is read yet: each call of `drain` takes COPIES_AT_ONCE of them.
            self._copied = self._copies.groups(after=stored or {})
        self._start_one = partial(self._start_one, target, arguments, connection)
        self.pool.begin(self._start_one, self._num_searchers)

    def replace_searchers(self, go_on_from: Mapping[str, int]) -> None:
        """Go on with new searchers where the trainer has gone back: what the present ones have sent is dropped.
        `go_on_from` is the highest number of each source whose groups it still has."""
        # The leases are returned first: after `stop` the pool has forgotten who held them.
        for incarnation in self.pool.incarnations():
            self.prompt_queue.hand_back(incarnation.holder)
        self.pool.stop(timeout_seconds=0.0)
        if self._copies is not None:
            # Otherwise a later resume would get groups of the steps that are made again from the second copy.
            self._copies.return_to(go_on_from)
        self._senders, self._stored, self._not_copied, self._copied = {}, [], set(), iter(())
        self._evaluations, self._wanted_evaluations, self._evaluator = [], [], None
        self.pool.begin(self._start_one, self._num_searchers)

    def _beat(self) -> None:
        self.row["beats"], self.row["seconds"] = self.row["beats"] + 1, time.monotonic() - self._began

    def drain(self) -> list[TrajectoryGroup]:
        """All groups that have arrived. Raises when there are no searchers any more and new ones would be of no use."""
        self._beat()
        self.row["lost"] = self.prompt_queue.num_lost
        if self._failure is not None:
            raise RoleDied(self._failure)
        failure, groups = self.pool.failure, list(islice(self._copied, COPIES_AT_ONCE))
        for copied in groups:
            self.prompt_queue.complete(copied.rollout, is_lost=not copied.trajectories)
        for incarnation in self.pool.incarnations():
            gone = incarnation.gone  # looked at before its messages: none comes after them
            for message in incarnation.process.link.drain():
                match message:
                    case TrajectoryGroup():
                        groups.append(message)
                        # At once: if its searcher is lost in the same moment, only its other rollouts are handed out again.
                        self.prompt_queue.complete(message.rollout, is_lost=not message.trajectories)
                        # The acknowledgement follows in `acknowledge`, once trainer and second copy have the group.
                        self._senders[message.id] = incarnation
                        if self._copies is not None:
                            self._not_copied.add(message.id)
                            self._copies.add(message)
                    case ("ask", count):
                        self._lease(incarnation, count)
                    case ("evaluated", (version, metrics)):
                        self._evaluator = None
                        self._evaluations.append((version, metrics))
                        # The searcher has answered every request up to this version (`TrainerConnection.take_asked`).
                        self._wanted_evaluations = [asked for asked in self._wanted_evaluations if asked > version]
            if gone:
                self._forget(incarnation)
        self._ask_for_evaluation()
        self._failure = failure  # raised at the next call: first the groups that came before it are stored
        return groups

    def _lease(self, incarnation: Incarnation, count: int) -> None:
        incarnation.process.link.send(("rollouts", self.prompt_queue.lease(incarnation.holder, count)))

    def _forget(self, incarnation: Incarnation) -> None:
        self.pool.forget(incarnation)
        self.prompt_queue.hand_back(incarnation.holder)
        # A process that takes its place asks for rollouts itself, and gets these first (`PromptQueue.lease`). Otherwise they
        # go to the others now: these may have enough of their own, all of which wait for steps that need just these.
        count, others = self.prompt_queue.num_handed_back, [] if incarnation.replaced else self._running()
        for place, other in enumerate(others):
            share = count // len(others) + (place < count % len(others))
            if share:
                self._lease(other, share)

    def _running(self) -> list[Incarnation]:
        return [each for each in self.pool.incarnations() if not each.gone]

    def acknowledge(self, group_ids: Sequence[str]) -> None:
        """The trainer has stored these groups. They are acknowledged when the second copy, if there is one, is stored."""
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
        """Let searchers see the weights, then evaluate the canary on what lies in the buffer."""
        self._beat()
        self._publish(self._buffers, weights)

    @property
    def reference_publisher(self) -> WeightPublisher | None:
        """Publishes references; None where they are never reset."""
        references = self._references
        return None if references is None else LocalWeights(lambda weights: self._publish(references, weights))

    def _publish(self, buffers: SharedWeights, weights: Weights) -> None:
        buffers.add_canary(self._canary(buffers.publish(weights.tensors, version=weights.version)))

    def evaluate(self, version: int) -> None:
        """Ask one searcher; if it dies, another is asked."""
        self._wanted_evaluations.append(version)
        self._evaluator = None
        self._ask_for_evaluation()

    def _ask_for_evaluation(self) -> None:
        running = self._running() if self._wanted_evaluations else []
        if running and self._evaluator not in running:
            self._evaluator = running[0]
            # The newest request stands for all of them: its answer covers the earlier versions.
            self._evaluator.process.link.send(("evaluate", self._wanted_evaluations[-1]))

    def take_evaluations(self) -> list[tuple[int, Mapping[str, float]]]:
        taken, self._evaluations = self._evaluations, []
        return taken

    def published(self, version: int) -> Weights | None:
        """The tensors of a version as searchers see them; None = it was overwritten, or never published."""
        return self._buffers.stored(version)

    def stop(self) -> None:
        self.pool.stop()
        # The memory closes last: a searcher that still starts opens it through this process's descriptors.
        self._buffers.memory.close()
        if self._references is not None:
            self._references.memory.close()


class TrainerConnection:
    """The side of searcher `index`, over its link to the trainer and shared memory."""

    def __init__(
        self,
        link: Link,
        handle: ConnectionHandle,
        config: RuntimeConfig,
        *,
        index: int,
        stock: int,
        note: Callable[[TrajectoryGroup], None] | None = None,
    ) -> None:
        """`stock` rollouts are kept ready; `note` is called with each group whose acknowledgement arrives."""
        self._link = link
        self._note = note
        self.counters = SharedCounters(SharedMemory.attach(handle.counters))
        self.row = self.counters.searcher(index)
        self.weights = SharedWeights.attach(handle.weights)
        # None = references are never reset.
        self.references = None if handle.references is None else SharedWeights.attach(handle.references)
        self.rollouts = RolloutSource(lambda count: link.send(("ask", count)), size=stock)
        self._config = config
        self._unacknowledged: dict[str, TrajectoryGroup] = {}
        self._asked: list[int] = []
        """Versions whose evaluation was asked for and has not begun."""

    def send(self, group: TrajectoryGroup) -> None:
        """Waits when too many groups are not stored yet."""

        def has_room() -> bool:
            if len(self._unacknowledged) >= WINDOW:
                self.handle_messages()  # acknowledgements make room
            return len(self._unacknowledged) < WINDOW

        wait_until(
            has_room,
            name="channel_full",
            row=self.row,
            deadline_seconds=self._config.wait_seconds,
            waiter="a searcher",
            awaited="the trainer",
            explain=lambda: (
                f"the trainer has not stored {len(self._unacknowledged)} groups on the way: it does not take in groups. "
                "Look at what it writes, or raise runtime.wait_seconds if its steps take this long"
            ),
            progress=self.counters.trainer_progress,
        )
        # Kept until the trainer has stored it: WINDOW counts these.
        self._unacknowledged[group.id] = group
        self._link.send(group)

    def handle_messages(self) -> None:
        """Take in what has arrived; never waits. Raises Stopped when this searcher is to end. Also a heartbeat."""
        self.row["heartbeat"] += 1
        for message in self._link.drain():
            match message:
                case ("stop", _):
                    raise Stopped
                case ("stored", group_ids):
                    for group_id in group_ids:
                        group = self._unacknowledged.pop(group_id)
                        if self._note is not None:
                            self._note(group)
                case ("rollouts", rollouts):
                    self.rollouts.add(rollouts)
                case ("evaluate", version):
                    self._asked.append(version)

    def take_asked(self, version: int) -> bool:
        """Whether an evaluation of `version` or an earlier one was asked for; all such requests count as answered."""
        reached = any(asked <= version for asked in self._asked)
        self._asked = [asked for asked in self._asked if asked > version]
        return reached

    def evaluated(self, version: int, metrics: Mapping[str, float]) -> None:
        self._link.send(("evaluated", (version, metrics)))
