"""What the host learns of the slots, as asynchronous copies: it is behind the device, and never makes it wait.

A `SlotSnapshot` says how far the slots were after some decode steps; `FinishedSlots` are responses taken out of their slots,
whose tokens may still be under way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tba.generate.sampling import Response
from tba.types import Completion


class SlotProgress(NamedTuple):
    """How far the first slots are, an entry per slot."""

    num_tokens: np.ndarray
    """Number of response tokens so far, int64."""
    done: np.ndarray
    """Whether the response is complete, or there is none; bool."""


class SlotSnapshot:
    """The slots' integers as they are when the device comes to it."""

    def __init__(self, integers: Tensor, *, num_tokens: int, done: int) -> None:
        """`num_tokens` and `done` are columns of the integers."""
        # On a CPU the copy would be the table itself, which the next decode step changes.
        self._integers = AsyncCopy(integers if integers.is_cuda else integers.clone())
        self._num_tokens, self._done = num_tokens, done

    def wait(self) -> SlotProgress:
        (integers,) = self._integers.wait()
        return SlotProgress(integers[:, self._num_tokens], integers[:, self._done] != 0)


class FinishedSlots:
    """Finished responses taken out of their slots, with their rows of the slots' tables, which may still be under way."""

    def __init__(
        self,
        responses: Sequence[Response] = (),
        num_tokens: Sequence[int] | np.ndarray = (),
        tables: AsyncCopy | None = None,
    ) -> None:
        """`tables` are tokens, behaviour and policy log-probs, a row per response."""
        self.responses, self.num_tokens, self.tables = responses, num_tokens, tables

    def completions(self, stop_ids: Collection[int]) -> Iterator[Completion]:
        """The finished completions; waits for the tables to arrive."""
        if self.tables is None:
            return
        arrays = self.tables.wait()
        for row, (response, count) in enumerate(zip(self.responses, self.num_tokens)):
            tokens, behaviour, policy = (array[row, :count] for array in arrays)
            yield response.completion(tokens.astype(np.int32), behaviour.copy(), policy.copy(), stop_ids)


class AsyncCopy:
    """Tables copied to the host asynchronously: as they are when the device comes to it, without waiting for it."""

    def __init__(self, *tables: Tensor) -> None:
        """On a CPU the tables are kept, not copied: a view of something that will change must be cloned before."""
        self._tables = [table.to("cpu", non_blocking=True) for table in tables]
        self._arrived: torch.cuda.Event | None = None
        if tables and tables[0].is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(tables[0].device))

    def wait(self) -> list[np.ndarray]:
        # The copies are complete once the device has passed the event; before that the host's memory holds garbage.
        if self._arrived is not None:
            self._arrived.synchronize()
        return [table.numpy() for table in self._tables]
