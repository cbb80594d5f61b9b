"""What is vLLM's own about the engine over it. Skipped where it is not installed; `make test-vllm` installs and runs it."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tiny_models import (
    GROUPED,
    VLLM_DEVICE,
    VOCABULARY,
    by_key,
    log_softmax,
    make_prompt,
    make_requests,
    make_tiny_model,
    make_weights_of,
    plain_log_probs,
    plain_logits,
    where_it_runs,
)

import tba
from tba.config import ConfigError, GenerateConfig, LoraConfig
from tba.engine.make_engine import make_engine, with_adapters
from tba.models.load import add_lora
from tba.types import Request, Sampling, Weights

FAMILY = "llama-wide-heads"
STOPS = [2, 3, 4]
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: see `make test-vllm`"
)


def make(kind="vllm", model=None, *, slots=3, max_length=40, seed=0, **config):
    model = make_tiny_model(FAMILY) if model is None else model
    settings = GenerateConfig(engine=kind, slots=slots, **config)
    return make_engine(where_it_runs(kind, model), STOPS, settings, seed=seed, max_length=max_length)


def weights_of(model, version):
    """As a searcher hands them over: on vLLM's device."""
    return make_weights_of(where_it_runs("vllm", model), version)


def test_nothing_imports_vllm_but_the_modules_that_are_imported_when_it_is_chosen():
    package = Path(tba.__file__).parent
    for path in package.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:  # of the module itself, not inside functions
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            chosen = [name for name in names if name.split(".")[0] == "vllm" or name.startswith("tba.engine.vllm_")]
            assert not chosen or path.name.startswith("vllm_"), f"{path} imports {chosen}"


def test_without_vllm_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # as Python notes a module that cannot be imported
    monkeypatch.delitem(sys.modules, "tba.engine.vllm_engine", raising=False)
    with pytest.raises(ConfigError, match=r"generate.engine=vllm needs vLLM.*pip install 'tba-rl\[vllm\]'"):
        make()


@needs_vllm
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probs_agree_with_the_native_engine_on_the_same_tokens(temperature):
    requests, sampling = make_requests(3, 8, 5), Sampling(max_new_tokens=24, temperature=temperature)
    prompts = {request.prompt.id: request.prompt.token_ids for request in requests}
    found = list(make(temperature=temperature).generate(requests, samples_per_prompt=4, sampling=sampling))
    native = make("native")
    scores = native.score([prompts[c.prompt_id] for c in found], [c.token_ids for c in found], temperature)
    assert len(found) == 12
    for completion, score in zip(found, scores):
        np.testing.assert_allclose(completion.policy_log_probs, score, atol=1e-4)
        assert completion.behaviour_log_probs.tolist() == completion.policy_log_probs.tolist()


@needs_vllm
def test_a_nucleus_has_behaviour_log_probs_of_its_own_and_the_policys_come_from_our_scorer():
    model, (request,) = make_tiny_model(FAMILY), make_requests(6)
    sampling = Sampling(max_new_tokens=10, min_new_tokens=10, top_p=0.6)
    (found,) = make(top_p=0.6).generate([request], samples_per_prompt=1, sampling=sampling)
    logits = plain_logits(model, request.prompt.token_ids, found.token_ids)
    expected = log_softmax(logits)[np.arange(10), found.token_ids]
    np.testing.assert_allclose(found.policy_log_probs, expected, atol=1e-4)
    logits[:, STOPS] = -np.inf  # as min_new_tokens does
    for row, token, log_prob in zip(np.exp(log_softmax(logits)), found.token_ids, found.behaviour_log_probs):
        order = np.argsort(-row)
        size = int(np.searchsorted(np.cumsum(row[order]), 0.6)) + 1
        assert token in order[:size]
        assert log_prob == pytest.approx(np.log(row[token] / row[order[:size]].sum()), abs=1e-4)
    (found,) = make().generate(
        [request], samples_per_prompt=1, sampling=sampling
    )  # an engine that expects no such thing
    assert np.isnan(found.policy_log_probs).all()
    assert np.isfinite(found.behaviour_log_probs).all()


@needs_vllm
def test_the_policys_log_probs_are_those_of_the_version_that_chose_each_token():
    models = {0: make_tiny_model(FAMILY), 4: make_tiny_model(FAMILY, seed=1)}
    engine, requests = make(min_new_tokens=12), make_requests(6, 3)
    steps = itertools.count()

    def between_steps():
        if next(steps) == 5:
            engine.load(weights_of(models[4], 4))

    sampling = Sampling(max_new_tokens=12, min_new_tokens=12)
    found = by_key(engine.generate(requests, samples_per_prompt=1, sampling=sampling, between_steps=between_steps))
    for request in requests:
        completion = found[request.prompt.id, 0]
        assert completion.version_spans == ((0, 0), (5, 4))
        for version, tokens in ((0, slice(0, 5)), (4, slice(5, None))):
            expected = plain_log_probs(models[version], request.prompt.token_ids, completion.token_ids)
            np.testing.assert_allclose(completion.policy_log_probs[tokens], expected[tokens], atol=1e-4)


@needs_vllm
@torch.no_grad()
def test_the_spans_say_which_version_each_tokens_keys_have():
    """What was read before an update keeps its keys and values; the last token is read by the step that chooses the next."""
    old, new = make_tiny_model(FAMILY), make_tiny_model(FAMILY, seed=1)
    engine, (request,) = make(slots=8), make_requests(6)
    prompt, steps = request.prompt.token_ids, itertools.count()

    def between_steps():
        if next(steps) == 3:
            engine.load(weights_of(new, 4))

    sampling = Sampling(max_new_tokens=12)
    found = list(engine.generate([request], samples_per_prompt=8, sampling=sampling, between_steps=between_steps))
    updated = [completion for completion in found if len(completion.version_spans) == 2]
    assert updated
    for completion in updated:
        assert completion.version_spans == ((0, 0), (3, 4))
        tokens = torch.from_numpy(np.concatenate((prompt, completion.token_ids)).astype(np.int64))[None]
        read_by_old = len(prompt) + 3 - 1
        before = old(tokens[:, :read_by_old], use_cache=True)
        after = new(tokens[:, read_by_old:-1], past_key_values=before.past_key_values)
        logits = torch.cat((before.logits, after.logits), dim=1)[0, len(prompt) - 1 :].double().numpy()
        expected = log_softmax(logits)[np.arange(len(completion.token_ids)), completion.token_ids]
        np.testing.assert_allclose(completion.policy_log_probs, expected, atol=1e-4)
        # With keys of the new weights only they would be others.
        anew = plain_log_probs(new, prompt, completion.token_ids)
        assert np.abs(completion.policy_log_probs - anew)[3:].max() > 0.01


@needs_vllm
def test_nothing_is_scheduled_while_weights_are_taken_and_scheduling_goes_on_when_that_fails(monkeypatch):
    engine, new = make(), weights_of(make_tiny_model(FAMILY, seed=1), 4)
    llm = engine._shared.llm
    seen = []
    update = llm.update_weights
    monkeypatch.setattr(llm, "update_weights", lambda info: (seen.append(llm.llm_engine.is_sleeping()), update(info)))
    engine.load(new)
    with pytest.raises(KeyError):
        engine.load(Weights(version=5, tensors={}))
    assert seen == [True]
    assert not llm.llm_engine.is_sleeping()
    (found,) = engine.generate(make_requests(6), samples_per_prompt=1, sampling=Sampling(max_new_tokens=4))
    assert found.version_spans == ((0, 4),)


@needs_vllm
def test_greedy_responses_know_the_policy_at_temperature_one():
    model, (request,) = make_tiny_model(FAMILY), make_requests(6)
    sampling = Sampling(max_new_tokens=10, greedy=True)
    engine = make()
    (found,) = engine.generate([request], samples_per_prompt=1, sampling=sampling)
    assert not found.behaviour_log_probs.any()
    expected = plain_log_probs(model, request.prompt.token_ids, found.token_ids)
    np.testing.assert_allclose(found.policy_log_probs, expected, atol=1e-4)
    (found,) = engine.generate([request], samples_per_prompt=1, sampling=replace(sampling, policy_temperature=0.5))
    assert np.isnan(found.policy_log_probs).all()


@needs_vllm
def test_a_response_depends_on_its_seed_prompt_and_index_but_not_on_its_neighbours():
    requests, sampling = make_requests(3, 8, 5), Sampling(max_new_tokens=20)
    engine = make(slots=5)
    together = by_key(engine.generate(requests, samples_per_prompt=3, sampling=sampling))
    alone = by_key(engine.generate([replace(requests[1], first_sample=2)], samples_per_prompt=1, sampling=sampling))
    assert alone["p1", 2].token_ids.tolist() == together["p1", 2].token_ids.tolist()
    assert len({tuple(found.token_ids) for found in together.values()}) == 9
    other = by_key(make(seed=1).generate(requests, samples_per_prompt=3, sampling=sampling))
    assert other["p1", 2].token_ids.tolist() != together["p1", 2].token_ids.tolist()


@needs_vllm
def test_scores_are_those_of_the_weights_in_use_also_at_full_length_and_while_responses_run():
    model, engine = make_tiny_model(FAMILY), make()
    prompts = [make_prompt("a", 4).token_ids, make_prompt("b", 1).token_ids, make_prompt("c", 10).token_ids]
    responses = [make_prompt("d", 9).token_ids, np.zeros(0, np.int32), make_prompt("e", 30).token_ids]
    seen = []

    def between_steps():
        if len(seen) < 3:
            seen.append(engine.score(prompts, responses, 1.0))

    requests, sampling = make_requests(5, 6, 7, 3), Sampling(max_new_tokens=20)
    found = list(engine.generate(requests, samples_per_prompt=2, sampling=sampling, between_steps=between_steps))
    for scores in seen:
        for prompt, response, score in zip(prompts, responses, scores):
            np.testing.assert_allclose(score, plain_log_probs(model, prompt, response), atol=1e-4)
    undisturbed = by_key(make().generate(requests, samples_per_prompt=2, sampling=sampling))
    assert by_key(found).keys() == undisturbed.keys()
    for key, completion in by_key(found).items():
        assert completion.token_ids.tolist() == undisturbed[key].token_ids.tolist()


@needs_vllm
def test_scores_at_another_temperature_are_our_own_scorers_and_follow_the_weights():
    prompt, response = make_prompt("a", 4).token_ids, make_prompt("d", 9).token_ids
    engine, new = make(temperature=0.5), make_tiny_model(FAMILY, seed=1)
    engine.load(weights_of(new, 3))
    (score,) = engine.score([prompt], [response], 0.5)
    np.testing.assert_allclose(score, plain_log_probs(new, prompt, response, temperature=0.5), atol=1e-4)
    with pytest.raises(ConfigError, match=r"cannot score at temperature 0.5.*generate.temperature"):
        make().score([prompt], [response], 0.5)


def make_long_model(seed):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**{**GROUPED, "max_position_embeddings": 512}, head_dim=32)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.dim() > 1 else None
    return model


@needs_vllm
def test_more_prompt_tokens_than_vllm_reads_in_one_step():
    model = make_long_model(0)
    engine = make(model=model, max_length=400, slots=40)
    requests = [Request(prompt=make_prompt(f"p{index}", 300)) for index in range(40)]
    found = list(engine.generate(requests, samples_per_prompt=1, sampling=Sampling(max_new_tokens=4)))
    assert len(found) == 40
    prompts = {request.prompt.id: request.prompt.token_ids for request in requests}
    texts = [prompts[completion.prompt_id] for completion in found], [completion.token_ids for completion in found]
    for completion, score in zip(found, engine.score(*texts, 1.0)):
        np.testing.assert_allclose(completion.policy_log_probs, score, atol=1e-4)


@needs_vllm
def test_a_prompt_started_after_a_load_shares_no_keys_with_the_old_weights():
    # Longer than a block of vLLM's prefix cache, which cannot be emptied while the other response runs.
    prompt = make_prompt("long", 300)
    old, new = make_long_model(0), make_long_model(1)
    engine = make(model=old, max_length=400)
    sampling = Sampling(max_new_tokens=4)
    other = Request(prompt=make_prompt("other", 5), sampling=Sampling(max_new_tokens=60, min_new_tokens=60))

    def requests():
        yield other
        yield Request(prompt=prompt)
        while engine.version == 0:
            yield None
        yield Request(prompt=prompt, first_sample=1)

    found = {}
    for completion in engine.generate(requests(), samples_per_prompt=1, sampling=sampling):
        found[completion.prompt_id, completion.sample_index] = completion
        if completion.prompt_id == "long" and engine.version == 0:
            engine.load(weights_of(new, 7))
    assert [version for _, version in found["other", 0].version_spans] == [0, 7]
    for index, (version, model) in enumerate([(0, old), (7, new)]):
        completion = found["long", index]
        assert completion.version_spans == ((0, version),)
        expected = plain_log_probs(model, prompt.token_ids, completion.token_ids)
        np.testing.assert_allclose(completion.policy_log_probs, expected, atol=1e-4)


@needs_vllm
def test_a_sibling_generates_with_the_same_weights_while_the_engine_has_responses_running():
    engine, sampling = make(), Sampling(max_new_tokens=12, min_new_tokens=12)
    requests = make_requests(3, 4, 5, 6)
    expected = by_key(make().generate(requests, samples_per_prompt=2, sampling=sampling))
    stream = engine.generate(requests, samples_per_prompt=2, sampling=sampling)
    first = next(stream)
    clone_for_evaluation = engine.clone_for_evaluation()
    again = by_key(clone_for_evaluation.generate(requests[:2], samples_per_prompt=2, sampling=sampling))
    assert {key: found.token_ids.tolist() for key, found in again.items()} == {
        key: expected[key].token_ids.tolist() for key in again
    }
    rest = by_key([first, *stream])
    assert {key: found.token_ids.tolist() for key, found in rest.items()} == {
        key: found.token_ids.tolist() for key, found in expected.items()
    }
    assert clone_for_evaluation.version == engine.version == 0


@needs_vllm
def test_a_plain_model_is_used_as_it_is_loaded_and_one_with_a_quantized_layer_is_not():
    """What decides on a GPU whether new weights go straight into the tensors in use."""
    from tba.engine.vllm_engine import is_used_as_loaded

    def judge(model):
        layers = list(model.modules())
        plain = all(map(is_used_as_loaded, layers))
        chosen = next(layer for layer in layers if getattr(layer, "quant_method", None) is not None)
        chosen.quant_method, kept = object(), chosen.quant_method
        quantized = all(map(is_used_as_loaded, layers))
        chosen.quant_method = kept
        return plain, quantized

    assert make()._shared.llm.apply_model(judge) == [(True, False)]


@needs_vllm
def test_tied_embeddings_are_replaced_at_both_ends():
    def tied(seed):
        torch.manual_seed(seed)
        config = transformers.Qwen2Config(
            **{**GROUPED, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1},
            tie_word_embeddings=True,
        )
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()

    engine, new = make(model=tied(0)), tied(1)
    prompt, response = make_prompt("a", 4).token_ids, make_prompt("d", 9).token_ids
    for model, version in ((tied(0), 0), (new, 5)):
        if version:
            engine.load(weights_of(model, version))
        (score,) = engine.score([prompt], [response], 1.0)
        np.testing.assert_allclose(score, plain_log_probs(model, prompt, response), atol=1e-4)


@needs_vllm
def test_one_config_has_one_folder_so_that_what_vllm_compiles_is_found_again(tmp_path, monkeypatch):
    from tba.engine.vllm_engine import config_folder

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    configs = [make_tiny_model(family).config for family in (FAMILY, FAMILY, "qwen2")]
    first, again, other = map(config_folder, configs)
    assert first == again != other
    assert [path.name for path in first.iterdir()] == ["config.json"]
    assert transformers.AutoConfig.from_pretrained(first).to_diff_dict() == configs[0].to_diff_dict()


@needs_vllm
def test_a_lora_adapter_is_merged_before_vllm_gets_it():
    pytest.importorskip("peft")
    model = make_tiny_model(FAMILY)
    engine = make(model=model)
    add_lora(model, LoraConfig(rank=2, targets=["q_proj", "v_proj"]), base="tiny", seed=0)
    adapter = {name: p.detach() + 0.3 for name, p in model.named_parameters() if ".lora_" in name}
    lora = with_adapters(engine, model)
    lora.load(Weights(version=2, tensors=adapter))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in adapter:
                parameter.copy_(adapter[name])
    prompt, response = make_prompt("a", 4).token_ids, make_prompt("d", 9).token_ids
    (score,) = lora.score([prompt], [response], 1.0)
    np.testing.assert_allclose(score, plain_log_probs(model, prompt, response), atol=1e-4)
    assert lora.version == 2


@needs_vllm
@pytest.mark.skipif(VLLM_DEVICE != "cpu", reason="vLLM's kernels for GPUs know such heads")
def test_a_model_that_vllms_kernels_do_not_know_is_refused_when_the_engine_is_made():
    with pytest.raises(ConfigError, match=r"cannot run this model: .*head.*Use generate.engine=native"):
        make(model=make_tiny_model("llama"))  # heads of 8 numbers


@needs_vllm
def test_weights_that_do_not_fit_and_temperatures_that_vllm_would_change_are_refused():
    engine = make()
    tensors = dict(weights_of(make_tiny_model(FAMILY), 1).tensors)
    del tensors["model.norm.weight"]
    with pytest.raises(KeyError, match=r"missing \['model\.norm\.weight'\]"):
        engine.load(Weights(version=1, tensors=tensors))
    assert engine.version == 0
    with pytest.raises(ConfigError, match=r"temperatures from 0\.01, got 0\.001"):
        list(
            engine.generate(
                make_requests(3), samples_per_prompt=1, sampling=Sampling(max_new_tokens=4, temperature=0.001)
            )
        )
    assert engine.vocabulary == VOCABULARY
