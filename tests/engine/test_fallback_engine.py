"""The engine over transformers' own forward pass: weights of models with buffers, angles that change with the length."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from tiny_models import GROUPED, SHAPE, generate_greedily, make_requests, make_weights_of, plain_log_probs
from transformers import AutoModelForCausalLM

from tba.engine.scoring import PolicyScorer
from tba.engine.transformers_engine import TransformersEngine
from tba.types import Sampling, Weights

pytestmark = pytest.mark.slow

STOPS = [2, 3, 4]
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
WITH_BUFFERS = {
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**SHAPE, **LATENT, **EXPERTS),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(**GROUPED, **EXPERTS, head_dim=8),
    "gemma4_text": lambda: transformers.Gemma4TextConfig(
        **GROUPED, head_dim=8, vocab_size_per_layer_input=37, hidden_size_per_layer_input=8
    ),
}


def make_model(config, *, seed: int = 0):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


def make_engine(model, **changes):
    return TransformersEngine(model, **{"stop_ids": STOPS, "seed": 0, "max_length": 64, **changes})


def make_scorer(model):
    return PolicyScorer(model, token_budget=64, max_length=64)


@pytest.mark.parametrize("family", WITH_BUFFERS)
def test_published_weights_load_though_buffers_are_not_among_them(family):
    new = make_model(WITH_BUFFERS[family](), seed=1)
    weights = make_weights_of(new, version=3)
    assert set(new.state_dict()) - set(weights.tensors), "the model has persistent buffers"
    engine, scorer = (kind(make_model(WITH_BUFFERS[family]())) for kind in (make_engine, make_scorer))
    engine.load(weights)
    scorer.load(weights)
    (request,) = make_requests(6)
    (found,) = engine.generate([request], samples_per_prompt=1, sampling=Sampling(max_new_tokens=8))
    prompt = request.prompt.token_ids
    want = plain_log_probs(new, prompt, found.token_ids)
    np.testing.assert_allclose(found.policy_log_probs, want, atol=1e-4)
    np.testing.assert_allclose(scorer.score([prompt], [found.token_ids], 1.0)[0], want, atol=1e-4)


SWITCH = 16
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 3.0, 5.0, 8.0],
    "original_max_position_embeddings": SWITCH,
    "factor": 8.0,
}
CHANGING_ANGLES = {
    # Its `generate` starts again where the angles change; that of a Llama with the same angles does not.
    "phi3": lambda: transformers.Phi3Config(
        **GROUPED, original_max_position_embeddings=SWITCH, rope_parameters=LONGROPE
    ),
    "llama": lambda: transformers.LlamaConfig(**GROUPED, rope_parameters=LONGROPE),
}


def spread(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0 if parameter.ndim > 1 else 1.0)
    return model


@pytest.mark.parametrize("family", CHANGING_ANGLES)
def test_where_the_angles_change_each_token_has_those_of_a_plain_pass_over_what_was_there(family):
    model = spread(make_model(CHANGING_ANGLES[family]()))
    requests = make_requests(6, SWITCH, SWITCH + 5)
    engine, sampling = make_engine(model), Sampling(max_new_tokens=20, min_new_tokens=20)
    for found in engine.generate(requests, samples_per_prompt=2, sampling=sampling):
        prompt = requests[int(found.prompt_id[1:])].prompt.token_ids
        tokens = found.token_ids
        want = [plain_log_probs(model, np.concatenate([prompt, tokens[:k]]), tokens[k : k + 1])[0] for k in range(20)]
        # plain_log_probs reads the last token too, which is one too many at the switch itself.
        at_switch = SWITCH - len(prompt)
        gap = np.abs(found.policy_log_probs - want)
        assert max(gap[index] for index in range(20) if index != at_switch) < 1e-4


def test_greedy_tokens_across_the_switch_are_those_of_plain_passes():
    """Not those of transformers' `generate`, which in some versions (5.17) keeps keys with the angles from before."""
    model = spread(make_model(CHANGING_ANGLES["phi3"]()))
    requests = make_requests(3, 10, 14)
    sampling = Sampling(max_new_tokens=24, greedy=True)
    for found in make_engine(model, stop_ids=[36]).generate(requests, samples_per_prompt=1, sampling=sampling):
        prompt = requests[int(found.prompt_id[1:])].prompt.token_ids
        assert found.token_ids.tolist() == greedy_by_plain_passes(model, prompt, 24, stop_id=36)


def greedy_by_plain_passes(model, prompt_ids: np.ndarray, max_new_tokens: int, *, stop_id: int) -> list[int]:
    """Each token by a pass over everything before it, without keys and values of other passes."""
    ids = prompt_ids.tolist()
    while len(ids) < len(prompt_ids) + max_new_tokens and (len(ids) == len(prompt_ids) or ids[-1] != stop_id):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt_ids) :]


def make_mamba2():
    return transformers.Mamba2Config(
        vocab_size=37, hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, state_size=8, n_groups=1, expand=2,
        eos_token_id=2, bos_token_id=1, pad_token_id=0,
    )  # fmt: skip


def test_a_model_without_keys_and_values_decodes_from_its_state():
    model = spread(make_model(make_mamba2()))
    requests = make_requests(3, 9)
    sampling = Sampling(max_new_tokens=12, greedy=True)
    for found in make_engine(model).generate(requests, samples_per_prompt=1, sampling=sampling):
        prompt = requests[int(found.prompt_id[1:])].prompt.token_ids
        assert found.token_ids.tolist() == generate_greedily(model, prompt, 12, STOPS)
        want = plain_log_probs(model, prompt, found.token_ids)
        np.testing.assert_allclose(found.policy_log_probs, want, atol=1e-4)


def test_a_model_that_gives_no_state_at_all_reads_everything_again(monkeypatch):
    model = spread(make_model(transformers.Olmo2Config(**GROUPED)))
    forward = model.forward

    def without_cache(*arguments, **options):
        return transformers.modeling_outputs.CausalLMOutput(logits=forward(*arguments, **options).logits)

    monkeypatch.setattr(model, "forward", without_cache)
    (request,) = make_requests(5)
    (found,) = make_engine(model).generate(
        [request], samples_per_prompt=1, sampling=Sampling(max_new_tokens=9, min_new_tokens=9)
    )
    want = plain_log_probs(model, request.prompt.token_ids, found.token_ids)
    np.testing.assert_allclose(found.policy_log_probs, want, atol=1e-4)


@pytest.mark.parametrize("kind", [make_engine, make_scorer])
def test_weights_that_lack_a_parameter_are_refused_and_nothing_is_loaded(kind):
    model = make_model(transformers.Olmo2Config(**GROUPED))
    holder = kind(model)
    before = model.model.embed_tokens.weight.clone()
    tensors = {name: torch.zeros_like(tensor) for name, tensor in make_weights_of(model, 1).tensors.items()}
    tensors.pop("model.norm.weight")
    with pytest.raises(KeyError, match=r"missing names, the first 'model\.norm\.weight'"):
        holder.load(Weights(version=1, tensors=tensors))
    assert torch.equal(model.model.embed_tokens.weight, before)
