"""Prompts read from the requests and prefilled, whose responses wait for slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tba.generate.responses import Response, finished_at_once, responses_of, sequence_of
from tba.generate.slots import Prefilled
from tba.types import Completion, Request, Sampling

Prefill = Callable[[Sequence[np.ndarray]], list[tuple[Prefilled, int]]]
"""Sequences -> for each the batch that holds its keys and values, and its row there."""


@dataclass(kw_only=True, eq=False)
class _Waiting:
    """A prefilled prompt and its responses that have no slot yet."""

    prefilled: Prefilled
    row: int
    responses: deque[Response]


@dataclass(frozen=True, kw_only=True, eq=False)
class Admission:
    """A response that gets a slot now, and where its prompt's keys and values are."""

    response: Response
    prefilled: Prefilled
    row: int


class Backlog:
    """Reads requests lazily: only when slots are free, and at most `read_ahead` prompts more than they need."""

    def __init__(
        self,
        requests: Iterator[Request | None],
        *,
        samples_per_prompt: int,
        sampling: Sampling,
        prefill: Prefill,
        stop_ids: Collection[int],
        num_slots: int,
        read_ahead: int,
    ) -> None:
        self.requests = requests
        self.read_ahead = max(1, min(read_ahead, num_slots // samples_per_prompt))
        self.samples_per_prompt = samples_per_prompt
        self.sampling = sampling
        self.prefill = prefill
        self.stop_ids = stop_ids
        self.waiting: deque[_Waiting] = deque()
        self.exhausted = False
        """The requests have come to their end."""
        self.completed: list[Completion] = []
        """Responses whose prefix was complete already; the engine hands them out."""

    def read_for(self, count: int, version: int) -> None:
        """Read and prefill, if fewer than `count` responses wait."""
        missing = count - sum(len(waiting.responses) for waiting in self.waiting)
        if missing > 0 and not self.exhausted:
            self._read(max(self.read_ahead, -(-missing // self.samples_per_prompt)), version)

    def take(self, count: int) -> list[Admission]:
        """Up to `count` responses to start now, in the order of the requests."""
        admissions: list[Admission] = []
        while self.waiting and len(admissions) < count:
            first = self.waiting[0]
            response = first.responses.popleft()
            admissions.append(Admission(response=response, prefilled=first.prefilled, row=first.row))
            if not first.responses:
                self.waiting.popleft()
        return admissions

    def is_older_than(self, version: int) -> bool:
        """Whether something that waits was prefilled with other weights."""
        return any(entry.prefilled.version != version for entry in self.waiting)

    def prefill_again(self) -> None:
        """Recompute what waits, with the weights of now."""
        waiting = list(self.waiting)
        sequences = [sequence_of(entry.responses[0].request) for entry in waiting]
        for entry, (prefilled, row) in zip(waiting, self.prefill(sequences)):
            entry.prefilled, entry.row = prefilled, row

    def _read(self, num_prompts: int, version: int) -> None:
        groups: list[deque[Response]] = []
        for request in self.requests:
            if request is None:
                break
            responses: deque[Response] = deque()
            for response in responses_of(request, self.samples_per_prompt, self.sampling):
                done = finished_at_once(response, self.stop_ids, version)
                if done is None:
                    responses.append(response)
                else:
                    self.completed.append(done)
            if responses:
                groups.append(responses)
            if len(groups) >= num_prompts or self.completed:
                break
        else:
            self.exhausted = True
        sequences = [sequence_of(responses[0].request) for responses in groups]
        for responses, (prefilled, row) in zip(groups, self.prefill(sequences)):
            self.waiting.append(_Waiting(prefilled=prefilled, row=row, responses=responses))
