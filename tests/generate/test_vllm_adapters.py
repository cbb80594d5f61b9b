"""LoRA adapters that vLLM keeps beside the base model. Skipped where it is not installed: see `make test-vllm`."""

from __future__ import annotations

import copy
import importlib.util

import numpy as np
import pytest
import torch
from tiny_models import VLLM_DEVICE, make_prompt, make_requests, make_tiny_model, plain_log_probs

from tba.config import ConfigError, GenerateConfig, LoraConfig
from tba.generate.make import make_engine, with_adapters
from tba.models.load import add_lora
from tba.types import Sampling, Weights

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: see `make test-vllm`"
)
pytest.importorskip("peft")

FAMILY = "llama-wide-heads"
# On a GPU vLLM applies adapters in 16 bits only, and two ways to the same numbers differ by their rounding.
DTYPE, NEAR = (torch.float32, 1e-4) if VLLM_DEVICE == "cpu" else (torch.bfloat16, 0.15)
LORA = LoraConfig(rank=3, alpha=5.0)


def make_model():
    return make_tiny_model(FAMILY, spread=3.0).to(VLLM_DEVICE, DTYPE)


def make_unmerged(model, **config):
    """The engine, and the model with an adapter in it, as a searcher makes them."""
    settings = GenerateConfig(engine="vllm", slots=3, lora="unmerged", **config)
    engine = make_engine(model, [2, 3, 4], settings, seed=0, max_length=40, lora=LORA)
    add_lora(model, LORA, base="tiny", seed=0)
    return engine


def make_adapter(model, version):
    """One that changes every layer, as a trainer publishes it."""
    generator = torch.Generator().manual_seed(version)
    tensors = {
        name: (0.3 * torch.randn(p.shape, generator=generator)).to(p.device, p.dtype)
        for name, p in model.named_parameters()
        if ".lora_" in name
    }
    assert len(tensors) == 2 * 7 * 3  # all linear layers
    return Weights(version=version, tensors=tensors)


def with_adapter(model, adapter):
    """The model that transformers and PEFT compute, in fp32 on the CPU."""
    model = copy.deepcopy(model).cpu().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in adapter.tensors:
                parameter.copy_(adapter.tensors[name])
    return model


PROMPT, RESPONSE = make_prompt("a", 4).token_ids, make_prompt("d", 9).token_ids


def test_an_adapter_beside_the_weights_scores_as_one_that_is_merged_into_them():
    model = make_model()
    plain = make_engine(copy.deepcopy(model), [2, 3, 4], GenerateConfig(engine="vllm", slots=3), seed=0, max_length=40)
    engine = make_unmerged(model)
    lora = with_adapters(plain, model)
    base = plain_log_probs(with_adapter(model, Weights(version=0, tensors={})), PROMPT, RESPONSE)
    np.testing.assert_allclose(engine.score([PROMPT], [RESPONSE], 1.0)[0], base, atol=NEAR)
    for version in (1, 2):  # the second takes the first one's place
        adapter = make_adapter(model, version)
        engine.load(adapter)
        lora.load(adapter)
        expected = plain_log_probs(with_adapter(model, adapter), PROMPT, RESPONSE)
        assert np.abs(expected - base).max() > 5 * NEAR
        for one in (engine, lora):
            np.testing.assert_allclose(one.score([PROMPT], [RESPONSE], 1.0)[0], expected, atol=NEAR)
        assert engine.version == version


def test_running_responses_go_on_with_the_new_adapter_and_later_ones_begin_with_it():
    model = make_model()
    engine = make_unmerged(model)
    adapters = {version: make_adapter(model, version) for version in (1, 2)}
    engine.load(adapters[1])
    requests, sampling = make_requests(6, 3, 5, 6), Sampling(max_new_tokens=12, min_new_tokens=0)
    steps = []

    def between_steps():
        steps.append(len(steps))
        if len(steps) == 4:
            engine.load(adapters[2])

    found = list(engine.generate(requests, samples_per_prompt=2, sampling=sampling, between_steps=between_steps))
    prompts = {request.prompt.id: request.prompt.token_ids for request in requests}
    spans = {tuple(version for _, version in completion.version_spans) for completion in found}
    assert (1, 2) in spans
    assert (2,) in spans
    models = {version: with_adapter(model, adapter) for version, adapter in adapters.items()}
    for completion in found:
        if len(completion.version_spans) == 1:
            (_, version), *_ = completion.version_spans
            expected = plain_log_probs(models[version], prompts[completion.prompt_id], completion.token_ids)
            np.testing.assert_allclose(completion.policy_log_probs, expected, atol=NEAR)


def test_scores_of_several_responses_while_others_run():
    """vLLM fails here where its head is prepared for adapters."""
    model = make_model()
    engine = make_unmerged(model)
    adapter = make_adapter(model, 1)
    engine.load(adapter)
    prompts, responses = [PROMPT, PROMPT[:3], PROMPT], [RESPONSE, RESPONSE, RESPONSE[:5]]
    seen = []

    def between_steps():
        if len(seen) < 2:
            seen.append(engine.score(prompts, responses, 1.0))

    sampling = Sampling(max_new_tokens=8)
    found = list(
        engine.generate(make_requests(6, 3, 5), samples_per_prompt=2, sampling=sampling, between_steps=between_steps)
    )
    assert len(found) == 6
    adapted = with_adapter(model, adapter)
    for prompt, response, *scores in zip(prompts, responses, *seen):
        for score in scores:
            np.testing.assert_allclose(score, plain_log_probs(adapted, prompt, response), atol=NEAR)


def test_our_own_scorer_follows_the_adapter():
    model = make_model()
    engine = make_unmerged(model, temperature=0.5)
    adapter = make_adapter(model, 3)
    engine.load(adapter)
    expected = plain_log_probs(with_adapter(model, adapter), PROMPT, RESPONSE, temperature=0.5)
    np.testing.assert_allclose(engine.score([PROMPT], [RESPONSE], 0.5)[0], expected, atol=2 * NEAR)


def test_nothing_is_left_of_the_folder_that_vllm_reads(tmp_path, monkeypatch):
    """A searcher may be killed: what lay in memory then would stay there."""
    model = make_model()
    engine = make_unmerged(model)
    monkeypatch.setattr("tba.generate.vllm_llm.MEMORY", tmp_path)
    adapter, seen = make_adapter(model, 1), []
    add = engine._shared.llm.llm_engine.add_lora
    monkeypatch.setattr(
        engine._shared.llm.llm_engine, "add_lora", lambda request: (seen.extend(tmp_path.iterdir()), add(request))
    )
    engine.load(adapter)
    assert [folder.name.startswith("tba-adapter-") for folder in seen] == [True]
    assert not list(tmp_path.iterdir())
    expected = plain_log_probs(with_adapter(model, adapter), PROMPT, RESPONSE)
    np.testing.assert_allclose(engine.score([PROMPT], [RESPONSE], 1.0)[0], expected, atol=NEAR)


def test_an_adapter_with_a_layer_missing_is_refused():
    model = make_model()
    engine = make_unmerged(model)
    adapter = make_adapter(model, 1)
    engine.load(adapter)
    tensors = dict(adapter.tensors)
    del tensors["model.layers.0.mlp.up_proj.lora_B.default.weight"]
    with pytest.raises(KeyError, match=r"missing \['model\.layers\.0\.mlp\.up_proj\.lora_B"):
        engine.load(Weights(version=2, tensors=tensors))
    assert engine.version == 1
    assert len(engine.score([PROMPT], [RESPONSE], 1.0)[0]) == len(RESPONSE)  # scheduling goes on


def test_an_adapter_of_the_head_and_one_of_no_layer_are_refused():
    model = make_model()
    engine = make_unmerged(model)
    adapter = make_adapter(model, 1)
    head = {f"lm_head.lora_{part}.default.weight": torch.zeros(3, 3) for part in "AB"}
    with pytest.raises(ConfigError, match=r"the adapter changes lm_head.*Leave it out of model\.lora\.targets"):
        engine.load(Weights(version=1, tensors={**adapter.tensors, **head}))
    with pytest.raises(ConfigError, match=r"none of the linear layers of model\.lora\.targets=\('c_attn',\)"):
        make_engine(
            make_model(),
            [2],
            GenerateConfig(engine="vllm", slots=3),
            seed=0,
            max_length=40,
            lora=LoraConfig(targets=["c_attn"]),
        )


def test_a_rank_that_vllm_does_not_know_is_refused():
    with pytest.raises(ConfigError, match=r"up to rank 512, and model\.lora\.rank is 600"):
        make_engine(
            make_model(),
            [2],
            GenerateConfig(engine="vllm", slots=3),
            seed=0,
            max_length=40,
            lora=LoraConfig(rank=600),
        )
