"""Prompts computed into pages: whole ones side by side, long ones part by part between decode steps.

A turn computes as many tokens as running responses may wait for, and everything when nothing runs. A part of a prompt begins
with a page and sees the pages of what came before it, its own or those that it shares with a prompt that begins alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from tba.generate.decoder.attention import CausalAttention
from tba.generate.decoder.decoder import Decoder
from tba.generate.native.page_attention import ContinuedAttention
from tba.generate.native.paged_cache import PagedCache, PagedPrompt
from tba.generate.native.prefill import PREFILL_TOKENS, WaitingPrompt
from tba.policy.packing import length_batches, on_device, padded

TURN_OPERATIONS = 6.5e13
"""Operations for prompts between two turns of decode steps: on an H200 a tenth of a second."""
LEAST_TURN, LARGEST_TURN = 1024, 8192
"""Fewest and most tokens in them: fewer at once would be bound by the launches of a pass, more would only wait for slots."""
MASK_NUMBERS = 2**27
"""Most numbers in the mask of a part of a long prompt."""
LEAST_DEFERRED = 4
"""Prompts with so many pages in common are computed one after the other: a pass more costs less than it saves."""
SMALL_START, SMALL_PART = 1024, 256
"""Parts of fewer tokens after fewer tokens are computed together, whatever came before each."""


class Part(NamedTuple):
    """Tokens of a prompt that are computed in one pass."""

    prompt: PagedPrompt
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


class PagedPrefill:
    """Computes keys and values of prompts into the pages of a cache."""

    def __init__(self, decoder: Decoder, cache: PagedCache) -> None:
        self.decoder, self.cache = decoder, cache
        spec = decoder.spec
        allowed = TURN_OPERATIONS / (2 * spec.num_active_weights)
        self.turn_tokens = int(min(LARGEST_TURN, max(LEAST_TURN, allowed)))
        self._has_masks = spec.sinks or spec.attention_cap is not None or any(window for window in spec.windows)

    def is_early(self, prompt: WaitingPrompt) -> bool:
        """A long prompt takes many turns, in which its slot would stand empty; short ones are computed side by side when a
        slot is free."""
        return len(prompt.sequence) > self.turn_tokens

    @torch.inference_mode()
    def __call__(self, waiting: Sequence[WaitingPrompt], version: int, *, at_once: bool) -> None:
        """Prompts in their order, as far as the turn's tokens and the pages that there are go."""
        most = PREFILL_TOKENS[self.decoder.device.type]
        most = most if at_once else min(most, self.turn_tokens)
        left = most
        while left > 0:
            parts = self._next_parts(waiting, version, left, most)
            for batch in self._batches(parts):
                self.batch(batch)
            if not parts:
                return
            left = most if at_once else left - sum(part.size for part in parts)

    def _next_parts(self, waiting: Sequence[WaitingPrompt], version: int, left: int, most: int) -> list[Part]:
        """The next part of each prompt that is not complete, up to the tokens that are `left` of a turn's `most`."""
        parts: list[Part] = []
        later = self._better_later(waiting, version)
        for index in range(len(waiting)):
            if left <= 0:
                break
            if index in later:
                continue
            stored = self._begun(waiting, index, version)
            if stored is None:
                break  # in order: a later one must not take the pages that this one waits for
            if stored.ready:
                continue
            # A prompt is cut only where it must be: a pass over the rest costs as much as one over more.
            if left < len(stored.ids) - stored.num_computed <= most:
                break
            part = self._part(stored, left)
            parts.append(part)
            left -= part.size
        return parts

    def _better_later(self, waiting: Sequence[WaitingPrompt], version: int) -> set[int]:
        """Prompts that begin as a longer one does which is computed now: in the next pass they share its pages."""
        found: set[int] = set()
        cache, size = self.cache, LEAST_DEFERRED * self.cache.page_size
        alike: dict[bytes, list[int]] = {}
        num_pages = 0
        num_spare = int((cache.counts > 0).sum()) + sum(len(prompt.responses) for prompt in waiting)
        for index, prompt in enumerate(waiting):
            if prompt.stored is None or prompt.stored.version != version:
                num_pages += cache.num_pages(len(prompt.sequence))
                if len(prompt.sequence) > size:
                    alike.setdefault(prompt.sequence[:size].tobytes(), []).append(index)
        # Where pages are short, with those that stay free (`_begun`), the longer one might never come: they would wait for
        # ever.
        if num_pages + num_spare > cache.pool.num_available:
            return found
        for members in alike.values():
            if len(members) > 1:
                longest = max(members, key=lambda index: len(waiting[index].sequence))
                found.update(index for index in members if index != longest)
        return found

    def _part(self, stored: PagedPrompt, most: int) -> Part:
        """What comes next of a prompt: the rest, or whole pages, at least one."""
        page, start = self.cache.page_size, stored.num_computed
        if start and self._has_masks:
            most = min(most, MASK_NUMBERS // (start + most))
        size = min(len(stored.ids) - start, max(most // page, 1) * page)
        return Part(stored, start, start + size)

    def _begun(self, waiting: Sequence[WaitingPrompt], index: int, version: int) -> PagedPrompt | None:
        """The prompt in the cache, with pages for all its tokens; None where there are not so many."""
        prompt, cache = waiting[index], self.cache
        if prompt.stored is not None and prompt.stored.version != version:
            self._drop(prompt)
        if prompt.stored is None:
            # A page for each response that runs or comes before stays free: what is computed now should not have to leave
            # at once. Those that come later leave, if need be.
            num_spare = int((cache.counts > 0).sum()) + sum(len(other.responses) for other in waiting[:index])
            later = [other for other in waiting[index + 1 :] if other.stored is not None]
            prompt.stored = cache.begin(prompt.sequence[:-1], version, num_spare=num_spare)
            while prompt.stored is None and later:
                self._drop(later.pop())
                prompt.stored = cache.begin(prompt.sequence[:-1], version, num_spare=num_spare)
        assert prompt.stored is None or isinstance(prompt.stored, PagedPrompt)
        return prompt.stored

    def _drop(self, prompt: WaitingPrompt) -> None:
        """A prompt leaves the cache, to be computed again later."""
        assert isinstance(prompt.stored, PagedPrompt)
        self.cache.drop(prompt.stored)
        prompt.stored = None

    def _batches(self, parts: Sequence[Part]) -> Iterator[list[Part]]:
        """Parts of similar size, together where what came before is as long: then no mask is needed. Short ones after short
        beginnings go together all the same."""
        groups: dict[int, list[Part]] = {}
        for part in parts:
            is_small = 0 < part.start < SMALL_START and part.size < SMALL_PART
            groups.setdefault(-1 if is_small else part.start, []).append(part)
        for group in groups.values():
            budget = PREFILL_TOKENS[self.decoder.device.type]
            for batch in length_batches([part.size for part in group], token_budget=budget):
                yield [group[index] for index in batch]

    @torch.inference_mode()
    def batch(self, parts: Sequence[Part]) -> None:
        """One pass over a right-padded batch, whose keys and values go into pages."""
        cache, device = self.cache, self.decoder.device
        columns = max(part.size for part in parts)
        ids = padded([part.prompt.ids[part.start : part.end] for part in parts], columns=columns, device=device)
        starts, ends = np.array([(part.start, part.end) for part in parts]).T
        places = starts[:, None] + np.arange(columns)
        real = places < ends[:, None]
        # Padding may lie beyond the tables of positions; no real token sees it.
        positions = on_device(torch.from_numpy(np.where(real, places, 0)), device)
        if starts.any():
            before = [part.prompt.pages[: part.start // cache.page_size] for part in parts]
            attend: CausalAttention = ContinuedAttention(
                self.decoder.spec, cache.pool, before, columns, dtype=cache.dtype
            )
        else:
            attend = CausalAttention(self.decoder.spec, *ids.shape, keep=True, dtype=cache.dtype)
        self.decoder.store_only(ids.flatten(), positions.flatten(), attend)
        pages = np.concatenate(
            [part.prompt.pages[np.arange(part.start, part.end) // cache.page_size] for part in parts]
        )
        keys, values = (table.transpose(2, 3).flatten(1, 2) for table in (attend.keys, attend.values))
        cache.pool.store(pages, places[real] % cache.page_size, np.flatnonzero(real), keys, values)
        for part in parts:
            cache.note_computed(part.prompt, part.end)
