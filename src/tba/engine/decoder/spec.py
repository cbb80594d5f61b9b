"""The parts of a decoder: the spec of its family's computation, and its static tensors.

A frozen `DecoderSpec` says how a family differs (norms, positions, biases, windows, caps). `DecoderWeights` holds the
matrices and norms, and which named tensor of a transformers state dict fills which part of them. Weights are copied in
place, so their addresses never change and a captured CUDA graph stays valid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tba.models.weights import check_fits
from tba.types import copy_all


class UnsupportedModel(Exception):
    """The native decoder cannot run this model; the message says why."""


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts: ExpertsSpec(num_experts=128, num_chosen=8, mlp_size=768, layers=(True,) * 48)"""

    num_experts: int
    num_chosen: int
    mlp_size: int
    layers: tuple[bool, ...]
    """Whether a layer has experts; the others have a dense MLP."""
    normalised: bool = True
    """Whether the weights of the chosen experts sum to 1: a soft-max of their scores alone. Otherwise it is one of all."""
    gate_limit: float | None = None
    """Largest gate and |up| of GPT-OSS, whose gated activation is (up + 1) gate sigmoid(1.702 gate); None = the family's."""
    gate_alpha: float = 1.702


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
    """Number of tokens that a token sees, itself included, by layer; None = all before it."""
    query_scales: tuple[float, ...]
    rotary_kinds: tuple[str, ...]
    """Name of the rotation table, by layer; "" = none (learned positions)."""
    rotary_dim: int = 0
    """Number of leading dimensions of a head that are rotated; 0 = learned positions."""
    norm: str = "rms"
    """Kind of norm: rms or layer."""
    norm_epsilon: float = 1e-6
    norm_offset: float = 0.0
    """Number added to rms weights when they are loaded: Gemma stores w and means 1 + w."""
    activation: str = "silu"
    gated: bool = True
    """Whether the MLP is down(act(gate) * up) instead of down(act(up))."""
    pre_norms: bool = True
    """Whether the input of attention and MLP is normed; OLMo 2 norms their output only."""
    post_norms: bool = False
    """Whether the output of attention and MLP is normed too, as in Gemma 2 and 3."""
    query_key_norm: Literal["none", "head", "all"] = "none"
    """Norm of queries and keys: none, over each head (Qwen3), or all heads together (OLMo)."""
    parallel_residual: bool = False
    """Whether attention and MLP both read the layer's input, as in GPT-NeoX."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor of what attention and MLP add, as in Granite."""
    final_scale: float = 1.0
    """Factor of the final norm's weights when they are loaded, which is one of the logits: Granite divides them."""
    attention_cap: float | None = None
    """Cap of attention scores, which become cap * tanh(score / cap); None = off."""
    logit_cap: float | None = None
    tied: bool = False
    sinks: bool = False
    """Whether each query head has a learned score that takes part in the soft-max and adds nothing, as in GPT-OSS."""
    experts: ExpertsSpec | None = None
    """How the MLP of some layers is divided among experts; None = all are one dense MLP."""

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def group(self) -> int:
        """Number of query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_active_weights(self) -> int:
        """Number of weights of all layers that a token meets: of experts those of the chosen ones."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        # A gated MLP has gate, up and down; the attention's share is query, key, value and output.
        matrices, sizes = 3 if self.gated else 2, [self.mlp_size] * self.num_layers
        if self.experts is not None:
            chosen = self.experts.num_chosen * self.experts.mlp_size
            sizes = [chosen if has_experts else self.mlp_size for has_experts in self.experts.layers]
        return self.num_layers * attention + matrices * self.hidden_size * sum(sizes)


class LowRank(NamedTuple):
    """A change of a matrix, up [out, R] x down [R, in], that is kept beside it (`DecoderAdapter`)."""

    down: Tensor
    up: Tensor


@dataclass(kw_only=True, eq=False)
class Linear:
    """A linear map with weight [out, in] and bias [out] or None."""

    weight: Tensor
    bias: Tensor | None = None
    low_rank: LowRank | None = None

    def __call__(self, x: Tensor) -> Tensor:
        # The scale of the adapter is in `up` already (`DecoderAdapter`).
        y = F.linear(x, self.weight, self.bias)
        if self.low_rank is not None:
            y.addmm_(F.linear(x, self.low_rank.down), self.low_rank.up.t())
        return y

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Add linear(x) to the residual in place; in one kernel where the types allow it."""
        # addmm takes one dtype: with half-precision matrices the fp32 residual cannot be its target.
        if self.bias is None and self.low_rank is None and residual.dtype == self.weight.dtype:
            residual.addmm_(x, self.weight.t())
        else:
            residual.add_(self(x))


@dataclass(kw_only=True, eq=False)
class Norm:
    """Layer norm where there is a bias, else RMS norm; fp32."""

    weight: Tensor
    bias: Tensor | None
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is not None:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)
        return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


@dataclass(kw_only=True, eq=False)
class DenseMlp:
    """An MLP; `up` is gate over up where it is gated."""

    up: Linear
    down: Linear


@dataclass(kw_only=True, eq=False)
class Experts:
    """The MLPs of a layer's experts: gate over up [X, 2 F, E] and down [X, E, F]."""

    router: Linear
    up: Tensor
    down: Tensor
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(kw_only=True, eq=False)
class Layer:
    """Weights of one layer: `qkv` stacks query, key and value heads."""

    attention_norm: Norm | None
    qkv: Linear
    output: Linear
    mlp_norm: Norm | None
    mlp: DenseMlp | Experts
    sinks: Tensor | None = None
    """Scores [H] that take part in the soft-max of every query, fp32."""
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    attention_post_norm: Norm | None = None
    mlp_post_norm: Norm | None = None

    def head_norms(self, spec: DecoderSpec) -> tuple[Tensor | None, Tensor | None]:
        """Weights of the norms of single query and key heads; None where there are none, or all heads are normed at once."""
        if spec.query_key_norm != "head" or self.query_norm is None or self.key_norm is None:
            return None, None
        return self.query_norm.weight, self.key_norm.weight


class Placement(NamedTuple):
    """Where one named tensor goes: Placement(target=qkv.weight[128:192], shape=(64, 128), arrange=pair_rows)"""

    target: Tensor
    shape: tuple[int, ...]
    arrange: Callable[[Tensor], Tensor]


@dataclass(kw_only=True, eq=False)
class DecoderWeights:
    """Every static tensor of a decoder, and what fills it."""

    embedding: Tensor
    """Input embedding [V, hidden]."""
    layers: list[Layer]
    final_norm: Norm
    head: Tensor
    """Output head [V, hidden]; the embedding itself when tied."""
    positions: Tensor | None
    """Learned position embedding [positions, hidden]; None = rotary."""
    placements: Mapping[str, Placement]
    ignored: frozenset[str]
    """Names that a bundle may hold without being used: the head of tied embeddings, buffers."""

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy all named tensors in place; nothing is copied when a name or shape is wrong."""
        check_fits(tensors, {name: place.shape for name, place in self.placements.items()}, ignored=self.ignored)
        # Arranged one by one: on a CPU none of them is kept longer than it takes to copy it.
        arranged = (placement.arrange(tensors[name]) for name, placement in self.placements.items())
        copy_all((placement.target for placement in self.placements.values()), arranged)
