"""Whole runs with models that the native engine does not know: buffers, experts with an adapter, no packing, images."""

import json

import pytest
import torch
import transformers
from problem import make_config, write_problem
from transformers import AutoModelForCausalLM

from tba.observe.run_folder import RunFolder
from tba.run import train

pytestmark = pytest.mark.slow

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 80,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
MODELS = {
    "a router with a buffer": (
        lambda: transformers.Glm4MoeConfig(
            **SHAPE, **EXPERTS, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1
        ),
        (),
    ),
    "experts with an adapter": (
        lambda: transformers.Qwen3MoeConfig(**SHAPE, **EXPERTS, num_experts=4),
        ("model.lora.rank=4",),
    ),
    "convolutions, one sequence at a time": (
        lambda: transformers.Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]),
        (),
    ),
    "a part that sees images": (
        lambda: transformers.Gemma3Config(
            text_config=transformers.Gemma3TextConfig(**SHAPE).to_dict(), vision_config=VISION, image_token_index=39
        ),
        (),
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_run_trains_publishes_and_loads(tmp_path, kind):
    make, options = MODELS[kind]
    write_problem(tmp_path)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(make()).save_pretrained(tmp_path / "model")
    config = make_config(tmp_path, "mode=sync", "train.max_steps=3", *options)
    train(config)
    records = [json.loads(line) for line in RunFolder(config.run_folder).metrics.read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    assert len(steps) == 3
    assert all(record["loss"] == record["loss"] for record in steps)
