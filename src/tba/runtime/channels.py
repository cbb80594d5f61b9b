"""How roles reach each other: the interfaces between them, their form within one process, and between processes the
messages, the two-way link and a searcher's end of the group channel; and the one way to wait. The loops know nothing else of
the runtime.

Nothing here imports torch or NumPy when it runs: a reward worker, which has a link too, is back in a moment after it was
killed.
"""

from __future__ import annotations

import pickle
import pickletools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from tba.runtime.board import Row
    from tba.runtime.leases import Visit
    from tba.types import TrajectoryGroup, Weights

Wait = Literal["none", "first_fill", "replay_ratio", "pace", "channel_full", "durable_replay"]
WAITS: tuple[Wait, ...] = ("none", "first_fill", "replay_ratio", "pace", "channel_full", "durable_replay")
"""The named places where a role may wait, and no others."""
POLL_SECONDS = 0.002
"""Time between two looks of a role that waits."""
MOST_COUNTED_SECONDS = 1.0
"""What counts of the time between two looks: more passes when the one who looks was suspended or busy."""


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


@dataclass(frozen=True, kw_only=True)
class Acknowledge:
    """Trainer to searcher: these groups are stored; forget them. Acknowledge(group_ids=("searcher-0.5f3a91c2/41",))"""

    group_ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Trainer to searcher: score the held-out prompts with this version or a newer one. Evaluate(version=100)"""

    version: int


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """Searcher to trainer: Evaluated(version=102, metrics={"accuracy": 0.61})"""

    version: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class AskVisits:
    """Searcher to trainer: so many more visits, please. AskVisits(count=16)"""

    count: int


@dataclass(frozen=True, kw_only=True)
class LeaseVisits:
    """Trainer to searcher: visits that are its own until it is gone. LeaseVisits(visits=(Visit(...), ...))"""

    visits: tuple[Visit, ...]


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Trainer to searcher: end now."""


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A child's last words: Failed(error="ValueError: ...", final=False)"""

    error: str
    final: bool = False
    """Whether a new process would fail in the same way, so that starting one is of no use."""


class RunCannotGoOn(RuntimeError):
    """An error of a role that a new process in its place would meet again."""


class Link:
    """Sends pickled messages and collects those that arrive. Both ends run our own code on one machine.

    A reader thread takes messages in as they come, so neither side ever waits for the other to read.
    """

    def __init__(self, connection: Connection, *, on_close: Callable[[], None]) -> None:
        self._connection = connection
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._send_lock = threading.Lock()
        self._on_close = on_close
        self.closed = False
        """The other end is gone."""
        self._reader = threading.Thread(target=self._read, daemon=True, name="link-reader")
        self._reader.start()

    def send(self, message: Any) -> bool:
        """Send a message; False when the other end is gone. One that cannot be pickled is a TypeError with its name."""
        try:
            payload = pickle.dumps(message)
        except Exception as error:  # what a message holds may fail to be pickled, each in its own way
            raise TypeError(
                f"a message {type(message).__name__} cannot be sent: {type(error).__name__}: {error}"
            ) from error
        try:
            with self._send_lock:
                self._connection.send_bytes(payload)
        except (BrokenPipeError, ConnectionResetError, OSError):
            self.closed = True
        return not self.closed

    def receive(self, timeout_seconds: float | None = 0.0) -> Any | None:
        """The next message; None when there is none within the time (0 = do not wait) or the other end is gone."""
        try:
            return self._inbox.get(block=timeout_seconds != 0.0, timeout=timeout_seconds or None)
        except queue.Empty:
            return None

    def drain(self) -> list[Any]:
        """All messages that have arrived."""
        messages = [self._inbox.get_nowait() for _ in range(self._inbox.qsize())]
        return [message for message in messages if message is not None]

    def _read(self) -> None:
        while True:
            try:
                payload = self._connection.recv_bytes()
            except (EOFError, ConnectionResetError, OSError):
                self.closed = True
                self._inbox.put(None)  # wakes a receiver that waits
                self._on_close()
                return
            try:
                self._inbox.put(pickle.loads(payload))
            except Exception as error:  # told as the sender's failure: a message that is lost in silence is waited for
                self._inbox.put(Failed(error=f"a message that cannot be read ({name_in(payload)}): {error!r:.500}"))


def name_in(payload: bytes) -> str:
    """The class that a pickled message names first, for an error; the message is not made."""
    words: list[str] = []
    for operation, argument, _ in pickletools.genops(payload):
        if operation.name == "STACK_GLOBAL" and len(words) >= 2:
            return ".".join(words[-2:])
        if operation.name == "GLOBAL":
            return str(argument).replace(" ", ".")
        if isinstance(argument, str):
            words.append(argument)
    return "no class"


class WindowedSender:
    """A searcher's end. Keeps each group until the trainer has stored it; waits when too many are on the way."""

    def __init__(
        self,
        link: Link,
        row: Row,
        *,
        window: int,
        deadline_seconds: float,
        handle_messages: Callable[[], None],
        progress: Callable[[], float] = lambda: 0.0,
        note: Callable[[TrajectoryGroup], None] | None = None,
    ) -> None:
        """`note` is told of each group whose acknowledgement arrives; None = nobody is."""
        self._link = link
        self._progress = progress
        self._note = note
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
            progress=self._progress,
        )
        self._unacknowledged[group.id] = group
        self._link.send(group)

    def acknowledge(self, message: Acknowledge) -> None:
        for group_id in message.group_ids:
            group = self._unacknowledged.pop(group_id, None)
            if group is not None and self._note is not None:
                self._note(group)

    def unacknowledged(self) -> Iterable[TrajectoryGroup]:
        """What a new trainer would have to be sent again."""
        return self._unacknowledged.values()

    def _has_room(self) -> bool:
        if len(self._unacknowledged) >= self._window:
            self._handle_messages()
        return len(self._unacknowledged) < self._window


class WaitedTooLong(RuntimeError):
    """A deadline passed; the message names who waited, for what, and what to look at."""


def wait_until(
    ready: Callable[[], bool],
    *,
    name: Wait,
    row: Row,
    deadline_seconds: float,
    explain: Callable[[], str],
    progress: Callable[[], float] = lambda: 0.0,
) -> float:
    """Poll until ready; returns the seconds waited. `explain` words the error when the deadline passes.

    The deadline counts only while `progress`, a number that changes while the awaited role works, stays the same, and while
    this process runs: a run that was suspended (Ctrl-Z, a batch system) goes on as if nothing had been.
    """
    if ready():
        return 0.0
    started, outer = time.monotonic(), row["wait"]
    seen, idle, looked = progress(), 0.0, started
    row["wait"] = WAITS.index(name)
    try:
        while not ready():
            now, current = time.monotonic(), progress()
            idle = 0.0 if current != seen else idle + min(now - looked, MOST_COUNTED_SECONDS)
            seen, looked = current, now
            if idle > deadline_seconds:
                raise WaitedTooLong(f"{explain()} (waited {deadline_seconds:g} s: {name})")
            time.sleep(POLL_SECONDS)
    finally:
        seconds = time.monotonic() - started
        row["wait"] = outer  # groups may be taken in, and that may wait, while the trainer waits for them
        row["wait_seconds"] += seconds
    return seconds


class Idleness:
    """How long a number has stayed the same, by the clock of whoever looks at it: the clocks of two hosts are never
    compared, and time in which nobody looked counts little."""

    def __init__(self) -> None:
        self._seen: float | None = None
        self._looked = time.monotonic()
        self.seconds = 0.0

    def look(self, number: float) -> float:
        now = time.monotonic()
        passed, self._looked = now - self._looked, now
        self.seconds = self.seconds + min(passed, MOST_COUNTED_SECONDS) if number == self._seen else 0.0
        self._seen = number
        return self.seconds
