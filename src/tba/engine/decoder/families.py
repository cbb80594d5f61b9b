"""The families that our decoder knows: what each one's config means, and the names of its tensors.

A new family needs an entry in `FAMILIES`: a function from its config to the spec, and its tensor names. That is enough where
`DecoderSpec` can say how it computes; what it cannot say needs a field there, and code in the decoder's passes. Whoever is
not listed is served by transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tba.engine.decoder.spec import DecoderSpec, ExpertsSpec, UnsupportedModel


@dataclass(frozen=True, kw_only=True)
class Names:
    """Tensor names of a family, without `.weight` and `.bias`; those of a layer follow `layers`.{index}."""

    embedding: str = "model.embed_tokens"
    positions: str | None = None
    layers: str = "model.layers"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    attention_norm: str | None = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    mlp_norm: str | None = "post_attention_layernorm"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    """Prefix of the experts' tensors: `gate_up_proj`, `down_proj` and their biases."""
    attention_post_norm: str = "post_attention_layernorm"
    mlp_post_norm: str = "post_feedforward_layernorm"
    transposed: bool = False
    """Whether matrices are stored [in, out] (GPT-2)."""
    interleaved: bool = False
    """Whether the one query-key-value matrix goes head by head: query, key, value of head 0, then of head 1 (GPT-NeoX)."""
    mixed_experts: bool = False
    """Whether experts' matrices are stored [in, out], with gate and up in turns (GPT-OSS)."""

    def within(self, prefix: str) -> Names:
        """The names where the text part is inside a larger model: model.norm is model.language_model.norm there."""
        moved = {name: prefix + getattr(self, name).partition(".")[2] for name in ("embedding", "layers", "final_norm")}
        return replace(self, **moved)


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
PHI3_NAMES = Names(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",))
OLMO2_NAMES = Names(attention_norm=None, mlp_norm=None)
GPT_OSS_NAMES = Names(router="mlp.router", mixed_experts=True)


def _shape_of(config: Any) -> dict[str, Any]:
    heads = config.num_attention_heads
    return {
        "family": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_heads": heads,
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
    }


ONE_WINDOW = ("mistral", "mixtral", "phi3", "qwen3_moe")
"""Families whose window, where there is one, is that of all layers, whatever their configs say of single layers."""
WINDOW_BY_LAYER = ("qwen2", "qwen3", "smollm3", "gemma2", "gemma3_text", "gpt_oss")
"""Families whose window is that of the layers that the config calls sliding; the others have none."""


def _windows(config: Any) -> tuple[int | None, ...]:
    # A config may carry a window that its family does not apply: hence the two lists.
    window, layers = getattr(config, "sliding_window", None), config.num_hidden_layers
    if config.model_type in WINDOW_BY_LAYER:
        return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)
    return (window if config.model_type in ONE_WINDOW else None,) * layers


def _llama_like(config: Any, *, tied: bool, **changes: Any) -> DecoderSpec:
    shape = _shape_of(config)
    # The share of a head that turns; the rest of it knows no position.
    partial = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    rotating = config.no_rope_layers if config.model_type == "smollm3" else (True,) * config.num_hidden_layers
    values = {
        "mlp_size": config.intermediate_size,
        "windows": _windows(config),
        "query_scales": (shape["head_dim"] ** -0.5,) * config.num_hidden_layers,
        # 1 in SmolLM 3's no_rope_layers means that the layer rotates, whatever the name says.
        "rotary_kinds": tuple("all" if rotates else "" for rotates in rotating),
        "rotary_dim": int(shape["head_dim"] * partial),
        "norm_epsilon": getattr(config, "rms_norm_eps", None) or config.layer_norm_eps,
        "activation": getattr(config, "hidden_activation", None) or config.hidden_act,
        "tied": tied,
    }
    return DecoderSpec(**{**shape, **values, **changes})


def _granite(config: Any, *, tied: bool) -> DecoderSpec:
    return _llama_like(
        config,
        tied=tied,
        query_scales=(config.attention_multiplier,) * config.num_hidden_layers,
        embedding_scale=config.embedding_multiplier,
        residual_scale=config.residual_multiplier,
        final_scale=1.0 / config.logits_scaling,
    )


def _with_experts(config: Any, *, tied: bool, experts: dict[str, Any] | None = None, **changes: Any) -> DecoderSpec:
    values = {
        "num_experts": config.num_experts if hasattr(config, "num_experts") else config.num_local_experts,
        "num_chosen": config.num_experts_per_tok,
        "mlp_size": getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
        "layers": (True,) * config.num_hidden_layers,
        "normalised": getattr(config, "norm_topk_prob", True),
    }
    return _llama_like(config, tied=tied, experts=ExpertsSpec(**{**values, **(experts or {})}), **changes)


def _qwen3_moe(config: Any, *, tied: bool) -> DecoderSpec:
    every, dense, num_layers = config.decoder_sparse_step, config.mlp_only_layers or (), config.num_hidden_layers
    layers = tuple(i not in dense and config.num_experts > 0 and (i + 1) % every == 0 for i in range(num_layers))
    return _with_experts(config, tied=tied, query_key_norm="head", experts={"layers": layers})


def _olmoe(config: Any, *, tied: bool) -> DecoderSpec:
    if config.clip_qkv is not None:
        raise UnsupportedModel(f"clip_qkv={config.clip_qkv}: the decoder does not clip queries, keys and values")
    return _with_experts(config, tied=tied, query_key_norm="all")


def _gpt_oss(config: Any, *, tied: bool) -> DecoderSpec:
    gate = {
        "gate_limit": getattr(config, "swiglu_limit", 7.0),  # older configs do not name them
        "gate_alpha": getattr(config, "swiglu_alpha", 1.702),
    }
    return _with_experts(config, tied=tied, sinks=True, experts=gate)


def _gemma(config: Any, *, tied: bool, **changes: Any) -> DecoderSpec:
    return _llama_like(config, tied=tied, norm_offset=1.0, embedding_scale=config.hidden_size**0.5, **changes)


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
    return _gemma2(config, tied=tied, query_key_norm="head", attention_cap=None, rotary_kinds=tuple(config.layer_types))


def _gpt2(config: Any, *, tied: bool) -> DecoderSpec:
    shape, layers = _shape_of(config), config.num_hidden_layers
    # GPT-2 may divide a layer's scores by its number, counted from 1.
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
    return _llama_like(config, tied=tied, norm="layer", gated=False, parallel_residual=config.use_parallel_residual)


QWEN3 = partial(_llama_like, query_key_norm="head")
OLMO2 = partial(_llama_like, pre_norms=False, post_norms=True, query_key_norm="all")

FAMILIES: Mapping[str, tuple[Callable[..., DecoderSpec], Names]] = {
    "llama": (_llama_like, LLAMA_NAMES),
    "mistral": (_llama_like, LLAMA_NAMES),
    "qwen2": (_llama_like, LLAMA_NAMES),
    "qwen3": (QWEN3, LLAMA_NAMES),
    "phi3": (_llama_like, PHI3_NAMES),
    "smollm3": (_llama_like, LLAMA_NAMES),
    "granite": (_granite, LLAMA_NAMES),
    "olmo2": (OLMO2, OLMO2_NAMES),
    "mixtral": (_with_experts, LLAMA_NAMES),
    "qwen3_moe": (_qwen3_moe, LLAMA_NAMES),
    "olmoe": (_olmoe, LLAMA_NAMES),
    "gpt_oss": (_gpt_oss, GPT_OSS_NAMES),
    "gemma": (_gemma, LLAMA_NAMES),
    "gemma2": (_gemma2, GEMMA2_NAMES),
    "gemma3_text": (_gemma3, GEMMA2_NAMES),
    "gpt2": (_gpt2, GPT2_NAMES),
    "gpt_neox": (_gpt_neox, GPT_NEOX_NAMES),
}
