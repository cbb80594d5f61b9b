"""One tiny config for each family, with windows, experts and switches small enough for a few dozen tokens to reach them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as t

VOCABULARY = 97
CONTEXT = 128
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": CONTEXT, **IDS,
}  # fmt: skip
GROUPED = {**SHAPE, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 16}
FOUR = {**GROUPED, "num_hidden_layers": 4}
OLD = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, **IDS}
OLDEST = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT, **IDS}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MOE = {**EXPERTS, "moe_intermediate_size": 48}
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 48,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}  # fmt: skip
LINEAR = {
    "head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2}
SCALED = {"embedding_multiplier": 3.0, "attention_multiplier": 0.1, "residual_multiplier": 0.5, "logits_scaling": 2.0}
SLIDING = ["sliding_attention", "full_attention"]
VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **values}}


LLAMA3_ROPE = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
LONGROPE = rope(
    "longrope",
    short_factor=[1.0] * 8,
    long_factor=[1.0 + index for index in range(8)],
    original_max_position_embeddings=16,
    factor=8.0,
)

CONFIGS: dict[str, Callable[[], t.PreTrainedConfig]] = {
    "Llama 3": lambda: t.LlamaConfig(**GROUPED, **LLAMA3_ROPE),
    "Llama, YaRN": lambda: t.LlamaConfig(**GROUPED, **rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "Llama, dynamic RoPE": lambda: t.LlamaConfig(**GROUPED, **rope("dynamic", factor=4.0)),
    "Llama 4, text": lambda: t.Llama4TextConfig(
        **HEADS, intermediate_size_mlp=96, num_local_experts=4, attention_chunk_size=16
    ),
    "Mistral": lambda: t.MistralConfig(**GROUPED, sliding_window=7),
    "Ministral": lambda: t.MinistralConfig(**HEADS, sliding_window=7),
    "Ministral 3": lambda: t.Ministral3Config(**HEADS),
    "Mixtral": lambda: t.MixtralConfig(**GROUPED, **LOCAL_EXPERTS),
    "Qwen2": lambda: t.Qwen2Config(**GROUPED, tie_word_embeddings=True),
    "Qwen2-MoE": lambda: t.Qwen2MoeConfig(**GROUPED, **MOE, shared_expert_intermediate_size=48),
    "Qwen2-MoE, window": lambda: t.Qwen2MoeConfig(
        **GROUPED, **MOE, shared_expert_intermediate_size=48, use_sliding_window=True, sliding_window=14,
        max_window_layers=2,
    ),
    "Qwen3": lambda: t.Qwen3Config(**GROUPED, head_dim=32),
    "Qwen3-MoE": lambda: t.Qwen3MoeConfig(**HEADS, **MOE),
    "Qwen3-Next": lambda: t.Qwen3NextConfig(**FOUR, **LINEAR, **MOE, shared_expert_intermediate_size=48),
    "Qwen3.5, text": lambda: t.Qwen3_5TextConfig(**FOUR, **LINEAR),
    "Gemma": lambda: t.GemmaConfig(**HEADS),
    "Gemma 2": lambda: t.Gemma2Config(**HEADS, sliding_window=7, query_pre_attn_scalar=20),
    "Gemma 3 1B, text": lambda: t.Gemma3TextConfig(
        **HEADS, sliding_window=7, query_pre_attn_scalar=20, layer_types=SLIDING
    ),
    "Gemma 3 4B and larger": lambda: t.Gemma3Config(
        text_config=t.Gemma3TextConfig(**HEADS, sliding_window=7, layer_types=SLIDING).to_dict(),
        vision_config=VISION,
        image_token_index=VOCABULARY - 1,
    ),
    "Gemma 4, text": lambda: t.Gemma4TextConfig(
        **HEADS, vocab_size_per_layer_input=VOCABULARY, hidden_size_per_layer_input=8
    ),
    "Phi-2": lambda: t.PhiConfig(**GROUPED),
    "Phi-3": lambda: t.Phi3Config(**GROUPED),
    "Phi-3.5, longrope": lambda: t.Phi3Config(**GROUPED, **LONGROPE, original_max_position_embeddings=16),
    "Phi-4-mini": lambda: t.Phi3Config(**GROUPED, partial_rotary_factor=0.75),
    "Phi-3.5-MoE": lambda: t.PhimoeConfig(**GROUPED, **LOCAL_EXPERTS),
    "Phi-3.5-MoE, window": lambda: t.PhimoeConfig(**GROUPED, **LOCAL_EXPERTS, sliding_window=14),
    "OLMo 2": lambda: t.Olmo2Config(**GROUPED),
    "OLMo 3": lambda: t.Olmo3Config(**FOUR, sliding_window=7),
    "OLMoE": lambda: t.OlmoeConfig(**GROUPED, **EXPERTS),
    "SmolLM3": lambda: t.SmolLM3Config(**FOUR),
    "Granite": lambda: t.GraniteConfig(**GROUPED, **SCALED),
    "Granite 4, hybrid": lambda: t.GraniteMoeHybridConfig(
        **GROUPED, **MAMBA, shared_intermediate_size=64, num_local_experts=0, layer_types=["mamba", "attention"]
    ),
    "DeepSeek-V2": lambda: t.DeepseekV2Config(**SHAPE, **LATENT, **ROUTED),
    "DeepSeek-V3": lambda: t.DeepseekV3Config(**SHAPE, **LATENT, **ROUTED),
    "GLM-4": lambda: t.Glm4Config(**HEADS),
    "GLM-4-MoE": lambda: t.Glm4MoeConfig(**HEADS, **ROUTED),
    "GPT-OSS": lambda: t.GptOssConfig(**HEADS, **LOCAL_EXPERTS, sliding_window=7),
    "Cohere": lambda: t.CohereConfig(**GROUPED, logit_scale=0.25),
    "Cohere 2": lambda: t.Cohere2Config(**FOUR, logit_scale=0.25, sliding_window=7),
    "EXAONE 4": lambda: t.Exaone4Config(**FOUR, sliding_window=7, sliding_window_pattern=4),
    "Seed-OSS": lambda: t.SeedOssConfig(**HEADS),
    "StarCoder 2": lambda: t.Starcoder2Config(**GROUPED),
    "StableLM": lambda: t.StableLmConfig(**GROUPED),
    "Nemotron": lambda: t.NemotronConfig(**HEADS),
    "Nemotron-H": lambda: t.NemotronHConfig(
        **{**HEADS, "num_hidden_layers": 4}, layers_block_type=["mamba", "attention", "mlp", "moe"], mamba_num_heads=8,
        mamba_head_dim=16, ssm_state_size=16, n_groups=1, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=48, moe_shared_expert_intermediate_size=48,
    ),
    "Falcon": lambda: t.FalconConfig(**OLD, max_position_embeddings=CONTEXT),
    "Falcon, ALiBi": lambda: t.FalconConfig(
        **OLD, max_position_embeddings=CONTEXT, alibi=True, multi_query=False, parallel_attn=False, bias=True
    ),
    "Falcon-H1": lambda: t.FalconH1Config(
        **HEADS, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16, mamba_n_groups=1
    ),
    "LFM2": lambda: t.Lfm2Config(**FOUR, layer_types=["conv", "full_attention"] * 2),
    "Jamba": lambda: t.JambaConfig(
        **FOUR, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, num_experts=2, mamba_d_state=8,
        mamba_dt_rank=8, use_mamba_kernels=False,
    ),
    "Mamba-2": lambda: t.Mamba2Config(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_heads=8, head_dim=16, state_size=16, n_groups=1,
        expand=2, max_position_embeddings=CONTEXT, **IDS,
    ),
    "OPT": lambda: t.OPTConfig(**OLD, ffn_dim=96, word_embed_proj_dim=64, max_position_embeddings=CONTEXT),
    "BLOOM": lambda: t.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=64, n_layer=2, n_head=4, max_position_embeddings=CONTEXT, **IDS
    ),
    "GPT-2": lambda: t.GPT2Config(**OLDEST),
    "GPT-J": lambda: t.GPTJConfig(**OLDEST, rotary_dim=8),
    "GPT-Neo": lambda: t.GPTNeoConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_layers=2, attention_types=[[["global", "local"], 1]], num_heads=4,
        window_size=14, max_position_embeddings=CONTEXT, **IDS,
    ),
    "GPT-NeoX": lambda: t.GPTNeoXConfig(**SHAPE),
}  # fmt: skip
"""Tiny configs by the name of their family."""
