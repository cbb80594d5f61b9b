"""The native engine: slots decoded side by side with our own decoder, finished slots refilled at once.

Each turn of the loop gives free slots to waiting responses, runs a decode step for all running ones and hands out what
the turn before finished: on a GPU the caller and the decode steps work side by side. A prompt is prefilled once; its samples
start from its keys and values as slots fall free. With the fused kernels keys and values lie in pages, and memory follows
the tokens that are there (paged_cache.py); elsewhere each slot has a place of full length (slot_cache.py).

Responses start in the order of the requests. Where keys and values of all of them have no room, the oldest go on: prompts
that wait leave the cache first, the last before the others, then the youngest response is taken out. Its tokens are kept on
the host, and it starts again from them before anything younger does; random numbers go by the number of the token, so it
goes on as it would have.

`load` may be called whenever the caller has control: between two completions, or from `between_steps`.
    in_flight   new weights act from the next token on; the keys and values of earlier tokens stay as the old weights made
                them. Spans say which version chose which token.
    drain       running responses finish first, then the weights are copied, and slots fill up: every response is of one
                version. The tensors given to `load` must not change until then.
A prompt without a token yet, waiting or in its slot, is prefilled again: a response whose spans name one version was
computed by that version, keys and values included.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from tba.engine.contract import Engine, RunningTokens, Update
from tba.engine.decoder.build import check_engine, make_decoder
from tba.engine.decoder.decoder import Decoder, DecoderAdapter
from tba.engine.decoder.fused_pass import why_not_fused
from tba.engine.decoder.layers import Attend
from tba.engine.native.cuda_graphs import FusedDecode, InPlaceLoader, slots_of_graph
from tba.engine.native.kept_turns import KeptTurn
from tba.engine.native.paged_cache import PAGE, PagedCache, default_cache_bytes
from tba.engine.native.prefill import READ_AHEAD, KeyValueCache, PagedPrefill, PrefillQueue, SlotPrefill, WaitingPrompt
from tba.engine.native.slot_cache import SlotAttention, SlotCache
from tba.engine.native.slots import AsyncCopy, SlotState, SlotTable
from tba.engine.sampling import BrokenLogits, Response, SamplingNeeds, WrittenTokens, sample
from tba.engine.scoring import ReferenceScorer
from tba.types import Completion, Request, Sampling, Weights, on_device

logger = logging.getLogger("tba.engine")

STEPS_OF_ROOM = 8
"""Decode steps that a response has room for when it starts."""
DECODE_STEPS_AHEAD = 3
"""Decode steps between two snapshots: the next ones run while the host reads, so nothing waits, but a finished slot idles
until then."""
DECODE_STEPS_PER_SNAPSHOT = 8
"""The same where the next ones must wait for the host: a finished slot idles half of them on average, a snapshot costs about
as much."""


def page_size_for(decoder: Decoder) -> int:
    """Number of positions of a page of keys and values: with the fused pass, whose kernels read pages; 0 = each slot has a
    place of full length instead."""
    return 0 if decoder.fused_pass is None else PAGE


class NativeEngine(Engine):
    """An engine that generates with a copy of `model` in static tensors; a Decoder is used as it is, without a copy."""

    def __init__(
        self,
        model: nn.Module | Decoder,
        *,
        stop_ids: Collection[int],
        seed: int,
        slots: int,
        max_length: int,
        update: Update = "in_flight",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        version: int = 0,
        max_cache_bytes: int | None = None,
    ) -> None:
        """`max_cache_bytes` bounds pages of keys and values; None = by what the device has free."""
        self.version = version
        self.device = torch.device(device)
        if isinstance(model, Decoder):
            self.decoder = model
        else:
            self.decoder = make_decoder(model, max_length=max_length, dtype=dtype, device=self.device)
        size = self.decoder.spec.vocab_size
        super().__init__(
            stop_ids=stop_ids, seed=seed, slots=slots, max_length=max_length, vocabulary=size, update=update
        )
        self._load_in_place = InPlaceLoader(self.decoder)
        self.state = SlotState(slots, self.device)
        self._stop_ids = torch.tensor(sorted(self.stop_ids), device=self.device)
        # The same set twice: ids for `sample`, and a flag for each word, which kernels look up without a search.
        self._is_stop = torch.zeros(size, dtype=torch.bool, device=self.device)
        self._is_stop[self._stop_ids] = True
        self._slots = SlotTable(slots)
        self._max_cache_bytes = max_cache_bytes
        self._make_cache(page_size_for(self.decoder))
        self._fused = self._make_fused()
        self._queue: PrefillQueue | None = None
        """Prompts that wait for slots while the engine generates."""
        self._snapshots: deque[tuple[int, AsyncCopy]] = deque()
        """Snapshots under way, of which the host has not taken note yet, each with the number of decode steps before it; the
        oldest first."""
        self._num_snapshots = 0
        """Number of snapshots taken so far; those under way are the last."""
        self._finished: list[tuple[list[Response], list[KeptTurn | None], np.ndarray, AsyncCopy]] = []
        """Responses taken out of their slots, with their numbers of tokens and their rows of the slots' tables, which may
        still be under way."""
        self._sibling: NativeEngine | None = None
        if not isinstance(model, Decoder):
            self._check(model)

    def _check(self, model: nn.Module) -> None:
        """Check what this engine generates; fused decode steps that fail, or are wrong, are not used, with a warning."""
        try:
            check_engine(model, self, self.decoder, self.max_length)
        except Exception as error:  # a kernel may fail to compile in as many ways as there are drivers
            if self._fused is None:
                raise
            logger.warning(
                "decoding without fused kernels and CUDA graphs, slower: %s: %.300s", type(error).__name__, error
            )
            self._fused = None
            # Pages are read by the fused kernels alone: without them keys and values need slots.
            self._make_cache(0)
            check_engine(model, self, self.decoder, self.max_length)

    def _make_cache(self, page_size: int) -> None:
        """Keys and values in pages of this size, or in slots for 0, and what fills and reads them."""
        spec, slots, dtype = self.decoder.spec, self.slots, self.decoder.attention_dtype
        self.cache: KeyValueCache
        self._prefill: SlotPrefill | PagedPrefill
        if page_size:
            most = default_cache_bytes(self.device) if self._max_cache_bytes is None else self._max_cache_bytes
            self.cache = PagedCache(
                spec, slots, dtype, self.device, max_length=self.max_length, max_bytes=most, page_size=page_size
            )
            self._prefill = PagedPrefill(self.decoder, self.cache)
        else:
            self.cache = SlotCache(spec, slots, dtype, self.device)
            self._prefill = SlotPrefill(self.decoder, self.cache)

    def _make_fused(self) -> FusedDecode | None:
        """The fused decode step on CUDA, where the family allows it; otherwise None, with a warning."""
        if self.device.type != "cuda":
            return None
        if not isinstance(self.cache, PagedCache):
            reason = why_not_fused(self.decoder.spec) or "its decoder has no fused pass"
            logger.warning("decoding without fused kernels and CUDA graphs, slower: %s.", reason)
            return None
        return FusedDecode(self.decoder, self.cache, self.state, self._is_stop)

    def clone_for_evaluation(self) -> NativeEngine:
        # Made once: its tables and graphs cost as much memory and time as this one's.
        if self._sibling is None:
            self._sibling = NativeEngine(
                self.decoder, device=self.device, max_cache_bytes=self._max_cache_bytes, **self.options
            )
        # Its decoder is this one's, weights included: a load here is a load there, and only the number is behind.
        self._sibling.version = self.version
        return self._sibling

    def score(
        self, prompt_ids: Sequence[np.ndarray], response_ids: Sequence[np.ndarray], temperature: float
    ) -> list[np.ndarray]:
        return ReferenceScorer(self.decoder).score(prompt_ids, response_ids, temperature)

    def _use(self, weights: Weights) -> None:
        if self._slots.any_running():
            self._synchronize()  # the spans below need the number of tokens that the old weights chose
        # Before anything is noted: where a tensor does not fit this raises, and the engine goes on as it was.
        self._load_in_place(weights.tensors)
        self.version = weights.version
        for slot, response in self._slots.items():
            response.open_span(int(self._slots.num_tokens[slot]), weights.version)
        if self._queue is not None:
            # What waits is computed again, also where these weights have the number of those before, as those of a trainer
            # that went back to a checkpoint.
            while self._queue.give_back(num_kept=0):
                pass
            self.cache.forget_prefixes()
            self._restart(self._queue)

    @torch.inference_mode()
    def running_tokens(self, requests: Collection[Request]) -> list[RunningTokens]:
        running = [(slot, response) for slot, response in self._slots.items() if response.request in requests]
        if not running:
            return []
        slots = [slot for slot, _ in running]
        # As many as the host knows of: on a GPU decode steps may be under way that add more.
        counts = self._slots.num_tokens[slots]
        tokens, _, policy = self.state.fetch(slots, int(counts.max())).wait()
        return [
            RunningTokens(
                response.request, response.sample_index, tokens[row, :count].astype(np.int32), policy[row, :count]
            )
            for row, ((_, response), count) in enumerate(zip(running, counts))
        ]

    @torch.inference_mode()
    def end_early(self, requests: Collection[Request]) -> None:
        slots = [slot for slot, response in self._slots.items() if response.request in requests]
        if slots:
            # The next decode step finds the response at its limit, and it leaves its slot in the usual way.
            self.state.column("limits", self.slots)[slots] = 0

    def _any_unfinished(self) -> bool:
        """Whether a response has tokens and is not complete, in its slot or taken out of it."""
        return self._slots.any_running() or (self._queue is not None and bool(self._queue.resumed()))

    def keep_adapter_apart(self, model: PreTrainedModel) -> None:
        """From now on take adapters like the one in `model`, without merging them; raises UnsupportedModel where it changes
        something else than matrices of layers."""
        self.decoder.adapter = DecoderAdapter(self.decoder.weights, model)
        for engine in (self, self._sibling):
            if engine is not None and engine._fused is not None:
                engine._fused.forget()

    def _generate(
        self,
        requests: Iterator[Request | None],
        samples_per_prompt: int,
        sampling: Sampling,
        between_steps: Callable[[], None] | None,
    ) -> Iterator[Completion]:
        # More prompts than fill all slots would only wait, and their keys and values grow stale.
        read_ahead = max(1, min(READ_AHEAD[self.device.type], self.slots // samples_per_prompt))
        queue = self._queue = PrefillQueue(
            requests=requests,
            samples_per_prompt=samples_per_prompt,
            sampling=sampling,
            cache=self.cache,
            stop_ids=self.stop_ids,
            read_ahead=read_ahead,
        )
        try:
            yield from self._loop(queue, between_steps)
        except BrokenLogits:
            self.cache.wipe()
            raise

    def _stop(self) -> None:
        self._queue = None
        # What is under way is forgotten unread: its slots may be placed anew.
        self._slots.clear()
        self._snapshots.clear()
        self._finished.clear()
        # Decode steps may still be under way: the device comes to this after them, in the order of its stream.
        self.state.vacate(slice(None))
        self.cache.clear()

    def _loop(self, queue: PrefillQueue, between_steps: Callable[[], None] | None) -> Iterator[Completion]:
        overlaps, slots = self._fused is not None, self._slots
        while True:
            if not overlaps:
                yield from self._completions()
            self._load_pending()
            self._refill(queue)
            if slots.any_running() and between_steps is not None:
                between_steps()
            ahead = self._start_decode_steps(queue)
            if overlaps:  # the GPU works on this turn, the caller on what an earlier one finished
                yield from self._completions()
            while queue.completed:
                yield queue.completed.pop()
            if ahead is not None:
                self._take_finished(ahead)
            elif queue.exhausted and not queue.waiting and not self._finished:
                return

    # --- into slots --------------------------------------------------------------------------------------------------

    def _refill(self, queue: PrefillQueue) -> None:
        """Give free slots to waiting responses, then move running ones into the gaps that remain."""
        # Slots of the host's view: those that finished under way are not free before a snapshot says so.
        num_free = self._slots.num_free
        if num_free and self._pending is None:
            queue.read_for(num_free, self.version)
        # Only now: reading may have loaded other weights, and no response may start from keys and values of older ones.
        # While weights wait for running responses to finish, only those go on that were taken out and have tokens already.
        waiting = list(queue.waiting) if self._pending is None else queue.resumed()
        if waiting and (self._slots.num_free or self._prefill.is_early(waiting[0])):
            # What is ready starts before more is prefilled: pages that it needs must not go to those behind it.
            self._start(queue, len(waiting))
            if queue.first(self.version) is None:
                at_once = not self._slots.any_running()
                if self._slots.num_free:
                    self._prefill(waiting, self.version, at_once=at_once)
                    self._start(queue, len(waiting))
                elif self._prefill.is_early(waiting[0]):
                    self._prefill(waiting[:1], self.version, at_once=at_once)
            if not self._slots.any_running():
                # Nothing runs, and the next response has no room even so: memory that was counted on is gone.
                response = waiting[0].responses[0]
                name = f"prompt {response.request.prompt.id!r}"
                self.cache.check_fits(response.max_length, f"{name} with its response")
                raise RuntimeError(f"nothing runs, and {name} cannot start: pages were lost.")
        self._close_gaps()

    def _restart(self, queue: PrefillQueue) -> None:
        """Compute the prompts in slots with the weights in use, where no token was chosen yet."""
        started = [
            slot for slot, response in self._slots.items() if self._slots.num_tokens[slot] == response.num_prefix_tokens
        ]
        if not started:
            return
        # No token of theirs was chosen yet: with the prompt computed again their spans name one version.
        responses = self._remove(started)
        # The youngest first: each comes before all that wait, so that in the end the oldest is in front.
        for response in sorted(responses, key=lambda response: -response.order):
            queue.put_back(response)
        first = [prompt for prompt in queue.waiting if prompt.responses[0] in responses]
        self._prefill(first, self.version, at_once=not self._slots.any_running())
        self._start(queue, len(first))
        self._close_gaps()

    def _start(self, queue: PrefillQueue, num_prompts: int) -> None:
        """Start responses of the first prompts, in order, as far as they are ready and there are slots and room."""
        started: list[tuple[int, Response]] = []
        # Running responses, each of which one page stays free for (`_has_room`).
        num_running = self._slots.count - len(self._slots.gaps)
        # Prompts behind the first `num_prompts` stay where they are: while draining they must not start with old weights.
        last = len(queue.waiting) - num_prompts
        for slot in self._slots.free_slots():
            prompt = queue.first(self.version) if len(queue.waiting) > last else None
            if prompt is None or not self._has_room(slot, prompt, queue, num_running + len(started)):
                break
            started.append((slot, queue.take()))
        if not started:
            return
        # Before `place`, which writes prefixes into the tables: they must have the columns.
        self.state.reserve(max(response.sampling.max_new_tokens for _, response in started))
        self.cache.flush()  # before any step: the device must know the pages of the slots that run
        places, responses = zip(*started)
        self.state.place(places, responses, self.seed)
        for slot, response in started:
            # One that was taken out goes on in its span, unless other weights came in the meantime.
            if response.written is None or response.spans[-1][1] != self.version:
                response.open_span(len(response.token_ids), self.version)
            self._slots.put(slot, response, first_snapshot=self._num_snapshots)

    def _has_room(self, slot: int, prompt: WaitingPrompt, queue: PrefillQueue, num_spare: int) -> bool:
        """Give a slot the room that a prompt's next response needs; one page for each other response stays free."""
        response = prompt.responses[0]
        while not self.cache.start(
            slot,
            prompt.stored,
            num_positions=min(response.start_position + STEPS_OF_ROOM, response.max_length),
            most_positions=response.max_length,
            is_last=len(prompt.responses) == 1,
            num_spare=num_spare,
        ):
            # Prompts that were computed ahead make room, the last of them first; never the one that is to start.
            if not queue.give_back(num_kept=1):
                return False
        return True

    @torch.inference_mode()
    def _close_gaps(self) -> None:
        if self._snapshots:  # a snapshot under way knows responses by their slots
            return
        # Host and device move the same slots: tables, pages and responses stay one row for one response.
        sources, targets = self._slots.compact()
        if sources:
            self.cache.move(sources, targets, self._slots.num_keys())
            self.state.move(*on_device(torch.tensor([sources, targets]), self.state.device))

    # --- decode steps ------------------------------------------------------------------------------------------------

    def _start_decode_steps(self, queue: PrefillQueue) -> int | None:
        """Start a decode step for every running response: on a GPU several, and they have only begun when this returns.

        -> snapshots that may stay under way: 1 = the next decode steps need not wait for what these ones finish. None =
        nothing runs.
        """
        ahead = int(self._may_run_ahead(queue))
        steps = 1
        if self._fused is not None:
            steps = DECODE_STEPS_AHEAD if ahead else DECODE_STEPS_PER_SNAPSHOT
            # The host is behind by the steps under way: they count as taken, though it has not seen their tokens.
            steps = min(steps, self._slots.most_left() - self._num_steps_under_way)
            if steps <= 0 and self._slots.any_running():
                return 0  # what is under way takes every response to its end
        # Before the launch: kernels write a token's keys into pages that its slot must have by then.
        self._make_room(queue, steps)
        if not self._slots.any_running():
            return None
        if self._fused is not None:
            self._fused.run(self._slots.count, decode_steps=steps)
        else:
            self._decode_step(self._slots.count, self._slots.num_keys(), self._slots.needs())
        # Copied behind the steps in the stream of the device, so it tells what they did.
        self._snapshots.append((steps, self.state.snapshot(self._slots.count)))
        self._num_snapshots += 1
        return ahead

    def _may_run_ahead(self, queue: PrefillQueue) -> bool:
        """Whether the next decode steps may start before it is known which responses these ones finish: a finished slot
        idles a little longer, but the device never waits for the host."""
        if self._fused is None or self._pending is not None:
            return False
        # Where nothing comes to fill the gaps, running responses move together, and for that the device must stand still.
        slots, total = self._slots, self.slots
        together = slots_of_graph(max(1, slots.count - len(slots.gaps)), total)
        return bool(queue.waiting) or together == slots_of_graph(max(1, slots.count), total)

    @torch.inference_mode()
    def _decode_step(self, count: int, num_keys: int, needs: SamplingNeeds) -> None:
        """One plain decode step: a token for each of the first `count` slots, written into the slots' tables."""
        state, decoder = self.state, self.decoder
        # No gaps on this path: slots are compacted before every step, so all of the first `count` run.
        ids, positions = state.column("ids", count), state.column("positions", count)
        logits = decoder.logits(decoder.hidden(ids, positions, self._attention(count, num_keys)))
        sampled = sample(logits, state.sampling(count), self._stop_ids, needs)
        state.record(count, sampled, self._is_stop)

    def _attention(self, count: int, num_keys: int) -> Attend:
        assert isinstance(self.cache, SlotCache), "pages are read by the fused kernels"
        return SlotAttention(self.decoder.spec, self.cache, self.state.column("positions", count), num_keys)

    def _make_room(self, queue: PrefillQueue, num_steps: int) -> None:
        """Room for the next decode steps of all running responses; where there is none, for the oldest of them."""
        if not self.cache.hold(*self._slots.reach(self._num_steps_under_way + num_steps)):
            # Everything that has run is noted first: finished responses give back what they hold.
            complete = self._synchronize()
            self._snapshots.clear()
            self._finish(complete)
            while self._slots.any_running() and not self.cache.hold(*self._slots.reach(num_steps)):
                if not queue.give_back(num_kept=0):
                    self._take_out(self._slots.youngest(), queue)
            self._close_gaps()
        self.cache.flush()

    @property
    def _num_steps_under_way(self) -> int:
        """Number of decode steps that have been started, and of which the host has not taken note."""
        return sum(steps for steps, _ in self._snapshots)

    def _synchronize(self) -> list[int]:
        """Wait until the device stands still, and bring the host's numbers up to date -> slots that are complete."""
        (integers,) = self.state.snapshot(self._slots.count).wait()
        return self._slots.update(integers, self._num_snapshots)

    @torch.inference_mode()
    def _take_out(self, slot: int, queue: PrefillQueue) -> None:
        """Take a running response out of its slot, with its tokens; the device must stand still."""
        num_tokens = int(self._slots.num_tokens[slot])
        # Before `_remove`: a slot that is free may be placed anew, and its rows written over.
        tables = self.state.fetch([slot], num_tokens).wait()
        (response,) = self._remove([slot])
        # Without a token of its own it starts over like one that never ran, from its prompt.
        if num_tokens > response.num_prefix_tokens:
            tokens, behaviour, policy = (table[0].copy() for table in tables)
            response.written = WrittenTokens(token_ids=tokens.astype(np.int32), behaviour=behaviour, policy=policy)
        queue.put_back(response)

    # --- out of slots ------------------------------------------------------------------------------------------------

    def _take_finished(self, ahead: int) -> None:
        """Take the finished responses out of their slots, by all snapshots but the last `ahead`."""
        slots: list[int] = []
        while len(self._snapshots) > ahead:
            number = self._num_snapshots - len(self._snapshots)
            _, snapshot = self._snapshots.popleft()
            # A slot that is done stays done until it is taken out, so the last snapshot names all of them.
            (integers,) = snapshot.wait()
            slots = self._slots.update(integers, number)
        self._finish(slots)

    def _completions(self) -> Iterator[Completion]:
        """The finished responses that have not been handed out; waits for their tables to arrive."""
        finished, self._finished = self._finished, []
        for responses, turns, counts, tables in finished:
            arrays = tables.wait()
            for row, (response, turn, count) in enumerate(zip(responses, turns, counts)):
                tokens, behaviour, policy = (array[row, :count] for array in arrays)
                if turn is not None:
                    ids = np.concatenate((response.request.prompt.token_ids, tokens[:-1])).astype(np.int64)
                    self.cache.name(response.key, turn, ids, response.spans[-1][1])
                yield response.completion(tokens.astype(np.int32), behaviour.copy(), policy.copy(), self.stop_ids)

    @torch.inference_mode()
    def _finish(self, slots: Sequence[int]) -> None:
        if slots:
            # Fetched before the slots are given away: the device copies the rows before a later `place` writes into them.
            counts = self._slots.num_tokens[slots]
            tables = self.state.fetch(slots, int(counts.max()))
            responses = [self._slots.remove(slot) for slot in slots]
            turns: list[KeptTurn | None] = []
            for slot, response, count in zip(slots, responses, counts.tolist()):
                # Kept where another request goes on from it, and one version has computed all of it.
                is_kept = response.request.goes_on and [version for _, version in response.spans] == [self.version]
                # The last token was chosen, and not fed.
                length = len(response.request.prompt.token_ids) + count - 1
                turns.append(self.cache.keep(response.key, slot, length) if is_kept else None)
            self.cache.release(slots)
            self._finished.append((responses, turns, counts, tables))

    def _remove(self, slots: Sequence[int]) -> list[Response]:
        responses = [self._slots.remove(slot) for slot in slots]
        self.state.vacate(torch.tensor(slots, device=self.state.device))
        self.cache.release(slots)
        return responses
