"""Our own decoder-only transformer for inference: one forward for every family, on static tensors.

A frozen `DecoderSpec` says how a family differs (norms, positions, biases, windows, caps); `families.py` makes it from
a transformers model and says where each named tensor goes. Tokens are one flat axis N, and attention is given from
outside (`Attend`): the same layers serve prefill, decoding in slots and scoring. Weights are copied in place, so their
addresses never change and a captured CUDA graph stays valid.

The residual stream, norms and rotations are fp32; the matrices have the engine's dtype.

What stands here is the plain pass. On CUDA most families run the same layers in fewer kernels (`fused_pass.py`).

Axes: N tokens, H query heads, K key/value heads, D head dimension, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tba.models.decoder_weights import DecoderWeights, Layer, Linear, Norm
from tba.models.fused_pass import make_fused_pass


class UnsupportedModel(Exception):
    """The native decoder cannot run this model; the message says why."""


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """How one model computes: everything but its weights.

    DecoderSpec(family="llama", vocab_size=512, hidden_size=128, num_heads=4, num_kv_heads=2, head_dim=32, mlp_size=384,
                windows=(None,) * 5, query_scales=(32**-0.5,) * 5, rotary_kinds=("all",) * 5, rotary_dim=32)
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    windows: tuple[int | None, ...]
    """Per layer: a token sees this many tokens, itself included; None = all before it."""
    query_scales: tuple[float, ...]
    """Per layer: factor of query x key."""
    rotary_kinds: tuple[str, ...]
    """Per layer: which rotation table; "" = none (learned positions)."""
    rotary_dim: int = 0
    """Leading dimensions of a head that are rotated; 0 = learned positions."""
    norm: str = "rms"
    """rms or layer."""
    norm_epsilon: float = 1e-6
    norm_offset: float = 0.0
    """Added to rms weights when they are loaded: Gemma stores w and means 1 + w."""
    activation: str = "silu"
    gated: bool = True
    """MLP is down(act(gate) * up) instead of down(act(up))."""
    post_norms: bool = False
    """Gemma 2 and 3 also norm the output of attention and MLP."""
    query_key_norm: bool = False
    parallel_residual: bool = False
    """GPT-NeoX: attention and MLP both read the layer's input."""
    embedding_scale: float = 1.0
    attention_cap: float | None = None
    """Scores become cap * tanh(score / cap); None = off."""
    logit_cap: float | None = None
    tied: bool = False
    """The head is the embedding matrix."""

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads


class Attend(Protocol):
    """How the tokens of one forward see each other and what came before."""

    def store(self, layer: int, key_NKD: Tensor, value_NKD: Tensor) -> None:
        """Keep the keys and values of these tokens."""

    def attend(self, layer: int, query_NHD: Tensor) -> Tensor:
        """Attention over what is stored -> [N, H * D]."""


class Decoder:
    """The forward pass. Make one with `families.make_decoder(model)`."""

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, rotations: Mapping[str, Tensor]) -> None:
        self.spec = spec
        self.weights = weights
        self.rotations = rotations
        """Kind -> complex64 [positions, rotary_dim / 2]: cos + i sin, scaling included."""
        self.activation = ACTIVATIONS[spec.activation]
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        # As in transformers, the factor is rounded to the dtype of the matrix first.
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=self.dtype, device=self.device)
        self.fused_pass = make_fused_pass(spec, weights, rotations)
        """None = the plain pass."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy named tensors of a transformers state dict over the weights, in place."""
        self.weights.load(tensors)

    def hidden(self, ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """Final hidden states, normed, ready for `logits` -> [N, hidden]."""
        x = self._embed(ids_N, positions_N)
        if self.fused_pass is not None:
            return self.fused_pass.hidden(x, positions_N, attend)
        rotations = self._rotations_at(positions_N)
        for index in range(self.spec.num_layers):
            x = self._layer(index, x, rotations[self.spec.rotary_kinds[index]], attend)
        return self.weights.final_norm(x).to(self.dtype)

    def store_only(self, ids_N: Tensor, positions_N: Tensor, attend: Attend) -> None:
        """Keys and values of every layer, nothing else: the last layer's attention and MLP are never computed."""
        x = self._embed(ids_N, positions_N)
        if self.fused_pass is not None:
            return self.fused_pass.store_only(x, positions_N, attend)
        rotations = self._rotations_at(positions_N)
        last = self.spec.num_layers - 1
        for index in range(last):
            x = self._layer(index, x, rotations[self.spec.rotary_kinds[index]], attend)
        layer = self.weights.layers[last]
        self._query(last, layer.attention_norm(x), rotations[self.spec.rotary_kinds[last]], attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [N, V]."""
        logits = F.linear(hidden, self.weights.head).float()
        cap = self.spec.logit_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _embed(self, ids_N: Tensor, positions_N: Tensor) -> Tensor:
        x = F.embedding(ids_N, self.weights.embedding)
        if self.spec.embedding_scale != 1.0:
            x = x * self._embedding_scale
        if self.weights.positions is not None:
            x = x + F.embedding(positions_N, self.weights.positions)
        return x.float()

    def _rotations_at(self, positions_N: Tensor) -> dict[str, Tensor | None]:
        found: dict[str, Tensor | None] = {
            kind: table.index_select(0, positions_N)[:, None] for kind, table in self.rotations.items()
        }
        return found or {"": None}

    def _layer(self, index: int, x: Tensor, rotation: Tensor | None, attend: Attend) -> Tensor:
        layer = self.weights.layers[index]
        query = self._query(index, layer.attention_norm(x), rotation, attend)
        attended = attend.attend(index, query).to(self.dtype)
        mlp_input = layer.mlp_norm(x) if self.spec.parallel_residual else None
        self._add(x, layer.output, attended, layer.attention_post_norm)
        inner = self._inner(layer, layer.mlp_norm(x) if mlp_input is None else mlp_input)
        self._add(x, layer.down, inner, layer.mlp_post_norm)
        return x

    def _add(self, x: Tensor, linear: Linear, inner: Tensor, post_norm: Norm | None) -> None:
        if post_norm is None:
            linear.add_to(x, inner)
        else:
            x.add_(post_norm(linear(inner).float()))

    def _query(self, index: int, x: Tensor, rotation: Tensor | None, attend: Attend) -> Tensor:
        """Project, rotate, store keys and values -> query [N, H, D] in fp32."""
        spec, layer = self.spec, self.weights.layers[index]
        heads = layer.qkv(x.to(self.dtype)).view(x.shape[0], spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        query_key = heads[:, : spec.num_heads + spec.num_kv_heads].float()
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = query_key.split((spec.num_heads, spec.num_kv_heads), dim=1)
            query_key = torch.cat((layer.query_norm(query), layer.key_norm(key)), dim=1)
        if rotation is not None:
            query_key = rotate(query_key, rotation)
        attend.store(index, query_key[:, spec.num_heads :], heads[:, spec.num_heads + spec.num_kv_heads :].float())
        return query_key[:, : spec.num_heads]

    def _inner(self, layer: Layer, x: Tensor) -> Tensor:
        inner = layer.up(x.to(self.dtype))
        if not self.spec.gated:
            return self.activation(inner)
        size = self.spec.mlp_size
        return self.activation(inner[:, :size]).mul_(inner[:, size:])


def rotate(heads_NHD: Tensor, rotation: Tensor) -> Tensor:
    """Rotary embedding as one complex product: `families` stores the two numbers of a pair side by side."""
    size = 2 * rotation.shape[-1]
    pairs = torch.view_as_complex(heads_NHD[..., :size].unflatten(-1, (-1, 2)))
    rotated = torch.view_as_real(pairs * rotation).flatten(-2)
    return rotated if size == heads_NHD.shape[-1] else torch.cat((rotated, heads_NHD[..., size:]), dim=-1)
