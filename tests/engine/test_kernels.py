"""Triton kernels against the plain code they stand in for, on a GPU, or slowly on a CPU with TRITON_INTERPRET=1.

TRITON_INTERPRET=1 python -m pytest tests/engine/test_kernels.py        (needs `pip install triton`)
"""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from builders import tiny_llama
from test_engine_lora import adapted
from tiny_models import make_prompt, make_tiny_model, make_weights_of, plain_log_probs

from tba.engine.native.cuda_graphs import FusedDecode
from tba.engine.native.engine import NativeEngine
from tba.engine.native.paged_cache import PAGE
from tba.models.log_probs import _log_probs_of_chunk
from tba.models.weights import make_weights
from tba.types import Prompt, Request, Sampling

pytest.importorskip("triton", reason="Triton is not installed: it comes with torch for CUDA.")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("kernels need a GPU, or TRITON_INTERPRET=1", allow_module_level=True)
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def engines(model) -> tuple[NativeEngine, NativeEngine]:
    """The same engine with fused and with plain passes and steps."""
    fused, plain = (NativeEngine(model, stop_ids=[2], seed=0, slots=3, max_length=32, device=DEVICE) for _ in range(2))
    plain._fused, plain.decoder.fused_pass = None, None
    plain._make_cache(0)
    if INTERPRETED:  # the cache that CUDA has
        fused._make_cache(PAGE)
        fused._fused = FusedDecode(fused.decoder, fused.cache, fused.state, fused._is_stop)
        fused.decoder.fused_pass = fused._fused.fused_pass
    assert fused._fused is not None
    return fused, plain


def responses(engine: NativeEngine, sampling: Sampling) -> dict:
    prompts = [Prompt(id=f"p{i}", token_ids=np.array([1, 5 + i], np.int32), text="") for i in range(2)]
    requests = [Request(prompt=prompt) for prompt in prompts]
    found = engine.generate(requests, samples_per_prompt=2, sampling=sampling)
    return {(c.prompt_id, c.sample_index): c for c in found}


# Of experts in fp32 no graph can be captured; in bf16 see tests/engine/test_engine_load_check.py.
FAMILIES = [
    "llama",
    "qwen3",
    "gemma",
    "smollm3",
    "granite",
    *(["qwen3-moe", "olmoe", "gpt-oss"] if INTERPRETED else []),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"greedy": True},
        {"temperature": 1.3, "policy_temperature": 0.9},
        {"top_p": 0.8, "top_k": 9, "min_new_tokens": 4},
    ],
    ids=["plain", "greedy", "tempered", "truncated"],
)
def test_fused_decoding_gives_the_tokens_and_log_probs_of_the_plain_step(family, settings):
    model = tiny_llama() if family == "llama" else make_tiny_model(family)
    fused, plain = engines(model)
    sampling = Sampling(max_new_tokens=5, **settings)
    got, want = responses(fused, sampling), responses(plain, sampling)
    assert got.keys() == want.keys()
    for key, completion in want.items():
        assert np.array_equal(got[key].token_ids, completion.token_ids)
        assert np.abs(got[key].policy_log_probs - completion.policy_log_probs).max() < 1e-4
        assert np.abs(got[key].behaviour_log_probs - completion.behaviour_log_probs).max() < 1e-4


def test_an_adapter_that_comes_when_graphs_are_captured_acts_from_then_on():
    model = tiny_llama().to(DEVICE)
    fused, plain = engines(model)
    sampling = Sampling(max_new_tokens=3)
    before = responses(fused, sampling)
    weights = make_weights(adapted(model, noise=0.5), version=1)
    for engine in (fused, plain):
        engine.keep_adapter_apart(adapted(model, noise=0.0))
        engine.load(weights)
    got, want = responses(fused, sampling), responses(plain, sampling)
    for key, completion in want.items():
        assert np.array_equal(got[key].token_ids, completion.token_ids)
        assert np.abs(got[key].policy_log_probs - completion.policy_log_probs).max() < 1e-4
    assert any(not np.array_equal(got[key].policy_log_probs, before[key].policy_log_probs) for key in got)


@pytest.mark.skipif(INTERPRETED, reason="too many steps for the interpreter: see tests/engine/test_engine_ahead.py")
def test_running_ahead_with_growing_tables_and_new_weights_in_between():
    models = {version: make_tiny_model("llama", seed=version) for version in range(4)}
    engine = NativeEngine(
        models[0].to(DEVICE), stop_ids=[2], seed=0, slots=8, max_length=96, update="drain", device=DEVICE
    )
    models[0].to("cpu")
    calls = 0

    def load() -> None:
        nonlocal calls
        calls += 1
        if calls % 20 == 0 and calls // 20 in models:
            weights = make_weights_of(models[calls // 20], calls // 20)
            engine.load(replace(weights, tensors={name: tensor.to(DEVICE) for name, tensor in weights.tensors.items()}))

    found = []
    for longest in (20, 33, 48):  # 33 is no multiple of 16: kernels of their own, and graphs captured anew
        requests = [
            Request(
                prompt=make_prompt(f"{longest}-{i}", 1 + i % 7), sampling=Sampling(max_new_tokens=1 + i * 7 % longest)
            )
            for i in range(60)
        ]
        prompts = {request.prompt.id: request.prompt.token_ids for request in requests}
        completions = list(
            engine.generate(
                requests, samples_per_prompt=2, sampling=Sampling(max_new_tokens=longest), between_steps=load
            )
        )
        assert len({(c.prompt_id, c.sample_index) for c in completions}) == len(completions) == 120
        found += [(completion, prompts[completion.prompt_id]) for completion in completions]
    assert {completion.version for completion, _ in found} == {0, 1, 2, 3}
    for completion, prompt in found:
        expected = plain_log_probs(models[completion.version], prompt, completion.token_ids)
        np.testing.assert_allclose(completion.policy_log_probs, expected, atol=1e-3)
    assert engine._fused._captures
    assert engine._fused._graphs


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("vocabulary", [40, 5000])
def test_fused_log_probs_have_the_values_and_gradients_of_the_plain_ones(vocabulary, keep):
    from tba.models.kernels import chosen_log_probs

    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 16, generator=generator).to(DEVICE) for n in (7, vocabulary))
    targets = torch.randint(vocabulary, (7,), generator=generator).to(DEVICE)
    weight = torch.randn(7, generator=generator).to(DEVICE)
    results = []
    for fused in (True, False):
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, head)]
        if fused:
            log_probs, entropy = chosen_log_probs(
                *leaves, targets, temperature=0.7, logits_at_once=3 * vocabulary, keep=keep
            )
        else:
            log_probs, entropy = _log_probs_of_chunk(*leaves, targets, 0.7, None, None)
        (log_probs * weight).sum().backward()
        results.append((log_probs.detach(), entropy, leaves[0].grad, leaves[1].grad))
    for got, want in zip(*results):
        assert (got - want).abs().max() < 5e-5 * max(1.0, want.abs().max().item())
