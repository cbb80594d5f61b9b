"""`tba doctor MODEL`: how a model would run, from its config alone."""

from __future__ import annotations

import json

import pytest
import transformers
from typer.testing import CliRunner

from tba.cli import app
from tba.run.doctor import examine_model

LARGE = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}


def report(folder, config) -> dict[str, str]:
    """Of a folder without weights and without a tokenizer."""
    config.save_pretrained(folder)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    return dict(examine_model(str(folder)))


def test_an_8b_llama_is_reported_without_its_weights(tmp_path):
    shape = {**LARGE, "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 8192}
    found = report(tmp_path, transformers.LlamaConfig(**shape))
    assert found["model"].endswith("llama, 8.03B parameters")
    assert found["engine"] == "native; on a GPU with fused kernels and CUDA graphs"
    assert found["training"] == "packed sequences, prompts shared by their responses"
    assert found["context"] == "8,192 tokens"
    # 8.03e9 x 2 bytes; 2 x 32 layers x 8 heads x 128 numbers x 2 bytes = 128 KiB a token.
    assert found["weights"] == "15 GiB in bf16, 29.9 in float32"
    assert found["searcher"].startswith("weights and 128 KiB of keys and values a token in bf16: 32 GiB for 256")


def test_what_has_no_fused_kernels_is_told_why(tmp_path):
    moe = transformers.Qwen3MoeConfig(num_hidden_layers=48, num_experts=128, moe_intermediate_size=768)
    assert report(tmp_path, moe)["engine"] == "native; on a GPU with fused kernels and CUDA graphs"
    found = report(tmp_path, transformers.GPTNeoXConfig(num_hidden_layers=2))
    assert found["engine"] == "native; on a GPU without fused kernels and CUDA graphs: it has layer norms"


@pytest.mark.parametrize(
    ("config", "training", "batches"),
    [
        (transformers.CohereConfig, "packed sequences", "prompts of all lengths together"),
        (transformers.MambaConfig, "one sequence at a time", "prompts of one length together"),
    ],
)
def test_a_model_without_a_description_says_how_the_fallback_runs_it(tmp_path, config, training, batches):
    found = report(tmp_path, config(num_hidden_layers=4))
    assert "over transformers' own forward pass, slower: model type" in found["engine"]
    assert found["training"].startswith(training)
    assert found["batches"] == batches


def test_rotary_angles_that_change_are_told_with_the_context(tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4096}
    rope |= {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48, "factor": 32.0}
    shape = {"hidden_size": 3072, "num_attention_heads": 32, "num_hidden_layers": 2, "max_position_embeddings": 131072}
    found = report(tmp_path, transformers.Phi3Config(**shape, rope_parameters=rope))
    assert found["context"] == "131,072 tokens; rotary angles change beyond 4,096"
    assert found["engine"].startswith("native up to 4,096 tokens, beyond over transformers; on a GPU with fused")
    assert found["training"].startswith("packed")


def test_a_model_that_is_not_there_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "is_encoder_decoder": True}))
    result = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert result.exit_code != 0
    assert "is an encoder-decoder" in str(result.exception)


@pytest.mark.parametrize("name", ["DeepseekV3Config", "FalconConfig", "Gemma4TextConfig", "JambaConfig", "GPTJConfig"])
def test_a_family_that_is_built_otherwise_has_a_report_without_guesses(tmp_path, name):
    found = report(tmp_path, getattr(transformers, name)())
    assert found["engine"].startswith("over transformers")
    assert found["searcher"].endswith("not known before it is loaded")
    assert "cannot be trained" not in found["training"]
