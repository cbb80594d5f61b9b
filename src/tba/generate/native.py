"""The native engine: slots decoded side by side with our own decoder, finished slots refilled at once.

Each turn of the loop gives free slots to waiting responses, runs a decode step for all running ones and hands out what
the turn before finished: on a GPU the caller and the steps work side by side. A prompt is prefilled once; its keys and
values are forked into the slots of its samples as they fall free.

`load` may be called whenever the caller has control: between two completions, or from `between_steps`.
    in_flight   new weights act from the next token on; the keys and values of earlier tokens, and of prompts that wait,
                stay as the old weights made them. Spans say which version chose which token.
    drain       running responses finish first, then the weights are copied, waiting prompts are prefilled again, and
                slots fill up: every response is of one version. The tensors given to `load` must not change until then.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from torch import nn

from tba.generate.backlog import Admission, Backlog
from tba.generate.fused import STEPS_AHEAD, STEPS_PER_LOOK, FusedDecode
from tba.generate.harvest import Harvest
from tba.generate.loading import InPlaceLoad
from tba.generate.responses import checked_requests
from tba.generate.running import Running
from tba.generate.sampling import Needs, sample
from tba.generate.scoring import ReferenceScorer
from tba.generate.slots import Look, Prefilled, SlotAttention, SlotCache, SlotState
from tba.models.decoder import Decoder, why_not_fused
from tba.models.decoder_attention import CausalAttention
from tba.models.families import make_decoder
from tba.models.packing import length_batches, on_device, padded
from tba.types import Completion, Request, Sampling, Weights

logger = logging.getLogger("tba.generate")

PREFILL_TOKENS = {"cpu": 2048, "cuda": 32_768}
"""Most tokens in one prefill pass, by device: on a CPU the activations of a pass should stay in its cache."""


READ_AHEAD = {"cpu": 16, "cuda": 64}
"""Prompts prefilled together when a slot falls free: one at a time would cost more in calls than in arithmetic."""


class NativeEngine:
    """Generates with a copy of `model` in static tensors; the model itself is not kept. A Decoder is used as it is."""

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
        self._load_in_place = InPlaceLoad(self.decoder)
        self._dtype = dtype
        # Small batched products are slow in bf16 on a CPU, and the cache of fp32 is the more exact one.
        cache_dtype = torch.float32 if self.device.type == "cpu" else dtype
        self.cache = SlotCache(self.decoder.spec, slots, cache_dtype, self.device)
        self.state = SlotState(slots, self.device)
        self.stop_ids = frozenset(stop_ids)
        self._stop_ids = torch.tensor(sorted(self.stop_ids), device=self.device)
        self._is_stop = torch.zeros(self.decoder.spec.vocab_size, dtype=torch.bool, device=self.device)
        self._is_stop[self._stop_ids] = True
        self._running = Running(slots)
        self._looks: deque[tuple[int, Look]] = deque()
        """Numbered, the oldest first: what the host has not taken note of yet."""
        self._num_looks = 0
        self._fused = self._make_fused()
        self._pending: Weights | None = None
        self._sibling: NativeEngine | None = None
        self._generating = False

    def _make_fused(self) -> FusedDecode | None:
        """On CUDA, where the family allows it; otherwise the plain step, in words."""
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
        """A second engine over the same weights, with slots of its own: to evaluate while this one stands still. It is made
        once: its tables and graphs are as dear as this one's."""
        if self._sibling is None:
            self._sibling = NativeEngine(
                self.decoder,
                stop_ids=sorted(self.stop_ids),
                seed=self.seed,
                slots=len(self._running.responses),
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
        """Take new weights: now, or under `drain` when running responses have finished."""
        if self.update == "drain" and self._running.any():
            self._pending = weights
            return
        if self._running.any():
            self._catch_up()
        self._load_now(weights)
        for slot, response in self._running.items():
            response.open_span(int(self._running.num_tokens[slot]), weights.version)

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
        backlog = Backlog(
            checked_requests(requests, sampling, self.max_length),
            samples_per_prompt=samples_per_prompt,
            sampling=sampling,
            prefill=self._prefill,
            stop_ids=self.stop_ids,
            num_slots=len(self._running.responses),
            read_ahead=READ_AHEAD[self.device.type],
        )
        try:
            yield from self._loop(backlog, between_steps)
        finally:
            self._running.clear()
            self._looks.clear()
            self.state.vacate(slice(None))
            self._load_pending()
            self._generating = False

    def _loop(self, backlog: Backlog, between_steps: Callable[[], None] | None) -> Iterator[Completion]:
        harvest = Harvest()
        overlaps = self._fused is not None
        while True:
            if not overlaps:
                yield from harvest.completions(self.stop_ids)
            if not self._running.any():
                self._load_pending()
            self._refill(backlog)
            works, ahead = self._running.any(), 0
            if works:
                if between_steps is not None:
                    between_steps()
                # Where a response waits for the next free slot, nobody waits for who is done.
                waits = bool(backlog.waiting) and not self._running.holes and self._pending is None
                ahead = self._step(may_run_ahead=waits)
            if overlaps:  # the GPU works on this turn, the caller on what an earlier one finished
                yield from harvest.completions(self.stop_ids)
            while backlog.completed:
                yield backlog.completed.pop()
            if not works and backlog.exhausted and not backlog.waiting:
                return
            harvest = self._harvest(ahead) if works else Harvest()

    def _refill(self, backlog: Backlog) -> None:
        """Give free slots to waiting responses (not while draining), then close the holes that remain."""
        free = self._running.free_slots()
        if free and self._pending is None:
            backlog.read_for(len(free), self.version)
            if self.update == "drain" and backlog.is_older_than(self.version):
                backlog.prefill_again()
            admissions = backlog.take(len(free))
            if admissions:
                self._admit(free[: len(admissions)], admissions)
        if not self._looks:  # a look under way knows responses by their slots
            self._move(*self._running.close_holes())

    @torch.inference_mode()
    def _admit(self, slots: list[int], admissions: Sequence[Admission]) -> None:
        responses = [admission.response for admission in admissions]
        self.cache.reserve(max(response.max_length for response in responses))
        self.state.reserve(max(response.sampling.max_new_tokens for response in responses))
        for prefilled in {id(admission.prefilled): admission.prefilled for admission in admissions}.values():
            chosen = [(s, a.row) for s, a in zip(slots, admissions) if a.prefilled is prefilled]
            targets, rows = on_device(torch.tensor(chosen), self.device).unbind(1)
            self.cache.fork(targets, prefilled, rows)
        self.state.place(slots, responses, self.seed)
        for slot, response in zip(slots, responses):
            response.open_span(response.num_prefix_tokens, self.version)
            self._running.put(slot, response, since=self._num_looks)

    @torch.inference_mode()
    def _move(self, sources: list[int], targets: list[int]) -> None:
        if not sources:
            return
        source, target = on_device(torch.tensor([sources, targets]), self.device)
        self.cache.move(source, target, self._running.num_keys())
        self.state.move(source, target)

    def _step(self, *, may_run_ahead: bool) -> int:
        """A token for every running response; on a GPU several, and it has only been told to when this returns.

        -> looks that may stay under way: 1 = the next steps need not wait for what these ones finish.
        """
        running, ahead = self._running, 0
        needs = running.needs()
        if self._fused is not None and self._fused.serves(needs):
            ahead = int(may_run_ahead)
            self._fused.run(running.count, steps=STEPS_AHEAD if ahead else STEPS_PER_LOOK)
        elif self._looks:
            return ahead  # the plain step wants to know first who is done
        else:
            self._decode(running.count, running.num_keys(), needs)
        self._looks.append((self._num_looks, self.state.look(running.count)))
        self._num_looks += 1
        return ahead

    def _catch_up(self) -> None:
        """Wait until the device stands still: the host's numbers are those of now."""
        self._running.advance_to(self.state.look(self._running.count).wait(), self._num_looks)

    @torch.inference_mode()
    def _decode(self, count: int, num_keys: int, needs: Needs) -> None:
        """One step, pure work on static tensors, no host in between."""
        state, decoder = self.state, self.decoder
        ids, positions = state.column("ids", count), state.column("positions", count)
        attend = SlotAttention(decoder.spec, self.cache, positions, num_keys)
        logits = decoder.logits(decoder.hidden(ids, positions, attend))
        sampled = sample(logits, state.sampling(count), self._stop_ids, needs)
        state.record(count, sampled, self._is_stop)

    @torch.inference_mode()
    def _harvest(self, ahead: int) -> Harvest:
        """Take the finished responses out of their slots, by all looks but the last `ahead`."""
        slots: list[int] = []
        while len(self._looks) > ahead:
            number, look = self._looks.popleft()
            slots = self._running.advance_to(look.wait(), number)
        if not slots:
            return Harvest()
        counts = self._running.num_tokens[slots]
        return Harvest(
            [self._running.remove(slot) for slot in slots], counts, self.state.fetch(slots, int(counts.max()))
        )

    @torch.inference_mode()
    def _prefill(self, sequences: Sequence[np.ndarray]) -> list[tuple[Prefilled, int]]:
        """Keys and values of all but the last token of each sequence, in batches of similar length."""
        found: dict[int, tuple[Prefilled, int]] = {}
        lengths = [len(sequence) - 1 for sequence in sequences]
        for batch in length_batches(lengths, token_budget=PREFILL_TOKENS[self.device.type]):
            prefilled = self._prefill_batch([sequences[index][:-1] for index in batch])
            found.update((index, (prefilled, row)) for row, index in enumerate(batch))
        return [found[index] for index in range(len(sequences))]

    def _prefill_batch(self, rows: Sequence[np.ndarray]) -> Prefilled:
        columns = max([1, *(len(row) for row in rows)])
        ids = padded(rows, columns=columns, device=self.device)
        positions = torch.arange(columns, device=self.device).expand_as(ids)
        attend = CausalAttention(self.decoder.spec, *ids.shape, keep=True, dtype=self.cache.keys.dtype)
        self.decoder.store_only(ids.flatten(), positions.flatten(), attend)
        # Where keys lie like values nothing needs to be copied: the pass wrote them as they are forked.
        keys = self.cache.arrange(attend.keys) if self.cache.positions_last else attend.keys
        return Prefilled(keys=keys, values=attend.values, version=self.version)

    def _load_pending(self) -> None:
        if self._pending is not None:
            self._load_now(self._pending)
            self._pending = None

    def _load_now(self, weights: Weights) -> None:
        self._load_in_place(weights.tensors)
        self.version = weights.version
