"""Decoding on CUDA: a step in few kernels, captured in CUDA graphs, several steps before the host looks.

Every kernel reads positions and stop flags on the device, so one graph per number of slots serves all lengths, and a slot
that is done stands still until the host takes its response. New weights are copied into the tensors the graphs read:
nothing is captured again.
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import Tensor

from tba.generate.sampling import Needs
from tba.generate.slots import SlotCache, SlotState
from tba.models.decoder import Decoder, FusedPass
from tba.models.decoder_spec import DecoderSpec

logger = logging.getLogger("tba.generate")

STEPS_PER_LOOK = 8
"""Decode steps between two looks of the host: a finished slot idles half of them on average, a look costs about as much."""
STEPS_AHEAD = 4
"""The same where the next steps are under way as the host looks: nothing waits for it, but a finished slot idles longer."""


class FusedSlotAttention:
    """One token per slot: written at the slot's position, seeing what lies before. All on the device, for a graph."""

    def __init__(self, spec: DecoderSpec, cache: SlotCache, positions: Tensor) -> None:
        self.spec, self.cache, self.positions = spec, cache, positions

    def room(self, layer: int, device: torch.device) -> tuple[Tensor, Tensor]:
        return self.cache.keys[layer], self.cache.values[layer]

    def attend(self, layer: int, query_NHD: Tensor) -> Tensor:
        from tba.kernels.attention import attend

        return attend(
            query_NHD,
            self.cache.keys[layer],
            self.cache.values[layer],
            self.positions,
            scale=self.spec.query_scales[layer],
            cap=self.spec.attention_cap,
            window=self.spec.windows[layer],
        )


class FusedDecode:
    """Runs decode steps of a decoder over the slots' static tensors."""

    def __init__(self, decoder: Decoder, cache: SlotCache, state: SlotState, is_stop_V: Tensor) -> None:
        self.decoder, self.cache, self.state, self.is_stop_V = decoder, cache, state, is_stop_V
        self.fused_pass = decoder.fused_pass or FusedPass(decoder.spec, decoder.weights, decoder.rotations)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._warm: set[int] = set()
        """Numbers of slots that have run once: kernels are compiled and libraries are ready, so a capture may follow."""
        self._addresses: tuple[tuple[int, torch.Size], ...] = ()
        self._captures = decoder.device.type == "cuda"

    @staticmethod
    def serves(needs: Needs) -> bool:
        """Truncation and forbidden tokens take the plain step."""
        return not (needs.truncation or needs.forbidden)

    @torch.inference_mode()
    def run(self, count: int, *, steps: int) -> None:
        """`steps` tokens for each of the first `count` slots that is not done."""
        slots = self._bucket(count)
        self._forget_if_moved()
        for _ in range(steps):
            if self._captures and slots not in self._graphs and slots in self._warm:
                self._capture(slots)
            if slots in self._graphs:
                self._graphs[slots].replay()
            else:
                self._step(slots)
                self._warm.add(slots)

    def _bucket(self, count: int) -> int:
        """Powers of two up to 64, then multiples of 64: few graphs, little waste."""
        rounded = 1 << (count - 1).bit_length() if count <= 64 else -(-count // 64) * 64
        return min(rounded, self.state.integers.shape[0])

    def _forget_if_moved(self) -> None:
        """Graphs hold addresses and sizes; growing tables have new ones."""
        tables = (self.cache.keys, self.cache.values, self.state.tokens)
        addresses = tuple((table.data_ptr(), table.shape) for table in tables)
        if addresses != self._addresses:
            if self._graphs:
                torch.cuda.synchronize()  # one of them may be at work
            self._graphs.clear()
            self._warm.clear()  # other sizes may be other kernels, and a capture must not compile any
            self._addresses = addresses

    def _capture(self, slots: int) -> None:
        """A graph for this number of slots; where memory is too short for it, steps go on kernel by kernel, in words."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph):
                self._step(slots)
        except torch.OutOfMemoryError as error:
            self._captures = False
            logger.warning("decoding without CUDA graphs from now on, slower: %.300s", error)
        else:
            self._graphs[slots] = graph

    def _step(self, slots: int) -> None:
        """One decode step, pure work on static tensors."""
        from tba.kernels.logits import choose_tokens

        decoder, positions = self.decoder, self.state.column("positions", slots)
        x = decoder._embed(self.state.column("ids", slots), positions)
        hidden = self.fused_pass.hidden(x, positions, FusedSlotAttention(decoder.spec, self.cache, positions))
        logits = F.linear(hidden, decoder.weights.head)
        choose_tokens(logits, self.state.columns(slots), self.is_stop_V, cap=decoder.spec.logit_cap)
