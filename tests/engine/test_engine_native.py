"""Slots: what is generated does not depend on how many there are, and none stays empty while there is work."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import by_key, keep_in_pages, make_requests, make_tiny_model, make_weights_of, plain_log_probs

from tba.engine.decoder.build import make_decoder
from tba.engine.native.engine import NativeEngine
from tba.engine.sampling import BrokenLogits
from tba.types import Request, Sampling

LENGTHS = (3, 8, 1, 5, 12, 4, 7)


@pytest.fixture(params=["slots", "pages"], autouse=True)
def cache(request, monkeypatch):
    """Every test with each of the two caches."""
    if request.param == "pages":
        keep_in_pages(monkeypatch)
    return request.param


def make(model=None, *, slots, seed=3, **changes):
    # From a decoder, not a model: the check of an engine that is made, which has its own tests, generates as much as these.
    model, dtype = make_tiny_model("llama") if model is None else model, changes.get("dtype", torch.float32)
    decoder = make_decoder(model, max_length=48, dtype=dtype, device=torch.device("cpu"))
    return NativeEngine(decoder, stop_ids=[2, 3, 4], seed=seed, slots=slots, max_length=48, **changes)


def generated(engine, requests, samples=3):
    return by_key(engine.generate(requests, samples_per_prompt=samples, sampling=Sampling(max_new_tokens=20)))


@functools.cache
def with_four_slots(cache):
    """What an engine of four slots with this cache generates for all lengths."""
    return generated(make(slots=4), make_requests(*LENGTHS))


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, completion in expected.items():
        assert found[key].token_ids.tolist() == completion.token_ids.tolist()
        assert found[key].finish == completion.finish
        np.testing.assert_allclose(found[key].policy_log_probs, completion.policy_log_probs, atol=1e-5)


@pytest.mark.parametrize("slots", [1, 2, 5, 64])
def test_tokens_are_the_same_whatever_the_number_of_slots(slots, cache):
    assert_same(generated(make(slots=slots), make_requests(*LENGTHS)), with_four_slots(cache))


def test_tokens_are_the_same_in_any_order_and_in_pieces(cache):
    requests, expected = make_requests(*LENGTHS), with_four_slots(cache)
    assert_same(generated(make(slots=4), requests[::-1]), expected)
    engine = make(slots=4)
    assert_same({**generated(engine, requests[4:]), **generated(engine, requests[:4])}, expected)
    later = [Request(prompt=request.prompt, first_sample=2) for request in requests]
    assert_same(
        {**generated(engine, requests, samples=2), **generated(engine, later, samples=1)},
        expected,
    )


def test_another_seed_gives_other_tokens(cache):
    first, second = with_four_slots(cache), generated(make(slots=4, seed=4), make_requests(*LENGTHS))
    assert sum(first[key].token_ids.tolist() == second[key].token_ids.tolist() for key in first) < len(first) / 2


def test_a_free_slot_is_refilled_before_the_next_step():
    engine, busy = make(slots=4), []
    requests = make_requests(*([5] * 8))
    stream = engine.generate(
        requests,
        samples_per_prompt=3,
        sampling=Sampling(max_new_tokens=20),
        between_steps=lambda: busy.append(engine._slots.count),
    )
    steps_at_completion = [len(busy) for _ in stream]
    assert len(steps_at_completion) == 24
    # when 20 of 24 are finished the last four run; until the 21st finishes no slot may have been empty
    assert set(busy[: steps_at_completion[20]]) == {4}
    assert busy[-1] < 4  # at the end the running ones stand together and empty slots cost nothing


def prefilled_by(engine):
    """Fills as the engine prefills: (number of tokens computed, version) of every part of a prompt."""
    found, batch = [], engine._prefill.batch

    def noting(rows, version=None):
        parts = [(len(row), version) for row in rows] if version is not None else None
        found.extend(parts or [(part.size, part.prompt.version) for part in rows])
        return batch(rows) if version is None else batch(rows, version)

    engine._prefill.batch = noting
    return found


def test_a_prompt_is_prefilled_once_for_all_its_samples():
    engine = make(slots=2)
    found = prefilled_by(engine)
    generated(engine, make_requests(4, 6), samples=7)
    assert sorted(found) == [(3, 0), (5, 0)]


@pytest.mark.parametrize("cache", ["slots"], indirect=True)
def test_the_cache_grows_to_what_requests_need_and_not_to_the_limit():
    engine = NativeEngine(make_tiny_model("llama"), stop_ids=[2], seed=0, slots=2, max_length=120)
    sampling = Sampling(max_new_tokens=10)
    list(engine.generate(make_requests(5), samples_per_prompt=1, sampling=sampling))
    assert engine.cache.values.shape[3] == 16
    requests = make_requests(5, 60, 7)
    found = by_key(engine.generate(requests, samples_per_prompt=2, sampling=sampling))
    assert engine.cache.values.shape[3] == 80
    for request in requests:
        expected = plain_log_probs(engine_model(), request.prompt.token_ids, found[request.prompt.id, 1].token_ids)
        np.testing.assert_allclose(found[request.prompt.id, 1].policy_log_probs, expected, atol=1e-4)


def engine_model():
    return make_tiny_model("llama")


def test_responses_that_start_after_a_load_in_flight_carry_only_the_new_version():
    engine, seen = make(slots=1), []

    def between_steps():
        seen.append(None)
        if len(seen) == 2:
            engine.load(make_weights_of(make_tiny_model("llama", seed=1), 6))

    sampling = Sampling(max_new_tokens=5, min_new_tokens=5)
    found = by_key(
        engine.generate(make_requests(4), samples_per_prompt=2, sampling=sampling, between_steps=between_steps)
    )
    assert found["p0", 0].version_spans == ((0, 0), (1, 6))
    assert found["p0", 1].version_spans == ((0, 6),)


@pytest.mark.parametrize("call", [1, 2, 4, 9])
def test_a_response_of_one_version_has_the_log_probs_of_that_versions_forward_pass(call):
    """Also where its prompt waited, prefilled or even in its slot, while other weights were loaded in flight."""
    models = {0: make_tiny_model("llama", seed=0), 6: make_tiny_model("llama", seed=1)}
    engine, calls = make(models[0], slots=4), []

    def between_steps():
        calls.append(None)
        if len(calls) == call:
            engine.load(make_weights_of(models[6], 6))

    lengths = (3, 6, 9, 12, 5, 5, 5, 5, 5, 5, 5, 5)
    requests = [
        Request(prompt=request.prompt, sampling=Sampling(max_new_tokens=length, min_new_tokens=length))
        for request, length in zip(make_requests(*[9] * 12), lengths)
    ]
    stream = engine.generate(requests, samples_per_prompt=1, sampling=requests[0].sampling, between_steps=between_steps)
    versions = []
    for found in stream:
        if len(found.version_spans) == 1:
            ((_, version),) = found.version_spans
            prompt = requests[int(found.prompt_id[1:])].prompt
            expected = plain_log_probs(models[version], prompt.token_ids, found.token_ids)
            np.testing.assert_allclose(found.policy_log_probs, expected, atol=1e-4)
            versions.append(version)
    assert versions.count(6) >= 6


def test_prompts_without_a_token_yet_are_prefilled_again_once_when_weights_are_loaded():
    engine = make(slots=4)
    engine._prefill.turn_tokens = 100  # of pages: prompts are not cut
    rows = prefilled_by(engine)

    def between_steps():
        if len(rows) == 8 and engine.version == 0:
            engine.load(make_weights_of(make_tiny_model("llama", seed=1), 1))

    lengths = (2, 9, 9, 9, 3, 3, 3, 3)
    requests = [
        Request(prompt=request.prompt, sampling=Sampling(max_new_tokens=length, min_new_tokens=length))
        for request, length in zip(make_requests(*range(2, 10)), lengths)
    ]
    stream = engine.generate(requests, samples_per_prompt=1, sampling=requests[0].sampling, between_steps=between_steps)
    assert len(list(stream)) == 8
    # The second four prompts are read when the first response has ended: one is in its slot and three wait at the load.
    assert sorted(rows) == sorted([(length, 0) for length in range(1, 9)] + [(length, 1) for length in range(5, 9)])


def test_other_weights_of_the_same_number_compute_what_waits_again():
    """As after a trainer went back to a checkpoint, and counts from there."""
    other = make_tiny_model("llama", seed=1)
    engine, requests, loaded = make(slots=1), make_requests(9, 9), []
    requests = [Request(prompt=replace(requests[0].prompt, id=f"p{index}")) for index in range(2)]

    def between_steps():
        if not loaded and engine._slots.num_tokens[0] > 0:
            loaded.append(engine.load(make_weights_of(other, engine.version)))

    options = {"samples_per_prompt": 2, "sampling": Sampling(max_new_tokens=5, min_new_tokens=5)}
    found = by_key(engine.generate(requests, between_steps=between_steps, **options))
    expected = by_key(make(other, slots=1).generate(requests, **options))
    del found["p0", 0], expected["p0", 0]  # it ran while the weights came
    assert_same(found, expected)


def test_an_engine_that_met_broken_weights_says_what_it_should_with_sound_ones():
    """Keys that are NaN stay in the cache, where others come to lie before them."""
    model = make_tiny_model("llama")
    sound, broken = make_weights_of(model, 2), make_weights_of(model, 1)
    broken.tensors["model.layers.1.self_attn.k_proj.weight"].fill_(float("nan"))
    engine = make(model, slots=2)
    engine.load(broken)
    with pytest.raises(BrokenLogits):
        generated(engine, make_requests(20, 20))
    engine.load(sound)
    assert_same(generated(engine, make_requests(3, 3)), generated(make(model, slots=2), make_requests(3, 3)))


def test_weights_that_still_wait_never_replace_newer_ones():
    engine = make(slots=1, update="drain")
    weights = make_weights_of(make_tiny_model("llama", seed=1), 0)
    completions = engine.generate(
        make_requests(4, 4),
        samples_per_prompt=1,
        sampling=Sampling(max_new_tokens=3),
        between_steps=lambda: engine.version or engine.load(replace(weights, version=1)),
    )
    next(completions)  # version 1 waits for this response, and nothing runs now
    engine.load(replace(weights, version=2))
    (second,) = completions
    assert engine.version == 2
    assert second.version_spans == ((0, 2),)


def test_draining_starts_nothing_new_until_the_weights_are_in():
    engine, started = make(slots=3, update="drain"), []

    def between_steps():
        started.append((engine._slots.count, engine.version))
        if len(started) == 2:
            engine.load(make_weights_of(make_tiny_model("llama", seed=1), 6))

    lengths = [Sampling(max_new_tokens=n, min_new_tokens=n) for n in (3, 5, 7, 4, 4, 4)]
    requests = [
        Request(prompt=request.prompt, sampling=sampling) for request, sampling in zip(make_requests(*[4] * 6), lengths)
    ]
    list(engine.generate(requests, samples_per_prompt=1, sampling=lengths[0], between_steps=between_steps))
    # three run to their ends at 3, 5 and 7 tokens; only then the other three start, with version 6
    assert started == [(3, 0)] * 3 + [(2, 0)] * 2 + [(1, 0)] * 2 + [(3, 6)] * 4


def test_the_cpu_cache_stays_fp32_when_matrices_are_bf16(cache):
    engine = make(make_tiny_model("llama", spread=3.0), slots=2, dtype=torch.bfloat16)
    assert engine.decoder.weights.embedding.dtype == torch.bfloat16
    dtype = engine.cache.keys.dtype if cache == "slots" else engine.cache.pool.base.dtype
    assert dtype == torch.float32


def test_the_tokens_of_running_responses_are_the_beginnings_of_what_they_become():
    engine, requests, looks = make(slots=3), make_requests(*LENGTHS), []
    sampling = Sampling(max_new_tokens=20)

    def between() -> None:
        looks.extend(engine.running_tokens(requests[:2]))

    found = by_key(engine.generate(requests, samples_per_prompt=2, sampling=sampling, between_steps=between))
    assert {(look.request.prompt.id, look.sample_index) for look in looks} == {
        (f"p{p}", k) for p in (0, 1) for k in (0, 1)
    }
    for look in looks:
        whole, count = found[look.request.prompt.id, look.sample_index], len(look.token_ids)
        assert look.token_ids.tolist() == whole.token_ids[:count].tolist()
        np.testing.assert_array_equal(look.policy_log_probs, whole.policy_log_probs[:count])


def test_responses_that_are_ended_early_are_beginnings_and_the_others_go_on(cache):
    requests = make_requests(*LENGTHS)
    engine, expected = make(slots=4), with_four_slots(cache)

    def end_first() -> None:
        if any(len(look.token_ids) >= 5 for look in engine.running_tokens(requests[1:2])):
            engine.end_early(requests[1:2])

    stream = engine.generate(
        requests, samples_per_prompt=3, sampling=Sampling(max_new_tokens=20), between_steps=end_first
    )
    found = by_key(stream)
    ended = {key: found.pop(key) for key in [("p1", k) for k in range(3)]}
    assert_same(found, {key: whole for key, whole in expected.items() if key not in ended})
    for key, completion in ended.items():
        whole = expected[key].token_ids.tolist()
        assert completion.token_ids.tolist() == whole[: len(completion.token_ids)]
    assert min(len(completion.token_ids) for completion in ended.values()) <= 6
