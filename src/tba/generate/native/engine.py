"""The native engine: slots decoded side by side with our own decoder, finished slots refilled at once.

Each turn of the loop gives free slots to waiting responses, runs a decode step for all running ones and hands out what
the turn before finished: on a GPU the caller and the decode steps work side by side. A prompt is prefilled once; its keys
and values are forked into the slots of its samples as they fall free.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from tba.generate.native.cuda_graphs import (
    DECODE_STEPS_AHEAD,
    DECODE_STEPS_PER_SNAPSHOT,
    FusedDecode,
    InPlaceLoader,
)
from tba.generate.native.kv_cache import Prefilled, SlotAttention, SlotCache
from tba.generate.native.load_check import check_engine
from tba.generate.native.prefill import READ_AHEAD, Admission, Prefill, PrefillQueue
from tba.generate.native.slots import FinishedSlots, SlotSnapshot, SlotState, SlotTable
from tba.generate.sampling import SamplingNeeds, checked_requests, sample, sequence_of
from tba.generate.scoring import ReferenceScorer
from tba.models.adapter import DecoderAdapter
from tba.models.build_decoder import make_decoder
from tba.models.decoder import Decoder
from tba.models.fused_pass import why_not_fused
from tba.models.packing import on_device
from tba.types import Completion, Request, Sampling, Weights

logger = logging.getLogger("tba.generate")


class NativeEngine:
    """An engine that generates with a copy of `model` in static tensors; a Decoder is used as it is, without a copy."""

    def __init__(
        self,
        model: nn.Module | Decoder,
        *,
        stop_ids: Sequence[int],
        seed: int,
        slots: int,
        max_length: int,
        update: Literal["in_flight", "drain"] = "in_flight",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        version: int = 0,
    ) -> None:
        self.seed, self.max_length, self.update = seed, max_length, update
        self.version = version
        self.device = torch.device(device)
        if isinstance(model, Decoder):
            self.decoder = model
        else:
            self.decoder = make_decoder(model, max_length=max_length, dtype=dtype, device=self.device)
        self._load_in_place = InPlaceLoader(self.decoder)
        self._dtype = dtype
        self.cache = SlotCache(self.decoder.spec, slots, self.decoder.attention_dtype, self.device)
        self.state = SlotState(slots, self.device)
        self.stop_ids = frozenset(stop_ids)
        self._stop_ids = torch.tensor(sorted(self.stop_ids), device=self.device)
        self._is_stop = torch.zeros(self.decoder.spec.vocab_size, dtype=torch.bool, device=self.device)
        self._is_stop[self._stop_ids] = True
        self._prefill = Prefill(self.decoder, self.cache)
        self._slots = SlotTable(slots)
        self._snapshots: deque[tuple[int, SlotSnapshot]] = deque()
        """Numbered snapshots that the host has not taken note of yet, the oldest first."""
        self._num_snapshots = 0
        self._fused = self._make_fused()
        self._pending: Weights | None = None
        self._sibling: NativeEngine | None = None
        self._generating = False
        if not isinstance(model, Decoder):
            self._check(model)

    def _check(self, model: nn.Module) -> None:
        """Check what this engine generates; fused decode steps that fail, or are wrong, are not used, with a warning."""
        try:
            check_engine(model, self)
        except Exception as error:  # a kernel may fail to compile in as many ways as there are drivers
            if self._fused is None:
                raise
            logger.warning(
                "decoding without fused kernels and CUDA graphs, slower: %s: %.300s", type(error).__name__, error
            )
            self._fused = None
            check_engine(model, self)

    def _make_fused(self) -> FusedDecode | None:
        """The fused decode step on CUDA, where the family allows it; otherwise None, with a warning."""
        if self.device.type != "cuda":
            return None
        reason = why_not_fused(self.decoder.spec)
        if reason is None and self.decoder.fused_pass is None:
            reason = "its fused pass failed the check"
        if reason is not None:
            logger.warning("decoding without fused kernels and CUDA graphs, slower: %s.", reason)
            return None
        return FusedDecode(self.decoder, self.cache, self.state, self._is_stop)

    @property
    def vocabulary(self) -> int:
        return self.decoder.spec.vocab_size

    def sibling(self) -> NativeEngine:
        """A second engine over the same weights, with slots of its own: to evaluate while this one stands still."""
        # Made once: its tables and graphs cost as much memory and time as this one's.
        if self._sibling is None:
            self._sibling = NativeEngine(
                self.decoder,
                stop_ids=sorted(self.stop_ids),
                seed=self.seed,
                slots=len(self._slots.responses),
                max_length=self.max_length,
                dtype=self._dtype,
                device=self.device,
            )
        self._sibling.version = self.version
        return self._sibling

    def score(
        self, prompt_ids: Sequence[np.ndarray], response_ids: Sequence[np.ndarray], temperature: float
    ) -> list[np.ndarray]:
        """Log-probs of given responses under the weights in use."""
        return ReferenceScorer(self.decoder).score(prompt_ids, response_ids, temperature)

    def load(self, weights: Weights) -> None:
        """Take new weights: now under `in_flight`, when the running responses have finished under `drain`."""
        if self.update == "drain" and self._slots.any_running():
            self._pending = weights
            return
        if self._slots.any_running():
            self._synchronize()  # the spans below need the number of tokens that the old weights chose
        self._load_now(weights)
        for slot, response in self._slots.items():
            response.open_span(int(self._slots.num_tokens[slot]), weights.version)
        self._prefill_started_again()

    def keep_adapter_apart(self, model: PreTrainedModel) -> None:
        """From now on take adapters like the one in `model`, without merging them; raises UnsupportedModel where it changes
        something else than matrices of layers."""
        self.decoder.adapter = DecoderAdapter(self.decoder, model)
        for engine in (self, self._sibling):
            if engine is not None and engine._fused is not None:
                engine._fused.forget()

    def generate(
        self,
        requests: Iterable[Request | None],
        *,
        samples_per_prompt: int,
        sampling: Sampling,
        between_steps: Callable[[], None] | None = None,
    ) -> Iterator[Completion]:
        """Yield responses as they finish. Requests are read lazily, so an endless iterator keeps the slots full."""
        if self._generating:
            raise RuntimeError("this engine is already generating: exhaust or close the other iterator first.")
        self._generating = True
        queue = PrefillQueue(
            checked_requests(requests, sampling, self.max_length),
            samples_per_prompt=samples_per_prompt,
            sampling=sampling,
            prefill=self._prefill_now,
            stop_ids=self.stop_ids,
            num_slots=len(self._slots.responses),
            read_ahead=READ_AHEAD[self.device.type],
        )
        try:
            yield from self._loop(queue, between_steps)
        finally:
            self._slots.clear()
            self._snapshots.clear()
            self.state.vacate(slice(None))
            self._load_pending()
            self._generating = False

    def _loop(self, queue: PrefillQueue, between_steps: Callable[[], None] | None) -> Iterator[Completion]:
        finished = FinishedSlots()
        overlaps = self._fused is not None
        while True:
            if not overlaps:
                yield from finished.completions(self.stop_ids)
            if not self._slots.any_running():
                self._load_pending()
            self._refill(queue)
            decodes, ahead = self._slots.any_running(), 0
            if decodes:
                if between_steps is not None:
                    between_steps()
                # While responses wait and no slot is free, the next decode steps need not know which responses are done: a
                # finished slot idles a little longer, and the device never waits for the host.
                may_run_ahead = bool(queue.waiting) and not self._slots.gaps and self._pending is None
                ahead = self._start_decode_steps(may_run_ahead=may_run_ahead)
            if overlaps:  # the GPU works on this turn, the caller on what an earlier one finished
                yield from finished.completions(self.stop_ids)
            while queue.completed:
                yield queue.completed.pop()
            if not decodes and queue.exhausted and not queue.waiting:
                return
            finished = self._take_finished(ahead) if decodes else FinishedSlots()

    def _refill(self, queue: PrefillQueue) -> None:
        """Give free slots to waiting responses (not while draining), then move running ones into the gaps that remain."""
        free = self._slots.free_slots()
        if free and self._pending is None:
            queue.read_for(len(free), self.version)
            # Weights were loaded while prompts waited: no response may start from keys and values of older ones.
            queue.prefill_again(self.version)
            admissions = queue.take(len(free))
            if admissions:
                self._admit(free[: len(admissions)], admissions)
        if not self._snapshots:  # a snapshot under way knows responses by their slots
            self._move(*self._slots.compact())

    def _prefill_started_again(self) -> None:
        """Compute the prompts in slots with the weights in use, where no token was chosen yet."""
        started = [
            (slot, response)
            for slot, response in self._slots.items()
            if self._slots.num_tokens[slot] == response.num_prefix_tokens
        ]
        if started:
            sequences = [sequence_of(response.request) for _, response in started]
            self._fork([slot for slot, _ in started], self._prefill_now(sequences))

    @torch.inference_mode()
    def _fork(self, slots: Sequence[int], prompts: Sequence[tuple[Prefilled, int]]) -> None:
        """Copy keys and values into slots; a prompt is a batch of a prefill and its row there."""
        for prefilled in {id(batch): batch for batch, _ in prompts}.values():
            chosen = [(slot, row) for slot, (batch, row) in zip(slots, prompts) if batch is prefilled]
            targets, rows = on_device(torch.tensor(chosen), self.device).unbind(1)
            self.cache.fork(targets, prefilled, rows)

    @torch.inference_mode()
    def _admit(self, slots: list[int], admissions: Sequence[Admission]) -> None:
        responses = [admission.response for admission in admissions]
        self.cache.reserve(max(response.max_length for response in responses))
        self.state.reserve(max(response.sampling.max_new_tokens for response in responses))
        self._fork(slots, [(admission.prefilled, admission.row) for admission in admissions])
        self.state.place(slots, responses, self.seed)
        for slot, response in zip(slots, responses):
            response.open_span(response.num_prefix_tokens, self.version)
            self._slots.put(slot, response, first_snapshot=self._num_snapshots)

    @torch.inference_mode()
    def _move(self, sources: list[int], targets: list[int]) -> None:
        if not sources:
            return
        source, target = on_device(torch.tensor([sources, targets]), self.device)
        self.cache.move(source, target, self._slots.num_keys())
        self.state.move(source, target)

    def _start_decode_steps(self, *, may_run_ahead: bool) -> int:
        """Start a decode step for every running response: on a GPU several, and they have only begun when this returns.

        -> snapshots that may stay under way: 1 = the next decode steps need not wait for what these ones finish.
        """
        slots, ahead = self._slots, 0
        if self._fused is not None:
            ahead = int(may_run_ahead)
            self._fused.run(slots.count, decode_steps=DECODE_STEPS_AHEAD if ahead else DECODE_STEPS_PER_SNAPSHOT)
        else:
            self._decode_step(slots.count, slots.num_keys(), slots.needs())
        self._snapshots.append((self._num_snapshots, self.state.snapshot(slots.count)))
        self._num_snapshots += 1
        return ahead

    def _synchronize(self) -> None:
        """Wait until the device stands still, and bring the host's numbers up to date."""
        # Finished responses are left in their slots: later snapshots name them again.
        self._slots.update(self.state.snapshot(self._slots.count).wait(), self._num_snapshots)

    @torch.inference_mode()
    def _decode_step(self, count: int, num_keys: int, needs: SamplingNeeds) -> None:
        """One plain decode step: a token for each of the first `count` slots, written into the slots' tables."""
        state, decoder = self.state, self.decoder
        ids, positions = state.column("ids", count), state.column("positions", count)
        attend = SlotAttention(decoder.spec, self.cache, positions, num_keys)
        logits = decoder.logits(decoder.hidden(ids, positions, attend))
        sampled = sample(logits, state.sampling(count), self._stop_ids, needs)
        state.record(count, sampled, self._is_stop)

    @torch.inference_mode()
    def _take_finished(self, ahead: int) -> FinishedSlots:
        """Take the finished responses out of their slots, by all snapshots but the last `ahead`."""
        slots: list[int] = []
        while len(self._snapshots) > ahead:
            number, snapshot = self._snapshots.popleft()
            # A slot that is done stays done until it is taken out, so the last snapshot names all of them.
            slots = self._slots.update(snapshot.wait(), number)
        if not slots:
            return FinishedSlots()
        counts = self._slots.num_tokens[slots]
        return FinishedSlots(
            [self._slots.remove(slot) for slot in slots], counts, self.state.fetch(slots, int(counts.max()))
        )

    def _prefill_now(self, sequences: Sequence[np.ndarray]) -> list[tuple[Prefilled, int]]:
        """Prefill with the weights in use: reading the requests may have loaded others since the queue was asked."""
        return self._prefill(sequences, self.version)

    def _load_pending(self) -> None:
        if self._pending is not None:
            self._load_now(self._pending)
            self._pending = None

    def _load_now(self, weights: Weights) -> None:
        self._load_in_place(weights.tensors)
        self.version = weights.version
