"""Our own decoder-only transformer for inference: one forward for every family, on static tensors.

`build.make_decoder` makes one from a transformers model. Tokens are one flat axis N, and attention is given from
outside (`Attend`): the same layers serve prefill, decoding in slots and scoring. The residual stream, norms and rotations
are fp32; the matrices have the engine's dtype.

`Decoder` holds the plain pass, which is the specification. On CUDA most families run the same layers with Triton kernels
(fused_pass.py). A decoder is used only if `check_decoder` finds that it computes what the model it was made from computes.

A LoRA adapter may be kept beside the matrices (`DecoderAdapter`) instead of being merged into them. Merging rounds
base + scale x B A to the engine's dtype. In half precision a change below half a unit in the last place of a weight is lost,
and the first optimizer steps are hardly more than that: the engine would go on sampling the base while the trainer's policy
has moved. In fp32 nothing is lost by merging, and decoding costs nothing.

Axes: N tokens, E hidden, H query heads, K key/value heads, D head dimension, V vocabulary, R ranks of all sources of a
matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from tba.engine.decoder.fused_pass import make_fused_pass
from tba.engine.decoder.layers import Attend, apply_experts, clamped_gate
from tba.engine.decoder.spec import (
    DecoderSpec,
    DecoderWeights,
    DenseMlp,
    Experts,
    Linear,
    LowRank,
    Norm,
    Placement,
    UnsupportedModel,
)
from tba.models.load import ADAPTER
from tba.models.weights import check_fits

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class Decoder:
    """The forward pass. Make one with `build.make_decoder(model)`."""

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, rotations: Mapping[str, Tensor]) -> None:
        self.spec = spec
        self.weights = weights
        self.rotations = rotations
        """Rotation tables by kind, complex64 [positions, rotary_dim / 2]: cos + i sin, scaling included."""
        self.activation = ACTIVATIONS[spec.activation]
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        # As in transformers, the factor is rounded to the dtype of the matrix first.
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=self.dtype, device=self.device)
        self.fused_pass = make_fused_pass(spec, weights, rotations)
        """The pass that serves instead of the plain one; None = the plain one serves."""
        self.adapter: DecoderAdapter | None = None
        """LoRA beside the matrices; None = there is none, or it is merged into them."""

    @property
    def attention_dtype(self) -> torch.dtype:
        """Dtype of queries, keys and values, also in a cache: the decoder's own, which the fast kernels want, but fp32 on a
        CPU, where small batched products are slow in bf16 and fp32 is the more exact."""
        return torch.float32 if self.device.type == "cpu" else self.dtype

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy named tensors of a transformers state dict over the weights, or those of an adapter over the adapter."""
        if self.adapter is not None and any(name in self.adapter.placements for name in tensors):
            self.adapter.load(tensors)
        else:
            self.weights.load(tensors)

    def hidden(self, ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """Final hidden states, normed, ready for `logits` -> [N, hidden]."""
        x = self.embed(ids_N, positions_N)
        if self.fused_pass is not None:
            return self.fused_pass.hidden(x, positions_N, attend)
        rotations = self._rotations_at(positions_N)
        for index in range(self.spec.num_layers):
            x = self._layer(index, x, rotations[self.spec.rotary_kinds[index]], attend)
        return self.weights.final_norm(x).to(self.dtype)

    def store_only(self, ids_N: Tensor, positions_N: Tensor, attend: Attend) -> None:
        """Keys and values of every layer, nothing else: the last layer's attention and MLP are never computed."""
        x = self.embed(ids_N, positions_N)
        if self.fused_pass is not None:
            return self.fused_pass.store_only(x, positions_N, attend)
        rotations = self._rotations_at(positions_N)
        last = self.spec.num_layers - 1
        for index in range(last):
            x = self._layer(index, x, rotations[self.spec.rotary_kinds[index]], attend)
        layer = self.weights.layers[last]
        # The last layer's query is not needed, but storing its keys and values goes by the same way.
        self._query(last, _normed(layer.attention_norm, x), rotations[self.spec.rotary_kinds[last]], attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V], fp32."""
        logits = F.linear(hidden, self.weights.head).float()
        cap = self.spec.logit_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def embed(self, ids_N: Tensor, positions_N: Tensor) -> Tensor:
        """The residual stream before the first layer, fp32 [N, E]."""
        x = F.embedding(ids_N, self.weights.embedding)
        if self.spec.embedding_scale != 1.0:
            x = x * self._embedding_scale
        if self.weights.positions is not None:
            x = x + F.embedding(positions_N, self.weights.positions)
        return x.float()

    def _rotations_at(self, positions_N: Tensor) -> dict[str, Tensor | None]:
        found = {kind: table.index_select(0, positions_N)[:, None] for kind, table in self.rotations.items()}
        return {"": None, **found}

    def _layer(self, index: int, x: Tensor, rotation: Tensor | None, attend: Attend) -> Tensor:
        layer = self.weights.layers[index]
        query = self._query(index, _normed(layer.attention_norm, x), rotation, attend)
        attended = attend.attend(index, query, layer.sinks).to(self.dtype)
        # x is changed in place below: a parallel MLP reads it as it came into the layer.
        mlp_input = _normed(layer.mlp_norm, x) if self.spec.parallel_residual else None
        self._add(x, layer.output, attended, layer.attention_post_norm)
        mlp_input = _normed(layer.mlp_norm, x) if mlp_input is None else mlp_input
        if isinstance(layer.mlp, DenseMlp):
            self._add(x, layer.mlp.down, self._gated(layer.mlp.up(mlp_input.to(self.dtype))), layer.mlp_post_norm)
        else:
            self._add_output(x, self._experts(layer.mlp, mlp_input), layer.mlp_post_norm)
        return x

    def _add(self, x: Tensor, linear: Linear, inner: Tensor, post_norm: Norm | None) -> None:
        if post_norm is None and self.spec.residual_scale == 1.0:
            linear.add_to(x, inner)
        else:
            self._add_output(x, linear(inner).float(), post_norm)

    def _add_output(self, x: Tensor, output: Tensor, post_norm: Norm | None) -> None:
        x.add_(_normed(post_norm, output), alpha=self.spec.residual_scale)

    def _query(self, index: int, x: Tensor, rotation: Tensor | None, attend: Attend) -> Tensor:
        """Project, rotate, store keys and values -> query [N, H, D] in fp32."""
        spec, layer = self.spec, self.weights.layers[index]
        # Heads of the stacked matrix: H queries, then K keys, then K values.
        heads = layer.qkv(x.to(self.dtype)).view(x.shape[0], spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        query_key = heads[:, : spec.num_heads + spec.num_kv_heads].float()
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = query_key.split((spec.num_heads, spec.num_kv_heads), dim=1)
            query_key = torch.cat(
                (self._head_norm(layer.query_norm, query), self._head_norm(layer.key_norm, key)), dim=1
            )
        if rotation is not None:
            query_key = rotate(query_key, rotation)
        # Stored before they are attended to: a token sees itself, and the cache holds keys that are rotated.
        attend.store(index, query_key[:, spec.num_heads :], heads[:, spec.num_heads + spec.num_kv_heads :].float())
        return query_key[:, : spec.num_heads]

    def _head_norm(self, norm: Norm, heads_NHD: Tensor) -> Tensor:
        return norm(heads_NHD) if self.spec.query_key_norm == "head" else norm(heads_NHD.flatten(1)).view_as(heads_NHD)

    def _gated(self, inner: Tensor) -> Tensor:
        if not self.spec.gated:
            return self.activation(inner)
        size = inner.shape[-1] // 2
        return self.activation(inner[:, :size]).mul_(inner[:, size:])

    def _experts(self, experts: Experts, x: Tensor) -> Tensor:
        spec = self.spec.experts
        assert spec is not None
        gated = self._gated if spec.gate_limit is None else partial(clamped_gate, spec=spec)
        return apply_experts(x.to(self.dtype), experts, spec, gated)


def _normed(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def rotate(heads_NHD: Tensor, rotation: Tensor) -> Tensor:
    """Rotary embedding as one complex product: `build` stores the two numbers of a pair side by side."""
    size = 2 * rotation.shape[-1]
    # Only the leading numbers of a head turn; with partial rotation the rest passes through.
    pairs = torch.view_as_complex(heads_NHD[..., :size].unflatten(-1, (-1, 2)))
    rotated = torch.view_as_real(pairs * rotation).flatten(-2)
    return rotated if size == heads_NHD.shape[-1] else torch.cat((rotated, heads_NHD[..., size:]), dim=-1)


# --- LoRA beside the matrices ----------------------------------------------------------------------------------------


class DecoderAdapter:
    """The static tensors of an adapter in a decoder, and which of its named tensors fills which part."""

    def __init__(self, weights: DecoderWeights, model: PreTrainedModel) -> None:
        """`model` has the adapter: its shapes and scales count, its values do not. It changes nothing until it is loaded."""
        self.placements: dict[str, Placement] = {}
        parts = ("lora_A", "lora_embedding_A")
        modules: dict[str, Any] = {
            name: module
            for name, module in model.named_modules()
            if any(ADAPTER in getattr(module, part, ()) for part in parts)
        }
        linears = [linear for layer in weights.layers for linear in (layer.qkv, layer.output)]
        for mlp in (layer.mlp for layer in weights.layers):
            linears += (mlp.up, mlp.down) if isinstance(mlp, DenseMlp) else (mlp.router,)
        # A named tensor may fill rows of a stacked matrix: views share its storage, by which the matrix is found.
        places = {_storage(linear.weight): linear for linear in linears}
        sources: dict[int, list[tuple[str, Placement]]] = {}
        for name in modules:
            placement = weights.placements.get(f"{name}.weight")
            if placement is None or _storage(placement.target) not in places:
                raise UnsupportedModel(f"its adapter changes {name}, which is no matrix of a layer")
            sources.setdefault(_storage(placement.target), []).append((name, placement))
        for storage, found in sources.items():
            places[storage].low_rank = self._place(places[storage], found, modules)

    def _place(self, linear: Linear, sources: list[tuple[str, Placement]], modules: Mapping[str, Any]) -> LowRank:
        num_rows, num_columns = linear.weight.shape
        ranks = [modules[name].r[ADAPTER] for name, _ in sources]
        # Zeros: before the first adapter is loaded the change is none. Sources of one matrix have ranks side by side.
        low_rank = LowRank(
            down=linear.weight.new_zeros(sum(ranks), num_columns), up=linear.weight.new_zeros(num_rows, sum(ranks))
        )
        start = 0
        for (name, base), rank in zip(sources, ranks):
            module, part = modules[name], slice(start, start + rank)
            # Row of the stacked matrix at which this source's part begins.
            first = base.target.storage_offset() // num_columns
            rows = slice(first, first + base.target.shape[0])
            shape = tuple(module.lora_A[ADAPTER].weight.shape)
            self.placements[_part_name(name, "A")] = Placement(low_rank.down[part], shape, lambda given: given)
            # The rest of `up` stays zero: a source's ranks change its own rows alone.
            target, shape = low_rank.up[rows, part], tuple(module.lora_B[ADAPTER].weight.shape)
            self.placements[_part_name(name, "B")] = Placement(target, shape, _arranged_like(base, module))
            start += rank
        return low_rank

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy a published adapter in place; nothing is copied when a name or shape is wrong."""
        check_fits(tensors, {name: place.shape for name, place in self.placements.items()})
        for name, placement in self.placements.items():
            placement.target.copy_(placement.arrange(tensors[name]))


def _arranged_like(base: Placement, module: Any) -> Callable[[Tensor], Tensor]:
    """From B [out, r] to the rows of the decoder's matrix, with the scale: what orders the rows of the weight orders B's."""
    scale, turned = module.scaling[ADAPTER], module.fan_in_fan_out
    return lambda given: base.arrange(given.float().t() if turned else given.float()) * scale


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _part_name(module: str, part: str) -> str:
    return f"{module}.lora_{part}.{ADAPTER}.weight"
