"""LoRA in engines: what is generated follows the trainer's adapter from the first step on, in half precision too."""

import copy

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, make_requests, make_tiny_model, plain_log_probs
from transformers import AutoModelForCausalLM, LlamaConfig

from tba.config import GenerateConfig, LoraConfig
from tba.engine.decoder.decoder import Decoder
from tba.engine.decoder.spec import UnsupportedModel
from tba.engine.make_engine import make_engine, with_adapters
from tba.engine.native.engine import NativeEngine
from tba.models.load import add_lora, merged
from tba.models.weights import make_weights
from tba.types import Sampling

pytestmark = pytest.mark.slow

SAMPLING = Sampling(max_new_tokens=8)


def adapted(model, *, noise: float, seed: int = 0, **config):
    """A copy of the model with an adapter that changes it."""
    model = copy.deepcopy(model)
    add_lora(model, LoraConfig(rank=4, **config), base="tiny", seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(noise * torch.randn(parameter.shape, generator=generator))
    return model


def make_native(model, **changes) -> NativeEngine:
    return NativeEngine(model, **{"stop_ids": [2], "seed": 0, "slots": 3, "max_length": 40, **changes})


WITH_EXPERTS = [family for family in FAMILIES if family.startswith(("mixtral", "qwen3-moe", "olmoe"))]


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_an_adapter_of_experts_has_no_place_beside_the_matrices(family):
    base = make_tiny_model(family)
    with pytest.raises(UnsupportedModel, match=r"its adapter changes model\.layers\.0\.mlp\.experts"):
        make_native(base).keep_adapter_apart(adapted(base, noise=0.0))


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in WITH_EXPERTS])
def test_an_adapter_beside_the_matrices_computes_what_it_computes_in_the_trainer(family):
    base = make_tiny_model(family, spread=3.0)
    trainer = adapted(base, noise=0.3)
    engine = make_native(base)
    engine.keep_adapter_apart(adapted(base, noise=0.0, seed=5))
    engine.load(make_weights(trainer, version=3))
    requests = make_requests(5, 2)
    for found in engine.generate(requests, samples_per_prompt=2, sampling=SAMPLING):
        prompt = requests[int(found.prompt_id[1:])].prompt
        expected = plain_log_probs(trainer, prompt.token_ids, found.token_ids)
        np.testing.assert_allclose(found.policy_log_probs, expected, atol=1e-4)
        assert found.version_spans == ((0, 3),)
        assert np.abs(plain_log_probs(base, prompt.token_ids, found.token_ids) - expected).max() > 0.01


def in_fp32(decoder: Decoder) -> Decoder:
    """The same numbers in fp32 arithmetic, so that only the rounding of what was loaded shows."""
    weights = decoder.weights
    tied = weights.head is weights.embedding
    weights.embedding = weights.embedding.float()
    weights.head = weights.embedding if tied else weights.head.float()
    for layer in weights.layers:
        for linear in (layer.qkv, layer.output, layer.mlp.up, layer.mlp.down):
            linear.weight = linear.weight.float()
            if linear.low_rank is not None:
                down, up = linear.low_rank.down.float(), linear.low_rank.up.float()
                linear.low_rank = type(linear.low_rank)(down=down, up=up)
    decoder.dtype = torch.float32
    return decoder


def log_prob(model, ids):
    log_probs = torch.log_softmax(model(ids[:, :-1], use_cache=False).logits, -1)
    return log_probs.gather(2, ids[:, 1:, None]).sum(1).mean()


def scored(engine, ids) -> float:
    """Mean log-prob of the responses, as `log_prob` has it."""
    rows = ids.numpy().astype(np.int32)
    return float(np.mean([scores.sum() for scores in engine.score(list(rows[:, :1]), list(rows[:, 1:]), 1.0)]))


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("kind", ["native", "transformers"])
def test_an_engine_in_bf16_has_the_trainers_gain_after_the_first_steps(kind, steps):
    """Merged in bf16 it had 16% of the gain after one step of Adam at the default rate, and 65% after five."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=97, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, eos_token_id=2,
    )  # fmt: skip
    base = AutoModelForCausalLM.from_config(shape).eval().to(torch.bfloat16)
    ids = torch.from_numpy(np.random.default_rng(0).integers(5, 97, (4, 24)))
    engine = make_engine(base, [2], GenerateConfig(engine=kind, slots=4), seed=0, max_length=64)
    trainer = adapted(base, noise=0.0).float()  # the same base, fp32 arithmetic
    optimizer = torch.optim.AdamW([p for p in trainer.parameters() if p.requires_grad], lr=2.4e-5, weight_decay=0.0)
    before = float(log_prob(trainer, ids).detach())
    for _ in range(steps):
        optimizer.zero_grad()
        (-log_prob(trainer, ids)).backward()
        optimizer.step()
    gain = float(log_prob(trainer, ids).detach()) - before
    with_adapters(engine, adapted(base, noise=0.0, seed=5)).load(make_weights(trainer, version=steps))
    if kind == "native":
        in_fp32(engine.decoder)
    else:
        engine.model.float()
    assert engine.version == steps
    assert scored(engine, ids) - before == pytest.approx(gain, rel=0.02)


def test_in_fp32_an_adapter_is_merged_and_costs_nothing_to_decode():
    base = make_tiny_model("llama")
    trainer, engine = adapted(base, noise=0.3), make_native(base)
    with_adapters(engine, adapted(base, noise=0.0)).load(make_weights(trainer, version=1))
    assert engine.decoder.adapter is None
    found = next(engine.generate(make_requests(4), samples_per_prompt=1, sampling=SAMPLING))
    prompt = make_requests(4)[0].prompt.token_ids
    np.testing.assert_allclose(found.policy_log_probs, plain_log_probs(trainer, prompt, found.token_ids), atol=1e-4)


def test_a_sibling_has_the_adapter_and_a_newer_one_replaces_it():
    base = make_tiny_model("llama")
    model = adapted(base, noise=0.0)
    engine = make_native(base)
    clone_for_evaluation = engine.clone_for_evaluation()
    engine.keep_adapter_apart(model)
    for version in (1, 2):
        trainer = adapted(base, noise=0.3, seed=version)
        engine.load(make_weights(trainer, version=version))
        (found,) = engine.clone_for_evaluation().generate(make_requests(4), samples_per_prompt=1, sampling=SAMPLING)
        prompt = make_requests(4)[0].prompt.token_ids
        np.testing.assert_allclose(found.policy_log_probs, plain_log_probs(trainer, prompt, found.token_ids), atol=1e-4)
        assert found.version_spans == ((0, version),)
    assert engine.clone_for_evaluation() is clone_for_evaluation


def test_an_adapter_on_something_else_than_a_layers_matrices_is_merged_with_a_warning(caplog):
    base = make_tiny_model("llama", spread=3.0)
    model = adapted(base, noise=0.0, targets=["q_proj", "lm_head"])
    with pytest.raises(UnsupportedModel, match="its adapter changes lm_head, which is no matrix of a layer"):
        make_native(base).keep_adapter_apart(model)
    base, model = base.to(torch.bfloat16), model.to(torch.bfloat16)
    engine = make_native(base, dtype=torch.bfloat16)
    with_adapters(engine, model).load(make_weights(model, version=1))
    assert "LoRA is merged in torch.bfloat16, which loses small changes: its adapter changes lm_head" in caplog.text
    assert engine.version == 1


@pytest.mark.parametrize("change", ["missing", "shape"])
def test_an_adapter_that_does_not_fit_is_refused_and_nothing_is_copied(change):
    base = make_tiny_model("llama")
    engine = make_native(base)
    engine.keep_adapter_apart(adapted(base, noise=0.0))
    weights = make_weights(adapted(base, noise=0.3), version=1)
    tensors = dict(weights.tensors)
    name = list(tensors)[-1]
    if change == "missing":
        del tensors[name]
    else:
        tensors[name] = tensors[name][:-1]
    with pytest.raises((KeyError, ValueError), match=r"lora_B\.default\.weight"):
        engine.load(type(weights)(version=1, tensors=tensors))
    assert engine.version == 0
    assert not engine.decoder.weights.layers[0].qkv.low_rank.up.any()


def test_merged_weights_are_still_what_is_exported():
    base = make_tiny_model("llama")
    model = adapted(base, noise=0.3)
    assert set(merged(model, make_weights(model, version=0)).tensors) == {name for name, _ in base.named_parameters()}
