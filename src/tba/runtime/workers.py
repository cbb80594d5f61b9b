"""Threads that share out work which comes in pieces, such as the micro-batches of an update. Each computes its pieces
alone (placement.py says why). Torch holds Python's lock only between its operations, so pieces should be big."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import chain, islice
from typing import TypeVar

import torch

Piece = TypeVar("Piece")
Result = TypeVar("Result")


class Workers:
    """`count` threads, each of which computes with one: Workers(2).in_order(square, [1, 2, 3]) yields 1, 4, 9."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ThreadPoolExecutor | None = None

    def in_order(self, compute: Callable[[Piece], Result], pieces: Iterable[Piece]) -> Iterator[Result]:
        """Results in the order of the pieces, no more than `count` + 1 held at a time. An error of a piece is raised in
        its place. The caller computes a single piece itself, with all the threads that it has."""
        pieces = iter(pieces)
        first = list(islice(pieces, 2))
        if len(first) < 2:
            # A worker would compute a single piece with one thread, where the caller has several.
            yield from map(compute, first)
            return
        if self._pool is None:
            torch.get_num_threads()  # a thread that has not used torch before would take over the workers' number
            self._pool = ThreadPoolExecutor(self.count, "worker", initializer=torch.set_num_threads, initargs=(1,))
        pending: deque[Future[Result]] = deque()
        try:
            for piece in chain(first, pieces):
                pending.append(self._pool.submit(compute, piece))
                # One piece more than there are workers is submitted, so that none is idle while the caller uses a result.
                if len(pending) > self.count:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:  # after an error the caller may change what they read
            for future in pending:
                future.cancel()
            wait(pending)
