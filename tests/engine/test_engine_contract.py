"""What every engine promises: the same tests for the native engine and for those over transformers and vLLM.

vLLM's tests are skipped where it is not installed; `make test-vllm` installs and runs them."""

from __future__ import annotations

import importlib.util
import itertools
import logging

import numpy as np
import pytest
import torch
import transformers
from tiny_models import (
    VOCABULARY,
    by_key,
    generate_greedily,
    keep_in_pages,
    make_prompt,
    make_requests,
    make_tiny_model,
    make_weights_of,
    plain_log_probs,
    where_it_runs,
)

from tba.config import GenerateConfig
from tba.engine.make_engine import make_engine, make_scorer, stop_ids_of
from tba.engine.native.engine import NativeEngine
from tba.engine.sampling import BrokenLogits
from tba.engine.scoring import PolicyScorer
from tba.engine.transformers_engine import TransformersEngine
from tba.types import Request, Sampling

STOPS = [2, 3, 4]
FAMILY = "llama-wide-heads"
ENGINES = ("native", "transformers")
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: see `make test-vllm`"
)


def make(kind, model=None, *, update="in_flight", slots=3, seed=0, max_length=40, stop_ids=STOPS):
    model = make_tiny_model(FAMILY) if model is None else model
    config = GenerateConfig(engine=kind, slots=slots)
    return make_engine(
        where_it_runs(kind, model), stop_ids, config, seed=seed, max_length=max_length, update=update, explores=True
    )


def weights_for(kind, model, version):
    """As a searcher hands them over: on the engine's device."""
    return make_weights_of(where_it_runs(kind, model), version)


@pytest.fixture(params=[*ENGINES, "native with pages", pytest.param("vllm", marks=needs_vllm)])
def kind(request, monkeypatch):
    if request.param == "native with pages":
        keep_in_pages(monkeypatch)
        return "native"
    return request.param


def test_both_engines_sample_the_identical_tokens():
    requests, sampling = make_requests(3, 8, 5), Sampling(max_new_tokens=15, temperature=1.3, top_p=0.95)
    native, other = (by_key(make(kind).generate(requests, samples_per_prompt=3, sampling=sampling)) for kind in ENGINES)
    assert native.keys() == other.keys()
    for key, completion in native.items():
        assert completion.token_ids.tolist() == other[key].token_ids.tolist()
        np.testing.assert_allclose(completion.behaviour_log_probs, other[key].behaviour_log_probs, atol=1e-4)
        np.testing.assert_allclose(completion.policy_log_probs, other[key].policy_log_probs, atol=1e-4)


def test_completions_say_what_was_asked(kind):
    request = Request(prompt=make_prompt("a", 4), first_sample=16)
    found = by_key(make(kind).generate([request], samples_per_prompt=3, sampling=Sampling(max_new_tokens=9)))
    assert sorted(found) == [("a", 16), ("a", 17), ("a", 18)]
    for completion in found.values():
        assert completion.token_ids.dtype == np.int32
        assert completion.behaviour_log_probs.dtype == completion.policy_log_probs.dtype == np.float32
        assert len(completion.token_ids) == len(completion.behaviour_log_probs) == len(completion.policy_log_probs)
        assert completion.version_spans == ((0, 0),)


def test_every_stop_id_ends_a_response_and_is_part_of_it(kind):
    sampling = Sampling(max_new_tokens=30)
    found = list(make(kind).generate(make_requests(*range(2, 9)), samples_per_prompt=6, sampling=sampling))
    for completion in found:
        inner, last = completion.token_ids[:-1].tolist(), int(completion.token_ids[-1])
        assert not set(inner) & set(STOPS)
        assert completion.finish == ("stop" if last in STOPS else "length")
        assert (completion.finish == "stop") or len(completion.token_ids) == 30
    assert {int(completion.token_ids[-1]) for completion in found if completion.finish == "stop"} == set(STOPS)


def test_greedy_is_generate(kind):
    model, (request,) = make_tiny_model(FAMILY), make_requests(7)
    (completion,) = make(kind).generate(
        [request], samples_per_prompt=1, sampling=Sampling(max_new_tokens=12, greedy=True)
    )
    assert completion.token_ids.tolist() == generate_greedily(model, request.prompt.token_ids, 12, STOPS)


def continued(engine, request, sampling):
    """A response, and the same one continued after 1 token, half of it, and all but the last."""
    whole = max(
        engine.generate([request], samples_per_prompt=4, sampling=sampling), key=lambda found: len(found.token_ids)
    )
    for cut in (1, len(whole.token_ids) // 2, len(whole.token_ids) - 1):
        again = Request(prompt=request.prompt, first_sample=whole.sample_index, prefix_ids=whole.token_ids[:cut])
        (found,) = engine.generate([again], samples_per_prompt=1, sampling=sampling)
        yield whole, cut, found


@pytest.mark.parametrize("kind", ENGINES)
def test_continuing_a_response_from_its_own_beginning_reproduces_it(kind):
    (request,) = make_requests(5)
    for whole, cut, found in continued(make(kind), request, Sampling(max_new_tokens=14, temperature=1.1)):
        assert found.token_ids.tolist() == whole.token_ids.tolist()
        np.testing.assert_allclose(found.policy_log_probs[cut:], whole.policy_log_probs[cut:], atol=1e-4)


def test_a_continuation_keeps_its_beginning_whose_log_probs_are_unknown(kind):
    model, (request,) = make_tiny_model(FAMILY), make_requests(5)
    for whole, cut, found in continued(make(kind), request, Sampling(max_new_tokens=14, temperature=1.1)):
        assert found.token_ids[:cut].tolist() == whole.token_ids[:cut].tolist()
        assert cut < len(found.token_ids) <= 14
        assert found.num_prefix_tokens == cut
        assert np.isnan(found.policy_log_probs[:cut]).all()
        assert np.isnan(found.behaviour_log_probs[:cut]).all()
        expected = plain_log_probs(model, request.prompt.token_ids, found.token_ids, temperature=1.1)
        np.testing.assert_allclose(found.policy_log_probs[cut:], expected[cut:], atol=1e-4)
        assert found.version_spans == ((cut, 0),)


@pytest.mark.parametrize(("prefix", "finish"), [([9, 8, 3], "stop"), ([9, 8, 7, 6, 9, 8, 7, 9, 9], "length")])
def test_a_prefix_that_is_complete_comes_back_at_once(kind, prefix, finish):
    request = Request(prompt=make_prompt("a", 4), prefix_ids=np.array(prefix, dtype=np.int32))
    other = Request(prompt=make_prompt("b", 4))
    engine, sampling = make(kind), Sampling(max_new_tokens=9)
    found = by_key(engine.generate([request, other], samples_per_prompt=2, sampling=sampling))
    assert len(found) == 4
    for index in range(2):
        assert found["a", index].token_ids.tolist() == prefix
        assert found["a", index].finish == finish
        assert found["a", index].num_prefix_tokens == len(prefix)


def test_a_prompt_that_does_not_fit_is_named_with_its_lengths(kind):
    requests = [Request(prompt=make_prompt("long one", 33))]
    with pytest.raises(
        ValueError, match=r"'long one' has 33 tokens and its response up to 8 .* max_length=40"
    ) as error:
        list(make(kind).generate(requests, samples_per_prompt=1, sampling=Sampling(max_new_tokens=8)))
    assert "generate.max_new_tokens" in str(error.value)
    requests = [Request(prompt=make_prompt("fits", 32))]
    assert list(make(kind).generate(requests, samples_per_prompt=1, sampling=Sampling(max_new_tokens=8)))


def test_an_empty_prompt_is_refused(kind):
    request = Request(prompt=make_prompt("empty", 0))
    with pytest.raises(ValueError, match="prompt 'empty' has no tokens"):
        list(make(kind).generate([request], samples_per_prompt=1, sampling=Sampling(max_new_tokens=8)))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sampling", [Sampling(max_new_tokens=9, greedy=True), Sampling(max_new_tokens=9, top_p=0.9)])
@pytest.mark.parametrize("broken", ["one logit", "all logits", "infinite"])
def test_logits_that_are_no_numbers_are_an_error_that_says_where(engine, sampling, broken):
    """Not a token: that would lie outside the vocabulary, or be one that nobody sampled."""
    model, found = make_tiny_model(FAMILY), []
    row = slice(None) if broken == "all logits" else 5
    model.lm_head.weight.data[row] = float("inf") if broken == "infinite" else float("nan")
    running = make(engine, stop_ids=[2])

    def between_steps():
        found.append(None)
        if len(found) == 3:
            running.load(make_weights_of(model, 7))

    requests = [Request(prompt=request.prompt, prefix_ids=np.array([7], np.int32)) for request in make_requests(4)]
    stream = running.generate(requests, samples_per_prompt=1, sampling=sampling, between_steps=between_steps)
    # one token of the prefix, two of version 0, and the fourth breaks: it ends there, not at the ninth
    with pytest.raises(BrokenLogits, match=r"at token 3 of response 0 to prompt 'p0', with weights of version 7"):
        list(stream)
    assert len(found) == 3
    running.load(make_weights_of(make_tiny_model(FAMILY), 8))
    assert len(list(running.generate(requests, samples_per_prompt=2, sampling=sampling))) == 2


def test_requests_are_read_lazily_from_an_endless_stream(kind):
    read = []

    def endless():
        for index in itertools.count():
            read.append(index)
            yield Request(prompt=make_prompt(f"p{index}", 3 + index % 4))

    stream = make(kind).generate(endless(), samples_per_prompt=2, sampling=Sampling(max_new_tokens=6))
    taken = [next(stream) for _ in range(40)]
    stream.close()
    assert len({(found.prompt_id, found.sample_index) for found in taken}) == 40
    assert len(read) < 40


def test_an_engine_generates_one_stream_at_a_time_and_is_free_after_closing(kind):
    engine, sampling = make(kind), Sampling(max_new_tokens=6, min_new_tokens=6)
    stream = engine.generate(make_requests(3, 4), samples_per_prompt=2, sampling=sampling)
    next(stream)
    with pytest.raises(RuntimeError, match="already generating"):
        next(engine.generate(make_requests(3), samples_per_prompt=1, sampling=sampling))
    stream.close()
    assert len(list(engine.generate(make_requests(3), samples_per_prompt=1, sampling=sampling))) == 1


def load_at_call(engine, weights, call):
    calls = itertools.count()

    def between_steps():
        if next(calls) == call:
            engine.load(weights)

    return between_steps


@torch.no_grad()
def greedy_with_a_change(old, new, prompt_ids, num_old, num_tokens):
    """transformers by hand: `num_old` tokens by the old model, then the new one on the old one's cache."""
    ids, cache, tokens = torch.from_numpy(prompt_ids.astype(np.int64))[None], None, []
    for index in range(num_tokens):
        output = (old if index < num_old else new)(ids, past_key_values=cache, use_cache=True)
        output.logits[..., STOPS] = -torch.inf  # as min_new_tokens does
        cache, ids = output.past_key_values, output.logits[:, -1:].argmax(-1)
        tokens.append(int(ids))
    return tokens


def test_weights_loaded_in_flight_act_from_the_next_token_and_keep_the_cache(kind):
    old, new = make_tiny_model(FAMILY, seed=0), make_tiny_model(FAMILY, seed=1)
    engine, (request,) = make(kind, old), make_requests(6)
    sampling = Sampling(max_new_tokens=12, min_new_tokens=12, greedy=True)
    (found,) = engine.generate(
        [request],
        samples_per_prompt=1,
        sampling=sampling,
        between_steps=load_at_call(engine, weights_for(kind, new, 5), 4),
    )
    old_again = make_tiny_model(FAMILY, seed=0)
    assert found.token_ids.tolist() == greedy_with_a_change(old_again, new, request.prompt.token_ids, 4, 12)
    assert found.version_spans == ((0, 0), (4, 5))
    assert found.version == 0
    assert engine.version == 5


def test_two_loads_between_the_same_tokens_leave_one_span(kind):
    engine, (request,) = make(kind), make_requests(6)
    new, newer = (weights_for(kind, make_tiny_model(FAMILY, seed=seed), seed) for seed in (1, 2))
    calls = itertools.count()

    def between_steps():
        if next(calls) == 3:
            engine.load(new)
            engine.load(newer)

    sampling = Sampling(max_new_tokens=6, min_new_tokens=6)
    (found,) = engine.generate([request], samples_per_prompt=1, sampling=sampling, between_steps=between_steps)
    assert found.version_spans == ((0, 0), (3, 2))


def test_draining_makes_every_response_of_one_version(kind):
    models = {0: make_tiny_model(FAMILY, seed=0), 9: make_tiny_model(FAMILY, seed=1)}
    engine = make(kind, make_tiny_model(FAMILY, seed=0), update="drain", slots=2)
    requests, sampling = make_requests(3, 8, 5, 6, 4), Sampling(max_new_tokens=10, temperature=0.8)
    load = load_at_call(engine, weights_for(kind, models[9], 9), 3)
    found = list(engine.generate(requests, samples_per_prompt=2, sampling=sampling, between_steps=load))
    prompts = {request.prompt.id: request.prompt.token_ids for request in requests}
    assert {completion.version_spans for completion in found} == {((0, 0),), ((0, 9),)}
    assert len(found) == 10
    for completion in found:
        model = models[completion.version]
        expected = plain_log_probs(model, prompts[completion.prompt_id], completion.token_ids, temperature=0.8)
        np.testing.assert_allclose(completion.policy_log_probs, expected, atol=1e-4)


@pytest.mark.parametrize("update", ["drain", "in_flight"])
def test_weights_loaded_between_two_completions_count(kind, update):
    engine = make(kind, update=update, slots=1)
    requests, sampling = make_requests(3, 4, 5), Sampling(max_new_tokens=4, min_new_tokens=4)
    stream = engine.generate(requests, samples_per_prompt=1, sampling=sampling)
    assert next(stream).version_spans == ((0, 0),)
    new = make_tiny_model(FAMILY, seed=1)
    engine.load(weights_for(kind, new, 3))
    second, third = stream  # the second may have begun when the first was handed out
    if update == "drain":
        assert len(second.version_spans) == 1
    else:
        assert second.version_spans[-1][1] == 3
        assert second.version_spans[-1][0] in (0, 1)
    assert third.version_spans == ((0, 3),)
    prompt = requests[2].prompt.token_ids
    expected = plain_log_probs(new, prompt, third.token_ids)
    np.testing.assert_allclose(engine.score([prompt], [third.token_ids], 1.0)[0], expected, atol=1e-4)
    np.testing.assert_allclose(third.policy_log_probs, expected, atol=1e-4)


def make_bloom():
    torch.manual_seed(0)
    config = transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=1, n_head=2, eos_token_id=2)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def test_an_unknown_family_falls_back_to_transformers_with_a_warning(caplog):
    model = make_bloom()
    with caplog.at_level(logging.WARNING, logger="tba.engine"):
        engine = make("native", model)
        scorer = make_scorer(model, max_length=40)
    assert isinstance(engine, TransformersEngine)
    assert isinstance(scorer, PolicyScorer)
    assert "model type 'bloom' is not one of" in caplog.text
    (found,) = engine.generate(make_requests(4), samples_per_prompt=1, sampling=Sampling(max_new_tokens=8))
    prompt = make_requests(4)[0].prompt.token_ids
    expected = plain_log_probs(model, prompt, found.token_ids)
    np.testing.assert_allclose(found.policy_log_probs, expected, atol=1e-4)
    np.testing.assert_allclose(scorer.score([prompt], [found.token_ids], 1.0)[0], expected, atol=1e-4)


def test_a_known_family_gets_the_native_engine_and_a_tokenizer_names_its_stop_id():
    class Tokenizer:
        eos_token_id = 4

    model = make_tiny_model(FAMILY)
    model.generation_config.eos_token_id = [2, 3]
    engine = make("native", model, stop_ids=Tokenizer())
    assert isinstance(engine, NativeEngine)
    assert engine.stop_ids == {2, 3, 4}


def test_a_model_without_any_stop_id_is_refused():
    model = make_tiny_model(FAMILY)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    with pytest.raises(ValueError, match=r"no EOS: .* Set eos_token_id in its generation_config.json"):
        stop_ids_of(model)
