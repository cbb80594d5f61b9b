"""Prefill: requests are read, and their prompts are computed into the cache once each. Their responses then wait for free
slots.

A prompt is computed but for its last token, which is fed at the first decode step. Into slots, prompts of similar length go
side by side. Into pages, long ones go part by part between decode steps: a turn computes as many tokens as running responses
may wait for, and everything when nothing runs. A part of a prompt begins with a page and sees the pages of what came before
it, its own or those that it shares with a prompt that begins alike.

Axes: B prompts, T tokens of the longest part, L positions before it, K key/value heads, H query heads, D head dimension.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from tba.engine.decoder.decoder import Decoder
from tba.engine.decoder.layers import CausalAttention, as_block, attention
from tba.engine.decoder.spec import DecoderSpec
from tba.engine.native.paged_cache import PagedCache, PagedPrompt, side_by_side
from tba.engine.native.slot_cache import SlotCache, SlotPrompt, SlotTurn
from tba.engine.sampling import Response, responses_of
from tba.models.packed_attention import additive
from tba.models.packing import length_batches, padded
from tba.types import Completion, Request, Sampling, on_device

KeyValueCache = SlotCache | PagedCache
READ_AHEAD = {"cpu": 16, "cuda": 64}
"""Prompts prefilled together when a slot falls free: one at a time would cost more in calls than in arithmetic."""
PREFILL_TOKENS = {"cpu": 2048, "cuda": 32_768}
"""Most tokens in one prefill pass, by device: on a CPU the activations of a pass should stay in its cache."""
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


# --- prompts that wait -----------------------------------------------------------------------------------------------


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


@dataclass(kw_only=True, eq=False)
class PrefillQueue:
    """Prompts read, whose responses wait for slots, in the order of the requests. Requests are read lazily: only when slots
    are free, so an endless iterator serves as well as a list."""

    requests: Iterator[Request | None]
    samples_per_prompt: int
    sampling: Sampling
    cache: KeyValueCache
    stop_ids: Collection[int]
    read_ahead: int
    """Number of prompts that are read together, at least."""
    waiting: deque[WaitingPrompt] = field(default_factory=deque)
    exhausted: bool = False
    completed: list[Completion] = field(default_factory=list)
    """Responses whose prefix was complete already; the engine hands them out."""
    _num_responses: int = 0

    def read_for(self, count: int, version: int) -> None:
        """Read until `count` responses wait; a turn of an episode is one response, not K."""
        missing = count - sum(len(waiting.responses) for waiting in self.waiting)
        if missing <= 0 or self.exhausted:
            return
        found: list[WaitingPrompt] = []
        num_found = 0
        for request in self.requests:
            # Nothing may start now, as under a pace limit; reading goes on at the next call.
            if request is None:
                break
            responses, completed = responses_of(
                request, self.samples_per_prompt, self.sampling, stop_ids=self.stop_ids, version=version
            )
            self.completed += completed
            for completion in completed:  # an episode that has ended: no turn follows
                self.cache.turns.drop((completion.prompt_id, completion.sample_index))
            if responses:
                self.cache.check_fits(responses[0].max_length, f"prompt {request.prompt.id!r} with its response")
                for response in responses:
                    # Order of the requests, over the whole call: it decides who goes on where memory is short.
                    response.order = self._num_responses
                    self._num_responses += 1
                num_found += len(responses)
                found.append(WaitingPrompt(responses=deque(responses)))
            # Completed responses are handed out before more is read: an endless run of complete prefixes would not end.
            if (num_found >= missing and len(found) >= self.read_ahead) or self.completed:
                break
        else:
            self.exhausted = True
        self.waiting.extend(found)

    def resumed(self) -> list[WaitingPrompt]:
        """Prompts up to the last whose response was taken out when it had tokens already."""
        # They stand in front of all that never ran.
        count = max((i + 1 for i, prompt in enumerate(self.waiting) if prompt.is_resumed), default=0)
        return list(self.waiting)[:count]

    def first(self, version: int) -> WaitingPrompt | None:
        """The prompt whose response comes next; None where there is none that `version` has prefilled."""
        stored = self.waiting[0].stored if self.waiting else None
        return self.waiting[0] if stored is not None and stored.ready and stored.version == version else None

    def take(self) -> Response:
        """The response that comes next, to start now."""
        # The cache has given the slot its room before (`_has_room`): a failed start leaves the queue as it was.
        response = self.waiting[0].responses.popleft()
        # With its last response started, the prompt's keys and values need not be kept any longer.
        if not self.waiting[0].responses:
            self.waiting.popleft()
        return response

    def put_back(self, response: Response) -> None:
        """A response that was taken out comes before all that wait: of the running ones it was the youngest."""
        first = self.waiting[0] if self.waiting else None
        # Beside its siblings where they still wait, so that one prefill serves it as well.
        is_sibling = first is not None and first.responses[0].request is response.request
        if first is not None and is_sibling and not first.is_resumed and response.written is None:
            first.responses.appendleft(response)
        else:
            self.waiting.appendleft(WaitingPrompt(responses=deque([response])))

    def give_back(self, num_kept: int) -> bool:
        """A turn that is kept, else the last prompt that is in the cache but for the first `num_kept`, leaves it -> whether
        there was one."""
        if self.cache.turns.drop_oldest():
            return True
        for waiting in reversed(list(self.waiting)[num_kept:]):
            if waiting.stored is not None:
                self.cache.drop(waiting.stored)
                # It is prefilled again when its turn comes; its place in the queue is the same.
                waiting.stored = None
                return True
        return False


# --- prefill ---------------------------------------------------------------------------------------------------------


class SlotPrefill:
    """Computes the keys and values of prompts, arranged as the slots have them."""

    def __init__(self, decoder: Decoder, cache: SlotCache) -> None:
        self.decoder, self.cache = decoder, cache

    def is_early(self, prompt: WaitingPrompt) -> bool:
        return False  # it would only grow stale

    @torch.inference_mode()
    def __call__(self, waiting: Sequence[WaitingPrompt], version: int, *, at_once: bool) -> None:
        """Prompts of similar lengths in one batch each, all their tokens but the last."""
        chosen = [prompt for prompt in waiting if prompt.stored is None or prompt.stored.version != version]
        going_on = [(prompt, self.cache.turns.take(prompt.responses[0].key, prompt.sequence[:-1])) for prompt in chosen]
        found = [(prompt, turn) for prompt, turn in going_on if turn is not None]
        lengths = [len(prompt.sequence) - 1 for prompt, _ in found]
        for batch in length_batches(lengths, token_budget=PREFILL_TOKENS[self.decoder.device.type]):
            self._go_on([found[index] for index in batch], version)
        chosen = [prompt for prompt, turn in going_on if turn is None]
        lengths = [len(prompt.sequence) - 1 for prompt in chosen]
        for batch in length_batches(lengths, token_budget=PREFILL_TOKENS[self.decoder.device.type]):
            rows = [chosen[index].sequence[:-1] for index in batch]
            for index, stored in zip(batch, self.batch(rows, version)):
                chosen[index].stored = stored

    @torch.inference_mode()
    def batch(self, rows: Sequence[np.ndarray], version: int) -> list[SlotPrompt]:
        """One pass over a right-padded batch; padding comes last, so no real token sees it."""
        device = self.decoder.device
        # A prompt of one token leaves nothing to prefill, but a pass needs a column.
        columns = max([1, *(len(row) for row in rows)])
        ids = padded(rows, columns=columns, device=device)
        positions = torch.arange(columns, device=device).expand_as(ids)
        attend = CausalAttention(self.decoder.spec, *ids.shape, dtype=self.cache.keys.dtype)
        self.decoder.store_only(ids.flatten(), positions.flatten(), attend)
        # Where keys lie like values nothing needs to be copied: the pass wrote them as they are forked.
        keys = self.cache.arrange(attend.keys) if self.cache.positions_last else attend.keys
        values = attend.values
        return [SlotPrompt(keys=keys, values=values, row=row, version=version) for row in range(len(rows))]

    def _go_on(self, found: Sequence[tuple[WaitingPrompt, SlotTurn]], version: int) -> None:
        """Prompts whose turns before were kept: only what came after those is computed, in one pass."""
        device, cache = self.decoder.device, self.cache
        turns = [turn for _, turn in found]
        starts = [turn.values.shape[3] for turn in turns]
        rows = [prompt.sequence[start:-1] for (prompt, _), start in zip(found, starts)]
        columns, width = max([1, *map(len, rows)]), max(starts)
        plain_keys = [turn.keys.transpose(-1, -2) if cache.positions_last else turn.keys for turn in turns]
        # Zeros behind the end of a shorter turn: the mask hides them.
        keys, values = (
            torch.cat([F.pad(table, (0, 0, 0, width - table.shape[3])) for table in tables], dim=1)
            for tables in (plain_keys, [turn.values for turn in turns])
        )
        places = np.array(starts)[:, None] + np.arange(columns)
        real = np.arange(columns) < np.array([[len(row)] for row in rows])
        attend = ContinuedAttention(
            self.decoder.spec, lambda layer: (keys[layer], values[layer]), starts, columns, cache.keys.dtype, device
        )
        ids = padded(rows, columns=columns, device=device)
        # Padding may lie beyond the tables of positions; no real token sees it.
        positions = on_device(torch.from_numpy(np.where(real, places, 0)), device)
        self.decoder.store_only(ids.flatten(), positions.flatten(), attend)
        for index, ((prompt, _), start, row) in enumerate(zip(found, starts, rows)):
            own = [table[:, index : index + 1, :, : len(row)] for table in (attend.keys, attend.values)]
            before = [table[:, index : index + 1, :, :start] for table in (keys, values)]
            whole_keys, whole_values = (torch.cat(both, dim=3) for both in zip(before, own))
            whole_keys = cache.arrange(whole_keys) if cache.positions_last else whole_keys
            prompt.stored = SlotPrompt(keys=whole_keys, values=whole_values, row=0, version=version)


class Part(NamedTuple):
    prompt: PagedPrompt
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


class PagedPrefill:
    def __init__(self, decoder: Decoder, cache: PagedCache) -> None:
        self.decoder, self.cache = decoder, cache
        spec = decoder.spec
        # A token costs two operations for each weight that it meets.
        allowed = TURN_OPERATIONS / (2 * spec.num_active_weights)
        self.turn_tokens = int(min(LARGEST_TURN, max(LEAST_TURN, allowed)))
        # Families for which `ContinuedAttention` may need a mask of T x (L + T) numbers.
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
            # Nothing is left to compute, or the next prompt waits, for pages or for a turn with more tokens.
            if not parts:
                return
            # Nothing runs: no one waits for these passes, so every pass may take the most that fits.
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
            start, rest = stored.num_computed, len(stored.ids) - stored.num_computed
            # A prompt is cut only where it must be: a pass over the rest costs as much as one over more.
            if left < rest <= most:
                break
            allowed = left
            if start and self._has_masks:
                allowed = min(left, MASK_NUMBERS // (start + left))
            # Parts end with a page unless the prompt does, so that the next part begins with one.
            size = min(rest, max(allowed // self.cache.page_size, 1) * self.cache.page_size)
            parts.append(Part(stored, start, start + size))
            left -= size
        return parts

    def _better_later(self, waiting: Sequence[WaitingPrompt], version: int) -> set[int]:
        """Prompts that begin as a longer one does which is computed now: in the next pass they share its pages. Prompts that
        go on from a kept turn have theirs already."""
        found: set[int] = set()
        cache, size = self.cache, LEAST_DEFERRED * self.cache.page_size
        alike: dict[bytes, list[int]] = {}
        num_pages = 0
        num_spare = int((cache.counts > 0).sum()) + sum(len(prompt.responses) for prompt in waiting)
        for index, prompt in enumerate(waiting):
            if prompt.stored is None or prompt.stored.version != version:
                num_pages += cache.num_pages(len(prompt.sequence))
                goes_on = cache.turns.has_beginning(prompt.responses[0].key, prompt.sequence[:-1])
                if len(prompt.sequence) > size and not goes_on:
                    alike.setdefault(prompt.sequence[:size].tobytes(), []).append(index)
        # Where pages are short, with those that stay free (`_begun`), the longer one might never come: they would wait for
        # ever.
        if num_pages + num_spare > cache.pool.num_available:
            return found
        for members in alike.values():
            if len(members) > 1:
                # The longest is computed now: its pages will hold what the others begin with.
                longest = max(members, key=lambda index: len(waiting[index].sequence))
                found.update(index for index in members if index != longest)
        return found

    def _begun(self, waiting: Sequence[WaitingPrompt], index: int, version: int) -> PagedPrompt | None:
        """The prompt in the cache, with pages for all its tokens; None where there are not so many."""
        prompt, cache = waiting[index], self.cache
        if prompt.stored is not None and prompt.stored.version != version:
            cache.drop(prompt.stored)
            prompt.stored = None
        if prompt.stored is None:
            # A page for each response that runs or comes before stays free: what is computed now should not have to leave
            # at once. Those that come later leave, if need be.
            num_spare = int((cache.counts > 0).sum()) + sum(len(other.responses) for other in waiting[:index])
            later = [other for other in waiting[index + 1 :] if other.stored is not None]
            key, ids = prompt.responses[0].key, prompt.sequence[:-1]
            # The turn that it goes on from stays to the end: its pages are the beginning of this prompt.
            own = key if cache.turns.has_beginning(key, ids) else None
            while (begun := cache.begin(ids, version, num_spare=num_spare)) is None:
                if cache.turns.drop_oldest(but=own):
                    continue
                # Earlier prompts come first: those behind lose their pages, the last one first.
                if not later:
                    return None
                last = later.pop()
                cache.drop(last.stored)
                last.stored = None
            prompt.stored = begun
            cache.turns.drop(key)  # its pages are the prompt's now
        return prompt.stored

    def _batches(self, parts: Sequence[Part]) -> Iterator[list[Part]]:
        """Parts of similar size, together where what came before is as long: then no mask is needed. Short ones after short
        beginnings go together all the same."""
        groups: dict[int, list[Part]] = {}
        for part in parts:
            is_small = 0 < part.start < SMALL_START and part.size < SMALL_PART
            # Key -1: short parts after short beginnings; else the common start of a group.
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
            attend: CausalAttention = self._continued(parts, columns)
        else:
            attend = CausalAttention(self.decoder.spec, *ids.shape, dtype=cache.dtype)
        self.decoder.store_only(ids.flatten(), positions.flatten(), attend)
        # Real tokens only, in the order of np.flatnonzero(real): row by row.
        pages = np.concatenate(
            [part.prompt.pages[np.arange(part.start, part.end) // cache.page_size] for part in parts]
        )
        keys, values = (table.transpose(2, 3).flatten(1, 2) for table in (attend.keys, attend.values))
        cache.pool.store(pages, places[real] % cache.page_size, np.flatnonzero(real), keys, values)
        for part in parts:
            # After the pass was launched: who finds these pages reads them later in the same stream.
            cache.note_computed(part.prompt, part.end)

    def _continued(self, parts: Sequence[Part], columns: int) -> ContinuedAttention:
        """Attention of parts that see the pages of what came before them. Every part begins with a page, so what came before
        it fills whole pages."""
        pool = self.cache.pool
        before = [part.prompt.pages[: part.start // pool.page_size] for part in parts]
        table = np.zeros((len(before), max(map(len, before))), dtype=np.int64)
        for row, pages in enumerate(before):
            # Rows with fewer pages are filled up with page 0, scratch, which the mask hides.
            table[row, : len(pages)] = pages
        located = pool.locate(table.reshape(-1))

        def earlier(layer: int) -> tuple[Tensor, Tensor]:
            # Gathered layer by layer: all layers at once would be a copy of the whole prompt.
            keys, values = side_by_side(pool.read(located, layer), table.shape)
            return keys, values

        starts = [len(pages) * pool.page_size for pages in before]
        return ContinuedAttention(self.decoder.spec, earlier, starts, columns, self.cache.dtype, pool.device)


class ContinuedAttention(CausalAttention):
    """Right-padded parts of sequences, each seeing what came before it, then itself."""

    def __init__(
        self,
        spec: DecoderSpec,
        earlier: Callable[[int], tuple[Tensor, Tensor]],
        starts: Sequence[int],
        num_columns: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`earlier` gives the keys and values [B, K, L, D] of a layer, of which part b sees the first `starts[b]`."""
        super().__init__(spec, len(starts), num_columns, dtype=dtype)
        self.earlier, self.width = earlier, max(starts)
        self.is_full = min(starts) == max(starts)
        """Whether every part sees all that is read: then the mask is that of the last queries of one causal sequence."""
        self.num_before = torch.tensor(starts, device=device)[:, None]

    def attend(self, layer: int, query_NHD: Tensor, sinks_H: Tensor | None = None) -> Tensor:
        spec, window = self.spec, self.spec.windows[layer]
        query = as_block(query_NHD, self.shape, self.dtype)
        earlier = self.earlier(layer)
        key, value = (torch.cat((old, own[layer]), dim=2) for old, own in zip(earlier, (self.keys, self.values)))
        in_sight = window is None or window >= key.shape[2]
        if query.is_cuda and self.is_full and in_sight and sinks_H is None and spec.attention_cap is None:
            # Without a mask of T x (L + T) numbers, which long prompts have no memory for.
            bias = causal_lower_right(query.shape[2], key.shape[2])
            attended = F.scaled_dot_product_attention(
                query, key, value, attn_mask=bias, scale=spec.query_scales[layer], enable_gqa=spec.group > 1
            )
        else:
            attended = attention(spec, layer, query, key, value, self._continued_mask(window, query.device), sinks_H)
        return attended.transpose(1, 2).flatten(2).flatten(0, 1)

    def _continued_mask(self, window: int | None, device: torch.device) -> Tensor:
        """Mask [B, 1, T, L + T]."""
        key = -1 if window is None else window
        if key not in self.masks:
            own, earlier = torch.arange(self.shape[1], device=device), torch.arange(self.width, device=device)
            start = self.num_before
            # Keys are the earlier ones, then the part itself, which begins where its own earlier ones end.
            position_BL = torch.cat((earlier.expand(len(start), -1), start + own), dim=1)
            real_BL = torch.cat((earlier < start, (own >= 0).expand(len(start), -1)), dim=1)
            behind = (start + own)[:, :, None] - position_BL[:, None]
            seen = (behind >= 0) & real_BL[:, None]
            seen = seen if window is None else seen & (behind < window)
            self.masks[key] = additive(seen, self.dtype)[:, None]
        return self.masks[key]
