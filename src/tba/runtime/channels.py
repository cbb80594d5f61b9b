"""The interfaces between roles, and their form within one process. The loops know nothing else of the runtime."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from tba.types import TrajectoryGroup, Weights


class GroupSender(Protocol):
    def send(self, group: TrajectoryGroup) -> None: ...


class GroupReceiver(Protocol):
    def drain(self) -> list[TrajectoryGroup]:
        """Everything that has arrived, at once; never waits. Raises when a sender has died."""
        ...

    def acknowledge(self, groups: Sequence[TrajectoryGroup]) -> None:
        """The groups are stored: their senders may forget them."""
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

    def acknowledge(self, groups: Sequence[TrajectoryGroup]) -> None:
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
