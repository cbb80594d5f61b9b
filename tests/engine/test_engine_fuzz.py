"""Random models, requests and loads against a plain forward pass, token by token.

Everything is drawn from the seed: shape and family, ragged prompts, prefixes, sampling settings, number of slots, pauses,
weights that arrive in flight or are drained, streams that are closed early, steps that run ahead as on a GPU; with pages
also memory for a few responses only, so that they are taken out and start again. Each token must be the one that `sample`
chooses from the logits of transformers' own pass, with the weights that the spans name for it and a cache that holds what
earlier weights computed.

A longer run: python tests/engine/test_engine_fuzz.py 200 [pages]        (seeds 1000 to 1199)
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from test_engine_ahead import StepsAhead, with_pauses
from tiny_models import by_key, keep_in_pages, make_weights_of
from transformers import AutoModelForCausalLM, PreTrainedModel

from tba.engine.native.engine import NativeEngine
from tba.engine.native.paged_cache import PagedCache
from tba.engine.sampling import SamplingNeeds, SamplingState, response_key, sample
from tba.types import Completion, Prompt, Request, Sampling

pytestmark = pytest.mark.slow

VOCABULARY = 41
STOPS = [2, 3]
MAX_LENGTH = 64
NUM_VERSIONS = 3
"""Number of different weights that the versions of a run go round."""
TOLERANCE = 2e-4
"""Largest gap of log-probs, in nats: fp32 sums in another order."""


def random_config(rng: random.Random) -> transformers.PreTrainedConfig:
    """A tiny model of one of the families, with heads, windows, caps and ties at random."""
    group, kv_heads, head_dim = rng.choice([1, 2, 3]), rng.choice([1, 2]), rng.choice([8, 12, 16])
    layers, window = rng.randint(1, 3), rng.randint(2, 12)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": group * kv_heads * head_dim,
        "intermediate_size": rng.choice([24, 40]),
        "num_hidden_layers": layers,
        "num_attention_heads": group * kv_heads,
        "max_position_embeddings": MAX_LENGTH,
        "eos_token_id": STOPS[0],
        "bos_token_id": 1,
        "pad_token_id": 0,
    }
    grouped = {**shape, "num_key_value_heads": kv_heads, "tie_word_embeddings": rng.random() < 0.5}
    gemma = {**grouped, "head_dim": head_dim, "sliding_window": window, "query_pre_attn_scalar": rng.choice([8, 20])}
    kinds = [rng.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]
    makers = (
        lambda: transformers.LlamaConfig(**grouped, attention_bias=rng.random() < 0.5, head_dim=rng.choice([8, 24])),
        lambda: transformers.MistralConfig(**grouped, head_dim=head_dim, sliding_window=window),
        lambda: transformers.Qwen2Config(
            **grouped, use_sliding_window=True, sliding_window=window, max_window_layers=rng.randint(0, layers)
        ),
        lambda: transformers.Qwen3Config(**grouped, head_dim=head_dim),
        lambda: transformers.Gemma2Config(**gemma, attn_logit_softcapping=rng.choice([2.0, None]), layer_types=kinds),
        lambda: transformers.Gemma3TextConfig(**gemma, layer_types=kinds),
        lambda: transformers.GPTNeoXConfig(**shape, rotary_pct=0.5, use_parallel_residual=rng.random() < 0.5),
        lambda: transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=shape["hidden_size"], n_layer=layers, n_head=group * kv_heads,
            n_positions=MAX_LENGTH, bos_token_id=1, eos_token_id=STOPS[0],
        ),
    )  # fmt: skip
    return rng.choice(makers)()


def random_models(rng: random.Random) -> list[PreTrainedModel]:
    """Models of one shape with weights of their own, large enough that every token matters."""
    config, models = random_config(rng), []
    for _ in range(NUM_VERSIONS):
        torch.manual_seed(rng.randrange(2**31))
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        for parameter in model.parameters():
            is_matrix = parameter.ndim >= 2
            parameter.data = parameter.data * 5.0 if is_matrix else parameter.data + 0.2 * torch.randn_like(parameter)
        models.append(model)
    return models


def random_sampling(rng: random.Random, longest: int) -> Sampling:
    return Sampling(
        max_new_tokens=longest,
        min_new_tokens=rng.choice([0, 0, 0, 1, longest // 2, longest]),
        temperature=rng.choice([1.0, 1.0, 0.6, 1.7]),
        policy_temperature=rng.choice([None, None, 0.9]),
        top_k=rng.choice([0, 0, 0, 1, 4, 100]),
        top_p=rng.choice([1.0, 1.0, 0.8, 0.3]),
        greedy=rng.random() < 0.15,
    )


def random_requests(rng: random.Random) -> list[Request]:
    found = []
    for index in range(rng.randint(3, 12)):
        longest = rng.randint(1, 20)
        sampling = random_sampling(rng, longest)
        prefix = [rng.randrange(5, VOCABULARY) for _ in range(rng.randint(1, longest))] if rng.random() < 0.3 else []
        token_ids = np.array([rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 30))], dtype=np.int32)
        found.append(
            Request(
                prompt=Prompt(id=f"p{index}", token_ids=token_ids, text=""),
                prefix_ids=np.array(prefix, dtype=np.int32),
                sampling=sampling,
                first_sample=rng.randint(0, 5),
            )
        )
    return found


@torch.no_grad()
def logits_by_spans(models: list[PreTrainedModel], request: Request, completion: Completion) -> torch.Tensor:
    """fp32 [new tokens, V]: each token's logits by the weights of its span, over keys and values of the spans before."""
    ids = torch.from_numpy(np.concatenate((request.prompt.token_ids, completion.token_ids)).astype(np.int64))
    first, num_prefix = len(request.prompt.token_ids), completion.num_prefix_tokens
    bounds = [*(token for token, _ in completion.version_spans), len(completion.token_ids)]
    cache, logits, fed = None, [], 0
    for (_, version), last in zip(completion.version_spans, bounds[1:]):
        part = ids[fed : first + last - 1]
        output = models[version % NUM_VERSIONS](part[None], past_key_values=cache, use_cache=True)
        cache, fed = output.past_key_values, first + last - 1
        logits.append(output.logits[0].float())
    return torch.cat(logits)[first + num_prefix - 1 :]


def state_of(request: Request, completion: Completion, sampling: Sampling, seed: int) -> SamplingState:
    """The sampling settings of every new token, as if each were a response."""
    tokens = torch.arange(completion.num_prefix_tokens, len(completion.token_ids))
    full = lambda value, dtype: torch.full(tokens.shape, value, dtype=dtype)  # noqa: E731
    return SamplingState(
        key=full(response_key(seed, request.prompt.id, completion.sample_index), torch.int64),
        position=tokens,
        temperature=full(1.0 if sampling.greedy else sampling.temperature, torch.float32),
        policy_temperature=full(sampling.training_temperature, torch.float32),
        top_p=full(sampling.top_p, torch.float32),
        top_k=full(sampling.top_k, torch.int64),
        greedy=full(int(sampling.greedy), torch.int64),
        min_new_tokens=full(sampling.min_new_tokens, torch.int64),
    )


def check_completion(models: list[PreTrainedModel], request: Request, completion: Completion, seed: int) -> int:
    """Compare one response with the plain pass -> number of tokens compared."""
    sampling, new = request.sampling, completion.num_prefix_tokens
    tokens = completion.token_ids
    assert tokens[:new].tolist() == request.prefix_ids.tolist()
    assert np.isnan(completion.policy_log_probs[:new]).all()
    stopped = len(tokens) > 0 and tokens[-1] in STOPS
    assert completion.finish == ("stop" if stopped else "length")
    assert stopped or len(tokens) == sampling.max_new_tokens
    assert not set(tokens[new:-1].tolist()) & set(STOPS), "a response ends at its first stop token"
    if len(tokens) == new:
        return 0
    versions = [version for _, version in completion.version_spans]
    assert completion.version_spans[0][0] == new
    assert versions == sorted(set(versions))
    needs = SamplingNeeds(*[True] * len(SamplingNeeds._fields))
    logits = logits_by_spans(models, request, completion)
    want = sample(logits, state_of(request, completion, sampling, seed), torch.tensor(STOPS), needs)
    assert tokens[new:].tolist() == want.tokens.tolist()
    np.testing.assert_allclose(completion.policy_log_probs[new:], want.policy, atol=TOLERANCE)
    np.testing.assert_allclose(completion.behaviour_log_probs[new:], want.behaviour, atol=TOLERANCE)
    return len(tokens) - new


def check_seed(seed: int) -> int:
    """One random engine with its requests -> number of tokens compared."""
    rng = random.Random(seed)
    models, requests, samples = random_models(rng), random_requests(rng), rng.randint(1, 3)
    update = rng.choice(["in_flight", "in_flight", "drain"])
    make = partial(
        NativeEngine,
        stop_ids=STOPS,
        seed=seed,
        slots=rng.randint(1, 6),
        max_length=MAX_LENGTH,
        update=update,
    )
    engine, runs_ahead, probability = make(models[0]), rng.random() < 0.5, rng.choice([0.0, 0.1, 0.3])
    # What was taken out is computed anew by the weights in use: with weights in flight not what the spans say.
    if isinstance(engine.cache, PagedCache) and (update == "drain" or probability == 0.0):
        longest = max(len(r.prompt.token_ids) + max(len(r.prefix_ids), r.sampling.max_new_tokens) for r in requests)
        least = engine.cache.num_pages(max(longest, 12)) + 2
        engine = make(engine.decoder, max_cache_bytes=rng.randint(least, least + 5) * engine.cache.pool.page_bytes)
    if runs_ahead:
        engine._fused = StepsAhead(engine)
    weights = [make_weights_of(model, 0) for model in models]
    versions = itertools.count(1)

    def perhaps_load() -> None:
        if rng.random() < probability:
            version = next(versions)
            engine.load(replace(weights[version % NUM_VERSIONS], version=version))

    def stream() -> Iterator[Request | None]:
        for request in with_pauses(rng, requests):
            perhaps_load()
            yield request

    options = {"samples_per_prompt": samples, "sampling": Sampling(max_new_tokens=5), "between_steps": perhaps_load}
    if rng.random() < 0.3:
        early = engine.generate(stream(), **options)
        list(itertools.islice(early, rng.randint(1, 5)))
        early.close()
    found = list(engine.generate(stream(), **options))
    expected = {(r.prompt.id, r.first_sample + k) for r in requests for k in range(samples)}
    assert by_key(found).keys() == expected
    assert len(found) == len(expected)
    assert update == "in_flight" or all(len(completion.version_spans) == 1 for completion in found)
    by_id = {request.prompt.id: request for request in requests}
    return sum(check_completion(models, by_id[c.prompt_id], c, seed) for c in found)


@pytest.mark.parametrize("seed", range(16))
def test_every_token_is_what_a_plain_pass_would_choose(seed):
    check_seed(seed)


@pytest.mark.parametrize("seed", range(16, 32))
def test_every_token_is_what_a_plain_pass_would_choose_with_pages(seed, monkeypatch):
    keep_in_pages(monkeypatch)
    check_seed(seed)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        if "pages" in sys.argv:
            keep_in_pages(patch)
        print(f"{sum(check_seed(1000 + index) for index in range(int(sys.argv[1]))):,} tokens as they must be")
