"""The Ray actor that a role runs under: it holds the role's resources on a node, starts the role as a process there, and
stands for the rest of the run towards it. The process finds counters, weight buffers and a link as on one machine; it
ends with the actor. Nothing here imports torch: an actor is there in a moment.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray

from tba.observe.run_folder import RunFolder
from tba.runtime.cluster import copies
from tba.runtime.cluster.weight_relay import Offer, WeightMirror
from tba.runtime.counters import SharedCounters
from tba.runtime.links import ConnectionHandle
from tba.runtime.processes import RoleProcess

logger = logging.getLogger("tba")

COLLECT_SECONDS = 0.02
"""Time for which frames are collected after the first: a call for each would keep a core busy."""
CHECK_SECONDS = 1.0
CONCURRENCY_GROUPS = {"exchange": 1, "deliver": 1, "weights": 1, "files": 1}
"""Each has a thread of its own, which takes calls in the order they were made; so have all other calls together."""


@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """News of a role since the last exchange."""

    frames: list[bytes]
    row: bytes
    pid: int
    status: int | None
    hung_up: bool
    files: Mapping[str, str] | None = None
    """Contents of the run folder (copies.what_is_there); None = it was not looked at."""


class RoleHost:
    """Runs one role on this node. `searcher` is the number of the searcher that it hosts; None = the trainer. `copied` is
    the run folder of a trainer whose run is copied to another node."""

    def __init__(
        self, *, name: str, searcher: int | None, search_path: Sequence[str], copied: Path | None = None
    ) -> None:
        # The starter's folders come first, so that a module is the one that its starter imports, not another of this node.
        sys.path[:] = [*search_path, *(path for path in sys.path if path not in search_path)]
        self._name = name
        self._searcher = searcher
        self._counters = SharedCounters.create()
        self._own = self._counters.own_part(searcher)
        self._role: RoleProcess | None = None
        self._started = threading.Event()
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        """Messages that the role has sent; None at its end."""
        self._hung_up = False
        self._mirror: WeightMirror | None = None
        self._has_mirror = threading.Event()
        self._has_weights = threading.Event()
        self._copied = None if copied is None else RunFolder(copied)
        self._looked = 0.0

    def start(
        self,
        target: str | bytes,
        arguments: Mapping[str, Any],
        *,
        connection: ConnectionHandle | None,
        log: Path | None,
        threads: int,
    ) -> None:
        """Start the role. A searcher, which is given `connection`, starts when the first weights of its trainer are there; a
        trainer finds its host in `arguments`."""
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        counters = self._counters.memory.handle
        if connection is None:
            own = {"host": replace(arguments["host"], counters=counters)}
        else:
            connection = replace(connection, counters=counters)
            self._mirror = WeightMirror(connection)
            own = {"connection": self._mirror.connection(connection)}
            self._has_mirror.set()
            # In this thread, which stays: Linux ends a process with the thread that has started it (die_with_parent).
            self._has_weights.wait()
        self._role = RoleProcess(
            self._name, target, {**arguments, **own}, log=log, threads=threads, unread=self._frames.put
        )
        self._started.set()

    @ray.method(concurrency_group="weights")
    def take_weights(self, offer: Offer, data: list[Any]) -> None:
        # Ray would fetch a bare argument before the call begins; in a list it is fetched here (weight_relay.Give).
        found = ray.get(data[0])
        self._has_mirror.wait()  # `start` was called before this, but in another thread
        assert self._mirror is not None
        self._mirror.take(offer, found)
        if self._mirror.is_filled:
            self._has_weights.set()

    @ray.method(concurrency_group="exchange")
    def exchange(self, counters: bytes, timeout_seconds: float) -> Exchanged:
        """Take in the shared counters and hand out what the role has sent; waits for that, but not longer than the time."""
        # The role's own part is left out: the role writes it in this memory, and the starter's copy of it is older.
        values, found, own = self._counters.values, np.frombuffer(counters, np.float64), self._own
        values[: own.start], values[own.stop :] = found[: own.start], found[own.stop :]
        frames: list[bytes | None] = []
        with suppress(queue.Empty):
            frames.append(self._frames.get(timeout=timeout_seconds))
            time.sleep(COLLECT_SECONDS)
            while True:
                frames.append(self._frames.get_nowait())
        self._hung_up = self._hung_up or None in frames
        # The field is read once: `start` may set it meanwhile, in another thread.
        role, files = self._role, None
        status = None if role is None else role.status
        # Once a second, and once more when the role has ended. Not before it has begun: the folder may be incomplete.
        is_due = status is not None or time.monotonic() >= self._looked + CHECK_SECONDS
        if self._copied is not None and role is not None and is_due:
            self._looked = time.monotonic()
            with suppress(OSError):  # something was removed while it was looked at
                files = copies.what_is_there(self._copied)
        return Exchanged(
            frames=[frame for frame in frames if frame is not None],
            row=self._counters.values[self._own].tobytes(),
            pid=0 if role is None else role.pid,
            status=status,
            hung_up=self._hung_up,
            files=files,
        )

    @ray.method(concurrency_group="deliver")
    def deliver(self, frame: bytes) -> None:
        """A frame for the role. It waits for its process, which a searcher has when its first weights come."""
        self._started.wait()
        assert self._role is not None
        self._role.link.send_bytes(frame)

    @ray.method(concurrency_group="files")
    def with_folder(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Result of a function of copies.py for the run folder on this node."""
        return call(self._copied, *arguments)

    def signal(self, number: int) -> None:
        if self._role is not None and self._role.alive:
            self._role.signal(number)

    def show_stacks(self) -> None:
        if self._role is not None:
            self._role.show_stacks()

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()
