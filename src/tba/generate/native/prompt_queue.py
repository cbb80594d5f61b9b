"""What fills slots: requests are read, their prompts wait to be prefilled once each, and their responses for free slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tba.generate.native.paged_cache import PagedCache
from tba.generate.native.slot_cache import SlotCache
from tba.generate.sampling import Response, responses_of
from tba.types import Completion, Request, Sampling

KeyValueCache = SlotCache | PagedCache
READ_AHEAD = {"cpu": 16, "cuda": 64}
"""Prompts prefilled together when a slot falls free: one at a time would cost more in calls than in arithmetic."""


@dataclass(kw_only=True, eq=False)
class WaitingPrompt:
    """A prompt and its responses that have no slot yet. They begin alike, so one prefill serves them all."""

    responses: deque[Response]
    sequence: np.ndarray = field(init=False)
    """All tokens that its responses start with, int64."""
    stored: Any = None
    """A SlotPrompt or PagedPrompt, what its prefill has left in the cache; None = it was not begun."""

    def __post_init__(self) -> None:
        self.sequence = self.responses[0].sequence

    @property
    def is_resumed(self) -> bool:
        """Whether its response has tokens of its own already."""
        return self.responses[0].written is not None

    def is_of(self, response: Response) -> bool:
        """Whether a response begins as these do."""
        return response.request is self.responses[0].request and not self.is_resumed and response.written is None


class PrefillQueue:
    """Prompts read, whose responses wait for slots, in the order of the requests.

    Requests are read lazily: only when slots are free, and at most `READ_AHEAD` prompts more than they need, so an
    endless iterator serves as well as a list.
    """

    def __init__(
        self,
        requests: Iterator[Request | None],
        *,
        samples_per_prompt: int,
        sampling: Sampling,
        cache: KeyValueCache,
        stop_ids: Collection[int],
        num_slots: int,
        read_ahead: int,
    ) -> None:
        self.requests = requests
        # More prompts than fill all slots would only wait, and their keys and values grow stale.
        self.read_ahead = max(1, min(read_ahead, num_slots // samples_per_prompt))
        self.samples_per_prompt = samples_per_prompt
        self.sampling = sampling
        self.cache = cache
        self.stop_ids = stop_ids
        self.waiting: deque[WaitingPrompt] = deque()
        self.exhausted = False
        """Whether the requests have come to their end."""
        self.completed: list[Completion] = []
        """Responses whose prefix was complete already; the engine hands them out."""
        self._num_responses = 0

    def read_for(self, count: int, version: int) -> None:
        """Read, if fewer than `count` responses wait."""
        missing = count - sum(len(waiting.responses) for waiting in self.waiting)
        if missing > 0 and not self.exhausted:
            self._read(max(self.read_ahead, -(-missing // self.samples_per_prompt)), version)

    def resumed(self) -> list[WaitingPrompt]:
        """Prompts up to the last whose response was taken out when it had tokens already."""
        # They stand in front of all that never ran.
        return list(self.waiting)[
            : max((i + 1 for i, prompt in enumerate(self.waiting) if prompt.is_resumed), default=0)
        ]

    def first(self, version: int) -> WaitingPrompt | None:
        """The prompt whose response comes next; None where there is none that `version` has prefilled."""
        stored = self.waiting[0].stored if self.waiting else None
        return self.waiting[0] if stored is not None and stored.ready and stored.version == version else None

    def take(self) -> Response:
        """The response that comes next, to start now."""
        first = self.waiting[0]
        response = first.responses.popleft()
        # With its last response started, the prompt's keys and values need not be kept any longer.
        if not first.responses:
            self.waiting.popleft()
        return response

    def put_back(self, response: Response) -> None:
        """A response that was taken out comes before all that wait: of the running ones it was the youngest."""
        first = self.waiting[0] if self.waiting else None
        if first is not None and first.is_of(response):
            first.responses.appendleft(response)
        else:
            self.waiting.appendleft(WaitingPrompt(responses=deque([response])))

    def give_back(self, num_kept: int) -> bool:
        """The last prompt that is in the cache, but for the first `num_kept`, leaves it -> whether there was one."""
        for waiting in reversed(list(self.waiting)[num_kept:]):
            if waiting.stored is not None:
                self.cache.drop(waiting.stored)
                waiting.stored = None
                return True
        return False

    def _read(self, num_prompts: int, version: int) -> None:
        found: list[WaitingPrompt] = []
        for request in self.requests:
            # Nothing may start now, as under a pace limit; reading goes on at the next call.
            if request is None:
                break
            responses, completed = responses_of(
                request, self.samples_per_prompt, self.sampling, stop_ids=self.stop_ids, version=version
            )
            self.completed += completed
            if responses:
                for response in responses:
                    response.order = self._num_responses
                    self._num_responses += 1
                found.append(WaitingPrompt(responses=deque(responses)))
            # Completed responses are handed out before more is read: an endless run of complete prefixes would not end.
            if len(found) >= num_prompts or self.completed:
                break
        else:
            self.exhausted = True
        self.waiting.extend(found)
