"""Tiny random models, one per family, for the engine's tests. Weights are large enough to make log-probs differ."""

from __future__ import annotations

import copy
import functools
import importlib.util
import os
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
import transformers
from plain_pages import read_pages
from transformers import AutoModelForCausalLM, PreTrainedModel

from tba.engine.native import engine, paged_cache, prefill
from tba.types import Completion, Prompt, Request, Weights

transformers.logging.set_verbosity_error()
# What is compared here is fp32: on a GPU vLLM's attention would otherwise multiply with ten bits.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")

VLLM_DEVICE = "cuda" if importlib.util.find_spec("vllm") and torch.cuda.is_available() else "cpu"
"""Where the installed vLLM runs."""
VOCABULARY = 37
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {**SHAPE, "num_key_value_heads": 2}
GEMMA = {**GROUPED, "head_dim": 16}
WINDOWED = {"sliding_window": 5, "query_pre_attn_scalar": 20}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128, "bos_token_id": 1}

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3}

FAMILIES: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    # Heads as vLLM's kernels for CPUs want them: 32 numbers or more.
    "llama-wide-heads": lambda: transformers.LlamaConfig(**GROUPED, head_dim=32),
    "llama-tied-biased": lambda: transformers.LlamaConfig(
        **GROUPED, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "llama3-rope": lambda: transformers.LlamaConfig(
        **GROUPED,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "mistral-window": lambda: transformers.MistralConfig(**GROUPED, sliding_window=5),
    "qwen2": lambda: transformers.Qwen2Config(**GROUPED, tie_word_embeddings=True),
    "qwen2-window": lambda: transformers.Qwen2Config(
        **GROUPED, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED, head_dim=16),
    "gpt2": lambda: transformers.GPT2Config(**GPT2, eos_token_id=2, scale_attn_by_inverse_layer_idx=True),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SHAPE, rotary_pct=0.5),
    "gpt_neox-sequential": lambda: transformers.GPTNeoXConfig(**SHAPE, rotary_pct=1.0, use_parallel_residual=False),
    "gemma": lambda: transformers.GemmaConfig(**GEMMA),
    "gemma2": lambda: transformers.Gemma2Config(
        **GEMMA, **WINDOWED, attn_logit_softcapping=2.0, final_logit_softcapping=5.0
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **GEMMA, **WINDOWED, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    # The text part of a model that sees images, too.
    "gemma3-inside": lambda: transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(
            **GEMMA, **WINDOWED, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
        ),
        vision_config=transformers.SiglipVisionConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=28,
            patch_size=14,
        ),
        mm_tokens_per_image=4,
        image_token_index=VOCABULARY - 1,
        boi_token_index=VOCABULARY - 2,
        eoi_token_index=VOCABULARY - 3,
    ),
    "phi3": lambda: transformers.Phi3Config(
        **GROUPED,
        sliding_window=5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    "smollm3": lambda: transformers.SmolLM3Config(**GROUPED, no_rope_layers=[1, 0, 1]),
    "granite": lambda: transformers.GraniteConfig(
        **GROUPED, embedding_multiplier=12.0, attention_multiplier=0.3, residual_multiplier=0.22, logits_scaling=3.0
    ),
    "olmo2": lambda: transformers.Olmo2Config(**GROUPED),
    "mixtral": lambda: transformers.MixtralConfig(
        **GROUPED, num_local_experts=6, num_experts_per_tok=2, sliding_window=5
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **GROUPED, **EXPERTS, head_dim=16, moe_intermediate_size=24, mlp_only_layers=[1], norm_topk_prob=True
    ),
    "qwen3-moe-plain-weights": lambda: transformers.Qwen3MoeConfig(
        **GROUPED, **EXPERTS, head_dim=16, moe_intermediate_size=24, norm_topk_prob=False
    ),
    "olmoe": lambda: transformers.OlmoeConfig(**GROUPED, **EXPERTS),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **GROUPED,
        num_local_experts=6,
        num_experts_per_tok=2,
        head_dim=16,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}


def make_tiny_model(
    family: str = "llama", *, seed: int = 0, spread: float = 6.0, layers: int | None = None
) -> PreTrainedModel:
    """A random model; `spread` multiplies the usual initialisation so that the next token matters. `layers` is for tests of
    what does not depend on their number: nearly all of a step's time is the interpreter's, layer by layer."""
    return copy.deepcopy(_random_model(family, seed, spread, layers))


@functools.cache
def _random_model(family: str, seed: int, spread: float, layers: int | None) -> PreTrainedModel:
    config = FAMILIES[family]()
    if layers is not None:
        config.num_hidden_layers = layers
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or ".ln_" in name or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(spread)
    return model


def keep_in_pages(monkeypatch: pytest.MonkeyPatch, *, page_size: int = 4) -> None:
    """Engines made from now on keep keys and values in pages, as on a GPU: small ones, in small chunks, so that sequences
    have many, and prompts longer than 8 tokens are prefilled in parts while others run."""
    monkeypatch.setattr(engine, "page_size_for", lambda decoder: page_size)
    read_pages(monkeypatch)
    monkeypatch.setitem(paged_cache.LEAST_CHUNK_BYTES, "cpu", 2**14)
    monkeypatch.setattr(prefill, "LARGEST_TURN", 2 * page_size)
    monkeypatch.setattr(prefill, "LEAST_TURN", 2 * page_size)


def make_prompt(prompt_id: str, length: int, *, seed: int = 0) -> Prompt:
    rng = np.random.default_rng([seed, length, *prompt_id.encode()])
    return Prompt(id=prompt_id, token_ids=rng.integers(6, VOCABULARY, size=length).astype(np.int32), text="")


def make_requests(*lengths: int) -> list[Request]:
    """One request per length, with ids p0, p1, ..."""
    return [Request(prompt=make_prompt(f"p{index}", length)) for index, length in enumerate(lengths)]


def where_it_runs(kind: str, model: PreTrainedModel) -> PreTrainedModel:
    """The model for an engine of this kind: where vLLM runs on a GPU, a copy that lies there."""
    return copy.deepcopy(model).to(VLLM_DEVICE) if kind == "vllm" and VLLM_DEVICE != "cpu" else model


def make_weights_of(model: PreTrainedModel, version: int) -> Weights:
    """As a trainer publishes them: tied tensors once."""
    tensors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return Weights(version=version, tensors=tensors, checksum=0)


def by_key(completions: Iterable[Completion]) -> dict[tuple[str, int], Completion]:
    return {(completion.prompt_id, completion.sample_index): completion for completion in completions}


@torch.no_grad()
def plain_logits(model: PreTrainedModel, prompt_ids: np.ndarray, response_ids: np.ndarray) -> np.ndarray:
    """float64 [T, V]: what a plain forward pass says before each response token."""
    ids = torch.from_numpy(np.concatenate((prompt_ids, response_ids)).astype(np.int64))[None]
    return model(ids).logits[0, len(prompt_ids) - 1 : -1].double().numpy()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def plain_log_probs(
    model: PreTrainedModel, prompt_ids: np.ndarray, response_ids: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    scores = log_softmax(plain_logits(model, prompt_ids, response_ids) / temperature)
    return scores[np.arange(len(response_ids)), response_ids]


def generate_greedily(
    model: PreTrainedModel, prompt_ids: np.ndarray, max_new_tokens: int, stop_ids: list[int]
) -> list[int]:
    """transformers' own greedy answer."""
    ids = torch.from_numpy(prompt_ids.astype(np.int64))[None]
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=stop_ids,
        pad_token_id=0,
    )
    return output[0, ids.shape[1] :].tolist()
