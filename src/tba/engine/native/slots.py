"""Slots: places for the responses that are decoded side by side.

`SlotState` holds what the device needs of each slot, in static tensors; `SlotTable` what the host knows: which response is
where. On a GPU the host is behind: it learns what happened from snapshots, asynchronous copies for which the device never
waits. Running responses always occupy slots 0 to n - 1, but for gaps that finished ones have left, so a decode step works on
views: `state[:n]`, `keys[:, :n]`. A gap is taken by the next response, or, when there is none, by the last running one.

Axes: S slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tba.engine.sampling import Response, SampledTokens, SamplingNeeds, SamplingState, sampling_needs, sampling_numbers
from tba.models.packing import padded
from tba.types import on_device

if TYPE_CHECKING:  # Triton is there only where CUDA is
    from tba.engine.kernels.choose_tokens import Columns

NO_SNAPSHOT = np.iinfo(np.int64).max
"""Number that no snapshot reaches: a slot without a response is in no snapshot."""
LEAST_COLUMNS = 256
"""Number of response tokens that the slots' tables have columns for, at least."""
INTEGERS = ("ids", "positions", "num_tokens", "limits", "keys", "top_k", "greedy", "min_new_tokens", "done")
FLOATS = ("temperature", "policy_temperature", "top_p")


class SlotTable:
    """The host's view of the slots: which response is where, and the few numbers that shape the next decode step."""

    def __init__(self, num_slots: int) -> None:
        self.responses: list[Response | None] = [None] * num_slots
        self.count = 0
        """Number of slots up to and including the last running one."""
        self.gaps: list[int] = []
        """Free slots below `count`."""
        self.positions = np.zeros(num_slots, dtype=np.int64)
        self.num_tokens = np.zeros(num_slots, dtype=np.int64)
        self.most_positions = np.zeros(num_slots, dtype=np.int64)
        """Number of positions that the response in a slot may come to have."""
        self.orders = np.zeros(num_slots, dtype=np.int64)
        self.first_snapshot = np.full(num_slots, NO_SNAPSHOT)
        """Number of the first snapshot that covers the response in a slot."""
        self.min_new_tokens = np.zeros(num_slots, dtype=np.int64)
        self.flags = np.zeros((num_slots, len(SamplingNeeds._fields)), dtype=bool)

    def any_running(self) -> bool:
        return self.count > len(self.gaps)

    @property
    def num_free(self) -> int:
        return len(self.responses) - self.count + len(self.gaps)

    def items(self) -> Iterator[tuple[int, Response]]:
        return ((slot, response) for slot, response in enumerate(self.responses) if response is not None)

    def free_slots(self) -> list[int]:
        """Slots without a response, gaps first: filling those keeps the running ones together."""
        return [*self.gaps, *range(self.count, len(self.responses))]

    def put(self, slot: int, response: Response, *, first_snapshot: int) -> None:
        """Give a slot to a response. Slots are taken in the order of `free_slots`."""
        # `free_slots` names gaps first, so a slot that is taken is the first gap or lies behind all running ones.
        if self.gaps and self.gaps[0] == slot:
            self.gaps.pop(0)
        # `count` never falls here: only `compact` and `clear` lower it.
        self.count = max(self.count, slot + 1)
        self.responses[slot] = response
        # Snapshots before this number saw the slot's last response, and are not applied to this one.
        self.first_snapshot[slot] = first_snapshot
        self.positions[slot] = response.start_position
        self.num_tokens[slot] = len(response.token_ids)
        self.most_positions[slot] = response.max_length
        self.orders[slot] = response.order
        self.min_new_tokens[slot] = response.sampling.min_new_tokens
        self.flags[slot] = sampling_needs(response.sampling)

    def remove(self, slot: int) -> Response:
        """Take a response out of its slot, which becomes a gap."""
        response, self.responses[slot] = self.responses[slot], None
        assert response is not None
        self.first_snapshot[slot] = NO_SNAPSHOT
        self.gaps.append(slot)
        return response

    def clear(self) -> None:
        self.responses = [None] * len(self.responses)
        self.count, self.gaps = 0, []
        self.first_snapshot[:] = NO_SNAPSHOT

    def update(self, integers: np.ndarray, number: int) -> list[int]:
        """Take note of snapshot `number` of the first slots -> slots whose response is complete."""
        # Columns of a snapshot are those of INTEGERS, in its order, as the device's table has them.
        all_tokens, done = (integers[:, INTEGERS.index(name)] for name in ("num_tokens", "done"))
        # A slot may have a new response since the snapshot was taken. The snapshot then describes the old one, and is not
        # applied.
        seen = np.flatnonzero(self.first_snapshot[: len(done)] <= number)
        num_tokens = all_tokens[seen]
        # Every token moves its slot on by one position, so positions follow from the counts and need not be copied.
        self.positions[seen] += num_tokens - self.num_tokens[seen]
        self.num_tokens[seen] = num_tokens
        return seen[done[seen] != 0].tolist()

    def reach(self, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Slots with a response, and the number of positions that each may have after so many more decode steps."""
        running = np.flatnonzero(self.first_snapshot[: self.count] != NO_SNAPSHOT)
        # An upper bound: a response may meet a stop token before.
        return running, np.minimum(self.positions[running] + num_steps, self.most_positions[running])

    def most_left(self) -> int:
        """Most tokens that a running response may still get."""
        running, positions = self.reach(0)
        return int((self.most_positions[running] - 1 - positions).max(initial=0))

    def youngest(self) -> int:
        running, _ = self.reach(0)
        return int(running[self.orders[running].argmax()])

    def num_keys(self) -> int:
        """Number of keys that the longest running response sees at its next decode step."""
        return int(self.positions[: self.count].max()) + 1

    def needs(self) -> SamplingNeeds:
        # Gaps keep the flags of their last response: that may ask for more than is needed, never for less.
        found = np.any(self.flags[: self.count], axis=0).tolist()
        # `forbidden` ends when every response has its min_new_tokens, so it is worked out for each step.
        early = bool((self.num_tokens[: self.count] < self.min_new_tokens[: self.count]).any())
        return SamplingNeeds(*found)._replace(forbidden=early)

    def compact(self) -> tuple[list[int], list[int]]:
        """Move the last running responses into gaps -> (from, to), for the device's tables to follow."""
        # There are as many gaps below `num_running` as running slots from it on, so sources and targets pair up.
        num_running = self.count - len(self.gaps)
        targets = [slot for slot in self.gaps if slot < num_running]
        sources = [slot for slot in range(num_running, self.count) if self.responses[slot] is not None]
        for source, target in zip(sources, targets):
            self.responses[target], self.responses[source] = self.responses[source], None
        tables = (self.positions, self.num_tokens, self.most_positions, self.orders, self.first_snapshot)
        for table in (*tables, self.min_new_tokens, self.flags):
            table[targets] = table[sources]
        self.first_snapshot[num_running:] = NO_SNAPSHOT
        self.count, self.gaps = num_running, []
        return sources, targets


class SlotState:
    """State of each slot on the device, as columns of two tables (two copies place a new response, whatever it needs).

    ids: token to be fed next; positions: its place in prompt + response; num_tokens: response tokens so far, prefix
    included; limits: response tokens allowed; keys: of the random numbers; done: 1 = the response is complete, or there
    is none.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.device = device
        self.integers = torch.zeros(num_slots, len(INTEGERS), dtype=torch.int64, device=device)
        self.vacate(slice(None))
        self.floats = torch.ones(num_slots, len(FLOATS), dtype=torch.float32, device=device)
        # No columns at first: `reserve` gives as many as the longest response may need.
        self.tokens = torch.zeros(num_slots, 0, dtype=torch.int64, device=device)
        self.behaviour = torch.zeros(num_slots, 0, device=device)
        self.policy = torch.zeros(num_slots, 0, device=device)

    @torch.inference_mode()
    def reserve(self, num_tokens: int) -> None:
        """Grow to responses of `num_tokens`, keeping what is there."""
        # Grown tables have new addresses: captured graphs notice that and are captured again, so they grow rarely.
        if num_tokens > self.tokens.shape[1]:
            extra = max(num_tokens, LEAST_COLUMNS, 2 * self.tokens.shape[1]) - self.tokens.shape[1]
            self.tokens, self.behaviour, self.policy = (
                F.pad(table, (0, extra)) for table in (self.tokens, self.behaviour, self.policy)
            )

    def column(self, name: str, num_slots: int) -> Tensor:
        if name in FLOATS:
            return self.floats[:num_slots, FLOATS.index(name)]
        return self.integers[:num_slots, INTEGERS.index(name)]

    def vacate(self, slots: Tensor | slice) -> None:
        """Mark slots as done: nothing runs there."""
        self.integers[slots, INTEGERS.index("done")] = 1

    def snapshot(self, num_slots: int) -> AsyncCopy:
        """How far the first slots are when the device comes to it, an asynchronous copy of their integers."""
        # On a CPU the copy would be the table itself, which the next decode step changes.
        integers = self.integers[:num_slots]
        return AsyncCopy(integers if integers.is_cuda else integers.clone())

    def columns(self, num_slots: int) -> Columns:
        from tba.engine.kernels.choose_tokens import Columns

        views = {name: self.column(name, num_slots) for name in (*INTEGERS, *FLOATS)}
        return Columns(**views, tokens=self.tokens, behaviour=self.behaviour, policy=self.policy)

    def sampling(self, num_slots: int) -> SamplingState:
        same = {name: self.column(name, num_slots) for name in (*FLOATS, "top_k", "greedy", "min_new_tokens")}
        return SamplingState(key=self.column("keys", num_slots), position=self.column("num_tokens", num_slots), **same)

    def fetch(self, slots: Sequence[int], num_tokens: int) -> AsyncCopy:
        """Tokens, behaviour and policy log-probs of some slots, as an asynchronous copy."""
        chosen = on_device(torch.tensor(slots), self.device)
        return AsyncCopy(*(table[:, :num_tokens][chosen] for table in (self.tokens, self.behaviour, self.policy)))

    @torch.inference_mode()
    def place(self, slots: Sequence[int], responses: Sequence[Response], seed: int) -> None:
        chosen = on_device(torch.tensor(slots), self.device)
        numbers = [sampling_numbers(response, seed) for response in responses]
        for response, row in zip(responses, numbers):
            # The last token that is there is fed first: prefill leaves it out, and its output is the next token.
            row |= {"ids": int(response.sequence[-1]), "positions": response.start_position, "done": 0}
            row |= {"num_tokens": row["position"], "limits": response.sampling.max_new_tokens, "keys": row["key"]}
        for table, names in ((self.integers, INTEGERS), (self.floats, FLOATS)):
            # One upload a table, in the order of its names: the columns' meaning is INTEGERS and FLOATS alone.
            table[chosen] = on_device(torch.tensor([[row[name] for name in names] for row in numbers]), self.device)
        longest = max(len(response.token_ids) for response in responses)
        if longest:
            # Only what there is already is set: what lies behind it is written before it is read.
            rows = [response.token_ids for response in responses]
            self.tokens[chosen, :longest] = padded(rows, columns=longest, device=self.device)
            self.behaviour[chosen, :longest] = float("nan")
            self.policy[chosen, :longest] = float("nan")
        for slot, response in zip(slots, responses):
            # A response that was taken out has log-probs of its own tokens: NaN stays for the prefix of its request only.
            if response.written is not None:
                both = np.stack((response.written.behaviour, response.written.policy))
                behaviour, policy = on_device(torch.from_numpy(both), self.device)
                self.behaviour[slot, : len(behaviour)] = behaviour
                self.policy[slot, : len(policy)] = policy

    def record(self, num_slots: int, sampled: SampledTokens, is_stop_V: Tensor) -> None:
        """Append the chosen tokens and make them the next to be fed; mark the responses that have ended as done."""
        slots, place = torch.arange(num_slots, device=self.device), self.column("num_tokens", num_slots)
        self.tokens[slots, place] = sampled.tokens
        self.behaviour[slots, place] = sampled.behaviour
        self.policy[slots, place] = sampled.policy
        self.column("ids", num_slots).copy_(sampled.tokens)
        # Positions and num_tokens are neighbours in INTEGERS: one kernel moves both on.
        self.integers[:num_slots, INTEGERS.index("positions") : INTEGERS.index("num_tokens") + 1] += 1
        # After num_tokens has moved on: a response of `limits` tokens is complete.
        ended = is_stop_V[sampled.tokens] | (self.column("num_tokens", num_slots) >= self.column("limits", num_slots))
        ended |= sampled.policy.isnan()  # nothing can follow: `Response.completion` raises when it is taken out
        self.column("done", num_slots).copy_(ended)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy slots to other slots and mark the old ones as done, so that a graph over more slots leaves them alone."""
        for table in (self.integers, self.floats, self.tokens, self.behaviour, self.policy):
            table[targets] = table[sources]
        # A moved slot would otherwise run twice, in its old place and in its new one.
        self.vacate(sources)


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
