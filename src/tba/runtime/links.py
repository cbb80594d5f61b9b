"""Messages between processes: what the roles of a run tell each other, and the two-way link that carries it.

A frame on a link is an address and a pickled message. The supervisor stands between trainer and searchers and passes frames
on by their address, without reading them:

    searcher -> trainer      TrajectoryGroup, AskVisits, Evaluated
    trainer -> searcher      Acknowledge, LeaseVisits, Evaluate
    trainer -> supervisor    StartSearchers, ReplaceSearcher, EndSearchers, ShowStacks
    supervisor -> trainer    SearcherStarted, SearcherEnded, SearchersFailed, SearchersEnded
    supervisor -> searcher   Stop
    replica -> trainer       TrajectoryGroup, as its searcher sent it
    any child -> parent      Failed

Nothing here imports torch or NumPy when it runs: a reward worker, which has a link too, is back in a moment after it was
killed, and the supervisor is there before anything else.
"""

from __future__ import annotations

import os
import pickle
import pickletools
import queue
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tba.runtime.board import MemoryHandle
    from tba.runtime.leases import Visit
    from tba.runtime.slot_memory import SlotsHandle

PARENT = ""
"""Address of whoever started this process and watches it."""
TRAINER = "trainer"
"""Address of the trainer. A searcher's is its name and the incarnation of its process: searcher-0.5f3a91c2."""
REPLICA = "replica"
"""Address of the supervisor's copies of groups (replica.py), as the trainer sees it."""


def group_address(group_id: str, responses: int) -> str:
    """The trainer's address on the frame of a group: the supervisor, which does not read the frame, learns which it is."""
    return f"{TRAINER}/{responses}/{group_id}"


def group_of(address: str) -> tuple[str, int] | None:
    """Id and number of responses of the group under an address; None = it is no group's.

    group_of("trainer/8/searcher-0.5f3a91c2/41") is ("searcher-0.5f3a91c2/41", 8)
    """
    role, _, rest = address.partition("/")
    responses, _, group_id = rest.partition("/")
    return (group_id, int(responses)) if role == TRAINER and group_id else None


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
class EndsHandle:
    """What a searcher's process needs to find its ends.

    EndsHandle(board=MemoryHandle(...), weights=SlotsHandle(...), references=None)
    """

    board: MemoryHandle
    weights: SlotsHandle
    references: SlotsHandle | None
    """Where new references are published; None = they never are."""


@dataclass(frozen=True, kw_only=True)
class StartSearchers:
    """Trainer to supervisor: the weights are published; start the searchers."""

    recipe: bytes
    """Pickled (target, arguments) of a searcher's process."""
    ends: bytes
    """Pickled EndsHandle, which the target is given too: the supervisor need not import what its weights are opened with."""
    stored: Mapping[str, int]
    """The highest number of each source whose groups the trainer has on disk: it lacks later ones of the replica."""
    count: int
    forked: bool
    """Whether searchers are forks of a process that has imported what they need."""


@dataclass(frozen=True, kw_only=True)
class ReplaceSearcher:
    """Trainer to supervisor: something is wrong with a searcher. ReplaceSearcher(holder="searcher-0.5f3a91c2", why="...")"""

    holder: str
    why: str


@dataclass(frozen=True, kw_only=True)
class EndSearchers:
    """Trainer to supervisor: end all searchers; SearchersEnded is the answer, and all that comes later is of new ones."""

    go_on_from: Mapping[str, int] | None = None
    """Where the trainer has gone back and needs new searchers: the highest number of each source whose groups it still has.
    None = the run is over."""


@dataclass(frozen=True, kw_only=True)
class ShowStacks:
    """Trainer to supervisor: a deadline has passed; have all roles write to their logs what they are doing."""


@dataclass(frozen=True, kw_only=True)
class SearcherStarted:
    """Supervisor to trainer: SearcherStarted(holder="searcher-0.5f3a91c2")"""

    holder: str


@dataclass(frozen=True, kw_only=True)
class SearcherEnded:
    """Supervisor to trainer, after the last of the searcher's own messages."""

    holder: str
    replaced: bool
    """Whether another will take its place."""


@dataclass(frozen=True, kw_only=True)
class SearchersFailed:
    """Supervisor to trainer: there is no searcher any more, and starting another is of no use."""

    error: str


@dataclass(frozen=True, kw_only=True)
class SearchersEnded:
    """Supervisor to trainer: no searcher runs any more."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Supervisor to searcher: end now."""


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A child's last words: Failed(error="ValueError: ...", final=False)"""

    error: str
    final: bool = False
    """Whether a new process would fail in the same way, so that starting one is of no use."""


class RunCannotGoOn(RuntimeError):
    """An error of a role that a new process in its place would meet again."""


class Link:
    """Sends messages and collects those that arrive. Both ends run our own code on one machine.

    A reader thread takes frames in as they come, so neither side ever waits for the other to read.
    """

    def __init__(self, connection: Connection, *, on_close: Callable[[], None] = lambda: None) -> None:
        self._connection = connection
        self._inbox: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._send_lock = threading.Lock()
        self._on_close = on_close
        self.closed = False
        """The other end is gone."""
        self._reader = threading.Thread(target=self._read, daemon=True, name="link-reader")
        self._reader.start()

    def send(self, message: Any, to: str = PARENT) -> bool:
        """Send a message; False when the other end is gone. One that cannot be pickled is a TypeError with its name."""
        return self.send_frame(to, pickled(message))

    def send_frame(self, address: str, body: bytes) -> bool:
        try:
            with self._send_lock:
                self._connection.send_bytes(frame(address, body))
        except (BrokenPipeError, ConnectionResetError, OSError):
            self.closed = True
        return not self.closed

    def receive(self, timeout_seconds: float | None = 0.0) -> Any | None:
        """The next message; None when there is none within the time (0 = do not wait) or the other end is gone."""
        try:
            found = self._inbox.get(block=timeout_seconds != 0.0, timeout=timeout_seconds or None)
        except queue.Empty:
            return None
        return None if found is None else found[1]

    def drain(self) -> list[Any]:
        """All messages that have arrived."""
        return [message for _, message in self.drain_addressed()]

    def drain_addressed(self) -> list[tuple[str, Any]]:
        """All messages that have arrived, each with the address on its frame: on the trainer's link that of the sender."""
        found = [self._inbox.get_nowait() for _ in range(self._inbox.qsize())]
        return [message for message in found if message is not None]

    def close(self) -> None:
        """Hang up: the other end sees that this one is gone. The reader, which sees it too, closes the descriptor; to close
        it here would neither wake the reader nor tell the other end."""
        self.closed = True
        hang_up(self._connection)

    def _read(self) -> None:
        while True:
            try:
                address, body = split_frame(self._connection.recv_bytes())
            except (
                EOFError,
                ConnectionResetError,
                OSError,
                TypeError,
            ):  # the last one where this end was closed meanwhile
                self.closed = True
                self._inbox.put(None)  # wakes a receiver that waits
                self._on_close()
                return
            self._take(address, body)

    def _take(self, address: str, body: bytes) -> None:
        try:
            message = pickle.loads(body)
        except Exception as error:  # told as the sender's failure: a message that is lost in silence is waited for
            message = Failed(error=f"a message that cannot be read ({name_in(body)}): {error!r:.500}")
        self._inbox.put((address, message))


def hang_up(connection: Connection) -> None:
    """Have both ends see that it is over, also one that is being read in another thread; closing does not tell that one."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


class RelayedLink(Link):
    """A link of the supervisor's: frames that arrive go unread to one place for all links, and sending never waits, or one
    process that is suspended would hold up the whole run."""

    def __init__(self, connection: Connection, *, deliver: Callable[[RelayedLink, str, bytes | None], None]) -> None:
        """`deliver` is called with every frame, in a thread of its own, and at the end with None for the body."""
        self._deliver = deliver
        self._outbox: queue.SimpleQueue[tuple[str, bytes] | None] = queue.SimpleQueue()
        super().__init__(connection, on_close=lambda: deliver(self, PARENT, None))
        threading.Thread(target=self._write, daemon=True, name="link-writer").start()

    def send_frame(self, address: str, body: bytes) -> bool:
        self._outbox.put((address, body))
        return not self.closed

    def close(self) -> None:
        self._outbox.put(None)
        super().close()

    def _take(self, address: str, body: bytes) -> None:
        self._deliver(self, address, body)

    def _write(self) -> None:
        while (sent := self._outbox.get()) is not None and super().send_frame(*sent):
            pass


def pickled(message: Any) -> bytes:
    try:
        return pickle.dumps(message)
    except Exception as error:  # what a message holds may fail to be pickled, each in its own way
        raise TypeError(
            f"a message {type(message).__name__} cannot be sent: {type(error).__name__}: {error}"
        ) from error


def frame(address: str, body: bytes) -> bytes:
    """One byte with the length of the address, the address, the message."""
    encoded = address.encode()
    return bytes([len(encoded)]) + encoded + body


def split_frame(data: bytes) -> tuple[str, bytes]:
    end = 1 + data[0]
    return data[1:end].decode(), data[end:]


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
