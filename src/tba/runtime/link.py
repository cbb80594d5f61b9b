"""Messages between the trainer and a child process: what is said, and the two-way link.

A reader thread takes messages in as they come, so neither side ever waits for the other to read. Nothing here imports torch:
a reward worker that was killed is back in a moment.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

EVALUATES = 0
"""The searcher that is asked for evaluations."""


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
class Stop:
    """Trainer to searcher: end now."""


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A child's last words: Failed(error="ValueError: ...")"""

    error: str


class Link:
    """Sends pickled messages and collects those that arrive. Both ends run our own code on one machine."""

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
        """False when the other end is gone."""
        try:
            with self._send_lock:
                self._connection.send(message)
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
                self._inbox.put(self._connection.recv())
            except (EOFError, ConnectionResetError, OSError):
                self.closed = True
                self._inbox.put(None)  # wakes a receiver that waits
                self._on_close()
                return
