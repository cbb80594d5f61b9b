"""Where an adapter may sit: experts, head and embedding compute, train and merge alike; tied ones are refused."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from tba.config import ConfigError, LoraConfig
from tba.models.load import add_lora, load_published, merged, with_adapter
from tba.models.packing import pack
from tba.models.policy import PolicyModel
from tba.models.weights import make_weights

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE),
    "llama-tied": lambda: transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=8
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "phimoe": lambda: transformers.PhimoeConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "jamba": lambda: transformers.JambaConfig(
        **SHAPE, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, num_experts=2, mamba_d_state=8,
        mamba_dt_rank=8, use_mamba_kernels=False,
    ),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=64),
}  # fmt: skip
HEAD = ("q_proj", "lm_head")
EMBEDDING = ("q_proj", "embed_tokens")
CASES = [
    ("qwen3_moe", "all-linear"),
    ("mixtral", "all-linear"),
    ("phimoe", "all-linear"),
    ("jamba", "all-linear"),
    ("gpt2", "all-linear"),
    ("llama", HEAD),
    ("llama", EMBEDDING),
]


def make_model(name: str):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    return model


def adapted(name: str, targets, *, seed: int = 0, noise: float = 0.2):
    model = make_model(name)
    add_lora(model, LoraConfig(rank=4, targets=targets), base="tiny", seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key or "lora_embedding" in key:
                parameter.copy_(noise * torch.randn(parameter.shape, generator=generator))
    return model


def sequences():
    generator = torch.Generator().manual_seed(3)
    tokens = lambda n: torch.randint(3, 50, (n,), generator=generator)  # noqa: E731
    return [tokens(5), tokens(2)], [[tokens(7), tokens(4)], [tokens(8)]]


def plain_log_probs(model) -> torch.Tensor:
    parts = []
    for prompt, own in zip(*sequences()):
        for response in own:
            logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1].float()
            parts.append(torch.log_softmax(logits, -1).gather(1, response[:, None])[:, 0])
    return torch.cat(parts)


@pytest.mark.parametrize(("name", "targets"), CASES)
def test_merged_weights_compute_what_the_adapted_model_computes(name, targets):
    model, other = adapted(name, targets), adapted(name, targets, seed=5)
    weights = merged(other, make_weights(model, version=3))
    plain = make_model(name)
    with torch.no_grad():
        want, before = plain_log_probs(model), plain_log_probs(plain)
        load_published(plain, weights.tensors)
        got = plain_log_probs(plain)
    assert (got - want).abs().max() < 1e-4
    assert (got - before).abs().max() > 0.1


@pytest.mark.parametrize(("name", "targets"), CASES)
def test_every_part_of_an_adapter_gets_the_gradient_of_a_plain_pass(name, targets):
    model = adapted(name, targets)
    want = plain_log_probs(model)
    weight = torch.arange(len(want)) / len(want)
    trained = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
    expected = torch.autograd.grad((want * weight).sum(), list(trained.values()))
    policy = PolicyModel(model)
    assert policy.packed == (name != "jamba")
    packed = pack(*sequences(), device=CPU)
    got = policy.forward(packed, temperature=1.0).log_pi_N
    assert (got - want).abs().max() < 1e-4
    (got * weight).sum().backward()
    for key, gradient in zip(trained, expected):
        assert trained[key].grad is not None, key
        assert (trained[key].grad - gradient).norm() <= 1e-4 * gradient.norm(), key


@pytest.mark.parametrize("targets", [HEAD, EMBEDDING])
def test_an_adapter_on_tied_embeddings_is_refused(targets):
    with pytest.raises(ConfigError, match=rf"model\.lora\.targets.*{targets[1]}.*tied"):
        add_lora(make_model("llama-tied"), LoraConfig(rank=4, targets=targets), base="tiny", seed=0)


@pytest.mark.parametrize(("name", "target"), [("phimoe", "router"), ("jamba", "dt_proj")])
def test_an_adapter_that_the_model_would_not_use_is_refused(name, target):
    with pytest.raises(ConfigError, match=rf"model\.lora\.targets.*{target}, which cannot have an adapter"):
        add_lora(make_model(name), LoraConfig(rank=4, targets=("q_proj", target)), base="tiny", seed=0)


def test_targets_that_the_model_does_not_have_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"model\.lora\.targets.*q_projection"):
        add_lora(make_model("llama"), LoraConfig(rank=4, targets=("q_projection",)), base="tiny", seed=0)


@pytest.mark.parametrize(("name", "targets"), CASES)
def test_a_saved_adapter_loads_merged(name, targets, tmp_path):
    base, model = tmp_path / "base", adapted(name, targets)
    make_model(name).save_pretrained(base)
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(tmp_path / "adapter")
    whole = with_adapter(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter").eval()
    with torch.no_grad():
        assert (plain_log_probs(whole) - plain_log_probs(model)).abs().max() < 1e-4
