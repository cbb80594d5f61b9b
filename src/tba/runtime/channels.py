"""The interfaces between roles, their form within one process, and a searcher's end of the local channel. The loops know
nothing else of the runtime.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from tba.runtime.board import Row, wait_until
from tba.runtime.link import Acknowledge, Link
from tba.types import TrajectoryGroup, Weights


class GroupSender(Protocol):
    def send(self, group: TrajectoryGroup) -> None: ...


class GroupReceiver(Protocol):
    def drain(self) -> list[TrajectoryGroup]:
        """Everything that has arrived, at once; never waits. Raises when a sender has died."""
        ...

    def acknowledge(self, group_ids: Sequence[str]) -> None:
        """These groups are stored: their senders may forget them."""
        ...


class WeightPublisher(Protocol):
    def publish(self, weights: Weights) -> None: ...


class LocalGroups:
    """A queue inside one process: sender and receiver in one."""

    def __init__(self) -> None:
        self._groups: list[TrajectoryGroup] = []

    def send(self, group: TrajectoryGroup) -> None:
        self._groups.append(group)

    def drain(self) -> list[TrajectoryGroup]:
        groups, self._groups = self._groups, []
        return groups

    def acknowledge(self, group_ids: Sequence[str]) -> None:
        """Nothing to forget: the queue is empty already."""


class LaggedWeights:
    """Publishing inside one process, exactly `lag` versions late: the last `lag` of them are kept."""

    def __init__(self, load: Callable[[Weights], None], *, lag: int) -> None:
        self._load = load
        self._lag = lag
        self._kept: deque[Weights] = deque()

    def publish(self, weights: Weights) -> None:
        copies = {name: tensor.clone() for name, tensor in weights.tensors.items()}
        self._kept.append(replace(weights, tensors=copies))
        if len(self._kept) > self._lag:
            self._load(self._kept.popleft())


class LocalWeights:
    """Publishing inside one process: the engine loads at once."""

    def __init__(self, load: Callable[[Weights], None]) -> None:
        self._load = load

    def publish(self, weights: Weights) -> None:
        self._load(weights)


class WindowedSender:
    """A searcher's end. Keeps each group until the trainer has stored it; waits when too many are on the way."""

    def __init__(
        self, link: Link, row: Row, *, window: int, deadline_seconds: float, handle_messages: Callable[[], None]
    ) -> None:
        self._link = link
        self._row = row
        self._window = window
        self._deadline_seconds = deadline_seconds
        self._handle_messages = handle_messages
        self._unacknowledged: dict[str, TrajectoryGroup] = {}

    def send(self, group: TrajectoryGroup) -> None:
        wait_until(
            self._has_room,
            name="channel_full",
            row=self._row,
            deadline_seconds=self._deadline_seconds,
            explain=lambda: (
                f"a searcher waited for the trainer to store its {len(self._unacknowledged)} groups on the way; "
                "the trainer does not take in groups. Raise runtime.wait_seconds if its steps take this long."
            ),
        )
        self._unacknowledged[group.id] = group
        self._link.send(group)

    def acknowledge(self, message: Acknowledge) -> None:
        for group_id in message.group_ids:
            self._unacknowledged.pop(group_id, None)

    def unacknowledged(self) -> Iterable[TrajectoryGroup]:
        """What a new trainer would have to be sent again."""
        return self._unacknowledged.values()

    def _has_room(self) -> bool:
        if len(self._unacknowledged) >= self._window:
            self._handle_messages()
        return len(self._unacknowledged) < self._window
