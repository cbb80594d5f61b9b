"""Weights between nodes, from the trainer's buffers through Ray's object store into those of each searcher's node.

    trainer -> its buffers -> WeightRelay: one put, an object that every node fetches once -> WeightMirror -> searcher's
    buffers

The checksum travels with the bytes, so nothing on the way needs to be trusted. A version that is overtaken before it was
passed on is left out.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import ray
import ray.exceptions

from tba.runtime.counters import SharedMemory
from tba.runtime.links import ConnectionHandle
from tba.runtime.weight_memory import Header, SharedWeightsHandle, WeightMemory, data_bytes, reserve

logger = logging.getLogger("tba")

Kind = Literal["weights", "references"]
CHECK_SECONDS = 0.005
RETRY_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Offer:
    """A version on its way: Offer(kind="weights", number=13, header=Header(...), canary=canary)"""

    kind: Kind
    number: int
    header: Header
    canary: np.ndarray


Give = Callable[[Offer, list[Any]], Any]
"""Hands an offer to a searcher's node, with the object that has its bytes in a list; returns what can be waited for."""


class WeightRelay:
    """One put serves all searchers. At most one offer is on its way to each: a slow node delays no other."""

    def __init__(self, connection: ConnectionHandle) -> None:
        self._sources = [_Source(kind, handle) for kind, handle in _handles(connection).items()]
        self._receivers: dict[str, Give] = {}
        self._given: dict[tuple[str, Kind], tuple[int, Any]] = {}
        """Number of the last offer and the call that delivers it, by receiver and kind."""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="weight-relay")
        self._thread.start()

    def add(self, name: str, give: Give) -> None:
        """A searcher gets what is published from now on, and the newest version at once."""
        with self._lock:
            self._receivers[name] = give

    def remove(self, name: str) -> None:
        with self._lock:
            self._receivers.pop(name, None)
            self._given = {key: given for key, given in self._given.items() if key[0] != name}

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(CHECK_SECONDS):
            try:
                # The lock is held during a put, so `add` and `remove` may wait for a copy of all weights.
                with self._lock:
                    for source in self._sources:
                        source.look()
                        if source.offer is not None:
                            self._give(source.offer, source.object)
            except ray.exceptions.RayError as error:  # such as an object store that is full: perhaps later it is not
                logger.warning("weights could not be passed on, which is tried again: %s", error)
                self._ended.wait(RETRY_SECONDS)

    def _give(self, offer: Offer, data: Any) -> None:
        for name, give in self._receivers.items():
            # A receiver that was given nothing yet gets the newest version, whatever its number.
            number, arrived = self._given.get((name, offer.kind), (-1, None))
            if offer.number > number and (arrived is None or ray.wait([arrived], timeout=0.0)[0]):
                self._given[name, offer.kind] = (offer.number, give(offer, [data]))


def _handles(connection: ConnectionHandle) -> dict[Kind, SharedWeightsHandle]:
    found: dict[Kind, SharedWeightsHandle] = {"weights": connection.weights}
    return found if connection.references is None else {**found, "references": connection.references}


class _Source:
    """The trainer's buffers of one kind, and the newest version in the object store."""

    def __init__(self, kind: Kind, handle: SharedWeightsHandle) -> None:
        self._kind = kind
        self._buffers = WeightMemory(SharedMemory.attach(handle.memory))
        self._size = data_bytes(handle.layout)
        self._number = 0
        self._header: Header | None = None
        self.object: Any = None
        self.offer: Offer | None = None
        """The newest offer; None before its canary is there, which the trainer computes at once."""

    def look(self) -> None:
        """Put a newer version into the object store. The version before leaves it after the last fetch."""
        # The number is read before the copy. If the copy is of a newer version, the next look puts that one again.
        number = self._buffers.number
        if number != self._number:
            found: list[Any] = []
            # Straight from the buffer into the store, which is the copy.
            header = self._buffers.copy_newest(
                lambda buffer: found.append(ray.put(self._buffers.data(buffer, self._size)))
            )
            if header is None:
                return  # overtaken: the next look sees the newer one
            # The last offer has gone: the new version is offered when its own canary is there.
            self._number, self._header, self.object, self.offer = number, header, found[0], None
        if self.offer is None and self._header is not None:
            canary = self._buffers.canary(self._header.version)
            if canary is not None:
                self.offer = Offer(kind=self._kind, number=self._number, header=self._header, canary=canary)


class WeightMirror:
    """A searcher's buffers on its own node, filled by offers of its trainer."""

    def __init__(self, connection: ConnectionHandle) -> None:
        """`connection` is the trainer's: of its buffers only the layout has a meaning here."""
        self._connection, self._theirs = connection, _handles(connection)
        self._buffers = {kind: WeightMemory(reserve(data_bytes(own.layout))) for kind, own in self._theirs.items()}

    def connection(self, counters: str) -> ConnectionHandle:
        """The same handles as the searcher finds them on this node, where `counters` are."""
        found = {kind: replace(own, memory=self._buffers[kind].memory.handle) for kind, own in self._theirs.items()}
        # On a cluster the trainer's buffers lie in host memory, as these do.
        return replace(
            self._connection, counters=counters, weights=found["weights"], references=found.get("references")
        )

    def take(self, offer: Offer, data: np.ndarray) -> None:
        buffers = self._buffers[offer.kind]
        buffer = buffers.begin()
        np.copyto(buffers.data(buffer, len(data)), data)
        buffers.finish(buffer, offer.header)
        buffers.add_canary(offer.canary)
