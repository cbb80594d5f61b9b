"""The interfaces between roles, with those within one process (others: connection.py), and the one way to wait."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from tba.runtime.counters import WAITS, RoleCounters, Wait
from tba.runtime.deadlines import Idleness

logger = logging.getLogger("tba")

if TYPE_CHECKING:
    from tba.types import TrajectoryGroup, Weights

POLL_SECONDS = 0.002
"""Time between two looks of a role that waits."""
WARN_AFTER_SECONDS = 45.0
"""Time without progress after which a wait is reported."""
MOST_NAMED = 8
"""Roles whose last heartbeat an error names."""


class GroupSender(Protocol):
    def send(self, group: TrajectoryGroup) -> None: ...


class GroupReceiver(Protocol):
    def drain(self) -> list[TrajectoryGroup]:
        """Everything that has arrived, at once; never waits. Raises when senders are gone and no new one would help."""
        ...

    def acknowledge(self, group_ids: Sequence[str]) -> None:
        """These groups are stored: their senders may forget them."""
        ...


class WeightPublisher(Protocol):
    def publish(self, weights: Weights) -> None: ...


class Stopped(Exception):
    """This searcher was asked to end."""


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
        self._in_use: Weights | None = None
        """The weights that were loaded last, for checkpoints; None = the start model."""

    def publish(self, weights: Weights) -> None:
        # The trainer changes these tensors at its next step, and they are loaded up to `lag` steps later: copies are kept.
        copies = {name: tensor.clone() for name, tensor in weights.tensors.items()}
        self._kept.append(replace(weights, tensors=copies))
        if len(self._kept) > self._lag:
            self._in_use = self._kept.popleft()
            self._load(self._in_use)

    def state(self) -> dict[str, Any]:
        return {"in_use": self._in_use, "kept": self._kept}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._in_use, self._kept = state["in_use"], state["kept"]
        # After a resume the engine has the start model, so it gets the weights that it had when the state was saved.
        if self._in_use is not None:
            self._load(self._in_use)


class LocalWeights:
    """Publishing inside one process: the engine loads at once."""

    def __init__(self, load: Callable[[Weights], None]) -> None:
        self._load = load

    def publish(self, weights: Weights) -> None:
        self._load(weights)


class WaitedTooLong(RuntimeError):
    """A deadline passed; the message names who waited for whom, the last heartbeat, the setting, and what to look at."""


def wait_until(
    ready: Callable[[], bool],
    *,
    name: Wait,
    row: RoleCounters,
    deadline_seconds: float,
    waiter: str,
    awaited: str,
    explain: Callable[[], str],
    progress: Callable[[], float] = lambda: 0.0,
    heartbeats: Callable[[], Mapping[str, float]] | None = None,
) -> float:
    """Poll until ready; returns the seconds waited. When the deadline passes, the error says what `explain` finds
    lacking, that `waiter` waited for `awaited`, and when each awaited role gave its last sign of life.

    The deadline, runtime.wait_seconds, counts only while `progress`, a number that changes while the awaited role works,
    stays the same, and while this process runs: a run that was suspended (Ctrl-Z, a batch system) goes on as if nothing had
    been. `heartbeats` has for each awaited role a number that changes while it lives, 0 = it has shown no sign yet; None =
    `progress` is that number.
    """
    # Nothing is written to the row without a wait: every group that is sent or stored comes by here.
    if ready():
        return 0.0
    started, outer = time.monotonic(), row["wait"]
    idleness, warned, ages = Idleness(), False, dict[str, Idleness]()
    row["wait"] = WAITS.index(name)
    try:
        while not ready():
            # Heartbeats are looked at with every poll: an Idleness counts little of the time between two distant looks.
            for role, beats in ({awaited: progress()} if heartbeats is None else heartbeats()).items():
                ages.setdefault(role, Idleness()).look(beats)
            idle = idleness.look(progress())
            if idle > WARN_AFTER_SECONDS and not warned:
                warned = True
                logger.warning("nothing has moved for %d s: %s.", idle, explain())
            if idle > deadline_seconds:
                raise WaitedTooLong(
                    f"{explain()} ({name}: {waiter} waited for {awaited}, and nothing moved for "
                    f"runtime.wait_seconds={deadline_seconds:g} s; last heartbeat: {_last_heartbeats(ages)})"
                )
            time.sleep(POLL_SECONDS)
    finally:
        seconds = time.monotonic() - started
        row["wait"] = outer  # groups may be taken in, and that may wait, while the trainer waits for them
        row["wait_seconds"] += seconds
    return seconds


def _last_heartbeats(ages: Mapping[str, Idleness]) -> str:
    """Of those that have been silent longest: searcher-1 more than 300.0 s ago, searcher-0 0.1 s ago"""
    found = []
    for role, age in sorted(ages.items(), key=lambda item: -item[1].seconds)[:MOST_NAMED]:
        # The last one came before the first look, where none has been seen to come.
        seconds = f"{'' if age.changed else 'more than '}{age.seconds:.1f} s ago"
        found.append(f"{role} {seconds if age.seen else 'none yet'}")
    more = f" and {len(ages) - MOST_NAMED} more" if len(ages) > MOST_NAMED else ""
    return ", ".join(found) + more or "no process is there to show one"
