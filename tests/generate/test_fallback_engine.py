"""The engine over transformers' own forward pass: weights of models with buffers, angles that change with the length."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from tiny_models import GROUPED, SHAPE, make_requests, make_weights_of, plain_log_probs
from transformers import AutoModelForCausalLM

from tba.generate.transformers_engine import TransformersEngine, TransformersScorer
from tba.types import Sampling, Weights

STOPS = [2, 3, 4]
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
WITH_BUFFERS = {
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**SHAPE, **LATENT, **EXPERTS),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(**GROUPED, **EXPERTS, head_dim=8),
    "gemma4_text": lambda: transformers.Gemma4TextConfig(
        **GROUPED, head_dim=8, vocab_size_per_layer_input=37, hidden_size_per_layer_input=8
    ),
}


def make_model(config, *, seed: int = 0):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


def make_engine(model, **changes):
    return TransformersEngine(model, **{"stop_ids": STOPS, "seed": 0, "max_length": 64, **changes})


@pytest.mark.parametrize("family", WITH_BUFFERS)
def test_published_weights_load_though_buffers_are_not_among_them(family):
    new = make_model(WITH_BUFFERS[family](), seed=1)
    weights = make_weights_of(new, version=3)
    assert set(new.state_dict()) - set(weights.tensors), "the model has persistent buffers"
    engine, scorer = (kind(make_model(WITH_BUFFERS[family]())) for kind in (make_engine, TransformersScorer))
    engine.load(weights)
    scorer.load(weights)
    (request,) = make_requests(6)
    (found,) = engine.generate([request], samples_per_prompt=1, sampling=Sampling(max_new_tokens=8))
    prompt = request.prompt.token_ids
    want = plain_log_probs(new, prompt, found.token_ids)
    np.testing.assert_allclose(found.policy_log_probs, want, atol=1e-4)
    np.testing.assert_allclose(scorer.score([prompt], [found.token_ids], 1.0)[0], want, atol=1e-4)


@pytest.mark.parametrize("kind", [make_engine, TransformersScorer])
def test_weights_that_lack_a_parameter_are_refused_and_nothing_is_loaded(kind):
    model = make_model(transformers.Olmo2Config(**GROUPED))
    holder = kind(model)
    before = model.model.embed_tokens.weight.clone()
    tensors = {name: torch.zeros_like(tensor) for name, tensor in make_weights_of(model, 1).tensors.items()}
    tensors.pop("model.norm.weight")
    with pytest.raises(KeyError, match=r"missing names, the first 'model\.norm\.weight'"):
        holder.load(Weights(version=1, tensors=tensors))
    assert torch.equal(model.model.embed_tokens.weight, before)
