"""Which models are packed: those whose packed log-probs and gradients are those of plain passes; others run one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from tba.models import packed_check
from tba.models.packed_check import PlainPassFailed
from tba.models.packing import pack, split_by_length
from tba.models.policy import PolicyModel, make_critic

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
GROUPED = {**SHAPE, "num_key_value_heads": 2}
FOUR = {**GROUPED, "num_hidden_layers": 4}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ONE_BY_ONE = {
    "falcon": lambda: transformers.FalconConfig(
        vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4
    ),
    "bloom": lambda: transformers.BloomConfig(vocab_size=97, hidden_size=64, n_layer=2, n_head=4),
    "gptj": lambda: transformers.GPTJConfig(vocab_size=97, n_embd=64, n_layer=2, n_head=4, rotary_dim=8),
    "jamba": lambda: transformers.JambaConfig(
        **FOUR, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, num_experts=2, mamba_d_state=8,
        mamba_dt_rank=8, use_mamba_kernels=False,
    ),
    "lfm2": lambda: transformers.Lfm2Config(**FOUR, layer_types=["conv", "full_attention", "conv", "full_attention"]),
    "falcon_h1": lambda: transformers.FalconH1Config(
        **GROUPED, head_dim=16, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16, mamba_n_groups=1
    ),
    "phimoe-window": lambda: transformers.PhimoeConfig(**GROUPED, **LOCAL_EXPERTS, sliding_window=30),
    "qwen2_moe-window": lambda: transformers.Qwen2MoeConfig(
        **GROUPED, **MOE, shared_expert_intermediate_size=48, use_sliding_window=True, sliding_window=30,
        max_window_layers=2,
    ),
    "llama4_text": lambda: transformers.Llama4TextConfig(
        **GROUPED, head_dim=16, intermediate_size_mlp=96, num_local_experts=4, attention_chunk_size=16
    ),
}  # fmt: skip
PACKED = {
    "granite": lambda: transformers.GraniteConfig(
        **GROUPED, embedding_multiplier=3.0, attention_multiplier=0.1, residual_multiplier=0.5, logits_scaling=2.0
    ),
    "cohere": lambda: transformers.CohereConfig(**GROUPED, logit_scale=0.25),
    "olmo3": lambda: transformers.Olmo3Config(**FOUR, sliding_window=30),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**GROUPED, **MOE, head_dim=16),
    "gpt_oss": lambda: transformers.GptOssConfig(**GROUPED, **LOCAL_EXPERTS, head_dim=16),
    "gpt_oss-window": lambda: transformers.GptOssConfig(**GROUPED, **LOCAL_EXPERTS, head_dim=16, sliding_window=9),
}


def make_model(config, *, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "conv" not in name:
                parameter.mul_(4.0)
            if "sinks" in name:
                parameter.normal_(1.0, 1.0)
    return model.to(dtype)


def sequences(*, longest: int = 40):
    generator = torch.Generator().manual_seed(3)
    tokens = lambda n: torch.randint(5, 97, (n,), generator=generator)  # noqa: E731
    return [tokens(9), tokens(4)], [[tokens(longest - 9), tokens(6)], [tokens(12)]]


def plain_log_probs(model, prompts, responses) -> torch.Tensor:
    parts = []
    for prompt, own in zip(prompts, responses):
        for response in own:
            row = torch.cat([prompt, response[:-1]])
            logits = model(row[None], use_cache=False).logits[0, len(prompt) - 1 :].float()
            parts.append(torch.log_softmax(logits, -1).gather(1, response[:, None])[:, 0])
    return torch.cat(parts)


def log_probs_and_gradient(model, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    (values * torch.linspace(-1, 1, len(values))).sum().backward()
    parts = [parameter.grad.float().flatten() for parameter in model.parameters() if parameter.grad is not None]
    return values.detach(), torch.cat(parts)


def check_exact(config, *, packed: bool) -> None:
    model = make_model(config)
    prompts, responses = sequences()
    want = log_probs_and_gradient(model, plain_log_probs(model, prompts, responses))
    policy = PolicyModel(model)
    assert policy.packed == packed
    row = pack(prompts, responses, device=CPU)
    got = log_probs_and_gradient(model, policy.forward(row, temperature=1.0).log_pi_N)
    assert (got[0] - want[0]).abs().max() < 1e-4
    assert (got[1] - want[1]).norm() < 1e-4 * want[1].norm()


@pytest.mark.parametrize("family", PACKED)
def test_packed_models_have_the_log_probs_and_gradients_of_plain_passes(family):
    check_exact(PACKED[family](), packed=True)


@pytest.mark.parametrize("family", ONE_BY_ONE)
def test_models_that_cannot_be_packed_exactly_are_exact_one_by_one(family, caplog):
    check_exact(ONE_BY_ONE[family](), packed=False)
    assert "one sequence at a time" in caplog.text


@pytest.mark.parametrize("family", ONE_BY_ONE)
def test_in_bf16_the_same_models_are_found_out(family):
    model = make_model(ONE_BY_ONE[family](), dtype=torch.bfloat16)
    prompts, responses = sequences()
    with torch.no_grad():
        want = plain_log_probs(model, prompts, responses)
        policy = PolicyModel(model)
        row = pack(prompts, responses, device=CPU)
        got = policy.forward(row, temperature=1.0).log_pi_N
    assert not policy.packed
    assert torch.equal(got, want)


@pytest.mark.parametrize("family", ["granite", "lfm2"])
def test_the_trial_leaves_the_model_as_it_was(family):
    config = {**PACKED, **ONE_BY_ONE}[family]()
    model = make_model(config, dtype=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    addresses = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    attention, layers = model.config._attn_implementation, len(model.model.layers)
    policy = PolicyModel(model)
    after = model.state_dict()
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    assert addresses == {name: tensor.data_ptr() for name, tensor in after.items()}
    assert len(model.model.layers) == layers
    assert model.config._attn_implementation == ("tba_packed" if policy.packed else attention)


def test_an_argument_of_attention_that_is_not_known_is_refused(caplog):
    model = make_model(PACKED["granite"]())
    forward = model.model.layers[0].self_attn.forward

    def with_more(*arguments, **options):
        return forward(*arguments, **options, temperature_of_heads=torch.ones(4))

    model.model.layers[0].self_attn.forward = with_more
    assert not PolicyModel(model).packed
    assert "its attention takes temperature_of_heads, which is not known here" in caplog.text


def test_a_window_that_the_run_cannot_reach_does_not_count():
    policy = PolicyModel(make_model(ONE_BY_ONE["phimoe-window"]()), max_length=30)
    assert policy.packed


def test_only_as_many_layers_are_tried_as_there_are_kinds(monkeypatch):
    seen = []
    make = packed_check._Trial

    def counted(model, length):
        seen.append((len(model.model.layers), length))
        return make(model, length)

    monkeypatch.setattr(packed_check, "_Trial", counted)
    shape = {**GROUPED, "num_hidden_layers": 8}
    PolicyModel(make_model(transformers.Olmo3Config(**shape, sliding_window=30)))
    assert set(seen) == {(4, 24), (4, 38)}  # three of four layers have a window; 30 + 8 tokens reach beyond it
    seen.clear()
    PolicyModel(make_model(transformers.LlamaConfig(**shape)))
    assert set(seen) == {(2, 24)}


def test_a_model_whose_own_pass_fails_is_refused_by_name():
    model = make_model(PACKED["granite"]())
    model.model.layers[1].self_attn.q_proj.to(torch.float64)
    with pytest.raises(PlainPassFailed, match=r"GraniteForCausalLM cannot be trained.*fails in float32 on cpu"):
        PolicyModel(model)


# --- angles that change with the length ---------------------------------------------------------------------------------


def longrope(switch: int = 16):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [float(factor) for factor in np.linspace(1.0, 8.0, 8)],
        "original_max_position_embeddings": switch,
        "factor": 8.0,
    }
    return transformers.Phi3Config(
        **GROUPED, original_max_position_embeddings=switch, rope_parameters=rope, pad_token_id=0
    )


def test_each_sequence_has_the_angles_of_its_own_length_whatever_lies_beside_it():
    check_exact(longrope(), packed=True)


def test_responses_are_split_at_the_length_and_come_back_in_order():
    prompts, responses = sequences(longest=20)
    whole = pack(prompts, responses, device=CPU)
    (short, short_index), (long, long_index) = split_by_length(whole, 15)
    assert [len(row) for row, _ in short.rows()] == [9 + 5, 4 + 11]
    assert [len(row) for row, _ in long.rows()] == [9 + 10]
    tokens = torch.empty_like(whole.targets_M)
    tokens[short_index], tokens[long_index] = short.targets_M, long.targets_M
    assert torch.equal(tokens, whole.targets_M)
    assert split_by_length(whole, 100)[0][0] is whole


def test_a_critic_is_refused_where_a_prompt_has_two_sets_of_hidden_states():
    model = make_model(longrope())
    with pytest.raises(ValueError, match="longer than 16 tokens"):
        PolicyModel(model, critic=make_critic(model))
    assert PolicyModel(make_model(longrope()), critic=make_critic(model), max_length=16).packed
