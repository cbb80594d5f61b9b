"""From a transformers model to our decoder: the spec of its family and the place of each of its tensors.

A new family needs an entry in `FAMILIES`: a function from its config to the spec, and its tensor names. That is enough where
`DecoderSpec` can say how it computes; what it cannot say needs a field there, and code in the decoder's passes.

A model that the decoder cannot run is refused with `UnsupportedModel` and served by transformers instead: an unknown model
type, activation or tensor, rotary angles that change within the lengths asked for, or a next-token distribution other than
that of the model's own forward pass. That last check is over 12 tokens: what a model does only further on (a window beyond
that) rests on its config being read rightly here, and on tests/generate/test_engine_families.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tba.models.decoder import ACTIVATIONS, Decoder, UnsupportedModel, check_decoder
from tba.models.decoder_spec import DecoderSpec, DecoderWeights, Layer, Linear, Norm, Placement
from tba.models.text_part import switch_length


@dataclass(frozen=True, kw_only=True)
class Names:
    """Tensor names of a family, without `.weight` and `.bias`; those of a layer follow `layers`.{index}."""

    embedding: str = "model.embed_tokens"
    positions: str | None = None
    layers: str = "model.layers"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    attention_post_norm: str = "post_attention_layernorm"
    mlp_post_norm: str = "post_feedforward_layernorm"
    transposed: bool = False
    """Whether matrices are stored [in, out] (GPT-2)."""
    interleaved: bool = False
    """Whether the one query-key-value matrix goes head by head: query, key, value of head 0, then of head 1 (GPT-NeoX)."""


LLAMA_NAMES = Names()
GEMMA2_NAMES = Names(mlp_norm="pre_feedforward_layernorm")
GPT2_NAMES = Names(
    embedding="transformer.wte",
    positions="transformer.wpe",
    layers="transformer.h",
    final_norm="transformer.ln_f",
    attention_norm="ln_1",
    qkv=("attn.c_attn",),
    output="attn.c_proj",
    mlp_norm="ln_2",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    transposed=True,
)
GPT_NEOX_NAMES = Names(
    embedding="gpt_neox.embed_in",
    layers="gpt_neox.layers",
    final_norm="gpt_neox.final_layer_norm",
    qkv=("attention.query_key_value",),
    output="attention.dense",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    interleaved=True,
)


def make_decoder(model: nn.Module, *, max_length: int, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Copy a transformers model into our decoder, for sequences up to `max_length`, and check it."""
    config: Any = model.config
    if config.model_type not in FAMILIES:
        raise UnsupportedModel(f"model type {config.model_type!r} is not one of {', '.join(FAMILIES)}")
    make_spec, names = FAMILIES[config.model_type]
    spec = make_spec(config, tied=_is_tied(model))
    if spec.activation not in ACTIVATIONS:
        raise UnsupportedModel(f"activation {spec.activation!r} is not one of {', '.join(ACTIVATIONS)}")
    rotations = _rotations(model, spec, max_length, device)
    weights = _Builder(model, spec, names, dtype, device).build()
    if weights.positions is not None and max_length > weights.positions.shape[0]:
        raise ValueError(
            f"max_length={max_length} is beyond the model's {weights.positions.shape[0]} learned positions: "
            "shorten prompts (task.max_prompt_tokens) or responses (generate.max_new_tokens)."
        )
    decoder = Decoder(spec, weights, rotations)
    decoder.load(model.state_dict())
    check_decoder(model, decoder, max_length)
    return decoder


def _is_tied(model: nn.Module) -> bool:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
    return head is not None and head.weight is embedding.weight


# --- what the families are -------------------------------------------------------------------------------------------


def _shape_of(config: Any) -> dict[str, Any]:
    """The fields of a spec that all configs call the same."""
    heads = config.num_attention_heads
    return {
        "family": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_heads": heads,
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
    }


def _windows(config: Any) -> tuple[int | None, ...]:
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if types is None:  # Mistral: one window for all layers
        return (window if config.model_type == "mistral" else None,) * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _llama_like(config: Any, *, tied: bool, **changes: Any) -> DecoderSpec:
    shape = _shape_of(config)
    values = {
        "mlp_size": config.intermediate_size,
        "windows": _windows(config),
        "query_scales": (shape["head_dim"] ** -0.5,) * config.num_hidden_layers,
        "rotary_kinds": ("all",) * config.num_hidden_layers,
        "rotary_dim": shape["head_dim"],
        "norm_epsilon": config.rms_norm_eps,
        "activation": getattr(config, "hidden_activation", None) or config.hidden_act,
        "tied": tied,
    }
    return DecoderSpec(**{**shape, **values, **changes})


def _qwen3(config: Any, *, tied: bool) -> DecoderSpec:
    return _llama_like(config, tied=tied, query_key_norm=True)


def _gemma(config: Any, *, tied: bool, **changes: Any) -> DecoderSpec:
    return _llama_like(
        config, tied=tied, norm_offset=1.0, embedding_scale=config.hidden_size**0.5, windows=_windows(config), **changes
    )


def _gemma2(config: Any, *, tied: bool, **changes: Any) -> DecoderSpec:
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModel("use_bidirectional_attention: the engine decodes causal models only")
    values = {
        "query_scales": (config.query_pre_attn_scalar**-0.5,) * config.num_hidden_layers,
        "attention_cap": config.attn_logit_softcapping,
        "logit_cap": config.final_logit_softcapping,
        "post_norms": True,
    }
    return _gemma(config, tied=tied, **{**values, **changes})


def _gemma3(config: Any, *, tied: bool) -> DecoderSpec:
    # transformers' Gemma 3 reads attn_logit_softcapping and does not apply it.
    return _gemma2(config, tied=tied, query_key_norm=True, attention_cap=None, rotary_kinds=tuple(config.layer_types))


def _gpt2(config: Any, *, tied: bool) -> DecoderSpec:
    shape, layers = _shape_of(config), config.num_hidden_layers
    scale = shape["head_dim"] ** -0.5 if config.scale_attn_weights else 1.0
    by_layer = config.scale_attn_by_inverse_layer_idx
    return DecoderSpec(
        **shape,
        mlp_size=config.n_inner or 4 * config.hidden_size,
        windows=(None,) * layers,
        query_scales=tuple(scale / (index + 1) if by_layer else scale for index in range(layers)),
        rotary_kinds=("",) * layers,
        norm="layer",
        norm_epsilon=config.layer_norm_epsilon,
        activation=config.activation_function,
        gated=False,
        tied=tied,
    )


def _gpt_neox(config: Any, *, tied: bool) -> DecoderSpec:
    shape, layers = _shape_of(config), config.num_hidden_layers
    return DecoderSpec(
        **shape,
        mlp_size=config.intermediate_size,
        windows=(None,) * layers,
        query_scales=(shape["head_dim"] ** -0.5,) * layers,
        rotary_kinds=("all",) * layers,
        rotary_dim=int(shape["head_dim"] * config.rope_parameters.get("partial_rotary_factor", 1.0)),
        norm="layer",
        norm_epsilon=config.layer_norm_eps,
        activation=config.hidden_act,
        gated=False,
        parallel_residual=config.use_parallel_residual,
        tied=tied,
    )


FAMILIES: Mapping[str, tuple[Callable[..., DecoderSpec], Names]] = {
    "llama": (_llama_like, LLAMA_NAMES),
    "mistral": (_llama_like, LLAMA_NAMES),
    "qwen2": (_llama_like, LLAMA_NAMES),
    "qwen3": (_qwen3, LLAMA_NAMES),
    "gemma": (_gemma, LLAMA_NAMES),
    "gemma2": (_gemma2, GEMMA2_NAMES),
    "gemma3_text": (_gemma3, GEMMA2_NAMES),
    "gpt2": (_gpt2, GPT2_NAMES),
    "gpt_neox": (_gpt_neox, GPT_NEOX_NAMES),
}


# --- rotation tables -------------------------------------------------------------------------------------------------


def _rotations(model: nn.Module, spec: DecoderSpec, max_length: int, device: torch.device) -> dict[str, Tensor]:
    """Rotation tables from the model's own rotary module, so that every static rotary type is right."""
    kinds = sorted(set(spec.rotary_kinds) - {""})
    if not kinds:
        return {}
    rotary = next((module for name, module in model.named_modules() if name.endswith("rotary_emb")), None)
    if rotary is None:
        raise UnsupportedModel(f"model type {spec.family!r} has no rotary_emb module to take its angles from")
    limit = switch_length(model.config)
    if limit is not None and max_length > limit:
        # Keys in a cache would go stale.
        raise UnsupportedModel(
            f"its rotary angles change for sequences of more than {limit} tokens, and these may have {max_length}"
        )
    return {kind: _rotation_table(rotary, kind, max_length).to(device) for kind in kinds}


@torch.no_grad()
def _rotation_table(rotary: nn.Module, kind: str, max_length: int) -> Tensor:
    like = next(rotary.buffers())
    positions = torch.arange(max_length, device=like.device)[None]
    x = torch.zeros(1, dtype=torch.float32, device=like.device)
    cos, sin = rotary(x, positions) if kind == "all" else rotary(x, positions, kind)
    half = cos.shape[-1] // 2  # transformers repeats the angles for both halves of a head
    return torch.complex(cos[0, :, :half].float(), sin[0, :, :half].float())


# --- static tensors and where named tensors go -----------------------------------------------------------------------


class _Builder:
    """Allocates the static tensors of one model and notes which named tensor fills which part."""

    def __init__(
        self, model: nn.Module, spec: DecoderSpec, names: Names, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec, self.names, self.dtype, self.device = spec, names, dtype, device
        self.shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self.ignored = {name for name, _ in model.named_buffers()}
        self.placements: dict[str, Placement] = {}

    def build(self) -> DecoderWeights:
        names, spec = self.names, self.spec
        embedding = self._table(names.embedding)
        if spec.tied:
            self.ignored.add(f"{names.head}.weight")
        weights = DecoderWeights(
            embedding=embedding,
            positions=None if names.positions is None else self._table(names.positions),
            layers=[self._layer(f"{names.layers}.{index}.") for index in range(spec.num_layers)],
            final_norm=self._norm(names.final_norm, spec.hidden_size),
            head=embedding if spec.tied else self._table(names.head),
            placements=self.placements,
            ignored=frozenset(self.ignored),
        )
        unused = [name for name in self.shapes if name not in self.placements and name not in self.ignored]
        if unused:
            raise UnsupportedModel(f"{spec.family} model has a tensor the decoder does not know: {unused[0]}")
        return weights

    def _layer(self, prefix: str) -> Layer:
        names, spec = self.names, self.spec
        norm = lambda name: self._norm(prefix + name, spec.hidden_size)  # noqa: E731
        head_norm = lambda name: self._norm(prefix + name, spec.head_dim, self._pair_heads)  # noqa: E731
        return Layer(
            attention_norm=norm(names.attention_norm),
            qkv=self._linear([(prefix + name, arrange) for name, arrange in self._qkv_sources()]),
            output=self._linear([(prefix + names.output, _same)]),
            mlp_norm=norm(names.mlp_norm),
            up=self._linear([(prefix + name, _same) for name in names.up]),
            down=self._linear([(prefix + names.down, _same)]),
            query_norm=head_norm(names.query_norm) if spec.query_key_norm else None,
            key_norm=head_norm(names.key_norm) if spec.query_key_norm else None,
            attention_post_norm=norm(names.attention_post_norm) if spec.post_norms else None,
            mlp_post_norm=norm(names.mlp_post_norm) if spec.post_norms else None,
        )

    def _qkv_sources(self) -> list[tuple[str, Callable[[Tensor], Tensor]]]:
        if len(self.names.qkv) == 3:
            return list(zip(self.names.qkv, (self._pair_heads, self._pair_heads, _same)))
        return [(self.names.qkv[0], self._split_interleaved if self.names.interleaved else _same)]

    def _pair_heads(self, rows: Tensor) -> Tensor:
        """Put the two halves that rotate together side by side: within a head 0, h, 1, h + 1, ...

        Queries and keys are reordered alike, so their products stay the same.
        """
        half, rest = self.spec.rotary_dim // 2, self.spec.head_dim - self.spec.rotary_dim
        heads = rows.unflatten(0, (-1, self.spec.head_dim))
        pairs = torch.stack((heads[:, :half], heads[:, half : 2 * half]), dim=2).flatten(1, 2)
        return torch.cat((pairs, heads[:, self.spec.head_dim - rest :]), dim=1).flatten(0, 1)

    def _split_interleaved(self, rows: Tensor) -> Tensor:
        query, key, value = rows.unflatten(0, (self.spec.num_heads, 3, self.spec.head_dim)).unbind(1)
        query, key = self._pair_heads(query.flatten(0, 1)), self._pair_heads(key.flatten(0, 1))
        return torch.cat((query, key, value.flatten(0, 1)))

    def _linear(self, sources: list[tuple[str, Callable[[Tensor], Tensor]]]) -> Linear:
        """One matrix of all sources stacked; with a bias when they have one."""
        turned = _transpose if self.names.transposed else _same
        weight = self._stack([(f"{name}.weight", arrange) for name, arrange in sources], turned, self.dtype)
        if f"{sources[0][0]}.bias" not in self.shapes:
            return Linear(weight=weight)
        bias = self._stack([(f"{name}.bias", arrange) for name, arrange in sources], _same, self.dtype)
        return Linear(weight=weight, bias=bias)

    def _stack(
        self,
        sources: list[tuple[str, Callable[[Tensor], Tensor]]],
        turned: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
    ) -> Tensor:
        shapes = [turned(torch.empty(self._shape(name), device="meta")).shape for name, _ in sources]
        target = torch.zeros(sum(shape[0] for shape in shapes), *shapes[0][1:], dtype=dtype, device=self.device)
        start = 0
        for (name, arrange), shape in zip(sources, shapes):
            self._place(name, target[start : start + shape[0]], _composed(turned, arrange))
            start += shape[0]
        return target

    def _table(self, name: str) -> Tensor:
        return self._stack([(f"{name}.weight", _same)], _same, self.dtype)

    def _norm(self, name: str, size: int, arrange: Callable[[Tensor], Tensor] | None = None) -> Norm:
        weight, offset = torch.zeros(size, device=self.device), self.spec.norm_offset
        self._place(f"{name}.weight", weight, lambda given: (arrange or _same)(given).float() + offset)
        bias = torch.zeros(size, device=self.device) if self.spec.norm == "layer" else None
        if bias is not None:
            self._place(f"{name}.bias", bias, _same)
        return Norm(weight=weight, bias=bias, epsilon=self.spec.norm_epsilon)

    def _place(self, name: str, target: Tensor, arrange: Callable[[Tensor], Tensor]) -> None:
        self.placements[name] = Placement(target=target, shape=self._shape(name), arrange=arrange)

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self.shapes:
            raise UnsupportedModel(f"{self.spec.family} model lacks the tensor {name}")
        return self.shapes[name]


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _transpose(tensor: Tensor) -> Tensor:
    return tensor.t()


def _composed(first: Callable[[Tensor], Tensor], then: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda tensor: then(first(tensor))
