"""The pass of a decoder on CUDA: the same layers as decoder.py, in few kernels.

Residual + norm is one kernel; rotation, storing and attention are one in a decode step, two otherwise. In a decode step,
whose rows are few, the matrix products are kernels of our own where those are faster than cuBLAS (kernels/layer.py): the
gated activation and the sum over parts of a product cost no launch. That makes seven kernels a layer, eight with cuBLAS,
where the plain pass has nineteen.

Axes: N tokens, E hidden, H query heads, K key/value heads, D head dimension, P parts of a product.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from tba.engine.decoder.layers import Attend, AttendProjected, CausalAttention, apply_experts, clamped_gate
from tba.engine.decoder.spec import DecoderSpec, DecoderWeights, DenseMlp, Linear, Norm

if TYPE_CHECKING:  # Triton is there only where CUDA is
    from tba.engine.kernels.layer import Tile

GELUS = ("gelu_new", "gelu_pytorch_tanh")


def why_not_fused(spec: DecoderSpec) -> str | None:
    """The reason why a family, or this installation, cannot use the fused kernels; None = it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    return why_never_fused(spec)


def why_never_fused(spec: DecoderSpec) -> str | None:
    """The reason why the fused kernels cannot compute a family, wherever it is; None = they can."""
    if spec.norm != "rms":
        return "it has layer norms"
    if spec.parallel_residual:
        return "it runs attention and MLP side by side"
    if not spec.gated or spec.activation not in ("silu", "swish", *GELUS):
        return f"its MLP is not gated by SiLU or GELU (it has {spec.activation})"
    if spec.rotary_dim == 0:
        return "it has learned positions"
    return None


def make_fused_pass(spec: DecoderSpec, weights: DecoderWeights, rotations: Mapping[str, Tensor]) -> FusedPass | None:
    serves = weights.embedding.is_cuda and why_not_fused(spec) is None
    return FusedPass(spec, weights, rotations) if serves else None


class Added(NamedTuple):
    """Sum that a layer's attention or MLP adds to the residual stream: the delta [N, E], or the sum of parts [P, N, E], and
    a bias [E] where that is not in the delta."""

    delta: Tensor
    bias: Tensor | None = None


class FusedPass:
    """`hidden` and `store_only` of a decoder, from the embedded tokens on."""

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, rotations: Mapping[str, Tensor]) -> None:
        self.spec, self.weights = spec, weights
        self.dtype = weights.embedding.dtype
        self.is_gelu = spec.activation in GELUS
        # As in transformers, the factor is rounded to the dtype of the matrix first.
        self.embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=self.dtype))
        self.rotations = {kind: torch.view_as_real(table).contiguous() for kind, table in rotations.items()}

    def embed(self, ids_N: Tensor) -> Tensor:
        """The residual stream before the first layer, fp32 [N, E]."""
        from tba.engine.kernels.layer import embed

        return embed(ids_N, self.weights.embedding, self.embedding_scale)

    def hidden(self, x_NE: Tensor, positions_N: Tensor, attend: Attend | AttendProjected) -> Tensor:
        """Final hidden states, normed; x is used up."""
        added: Added | None = None
        for index in range(self.spec.num_layers):
            added = self._layer(index, x_NE, added, positions_N, attend)
        # The last layer's sum is still to be added: each addition waits for the norm that follows, one kernel for both.
        return self._add_norm(x_NE, added, self.weights.final_norm)

    def store_only(self, x_NE: Tensor, positions_N: Tensor, attend: Attend) -> None:
        added: Added | None = None
        last = self.spec.num_layers - 1
        for index in range(last):
            added = self._layer(index, x_NE, added, positions_N, attend)
        self._store(last, self._projected(last, x_NE, added), positions_N, attend)

    def _layer(
        self, index: int, x: Tensor, added: Added | None, positions: Tensor, attend: Attend | AttendProjected
    ) -> Added:
        """Adds what the layer before adds to the residual stream x, and returns what this layer's MLP adds."""
        layer, spec = self.weights.layers[index], self.spec.experts
        qkv = self._projected(index, x, added)
        # A decode step over pages; other passes store first and attend then.
        if isinstance(attend, AttendProjected):
            rotations = self.rotations.get(self.spec.rotary_kinds[index])
            attended = attend.attend_projected(index, qkv, rotations, *layer.head_norms(self.spec))
        else:
            attended = attend.attend(index, self._store(index, qkv, positions, attend), layer.sinks)
        attended = attended.to(self.dtype)
        mlp_input = self._add_norm(x, self._added(layer.output, attended, layer.attention_post_norm), layer.mlp_norm)
        if isinstance(layer.mlp, DenseMlp):
            return self._added(layer.mlp.down, self._gated(layer.mlp.up, mlp_input), layer.mlp_post_norm)
        from tba.engine.kernels.layer import gated

        assert spec is not None
        activate = partial(gated, gelu=self.is_gelu) if spec.gate_limit is None else partial(clamped_gate, spec=spec)
        return Added(self._normed(apply_experts(mlp_input, layer.mlp, spec, activate), layer.mlp_post_norm))

    def _projected(self, index: int, x: Tensor, added: Added | None) -> Tensor:
        """Query, key and value heads of a layer [N, (H + 2 K) D], neither normed nor rotated by head."""
        from tba.engine.kernels.layer import linear

        layer = self.weights.layers[index]
        normed = self._add_norm(x, added, layer.attention_norm)
        tile = self._tile("plain", layer.qkv, normed)
        qkv = layer.qkv(normed) if tile is None else linear(normed, layer.qkv.weight, layer.qkv.bias, tile)
        if self.spec.query_key_norm == "all":
            # All query heads together, and all key heads. The kernels that follow norm by head only.
            start = 0
            for norm, heads in ((layer.query_norm, self.spec.num_heads), (layer.key_norm, self.spec.num_kv_heads)):
                assert norm is not None
                part = qkv[:, start : start + heads * self.spec.head_dim]
                part.copy_(norm(part.float()))
                start += part.shape[1]
        return qkv

    def _store(self, index: int, qkv: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Norm and rotate heads, store keys and values -> query [N, H, D]."""
        from tba.engine.kernels.layer import rotate_and_store

        spec, layer = self.spec, self.weights.layers[index]
        if isinstance(attend, CausalAttention):
            # The kernel writes into the tables themselves: `store` would copy them onto themselves.
            keys, values = attend.storage(index, qkv.device)
        else:
            keys, values = qkv.new_empty(2, qkv.shape[0], spec.num_kv_heads, spec.head_dim)
        query_norm, key_norm = layer.head_norms(spec)
        query = rotate_and_store(
            qkv,
            positions,
            self.rotations.get(spec.rotary_kinds[index]),
            keys,
            values,
            num_heads=spec.num_heads,
            query_norm=query_norm,
            key_norm=key_norm,
            epsilon=spec.norm_epsilon,
        )
        if not isinstance(attend, CausalAttention):
            attend.store(index, keys, values)
        return query

    def _gated(self, up: Linear, x: Tensor) -> Tensor:
        """activation(gate) * up [N, F]."""
        from tba.engine.kernels.layer import gated, gated_linear

        tile = self._tile("gated", up, x)
        if tile is None:
            return gated(up(x), gelu=self.is_gelu)
        return gated_linear(x, up.weight, up.bias, tile, gelu=self.is_gelu)

    def _added(self, linear: Linear, x: Tensor, post_norm: Norm | None) -> Added:
        from tba.engine.kernels.layer import linear_parts

        # A post-norm needs the whole sum, so the parts could not wait for the next norm.
        tile = self._tile("parts", linear, x) if post_norm is None else None
        if tile is None:
            return Added(self._normed(linear(x), post_norm))
        return Added(linear_parts(x, linear.weight, tile), linear.bias)

    def _tile(self, kind: Literal["plain", "gated", "parts"], linear: Linear, x: Tensor) -> Tile | None:
        """How our own kernel cuts this product; None = cuBLAS serves."""
        from tba.engine.kernels.layer import choose_tile

        # Our products know no second matrix: a Linear with an adapter beside it computes both by cuBLAS.
        return None if linear.low_rank is not None else choose_tile(kind, x, linear.weight)

    def _add_norm(self, x: Tensor, added: Added | None, norm: Norm | None) -> Tensor:
        """x + what is added, kept in x, normed where there is a norm, in the matrices' dtype."""
        from tba.engine.kernels.layer import add_norm

        delta, bias = (None, None) if added is None else added
        weight, epsilon = (None, 0.0) if norm is None else (norm.weight, norm.epsilon)
        return add_norm(x, delta, weight, epsilon, self.dtype, bias_E=bias, delta_scale=self.spec.residual_scale)

    def _normed(self, output: Tensor, norm: Norm | None) -> Tensor:
        from tba.engine.kernels.layer import add_norm

        return output if norm is None else add_norm(output, None, norm.weight, norm.epsilon, torch.float32)
