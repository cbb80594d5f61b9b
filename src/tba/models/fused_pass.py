"""The decoder's layers on CUDA: one Triton kernel each for residual + norm, rotation + storing, and the gated activation.

It computes what the plain pass of decoder.py computes, which is its specification: nine kernels a layer where that one has
nineteen. Decode steps (generate/fused.py) run the same layers over the slots.

Axes: N tokens, E hidden, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from tba.models.decoder_weights import DecoderWeights, Norm

if TYPE_CHECKING:  # decoder.py imports this file
    from tba.models.decoder import Attend, DecoderSpec

GELUS = ("gelu_new", "gelu_pytorch_tanh")


def why_not_fused(spec: DecoderSpec) -> str | None:
    """What keeps a family, or this installation, from the fused kernels; None = nothing."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if spec.norm != "rms":
        return "it has layer norms"
    if spec.post_norms or spec.parallel_residual:
        return "it norms the output of its blocks, or runs them side by side"
    if not spec.gated or spec.activation not in ("silu", "swish", *GELUS):
        return f"its MLP is not gated by SiLU or GELU (it has {spec.activation})"
    if spec.rotary_dim == 0:
        return "it has learned positions"
    return None


def make_fused_pass(spec: DecoderSpec, weights: DecoderWeights, rotations: Mapping[str, Tensor]) -> FusedPass | None:
    """None = the plain pass serves: on a CPU, without Triton, or for a family that computes otherwise."""
    serves = weights.embedding.is_cuda and why_not_fused(spec) is None
    return FusedPass(spec, weights, rotations) if serves else None


@runtime_checkable
class AttendInPlace(Protocol):
    """An `Attend` whose tensors the kernel writes at once, instead of handing over keys and values to be copied."""

    def room(self, layer: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where this layer's keys and values go: [N, K, D], or slots [S, K, L, D], both alike."""

    def attend(self, layer: int, query_NHD: Tensor) -> Tensor:
        """Attention over what is stored -> [N, H * D]."""


class FusedPass:
    """`hidden` and `store_only` of a decoder, from the embedded tokens on."""

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, rotations: Mapping[str, Tensor]) -> None:
        self.spec, self.weights = spec, weights
        self.dtype = weights.embedding.dtype
        self.rotations = {kind: torch.view_as_real(table).contiguous() for kind, table in rotations.items()}

    def hidden(self, x_NE: Tensor, positions_N: Tensor, attend: Attend | AttendInPlace) -> Tensor:
        """Final hidden states, normed; x is used up."""
        delta: Tensor | None = None
        for index in range(self.spec.num_layers):
            delta = self._layer(index, x_NE, delta, positions_N, attend)
        return self._add_norm(x_NE, delta, self.weights.final_norm)

    def store_only(self, x_NE: Tensor, positions_N: Tensor, attend: Attend | AttendInPlace) -> None:
        """Keys and values of every layer, nothing else; x is used up."""
        delta: Tensor | None = None
        last = self.spec.num_layers - 1
        for index in range(last):
            delta = self._layer(index, x_NE, delta, positions_N, attend)
        self._query(last, x_NE, delta, positions_N, attend)

    def _layer(
        self, index: int, x: Tensor, delta: Tensor | None, positions: Tensor, attend: Attend | AttendInPlace
    ) -> Tensor:
        """Adds `delta` to the residual stream x, and returns what this layer's MLP would add."""
        from tba.kernels.layer import gated

        layer = self.weights.layers[index]
        query = self._query(index, x, delta, positions, attend)
        attended = attend.attend(index, query).to(self.dtype)
        inner = layer.up(self._add_norm(x, layer.output(attended), layer.mlp_norm))
        return layer.down(gated(inner, gelu=self.spec.activation in GELUS))

    def _query(
        self, index: int, x: Tensor, delta: Tensor | None, positions: Tensor, attend: Attend | AttendInPlace
    ) -> Tensor:
        """Project, rotate, store keys and values -> query [N, H, D]."""
        from tba.kernels.layer import rotate_and_store

        spec, layer = self.spec, self.weights.layers[index]
        qkv = layer.qkv(self._add_norm(x, delta, layer.attention_norm))
        if isinstance(attend, AttendInPlace):
            keys, values = attend.room(index, x.device)
        else:
            keys, values = qkv.new_empty(2, x.shape[0], spec.num_kv_heads, spec.head_dim)
        query = rotate_and_store(
            qkv,
            positions,
            self.rotations.get(spec.rotary_kinds[index]),
            keys,
            values,
            num_heads=spec.num_heads,
            query_norm=None if layer.query_norm is None else layer.query_norm.weight,
            key_norm=None if layer.key_norm is None else layer.key_norm.weight,
            epsilon=spec.norm_epsilon,
        )
        if not isinstance(attend, AttendInPlace):
            attend.store(index, keys, values)
        return query

    def _add_norm(self, x: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
        from tba.kernels.layer import add_norm

        return add_norm(x, delta, norm.weight, norm.epsilon, self.dtype)
