"""The engine over transformers decodes many prompts together, and each response is what it would be alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from tiny_models import GROUPED, SHAPE, VOCABULARY, by_key, make_prompt, make_tiny_model, make_weights_of
from transformers import AutoModelForCausalLM

from tba.engine.transformers_engine import TransformersEngine, cache_abilities
from tba.types import Request, Sampling

pytestmark = pytest.mark.slow

OTHERS = {
    "cohere": lambda: transformers.CohereConfig(**GROUPED),
    "bloom": lambda: transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=3, n_head=4),
    "falcon": lambda: transformers.FalconConfig(**SHAPE, new_decoder_architecture=False, multi_query=True),
    # Attention and states in every layer: its cache selects the rows of the keys alone.
    "falcon-h1": lambda: transformers.FalconH1Config(
        **GROUPED,
        mamba_d_ssm=32,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_n_groups=1,
        mamba_chunk_size=8,
    ),
    # Left to itself it counts positions wrongly when it reads with its cache.
    "bamba": lambda: transformers.BambaConfig(
        **GROUPED, mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1, attn_layer_indices=[1]
    ),
    "mamba": lambda: transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=8, bos_token_id=1, eos_token_id=2
    ),
}


def make_model(name: str):
    if name == "gpt-oss":
        return make_tiny_model(name)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(OTHERS[name]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
    return model


def make_engine(model, **changes) -> TransformersEngine:
    return TransformersEngine(model, **{"stop_ids": [2, 3, 4], "seed": 0, "max_length": 64, "slots": 64, **changes})


def mixed_requests() -> list[Request]:
    """Prompts of many lengths, some with a prefix and with sampling of their own."""
    requests = []
    for index, length in enumerate((3, 14, 1, 9, 9, 5)):
        prefix = np.array([6, 7, 8][: index % 3], np.int32)
        own = Sampling(max_new_tokens=6, temperature=0.7, top_p=0.8, min_new_tokens=4) if index % 2 else None
        requests.append(Request(prompt=make_prompt(f"p{index}", length), prefix_ids=prefix, sampling=own))
    return requests


@pytest.mark.parametrize("name", [*OTHERS, "gpt-oss"])
def test_responses_decoded_together_are_those_decoded_alone(name):
    model, sampling = make_model(name), Sampling(max_new_tokens=17)
    together, alone = (
        by_key(make_engine(model, slots=slots).generate(mixed_requests(), samples_per_prompt=3, sampling=sampling))
        for slots in (64, 1)
    )
    assert together.keys() == alone.keys()
    for key, completion in alone.items():
        assert together[key].token_ids.tolist() == completion.token_ids.tolist()
        np.testing.assert_allclose(together[key].policy_log_probs, completion.policy_log_probs, atol=2e-5)
        np.testing.assert_allclose(together[key].behaviour_log_probs, completion.behaviour_log_probs, atol=2e-5)
        assert together[key].finish == completion.finish


def test_a_batch_of_many_prompts_takes_as_many_passes_as_its_longest_response():
    model, sampling = make_model("cohere"), Sampling(max_new_tokens=12, min_new_tokens=12)
    passes = []
    model.register_forward_hook(lambda module, args, output: passes.append(output.logits.shape[0]))
    engine = make_engine(model, slots=64)
    assert engine.abilities == (True, True, True, True)
    passes.clear()
    requests = [Request(prompt=make_prompt(f"p{index}", 2 + index)) for index in range(8)]
    assert len(list(engine.generate(requests, samples_per_prompt=4, sampling=sampling))) == 32
    assert passes == [8] + [32] * 11  # each prompt is read once


def test_rows_that_have_finished_leave_the_batch():
    model = make_model("cohere")
    engine = make_engine(model, slots=64)
    assert engine.abilities == (True, True, True, True)
    sizes = []
    model.register_forward_hook(lambda module, args, output: sizes.append(output.logits.shape[0]))
    requests = [
        Request(prompt=make_prompt(f"p{index}", 3), sampling=Sampling(max_new_tokens=new, min_new_tokens=new))
        for index, new in enumerate((2, 2, 2, 20))
    ]
    list(engine.generate(requests, samples_per_prompt=1, sampling=Sampling(max_new_tokens=20)))
    assert sizes == [4, 4] + [1] * 18


def test_a_model_with_states_decodes_prompts_of_one_length_together():
    assert not cache_abilities(make_model("mamba")).pads
    assert not cache_abilities(make_model("falcon-h1")).selects
    assert cache_abilities(make_model("bamba")).caches  # not so where it is not told positions
    assert cache_abilities(make_model("bloom"))[1:] == (True, True, True)


def test_weights_that_arrive_in_a_batch_open_a_span_in_each_open_response():
    old, new = make_tiny_model("llama", seed=0), make_tiny_model("llama", seed=1)
    engine, calls = make_engine(old), []

    def load_once() -> None:
        calls.append(None)
        if len(calls) == 4:
            engine.load(make_weights_of(new, version=5))

    sampling = Sampling(max_new_tokens=8, min_new_tokens=8)
    requests = [Request(prompt=make_prompt("a", 3)), Request(prompt=make_prompt("b", 6))]
    found = list(engine.generate(requests, samples_per_prompt=1, sampling=sampling, between_steps=load_once))
    assert [completion.version_spans for completion in found] == [((0, 0), (3, 5))] * 2


def test_a_trial_on_a_model_that_says_the_same_after_everything_is_as_strict():
    model = make_model("mamba")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1e-3)
    assert not cache_abilities(model).pads
    assert cache_abilities(model).caches
