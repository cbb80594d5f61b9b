"""Random numbers, truncation and log-probs, against slow independent computations."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from tiny_models import by_key, log_softmax, make_requests, make_tiny_model, plain_logits

from tba.engine.native.engine import NativeEngine
from tba.engine.sampling import invert_cdf, response_key, uniforms
from tba.types import Request, Sampling

STOPS = [2, 3]
WORD = 2**64 - 1


def uniform_by_hand(seed: int, prompt_id: str, sample_index: int, position: int) -> float:
    """splitmix64 in Python's unbounded integers."""
    digest = hashlib.blake2b(f"{seed}/{prompt_id}/{sample_index}".encode(), digest_size=8).digest()
    z = (int.from_bytes(digest, "little") + (position + 1) * 0x9E3779B97F4A7C15) & WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    z ^= z >> 31
    return float(np.float32(((z >> 40) + 0.5) * 2.0**-24))


def slow_distribution(logits: np.ndarray, sampling: Sampling, position: int) -> np.ndarray:
    """float64 behaviour probabilities, token by token in plain Python."""
    weights = {}
    for token, logit in enumerate(logits):
        if token in STOPS and position < sampling.min_new_tokens:
            continue
        weights[token] = math.exp((logit - logits.max()) / sampling.temperature)
    ranked = sorted(weights, key=lambda token: (-weights[token], token))
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    total, mass, kept = sum(weights[token] for token in ranked), 0.0, []
    for token in ranked:
        if mass >= sampling.top_p * total and sampling.top_p < 1.0:
            break
        kept.append(token)
        mass += weights[token]
    probs = np.zeros(len(logits))
    probs[kept] = [weights[token] / mass for token in kept]
    return probs


def token_by_hand(probs: np.ndarray, u: float) -> int:
    """The first token whose cumulative probability is above u."""
    return int(np.flatnonzero(np.cumsum(probs) > u)[0])


def test_uniforms_equal_splitmix64_in_plain_integers():
    cases = [(0, "p", 0, 0), (0, "p", 0, 1), (7, "train-17", 3, 250), (123, "ü", 10**6, 4095)]
    keys = torch.tensor([response_key(seed, prompt, sample) for seed, prompt, sample, _ in cases])
    found = uniforms(keys, torch.tensor([position for *_, position in cases]))
    assert found.tolist() == [uniform_by_hand(*case) for case in cases]
    assert found.dtype == torch.float32


def test_uniforms_are_uniform_and_differ_between_samples():
    keys = torch.tensor([response_key(0, "p", index) for index in range(4000)])
    values = uniforms(keys, torch.zeros(4000, dtype=torch.int64)).numpy()
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    assert ((counts - 200) ** 2 / 200).sum() < 19 + 4 * math.sqrt(2 * 19)
    assert len(set(values.tolist())) > 3990


@pytest.mark.parametrize(
    ("u", "token"),
    [(0.1, 0), (0.25, 1), (0.5, 1), (0.7499, 1), (0.75, 3), (0.99, 3), (1.0, 3)],
)
def test_inverse_cdf_counts_entries_up_to_u(u, token):
    # cdf = [.25, .75, .75, 1, 1]: token 2 has no probability, token 4 neither, and u = 1 ends at token 3
    probs = torch.tensor([[0.25, 0.5, 0.0, 0.25, 0.0]])
    tokens, total = invert_cdf(probs, torch.tensor([u]))
    assert tokens.tolist() == [token]
    assert total.tolist() == [1.0]


def test_inverse_cdf_works_on_what_truncation_left():
    # total .5: u = .5 means .25, which the first entry reaches, so the second kept token is next
    tokens, _ = invert_cdf(torch.tensor([[0.25, 0.0, 0.0, 0.25]]), torch.tensor([0.5]))
    assert tokens.tolist() == [3]


SETTINGS = {
    "plain": Sampling(max_new_tokens=8),
    "temperature": Sampling(max_new_tokens=8, temperature=0.6),
    "hot": Sampling(max_new_tokens=8, temperature=2.5, policy_temperature=0.8),
    "top-p": Sampling(max_new_tokens=8, top_p=0.7),
    "top-k": Sampling(max_new_tokens=8, top_k=5, temperature=1.5),
    "both": Sampling(max_new_tokens=8, top_k=6, top_p=0.8, temperature=1.3, policy_temperature=1.0),
    "one": Sampling(max_new_tokens=8, top_p=1e-6),
    "late stop": Sampling(max_new_tokens=8, min_new_tokens=6, temperature=1.2),
    "late stop, cut": Sampling(max_new_tokens=8, min_new_tokens=6, top_p=0.9),
    "greedy": Sampling(max_new_tokens=8, greedy=True, min_new_tokens=3),
}


def check_completion(model, request, completion, sampling):
    logits = plain_logits(model, request.prompt.token_ids, completion.token_ids)
    policy = log_softmax(logits / sampling.training_temperature)
    for position, token in enumerate(completion.token_ids):
        probs = slow_distribution(logits[position], sampling, position)
        if sampling.greedy:
            assert token == probs.argmax()
            assert completion.behaviour_log_probs[position] == 0.0
        else:
            u = uniform_by_hand(5, completion.prompt_id, completion.sample_index, position)
            assert token == token_by_hand(probs, u)
            assert completion.behaviour_log_probs[position] == pytest.approx(math.log(probs[token]), abs=1e-4)
        assert completion.policy_log_probs[position] == pytest.approx(policy[position, token], abs=1e-4)


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_and_both_log_probs_follow_the_settings(name):
    model, sampling = make_tiny_model("llama"), SETTINGS[name]
    engine = NativeEngine(model, stop_ids=STOPS, seed=5, slots=4, max_length=24)
    requests = make_requests(4, 9)
    found = by_key(engine.generate(requests, samples_per_prompt=3, sampling=sampling))
    for request in requests:
        for index in range(3):
            check_completion(model, request, found[request.prompt.id, index], sampling)


def test_requests_with_different_settings_share_a_batch():
    model = make_tiny_model("llama")
    engine = NativeEngine(model, stop_ids=STOPS, seed=5, slots=30, max_length=24)
    requests = [
        Request(prompt=request.prompt, sampling=sampling)
        for request, sampling in zip(make_requests(*range(2, 2 + len(SETTINGS))), SETTINGS.values())
    ]
    found = by_key(engine.generate(requests, samples_per_prompt=2, sampling=Sampling(max_new_tokens=3)))
    for request in requests:
        check_completion(model, request, found[request.prompt.id, 1], request.sampling)


@pytest.mark.parametrize("name", ["plain", "both"])
def test_sampling_frequencies_are_the_probabilities(name):
    model = make_tiny_model("llama", spread=4.0)
    sampling = Sampling(**{**vars(SETTINGS[name]), "max_new_tokens": 1})
    engine = NativeEngine(model, stop_ids=STOPS, seed=1, slots=512, max_length=24)
    (request,) = make_requests(5)
    num_samples = 6000
    tokens = [
        int(completion.token_ids[0])
        for completion in engine.generate([request], samples_per_prompt=num_samples, sampling=sampling)
    ]
    logits = plain_logits(model, request.prompt.token_ids, np.zeros(1, dtype=np.int32))[0]
    expected = num_samples * slow_distribution(logits, sampling, 0)
    counts = np.bincount(tokens, minlength=len(expected))
    assert counts[expected == 0].sum() == 0
    seen = expected > 0
    freedom = seen.sum() - 1
    chi_square = ((counts - expected)[seen] ** 2 / expected[seen]).sum()
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)
