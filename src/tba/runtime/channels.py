"""How roles reach each other: the interfaces, their form within one process, and the one way to wait. The loops know nothing
else of the runtime: whether the other role is in this process, in another one or on another host.

`Runtime` is what a trainer has of a run, `SearcherEnds` what a searcher has of it. Their form between the processes of one
machine is in local.py and ends.py.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tba.runtime.deadlines import HeartbeatAges, Idleness, Waiting, overdue

logger = logging.getLogger("tba")

if TYPE_CHECKING:
    import numpy as np

    from tba.observe.display import RoleStatus
    from tba.runtime.board import Row
    from tba.runtime.leases import VisitSource
    from tba.runtime.links import Evaluated
    from tba.types import TrajectoryGroup, Weights

Wait = Literal["none", "first_fill", "replay_ratio", "pace", "channel_full", "durable_replay"]
WAITS: tuple[Wait, ...] = ("none", "first_fill", "replay_ratio", "pace", "channel_full", "durable_replay")
"""The named places where a role may wait, and no others."""
POLL_SECONDS = 0.002
"""Time between two looks of a role that waits."""
TOLD_AFTER_SECONDS = 45.0
"""Time without any movement after which a wait is told."""


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


class WeightSource(Protocol):
    """Where a searcher finds the weights of one trainer."""

    @property
    def newest_version(self) -> int:
        """-1 before the first publication."""
        ...

    @property
    def on_gpu(self) -> bool:
        """Whether what is fetched also lies on the GPU that trainer and searcher use (`Weights.shared`)."""
        ...

    @property
    def takes_long(self) -> bool:
        """Whether a fetch is worth a thread of its own."""
        ...

    def fetch(self) -> Weights:
        """A private copy of the newest version, checked; the copy is overwritten by the next fetch."""
        ...

    def loaded(self) -> None:
        """Say that what was fetched last is being read by work that is queued already, and by nothing later."""
        ...

    def canary(self, version: int) -> np.ndarray | None:
        """The trainer's log-probs of the canary tokens under this version; None = not there yet, or overtaken."""
        ...


class Runtime(GroupReceiver, WeightPublisher, Protocol):
    """What a trainer has of an asynchronous run."""

    @property
    def row(self) -> Row:
        """The trainer's own numbers, which the others see."""
        ...

    @property
    def reference_publisher(self) -> WeightPublisher | None:
        """Publishes references; None where they are never reset."""
        ...

    def start_searchers(
        self, target: Callable[..., None], arguments: Mapping[str, Any], *, stored: Mapping[str, int] | None = None
    ) -> None:
        """Have searchers run `target(link, index=..., incarnation=..., **arguments)` from now on. `stored` is the highest
        number of each source whose groups are on disk."""
        ...

    def replace_searchers(self, go_on_from: Mapping[str, int]) -> None:
        """Go on with new searchers: nothing that the present ones still do or have sent arrives. `go_on_from` is the highest
        number of each source whose groups the trainer still has."""
        ...

    def evaluate(self, version: int) -> None:
        """Ask for an evaluation; the trainer does not wait for it."""
        ...

    def take_evaluations(self) -> list[Evaluated]:
        """Evaluations that have come since the last call."""
        ...

    def progress(self) -> float:
        """A number that changes while any searcher works."""
        ...

    def heartbeats(self) -> Mapping[str, float]:
        """For each searcher a number that changes while it lives."""
        ...

    def published(self, version: int) -> Weights | None:
        """What searchers see of a version; None = it was overwritten, or never published."""
        ...

    def statuses(self) -> list[RoleStatus]:
        """Who does what."""
        ...

    def metrics(self) -> dict[str, float]:
        """What the searchers have done so far, by searcher."""
        ...

    def stop(self) -> None:
        """End all searchers; may be called more than once."""
        ...


class SearcherEnds(GroupSender, Protocol):
    """What a searcher has of a run: its ends of everything that leads to the trainer."""

    @property
    def row(self) -> Row:
        """Its own numbers, which the others see: signs of life among them."""
        ...

    @property
    def visits(self) -> VisitSource: ...

    @property
    def weights(self) -> WeightSource: ...

    @property
    def references(self) -> WeightSource | None:
        """None = references are never reset."""
        ...

    def handle_messages(self) -> None:
        """Take in what has arrived; never waits. Raises Stopped when this searcher is to end."""
        ...

    def take_asked(self, version: int) -> bool:
        """Whether an evaluation of `version` or an earlier one was asked for; all such requests count as answered."""
        ...

    def evaluated(self, version: int, metrics: Mapping[str, float]) -> None: ...

    def trainer_progress(self) -> float:
        """A number that changes while the trainer works, or starts."""
        ...

    def trainer_waits(self) -> bool:
        """Whether the trainer waits for responses."""
        ...

    def lost_visits(self) -> int:
        """Number of visits of the run so far that brought nothing to train on."""
        ...


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
        """What was loaded last, for checkpoints; None = the start model."""

    def publish(self, weights: Weights) -> None:
        copies = {name: tensor.clone() for name, tensor in weights.tensors.items()}
        self._kept.append(replace(weights, tensors=copies))
        if len(self._kept) > self._lag:
            self._in_use = self._kept.popleft()
            self._load(self._in_use)

    def state(self) -> dict[str, Any]:
        return {"in_use": self._in_use, "kept": self._kept}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._in_use, self._kept = state["in_use"], state["kept"]
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
    row: Row,
    deadline_seconds: float,
    waiting: Waiting,
    explain: Callable[[], str],
    progress: Callable[[], float] = lambda: 0.0,
) -> float:
    """Poll until ready; returns the seconds waited. When the deadline passes, the error has what `explain` says is lacking
    and what `waiting` says of who waits for whom.

    The deadline counts only while `progress`, a number that changes while the awaited role works, stays the same, and while
    this process runs: a run that was suspended (Ctrl-Z, a batch system) goes on as if nothing had been. A wait in which
    nothing has moved for TOLD_AFTER_SECONDS is told once, long before its deadline.
    """
    if ready():
        return 0.0
    started, outer = time.monotonic(), row["wait"]
    idleness, ages, told = Idleness(), HeartbeatAges(waiting), False
    row["wait"] = WAITS.index(name)
    try:
        while not ready():
            ages.look()
            idle = idleness.look(progress())
            if idle > TOLD_AFTER_SECONDS and not told:
                told = True
                logger.warning("nothing has moved for %d s: %s.", idle, explain())
            if idle > deadline_seconds:
                words = overdue(explain(), name=name, waiting=waiting, seconds=deadline_seconds, ages=ages)
                raise WaitedTooLong(words)
            time.sleep(POLL_SECONDS)
    finally:
        seconds = time.monotonic() - started
        row["wait"] = outer  # groups may be taken in, and that may wait, while the trainer waits for them
        row["wait_seconds"] += seconds
    return seconds
