"""What fills slots: requests are read, their prompts prefilled once, and their responses wait for free slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tba.generate.native.kv_cache import Prefilled, SlotCache
from tba.generate.sampling import Response, finished_at_once, responses_of, sequence_of
from tba.models.decoder import Decoder
from tba.models.decoder_attention import CausalAttention
from tba.models.packing import length_batches, padded
from tba.types import Completion, Request, Sampling

PREFILL_TOKENS = {"cpu": 2048, "cuda": 32_768}
"""Most tokens in one prefill pass, by device: on a CPU the activations of a pass should stay in its cache."""
READ_AHEAD = {"cpu": 16, "cuda": 64}
"""Prompts prefilled together when a slot falls free: one at a time would cost more in calls than in arithmetic."""


@dataclass(kw_only=True, eq=False)
class _WaitingPrompt:
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


class PrefillQueue:
    """Prompts read and prefilled, whose responses wait for slots, in the order of the requests.

    Requests are read lazily: only when slots are free, and at most `READ_AHEAD` prompts more than they need, so an
    endless iterator serves as well as a list.
    """

    def __init__(
        self,
        requests: Iterator[Request | None],
        *,
        samples_per_prompt: int,
        sampling: Sampling,
        prefill: Callable[[Sequence[np.ndarray]], list[tuple[Prefilled, int]]],
        stop_ids: Collection[int],
        num_slots: int,
        read_ahead: int,
    ) -> None:
        """`prefill` gives, for each sequence, the batch that holds its keys and values, and its row there."""
        self.requests = requests
        # More prompts than fill all slots would only wait, and their keys and values grow stale.
        self.read_ahead = max(1, min(read_ahead, num_slots // samples_per_prompt))
        self.samples_per_prompt = samples_per_prompt
        self.sampling = sampling
        self.prefill = prefill
        self.stop_ids = stop_ids
        self.waiting: deque[_WaitingPrompt] = deque()
        self.exhausted = False
        """Whether the requests have come to their end."""
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
            # With its last response admitted, the prompt's keys and values need not be kept any longer.
            if not first.responses:
                self.waiting.popleft()
        return admissions

    def prefill_again(self, version: int) -> None:
        """Recompute the keys and values of waiting prompts that other weights than those in use, of `version`, computed."""
        older = [entry for entry in self.waiting if entry.prefilled.version != version]
        if not older:
            return
        sequences = [sequence_of(entry.responses[0].request) for entry in older]
        for entry, (prefilled, row) in zip(older, self.prefill(sequences)):
            entry.prefilled, entry.row = prefilled, row

    def _read(self, num_prompts: int, version: int) -> None:
        groups: list[deque[Response]] = []
        for request in self.requests:
            # Nothing may start now, as under a pace limit; reading goes on at the next call.
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
            # Completed responses are handed out before more is read: an endless run of complete prefixes would not end.
            if len(groups) >= num_prompts or self.completed:
                break
        else:
            self.exhausted = True
        # The responses of a request begin alike, so one prefill serves them all.
        sequences = [sequence_of(responses[0].request) for responses in groups]
        for responses, (prefilled, row) in zip(groups, self.prefill(sequences)):
            self.waiting.append(_WaitingPrompt(prefilled=prefilled, row=row, responses=responses))


class Prefill:
    """Computes the keys and values of prompts, arranged as the slots' cache has them."""

    def __init__(self, decoder: Decoder, cache: SlotCache) -> None:
        self.decoder, self.cache = decoder, cache

    @torch.inference_mode()
    def __call__(self, sequences: Sequence[np.ndarray], version: int) -> list[tuple[Prefilled, int]]:
        """For each sequence the batch of similar lengths that holds all its tokens but the last, and its row there."""
        found: dict[int, tuple[Prefilled, int]] = {}
        lengths = [len(sequence) - 1 for sequence in sequences]
        for batch in length_batches(lengths, token_budget=PREFILL_TOKENS[self.decoder.device.type]):
            prefilled = self.batch([sequences[index][:-1] for index in batch], version)
            found.update((index, (prefilled, row)) for row, index in enumerate(batch))
        # Batches go by length; the caller pairs the results with its sequences in their order.
        return [found[index] for index in range(len(sequences))]

    @torch.inference_mode()
    def batch(self, rows: Sequence[np.ndarray], version: int) -> Prefilled:
        """One pass over a right-padded batch; padding comes last, so no real token sees it."""
        device = self.decoder.device
        # A prompt of one token leaves nothing to prefill, but a pass needs a column.
        columns = max([1, *(len(row) for row in rows)])
        ids = padded(rows, columns=columns, device=device)
        positions = torch.arange(columns, device=device).expand_as(ids)
        attend = CausalAttention(self.decoder.spec, *ids.shape, keep=True, dtype=self.cache.keys.dtype)
        self.decoder.store_only(ids.flatten(), positions.flatten(), attend)
        # Where keys lie like values nothing needs to be copied: the pass wrote them as they are forked.
        keys = self.cache.arrange(attend.keys) if self.cache.positions_last else attend.keys
        return Prefilled(keys=keys, values=attend.values, version=version)
