"""The two-way link between a process and its parent, and what a searcher needs to find its ends.

Messages between trainer and searcher are groups, and pairs of a name and a value:

    searcher -> trainer      a TrajectoryGroup as it is; ask: number of rollouts; evaluated: (version, metrics)
    trainer -> searcher      stored: group ids; rollouts: those that it gets; evaluate: version; stop
    any child -> parent      Failed

Nothing here imports torch or NumPy when it runs: a reward worker has a link too.
"""

from __future__ import annotations

import os
import pickle
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tba.runtime.weight_memory import SharedWeightsHandle

STOP = ("stop", None)


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A child's error report: Failed(error="ValueError: ...", final=False)"""

    error: str
    final: bool = False
    """Whether a new process would fail in the same way, so that starting one is of no use."""


@dataclass(frozen=True, kw_only=True)
class ConnectionHandle:
    """How a searcher opens the memory of its connection: ConnectionHandle(counters="/proc/4711/fd/9", weights=..., ...)"""

    counters: str
    weights: SharedWeightsHandle
    references: SharedWeightsHandle | None


class RunCannotGoOn(RuntimeError):
    """An error of a role that a new process in its place would meet again."""


class Link:
    """A reader thread takes messages in as they come, so neither side ever waits for the other to read."""

    def __init__(
        self,
        connection: Any,
        *,
        on_close: Callable[[], None] = lambda: None,
        queued: bool = False,
        unread: Callable[[bytes | None], None] | None = None,
    ) -> None:
        """`queued`: a thread sends, so that sending never waits; one searcher that is suspended delays no other.
        `unread` gets every message as it came, and None at the end, in the place of the inbox."""
        self._connection = connection
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """None = the other end is gone."""
        self._outbox: queue.SimpleQueue[bytes | None] | None = queue.SimpleQueue() if queued else None
        # Several threads may send, and the bytes of two messages must not mix.
        self._send_lock = threading.Lock()
        self._on_close = on_close
        self._unread = unread
        self.failure: Failed | None = None
        """The error report that has arrived, seen before anybody looks for messages."""
        self.closed = False
        """The other end is gone, and all that it has sent has arrived."""
        # The threads start last, because they use every field. They are daemons: a process ends although its reader waits.
        threading.Thread(target=self._read, daemon=True, name="link-reader").start()
        if queued:
            threading.Thread(target=self._write, daemon=True, name="link-writer").start()

    def send(self, message: Any) -> bool:
        """Send a message; False when the other end is gone. One that cannot be pickled is a TypeError with its name."""
        # Pickled here, not in the writer's thread: the caller sees the error, and may change the object.
        return self.send_bytes(pickled(message))

    def send_bytes(self, body: bytes) -> bool:
        if self._outbox is None:
            return self._send(body)
        self._outbox.put(body)
        return not self.closed

    def receive(self, timeout_seconds: float | None = 0.0) -> Any | None:
        """The next message; None when there is none within the time (0 = do not wait) or the other end is gone."""
        try:
            return self._inbox.get(block=timeout_seconds != 0.0, timeout=timeout_seconds or None)
        except queue.Empty:
            return None

    def drain(self) -> list[Any]:
        # Only one thread takes messages out, so at least qsize() of them are there.
        found = [self._inbox.get_nowait() for _ in range(self._inbox.qsize())]
        return [message for message in found if message is not None]

    def close(self) -> None:
        """Hang up. The reader, which sees it too, closes the descriptor: to close it here would neither wake the reader
        nor reach the other end."""
        # None ends the writer's thread. The line is cut at once, so messages that are still queued may be lost.
        if self._outbox is not None:
            self._outbox.put(None)
        self._hang_up()

    def _hang_up(self) -> None:
        # `socket` closes the descriptor that it is given, and the reader still needs its own: a duplicate is shut down.
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)

    def _send(self, body: bytes) -> bool:
        try:
            with self._send_lock:
                self._connection.send_bytes(body)
        except OSError:
            return False
        return not self.closed

    def _write(self) -> None:
        assert self._outbox is not None
        while (body := self._outbox.get()) is not None and self._send(body):
            pass

    def _read(self) -> None:
        while True:
            try:
                body = self._connection.recv_bytes()
            except (EOFError, OSError, TypeError):  # the last one where this end was closed meanwhile
                # `closed` is set before the None: a receiver that the None wakes must see that nothing follows.
                self.closed = True
                (self._unread or self._inbox.put)(None)  # wakes a receiver that waits
                self._on_close()
                return
            (self._unread or self._take)(body)

    def _take(self, body: bytes) -> None:
        try:
            message = pickle.loads(body)
        except Exception as error:  # reported as the sender's failure: a message that is lost in silence is waited for
            message = Failed(error=f"a message that cannot be read: {error!r:.500}")
        if isinstance(message, Failed):
            self.failure = self.failure or message
        self._inbox.put(message)


def pickled(message: Any) -> bytes:
    try:
        return pickle.dumps(message)
    except Exception as error:  # what a message holds may fail to be pickled, each in its own way
        raise TypeError(
            f"a message {type(message).__name__} cannot be sent: {type(error).__name__}: {error}"
        ) from error
