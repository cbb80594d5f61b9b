"""The native decoder computes what transformers computes, for every family, and refuses what it does not know."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import transformers
from tiny_models import (
    FAMILIES,
    GROUPED,
    VOCABULARY,
    by_key,
    generate_greedily,
    keep_in_pages,
    make_requests,
    make_tiny_model,
    make_weights_of,
    plain_log_probs,
    plain_logits,
)

from tba.engine.decoder.build import make_decoder
from tba.engine.decoder.spec import UnsupportedModel
from tba.engine.native.engine import NativeEngine
from tba.types import Sampling

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
STOPS = [2, 3, 4]


def make_engine(model, **changes):
    settings = {"stop_ids": STOPS, "seed": 0, "slots": 3, "max_length": 40, **changes}
    return NativeEngine(model, **settings)


@functools.cache
def model_and_engine(family):
    """For tests that change neither."""
    model = make_tiny_model(family)
    return model, make_engine(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers_generate(family):
    model, engine = model_and_engine(family)
    requests = make_requests(3, 9, 1, 14)  # more than slots, shorter and longer than windows
    sampling = Sampling(max_new_tokens=12, greedy=True)
    found = by_key(engine.generate(requests, samples_per_prompt=1, sampling=sampling))
    for request in requests:
        prompt_ids, tokens = request.prompt.token_ids, found[request.prompt.id, 0].token_ids
        # Each token is the best one after those before it: what transformers' `generate` does, from one pass.
        assert tokens.tolist() == plain_logits(model, prompt_ids, tokens).argmax(-1).tolist()
        assert [token in STOPS for token in tokens[:-1]] == [False] * (len(tokens) - 1)
        assert len(tokens) == 12 or tokens[-1] in STOPS
    longest = requests[-1].prompt
    assert found[longest.id, 0].token_ids.tolist() == generate_greedily(model, longest.token_ids, 12, STOPS)


@pytest.mark.parametrize("pages", [False, True], ids=["slots", "pages"])
@pytest.mark.parametrize("family", FAMILIES)
def test_policy_log_probs_equal_a_plain_forward_pass(family, pages, monkeypatch):
    model, engine = model_and_engine(family)
    if pages:
        keep_in_pages(monkeypatch)
        engine = make_engine(model)
    requests = make_requests(2, 13, 7)
    found = by_key(engine.generate(requests, samples_per_prompt=2, sampling=Sampling(max_new_tokens=12)))
    for request in requests:
        for index in range(2):
            completion = found[request.prompt.id, index]
            expected = plain_log_probs(model, request.prompt.token_ids, completion.token_ids)
            np.testing.assert_allclose(completion.policy_log_probs, expected, atol=1e-4)
            np.testing.assert_allclose(completion.behaviour_log_probs, expected, atol=1e-4)


def test_log_probs_in_bf16_are_close_to_fp32():
    model = make_tiny_model("llama", spread=3.0)
    requests = make_requests(5, 11)
    engine = make_engine(model, dtype=torch.bfloat16)
    found = by_key(engine.generate(requests, samples_per_prompt=4, sampling=Sampling(max_new_tokens=16)))
    gaps = []
    for request in requests:
        for index in range(4):
            completion = found[request.prompt.id, index]
            expected = plain_log_probs(model, request.prompt.token_ids, completion.token_ids)
            gaps.append(np.abs(completion.policy_log_probs - expected))
    gap = np.concatenate(gaps)
    assert 1e-6 < gap.mean() < 0.02  # really bf16, and near


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gemma3", "qwen2"])
def test_loaded_weights_replace_the_old_ones_in_place(family):
    old, new = make_tiny_model(family, seed=0), make_tiny_model(family, seed=1)
    engine = make_engine(old)
    addresses = {name: place.target.data_ptr() for name, place in engine.decoder.weights.placements.items()}
    engine.load(make_weights_of(new, version=7))
    (completion,) = engine.generate(make_requests(6), samples_per_prompt=1, sampling=Sampling(max_new_tokens=12))
    expected = plain_log_probs(new, make_requests(6)[0].prompt.token_ids, completion.token_ids)
    np.testing.assert_allclose(completion.policy_log_probs, expected, atol=1e-4)
    assert completion.version_spans == ((0, 7),)
    assert addresses == {name: place.target.data_ptr() for name, place in engine.decoder.weights.placements.items()}


def test_a_state_dict_that_repeats_the_tied_head_loads():
    model = make_tiny_model("qwen2")
    state = model.state_dict()
    assert "lm_head.weight" in state
    make_decoder(model, max_length=16, dtype=torch.float32, device=CPU).load(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "missing names, the first 'model.norm.weight'"),
        (
            lambda tensors: tensors.update({"model.norm.weights": torch.zeros(32)}),
            "unknown names, the first 'model.norm.weights' .did you mean model.norm.weight.",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(31)}),
            r"model.norm.weight has shape \(31,\), the engine's model has \(32,\)",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_nothing_is_copied(change, message):
    model = make_tiny_model("llama")
    decoder = make_decoder(model, max_length=16, dtype=torch.float32, device=CPU)
    before = decoder.weights.embedding.clone()
    tensors = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    change(tensors)
    with pytest.raises((KeyError, ValueError), match=message):
        decoder.load(tensors)
    assert torch.equal(decoder.weights.embedding, before)


def test_an_unknown_family_is_refused_by_name():
    config = transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=1, n_head=2)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModel, match="model type 'bloom' is not one of llama, mistral"):
        make_decoder(model, max_length=16, dtype=torch.float32, device=CPU)


def test_rotary_angles_that_change_beyond_the_context_are_exact_within_it():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**GROUPED, "max_position_embeddings": 24}, rope_parameters=rope)
    model = transformers.LlamaForCausalLM(config).eval()
    (request,) = make_requests(6)
    sampling = Sampling(max_new_tokens=18, min_new_tokens=18)
    (found,) = make_engine(model, max_length=24).generate([request], samples_per_prompt=1, sampling=sampling)
    expected = plain_log_probs(model, request.prompt.token_ids, found.token_ids)
    np.testing.assert_allclose(found.policy_log_probs, expected, atol=1e-4)
    with pytest.raises(UnsupportedModel, match="change for sequences of more than 24 tokens, and these may have 25"):
        make_decoder(model, max_length=25, dtype=torch.float32, device=CPU)


def test_a_model_that_computes_otherwise_is_refused_with_the_difference():
    model = make_tiny_model("llama")
    model.model.layers[0].self_attn.scaling *= 2.0
    with pytest.raises(UnsupportedModel, match="differs from this llama model's forward pass by"):
        make_decoder(model, max_length=16, dtype=torch.float32, device=CPU)


def test_sequences_beyond_learned_positions_are_refused():
    with pytest.raises(ValueError, match="max_length=129 is beyond the model's 128 learned positions"):
        make_decoder(make_tiny_model("gpt2"), max_length=129, dtype=torch.float32, device=CPU)


SLIDING, FULL = ["sliding_attention"] * 3, ["full_attention"] * 3


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("SmolLM3Config", {"use_sliding_window": False, "layer_types": SLIDING}),
        ("MistralConfig", {"layer_types": FULL}),
        ("Phi3Config", {"layer_types": FULL}),
        ("MixtralConfig", {"layer_types": FULL, "num_local_experts": 4}),
        ("LlamaConfig", {"layer_types": SLIDING}),
        ("GraniteConfig", {"layer_types": SLIDING}),
        ("Olmo2Config", {"layer_types": SLIDING}),
        ("GemmaConfig", {"layer_types": SLIDING}),
    ],
)
def test_windows_are_those_of_the_models_code_whatever_its_config_says_besides(kind, settings):
    config = getattr(transformers, kind)(**GROUPED, sliding_window=14)
    for name, value in settings.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    request = make_requests(30)[0]
    engine = make_engine(model, max_length=64)
    (found,) = engine.generate([request], samples_per_prompt=1, sampling=Sampling(max_new_tokens=18))
    expected = plain_log_probs(model, request.prompt.token_ids, found.token_ids)
    np.testing.assert_allclose(found.policy_log_probs, expected, atol=1e-4)


def test_an_odd_number_of_rotated_numbers_is_refused():
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.6}
    model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**GROUPED, head_dim=16, rope_parameters=rope))
    with pytest.raises(UnsupportedModel, match="9 numbers of a head are rotated, which is odd"):
        make_decoder(model, max_length=16, dtype=torch.float32, device=CPU)


def test_experts_are_refused_where_pytorch_has_no_grouped_product(monkeypatch):
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    with pytest.raises(UnsupportedModel, match=r"experts need PyTorch 2\.10 or newer"):
        make_decoder(make_tiny_model("mixtral"), max_length=16, dtype=torch.float32, device=CPU)
