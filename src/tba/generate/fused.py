"""Decoding on CUDA: a step in few kernels, captured in CUDA graphs, several steps before the host looks.

Every kernel reads positions and stop flags on the device, so one graph per number of slots serves all lengths, and a slot
that is done stands still until the host takes its response. New weights are copied into the tensors the graphs read:
nothing is captured again.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tba.generate.sampling import Needs
from tba.generate.slots import SlotCache, SlotState
from tba.models.decoder import Decoder, DecoderSpec

STEPS_PER_LOOK = 8
"""Decode steps between two looks of the host: a finished slot idles half of them on average, a look costs about as much."""
GELUS = ("gelu_new", "gelu_pytorch_tanh")


def why_not_fused(spec: DecoderSpec) -> str | None:
    """What keeps a family from the fused step; None = nothing."""
    if spec.norm != "rms":
        return "it has layer norms"
    if spec.post_norms or spec.parallel_residual:
        return "it norms the output of its blocks, or runs them side by side"
    if not spec.gated or spec.activation not in ("silu", "swish", *GELUS):
        return f"its MLP is not gated by SiLU or GELU (it has {spec.activation})"
    if spec.rotary_dim == 0:
        return "it has learned positions"
    return None


class FusedDecode:
    """Runs decode steps of a decoder over the slots' static tensors."""

    def __init__(self, decoder: Decoder, cache: SlotCache, state: SlotState, is_stop_V: Tensor) -> None:
        self.decoder, self.cache, self.state, self.is_stop_V = decoder, cache, state, is_stop_V
        self.rotations = {kind: torch.view_as_real(table).contiguous() for kind, table in decoder.rotations.items()}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._warm: set[int] = set()
        """Numbers of slots that have run once: kernels are compiled and libraries are ready, so a capture may follow."""
        self._addresses: tuple[int, int] = (0, 0)

    @staticmethod
    def serves(needs: Needs) -> bool:
        """Truncation and forbidden tokens take the plain step."""
        return not (needs.truncation or needs.forbidden)

    @torch.inference_mode()
    def run(self, count: int, *, steps: int = STEPS_PER_LOOK) -> None:
        """`steps` tokens for each of the first `count` slots that is not done."""
        slots = self._bucket(count)
        self._forget_if_moved()
        for _ in range(steps):
            if slots not in self._graphs and slots in self._warm and self.decoder.device.type == "cuda":
                self._graphs[slots] = self._capture(slots)
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
        """Graphs hold addresses; growing tables have new ones."""
        addresses = (self.cache.values.data_ptr(), self.state.tokens.data_ptr())
        if addresses != self._addresses:
            self._graphs.clear()
            self._addresses = addresses

    def _capture(self, slots: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            self._step(slots)
        return graph

    def _step(self, slots: int) -> None:
        """One decode step, pure work on static tensors."""
        from tba.kernels.choose import choose_tokens
        from tba.kernels.decode import add_norm

        decoder, weights = self.decoder, self.decoder.weights
        positions = self.state.column("positions", slots)
        x = decoder._embed(self.state.column("ids", slots), positions)
        delta: Tensor | None = None
        for index in range(decoder.spec.num_layers):
            delta = self._layer(index, x, delta, positions)
        norm = weights.final_norm
        hidden = add_norm(x, delta, norm.weight, norm.epsilon, decoder.dtype)
        logits = F.linear(hidden, weights.head)
        choose_tokens(logits, self.state.columns(slots), self.is_stop_V, cap=decoder.spec.logit_cap)

    def _layer(self, index: int, x: Tensor, delta: Tensor | None, positions: Tensor) -> Tensor:
        """Adds `delta` to the residual stream x, and returns what this layer's MLP would add."""
        from tba.kernels.decode import add_norm, attend, gated, rotate_and_store

        spec, layer, dtype = self.decoder.spec, self.decoder.weights.layers[index], self.decoder.dtype
        keys, values = self.cache.keys[index], self.cache.values[index]
        norm = layer.attention_norm
        query = rotate_and_store(
            layer.qkv(add_norm(x, delta, norm.weight, norm.epsilon, dtype)),
            positions,
            self.rotations.get(spec.rotary_kinds[index]),
            keys,
            values,
            num_heads=spec.num_heads,
            query_norm=None if layer.query_norm is None else layer.query_norm.weight,
            key_norm=None if layer.key_norm is None else layer.key_norm.weight,
            epsilon=spec.norm_epsilon,
        )
        attended = attend(
            query,
            keys,
            values,
            positions,
            scale=spec.query_scales[index],
            cap=spec.attention_cap,
            window=spec.windows[index],
        )
        norm = layer.mlp_norm
        inner = layer.up(add_norm(x, layer.output(attended.to(dtype)), norm.weight, norm.epsilon, dtype))
        return layer.down(gated(inner, gelu=spec.activation in GELUS))
