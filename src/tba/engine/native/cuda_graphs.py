"""CUDA graphs: decode steps over the slots, and the loading of new weights, captured once and replayed.

A decode step is few kernels. Several steps run before the host takes a snapshot of the slots. Every kernel reads positions,
page tables and stop flags on the device. So one graph for each number of slots and way of reading pages serves all lengths.
A finished slot is idle until the host takes its response. New weights are copied into the tensors the graphs read,
and pages never move: nothing is captured again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tba.engine.decoder.decoder import Decoder
from tba.engine.decoder.fused_pass import FusedPass
from tba.engine.native.paged_cache import PagedCache, PagePlan
from tba.engine.native.slots import SlotState

logger = logging.getLogger("tba.engine")


def slots_of_graph(count: int, num_slots: int) -> int:
    """Number of slots that a graph over the first `count` runs over: powers of two up to 64, then multiples of 64: few
    graphs, little waste."""
    rounded = 1 << (count - 1).bit_length() if count <= 64 else -(-count // 64) * 64
    return min(rounded, num_slots)


class FusedPagedAttention:
    """One token per slot over its own pages, in the kernels of `attend_pages`, from the projection on: positions and tables
    are read on the device, so a captured graph serves all lengths."""

    def __init__(self, decoder: Decoder, cache: PagedCache, state: SlotState, num_slots: int, plan: PagePlan) -> None:
        from tba.engine.kernels.paged_attention import PageView

        self.decoder, self.plan = decoder, plan
        self.view = PageView(
            base=cache.pool.base,
            table=cache.table,
            positions=state.column("positions", num_slots),
            done=state.column("done", num_slots),
            members=cache.groups.members,
            shared=cache.groups.shared,
        )

    def attend_projected(
        self, layer: int, qkv: Tensor, rotations: Tensor | None, query_norm: Tensor | None, key_norm: Tensor | None
    ) -> Tensor:
        from tba.engine.kernels.paged_attention import attend_pages

        spec = self.decoder.spec
        return attend_pages(
            qkv,
            self.view,
            layer,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.query_scales[layer],
            cap=spec.attention_cap,
            window=spec.windows[layer],
            sinks_H=self.decoder.weights.layers[layer].sinks,
            rotations=rotations,
            query_norm=query_norm,
            key_norm=key_norm,
            epsilon=spec.norm_epsilon,
            splits=self.plan.splits,
            shared=self.plan.shared,
        )


class FusedDecode:
    """Runs decode steps of a decoder over the slots' static tensors, from captured graphs once kernels are compiled."""

    def __init__(self, decoder: Decoder, cache: PagedCache, state: SlotState, is_stop_V: Tensor) -> None:
        self.decoder, self.cache, self.state, self.is_stop_V = decoder, cache, state, is_stop_V
        self.fused_pass = decoder.fused_pass or FusedPass(decoder.spec, decoder.weights, decoder.rotations)
        self._graphs: dict[tuple[int, PagePlan], torch.cuda.CUDAGraph] = {}
        self._warm: set[tuple[int, PagePlan]] = set()
        """Numbers of slots, and ways of reading pages, that have run once: kernels are compiled and libraries are ready, so
        that a capture may follow."""
        self._address: tuple[int, torch.Size] | None = None
        self._captures = decoder.device.type == "cuda"
        self._memory: Any = None
        """Pool that all graphs have their memory of: they run one after the other and leave nothing there."""

    @torch.inference_mode()
    def run(self, count: int, *, decode_steps: int) -> None:
        """`decode_steps` tokens for each of the first `count` slots that is not done."""
        # Slots beyond `count` are done, and a slot that is done stands still: a graph over more slots changes nothing there.
        slots = slots_of_graph(count, self.state.integers.shape[0])
        # A graph is good for one plan: which kernels run, and on how many programs, is fixed when it is captured.
        step = (slots, self.cache.plan(slots))
        # Before the lookup: when the tables of responses have grown, graphs hold the addresses and sizes of freed ones.
        address = (self.state.tokens.data_ptr(), self.state.tokens.shape)
        if address != self._address:
            if self._graphs:
                torch.cuda.synchronize()  # one of them may be at work
            self._graphs.clear()
            # The old pool goes with its graphs.
            self._memory = torch.cuda.graph_pool_handle() if self._captures else None
            self._warm.clear()  # other sizes may be other kernels, and a capture must not compile any
            self._address = address
        for _ in range(decode_steps):
            if self._captures and step not in self._graphs and step in self._warm:
                self._capture(*step)
            if step in self._graphs:
                self._graphs[step].replay()
            else:
                # Kernel by kernel at first: this compiles what is missing, which a capture must not.
                self._decode_step(*step)
                self._warm.add(step)

    def forget(self) -> None:
        """Drop all graphs: the decoder computes otherwise from now on."""
        self._address = None

    def _capture(self, slots: int, plan: PagePlan) -> None:
        """A graph for this number of slots and plan; without memory for one, decoding goes on kernel by kernel, with a
        warning."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            # A capture computes nothing: the graph is replayed for the step itself.
            with torch.cuda.graph(graph, pool=self._memory):
                self._decode_step(slots, plan)
        except torch.OutOfMemoryError as error:
            self._captures = False
            logger.warning("decoding without CUDA graphs from now on, slower: %.300s", error)
        else:
            self._graphs[slots, plan] = graph

    def _decode_step(self, slots: int, plan: PagePlan) -> None:
        """One decode step: work on static tensors only, so that it can be captured."""
        from tba.engine.kernels.choose_tokens import choose_tokens

        decoder, positions = self.decoder, self.state.column("positions", slots)
        # In a capture all tensors below lie in the graphs' memory pool, which any later replay may overwrite.
        x = self.fused_pass.embed(self.state.column("ids", slots))
        attend = FusedPagedAttention(decoder, self.cache, self.state, slots, plan)
        hidden = self.fused_pass.hidden(x, positions, attend)
        logits = F.linear(hidden, decoder.weights.head)
        choose_tokens(logits, self.state.columns(slots), self.is_stop_V, cap=decoder.spec.logit_cap)


class InPlaceLoader:
    """Copies named tensors into a decoder's static tensors.

    On CUDA the hundreds of small copies and rearrangements become one graph once the tensors come from the same addresses as
    the time before, as they do from a searcher's private copy.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._addresses: tuple[int, ...] = ()
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def __call__(self, tensors: Mapping[str, Tensor]) -> None:
        # The first load from new addresses is plain, the second is captured: addresses may never come again.
        addresses = tuple(tensor.data_ptr() for tensor in tensors.values())
        on_cuda = self._decoder.device.type == "cuda" and all(tensor.is_cuda for tensor in tensors.values())
        # A captured copy reads from fixed addresses: tensors elsewhere must be copied one by one.
        if not on_cuda or addresses != self._addresses:
            self._addresses, self._graph = addresses, None
            self._decoder.load(tensors)
            return
        if self._graph is None:
            self._graph = self._capture(tensors)
        # Reads what lies at the addresses now: new values in the same tensors.
        self._graph.replay()

    def _capture(self, tensors: Mapping[str, Tensor]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            self._decoder.load(tensors)
        return graph
