"""The host's view of the slots: which response is where, and the few numbers that shape the next step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tba.generate.responses import Response
from tba.generate.sampling import Needs, needs_of
from tba.generate.slots import Progress

NEVER = np.iinfo(np.int64).max


class Running:
    """The host's view of the slots: which response is where, and the few numbers that shape the next step."""

    def __init__(self, num_slots: int) -> None:
        self.responses: list[Response | None] = [None] * num_slots
        self.count = 0
        """Slots up to the last running one."""
        self.holes: list[int] = []
        self.positions = np.zeros(num_slots, dtype=np.int64)
        self.num_tokens = np.zeros(num_slots, dtype=np.int64)
        self.since = np.full(num_slots, NEVER)
        """The first look that tells of the response in a slot."""
        self.min_new_tokens = np.zeros(num_slots, dtype=np.int64)
        self.flags = np.zeros((num_slots, len(Needs._fields)), dtype=bool)

    def any(self) -> bool:
        return self.count > len(self.holes)

    def items(self) -> Iterator[tuple[int, Response]]:
        return ((slot, response) for slot, response in enumerate(self.responses) if response is not None)

    def free_slots(self) -> list[int]:
        return [*self.holes, *range(self.count, len(self.responses))]

    def put(self, slot: int, response: Response, *, since: int) -> None:
        """Slots are taken in the order of `free_slots`."""
        if self.holes and self.holes[0] == slot:
            self.holes.pop(0)
        self.count = max(self.count, slot + 1)
        self.responses[slot] = response
        self.since[slot] = since
        self.positions[slot] = response.start_position
        self.num_tokens[slot] = response.num_prefix_tokens
        self.min_new_tokens[slot] = response.sampling.min_new_tokens
        self.flags[slot] = needs_of(response.sampling)

    def remove(self, slot: int) -> Response:
        response, self.responses[slot] = self.responses[slot], None
        assert response is not None
        self.since[slot] = NEVER
        self.holes.append(slot)
        return response

    def clear(self) -> None:
        self.responses = [None] * len(self.responses)
        self.count, self.holes = 0, []
        self.since[:] = NEVER

    def advance_to(self, progress: Progress, look: int) -> list[int]:
        """Slots whose response is complete by a look at the first slots; those taken after it are not what it saw."""
        seen = np.flatnonzero(self.since[: len(progress.done)] <= look)
        num_tokens = progress.num_tokens[seen]
        self.positions[seen] += num_tokens - self.num_tokens[seen]
        self.num_tokens[seen] = num_tokens
        return seen[progress.done[seen]].tolist()

    def num_keys(self) -> int:
        """Keys the longest running response sees at its next step."""
        return int(self.positions[: self.count].max()) + 1

    def needs(self) -> Needs:
        found = np.any(self.flags[: self.count], axis=0).tolist()
        early = bool((self.num_tokens[: self.count] < self.min_new_tokens[: self.count]).any())
        return Needs(*found)._replace(forbidden=early)

    def close_holes(self) -> tuple[list[int], list[int]]:
        """Move the last running responses into holes -> (from, to)."""
        num_running = self.count - len(self.holes)
        targets = [slot for slot in self.holes if slot < num_running]
        sources = [slot for slot in range(num_running, self.count) if self.responses[slot] is not None]
        for source, target in zip(sources, targets):
            self.responses[target], self.responses[source] = self.responses[source], None
        for table in (self.positions, self.num_tokens, self.since, self.min_new_tokens, self.flags):
            table[targets] = table[sources]
        self.since[num_running:] = NEVER
        self.count, self.holes = num_running, []
        return sources, targets
