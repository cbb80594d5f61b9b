"""Decode steps that run ahead of the host: the same tokens, and spans that say which version chose which token."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import by_key, keep_in_pages, make_prompt, make_tiny_model, make_weights_of
from transformers import PreTrainedModel

from tba.engine.decoder.build import make_decoder
from tba.engine.native.engine import DECODE_STEPS_AHEAD, NativeEngine
from tba.engine.native.slots import INTEGERS
from tba.engine.sampling import SamplingNeeds, response_key
from tba.types import Completion, Request, Sampling

pytestmark = pytest.mark.slow

SAMPLING = Sampling(max_new_tokens=20)


@pytest.fixture(params=["slots", "pages"], autouse=True)
def cache(request, monkeypatch):
    """Every test with each of the two caches."""
    if request.param == "pages":
        keep_in_pages(monkeypatch)
    return request.param


class StepsAhead:
    """What the fused decoder does on a GPU, with plain steps: several at once, in which a slot that is done stands still."""

    def __init__(self, engine: NativeEngine) -> None:
        self.engine = engine
        self.numbers: list[int] = []

    @torch.inference_mode()
    def run(self, count: int, *, decode_steps: int) -> None:
        self.numbers.append(decode_steps)
        engine, state = self.engine, self.engine.state
        for _ in range(decode_steps):
            done = state.column("done", count).nonzero().flatten()
            tables = (state.integers, state.tokens, state.behaviour, state.policy)
            before = [table[done].clone() for table in tables]
            state.integers[done, INTEGERS.index("num_tokens")] = 0  # whatever it writes is taken back
            engine._decode_step(count, engine.cache.num_positions, SamplingNeeds(*[True] * len(SamplingNeeds._fields)))
            for table, rows in zip(tables, before):
                table[done] = rows


def make_model(seed: int = 0) -> PreTrainedModel:
    return make_tiny_model("llama", seed=seed, layers=1)


def make(*, slots: int, ahead: bool = True, update: str = "in_flight") -> NativeEngine:
    # A decoder, not a model: the check of an engine that is made, which has its own tests, would take a third of the time.
    decoder = make_decoder(make_model(), max_length=48, dtype=torch.float32, device=torch.device("cpu"))
    engine = NativeEngine(decoder, stop_ids=[2, 3, 4], seed=3, slots=slots, max_length=48, update=update)
    if ahead:
        engine._fused = StepsAhead(engine)
    return engine


def mixed_requests(rng: random.Random, count: int) -> list[Request]:
    """Of all lengths; some with a prefix, a least length, truncation or greedy."""
    found = []
    for index in range(count):
        longest = rng.randint(1, 24)
        prefix = [rng.randint(5, 30) for _ in range(rng.randint(0, longest))] if rng.random() < 0.3 else []
        sampling = Sampling(
            max_new_tokens=longest,
            min_new_tokens=rng.randint(0, longest) if rng.random() < 0.2 else 0,
            top_k=5 if rng.random() < 0.1 else 0,
            greedy=rng.random() < 0.1,
        )
        prompt = make_prompt(f"p{index}", rng.randint(1, 9))
        found.append(Request(prompt=prompt, prefix_ids=np.array(prefix, dtype=np.int32), sampling=sampling))
    return found


def with_pauses(rng: random.Random, requests: list[Request]) -> Iterator[Request | None]:
    for request in requests:
        while rng.random() < 0.3:
            yield None
        yield request


def assert_same(found: list[Completion], expected: list[Completion]) -> None:
    assert len(found) == len(expected)
    got, want = by_key(found), by_key(expected)
    assert got.keys() == want.keys()
    for key, completion in want.items():
        assert got[key].token_ids.tolist() == completion.token_ids.tolist()
        assert got[key].finish == completion.finish
        np.testing.assert_allclose(got[key].policy_log_probs, completion.policy_log_probs, atol=1e-5)
        np.testing.assert_allclose(got[key].behaviour_log_probs, completion.behaviour_log_probs, atol=1e-5)


@pytest.mark.parametrize("slots", [1, 3, 24])
def test_steps_run_ahead_and_give_the_tokens_of_single_steps(slots):
    requests = [
        Request(prompt=make_prompt(f"p{i}", 3 + i % 5), sampling=Sampling(max_new_tokens=1 + 7 * i % 23))
        for i in range(12)
    ]
    engine = make(slots=slots)
    found = list(engine.generate(requests, samples_per_prompt=2, sampling=SAMPLING))
    assert_same(found, list(make(slots=4, ahead=False).generate(requests, samples_per_prompt=2, sampling=SAMPLING)))
    assert DECODE_STEPS_AHEAD in engine._fused.numbers


def test_no_step_runs_beyond_the_longest_response():
    sampling = Sampling(max_new_tokens=22, min_new_tokens=22)
    engine = make(slots=4)
    requests = [Request(prompt=make_prompt(f"p{i}", 3)) for i in range(3)]
    assert len(list(engine.generate(requests, samples_per_prompt=1, sampling=sampling))) == 3
    assert sum(engine._fused.numbers) == 22


def test_truncation_and_forbidden_tokens_never_take_a_batch_off_the_fused_steps():
    """One response among many that asks for top-p, top-k or a least length: with graphs all run on, and run ahead."""
    engine = make(slots=4)
    outside, decode = [], engine._decode_step
    run = engine._fused.run

    def fused_run(count, *, decode_steps):
        engine._decode_step = decode
        run(count, decode_steps=decode_steps)
        engine._decode_step = outside.append

    engine._decode_step, engine._fused.run = outside.append, fused_run
    settings = [{"top_p": 0.9}, {"min_new_tokens": 1}, {"top_k": 3}, {"min_new_tokens": 9}, {}, {}, {}]
    requests = [
        Request(prompt=make_prompt(f"p{i}", 5), sampling=Sampling(max_new_tokens=16, **settings[i % len(settings)]))
        for i in range(28)
    ]
    assert len(list(engine.generate(requests, samples_per_prompt=1, sampling=SAMPLING))) == 28
    assert not outside
    assert DECODE_STEPS_AHEAD in engine._fused.numbers


@pytest.mark.parametrize("seed", range(5))
def test_tokens_are_those_of_the_plain_engine_also_after_an_early_end(seed):
    rng = random.Random(seed)
    requests, samples = mixed_requests(rng, rng.randint(5, 12)), rng.choice([1, 2, 3])
    engine = make(slots=rng.choice([1, 2, 3, 5, 8]))
    expected = list(make(slots=4, ahead=False).generate(requests, samples_per_prompt=samples, sampling=SAMPLING))
    stream = engine.generate(with_pauses(rng, requests), samples_per_prompt=samples, sampling=SAMPLING)
    for _ in range(rng.randint(0, 6)):
        next(stream, None)
    stream.close()
    found = list(engine.generate(with_pauses(rng, requests), samples_per_prompt=samples, sampling=SAMPLING))
    assert_same(found, expected)
    assert not engine._snapshots
    assert not engine._slots.any_running()


def chosen_by(engine: NativeEngine) -> dict[tuple[int, int], int]:
    """Fills as the engine decodes: (key of the response, token) -> version of the weights at that step."""
    truth: dict[tuple[int, int], int] = {}
    decode = engine._decode_step

    def recording(count: int, num_keys: int, needs: SamplingNeeds) -> None:
        columns = (engine.state.column(name, count).tolist() for name in ("keys", "num_tokens", "done"))
        for key, token, done in zip(*columns):
            if not done:
                assert (key, token) not in truth, "a token was chosen twice"
                truth[key, token] = engine.version
        decode(count, num_keys, needs)

    engine._decode_step = recording
    return truth


@pytest.mark.parametrize("update", ["in_flight", "drain"])
@pytest.mark.parametrize("seed", range(5))
def test_spans_name_the_weights_that_chose_each_token(seed, update):
    rng = random.Random(seed)
    requests, samples = mixed_requests(rng, rng.randint(5, 12)), rng.choice([1, 2])
    engine = make(slots=rng.choice([1, 2, 3, 5]), update=update)
    truth = chosen_by(engine)
    weights = [make_weights_of(make_model(seed), 0) for seed in range(2)]
    versions = itertools.count(1)

    def perhaps_load(probability: float) -> None:
        if rng.random() < probability:
            version = next(versions)
            engine.load(replace(weights[version % 2], version=version))

    def stream() -> Iterator[Request | None]:
        for request in with_pauses(rng, requests):
            perhaps_load(0.05)
            yield request

    found = []
    for completion in engine.generate(
        stream(), samples_per_prompt=samples, sampling=SAMPLING, between_steps=lambda: perhaps_load(0.15)
    ):
        found.append(completion)
        perhaps_load(0.1)
    assert len(by_key(found)) == len(found) == len(requests) * samples
    for completion in found:
        spans = completion.version_spans
        assert update == "in_flight" or len(spans) == 1
        key = response_key(3, completion.prompt_id, completion.sample_index)
        for token in range(completion.num_prefix_tokens, len(completion.token_ids)):
            assert truth[key, token] == [version for first, version in spans if first <= token][-1]
        assert (key, len(completion.token_ids)) not in truth


def test_a_sibling_may_generate_while_steps_are_under_way():
    requests = mixed_requests(random.Random(0), 12)
    engine = make(slots=3)
    evaluations = []

    def evaluate() -> None:
        if len(evaluations) < 2:
            evaluations.append(
                list(engine.clone_for_evaluation().generate(requests[:4], samples_per_prompt=1, sampling=SAMPLING))
            )

    plain = make(slots=3, ahead=False)
    found = []
    for completion in engine.generate(requests, samples_per_prompt=2, sampling=SAMPLING, between_steps=evaluate):
        found.append(completion)
        if len(found) == 5:
            evaluations.append(
                list(engine.clone_for_evaluation().generate(requests[:4], samples_per_prompt=1, sampling=SAMPLING))
            )
    assert_same(found, list(plain.generate(requests, samples_per_prompt=2, sampling=SAMPLING)))
    expected = list(plain.generate(requests[:4], samples_per_prompt=1, sampling=SAMPLING))
    for evaluation in evaluations:
        assert_same(evaluation, expected)
