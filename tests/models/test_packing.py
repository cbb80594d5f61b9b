"""Packed log-probs equal unpacked ones, for every supported shape, and sequences do not see each other."""

import pytest
import torch
from builders import tiny_llama
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    Qwen2Config,
    Qwen3Config,
)

from tba.models.packing import length_batches, pack, split_by_budget
from tba.models.policy import PolicyModel

SHAPE = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS = {
    "qwen2": Qwen2Config(**SHAPE, num_key_value_heads=2),
    "qwen3": Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=8),
    "gpt2": GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2),
    "gpt_neox": GPTNeoXConfig(**SHAPE),
    "gemma": GemmaConfig(**SHAPE, num_key_value_heads=1, head_dim=8),
    "gemma2": Gemma2Config(**SHAPE, num_key_value_heads=2, head_dim=8, sliding_window=5),
    "gemma3": Gemma3TextConfig(
        **SHAPE,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
    ),
}


def make_model(name: str):
    torch.manual_seed(0)
    if name == "llama":
        return tiny_llama()
    return AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager").eval()


def sequences() -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    generator = torch.Generator().manual_seed(3)

    def tokens(n: int) -> torch.Tensor:
        return torch.randint(3, 40, (n,), generator=generator)

    return [tokens(5), tokens(9), tokens(2)], [[tokens(7), tokens(1), tokens(4)], [tokens(3), tokens(11)], [tokens(8)]]


@torch.no_grad()
def plain_log_probs(model, prompts, responses, temperature: float) -> torch.Tensor:
    parts = []
    for prompt, own in zip(prompts, responses):
        for response in own:
            logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1].float()
            parts.append(torch.log_softmax(logits / temperature, -1).gather(1, response[:, None])[:, 0])
    return torch.cat(parts)


@pytest.mark.parametrize("name", ["llama", *CONFIGS])
def test_packed_log_probs_equal_unpacked_ones(name):
    prompts, responses = sequences()
    want = plain_log_probs(make_model(name), prompts, responses, 0.7)
    policy = PolicyModel(make_model(name))
    assert policy.packed
    packed = pack(prompts, responses, device=policy.device)
    with torch.no_grad():
        got = policy.forward(packed, temperature=0.7).log_pi_N
    assert (got - want).abs().max() < 1e-5


def test_changing_one_sequence_changes_no_others_log_probs():
    policy = PolicyModel(tiny_llama())
    prompts, responses = sequences()

    def log_probs() -> torch.Tensor:
        with torch.no_grad():
            packed = pack(prompts, responses, device=policy.device)
            return policy.forward(packed, temperature=1.0).log_pi_N

    before = log_probs()
    responses[0][0] = (responses[0][0] + 5) % 40
    after = log_probs()
    changed = len(responses[0][0])
    assert torch.equal(before[changed:], after[changed:])
    assert not torch.equal(before[:changed], after[:changed])


def test_entropy_is_that_of_the_whole_distribution():
    model = tiny_llama()
    prompts, responses = [torch.tensor([5, 6])], [[torch.tensor([7])]]
    with torch.no_grad():
        p = torch.softmax(model(prompts[0][None]).logits[0, -1] / 2.0, -1)
    policy = PolicyModel(model)
    packed = pack(prompts, responses, device=policy.device)
    assert policy.forward(packed, temperature=2.0).entropy_N.item() == pytest.approx(
        -(p * p.log()).sum().item(), abs=1e-5
    )


def test_chunked_log_probs_have_the_same_gradients(monkeypatch):
    from tba.models import log_probs

    generator = torch.Generator().manual_seed(0)
    # In bf16, because in fp32 a CPU computes them in another way.
    hidden, head = (torch.randn(rows, 4, generator=generator).bfloat16() for rows in (10, 6))
    targets = torch.randint(0, 6, (10,), generator=generator)

    def gradient() -> tuple[torch.Tensor, torch.Tensor]:
        leaf = hidden.clone().requires_grad_()
        values, _ = log_probs.chosen_log_probs(leaf, head, targets, temperature=0.5)
        (values * torch.arange(10)).sum().backward()
        return values.detach(), leaf.grad

    whole = gradient()
    monkeypatch.setattr(log_probs, "LOGITS_PER_CHUNK", 18)  # 3 rows a chunk
    chunked = gradient()
    assert torch.allclose(whole[0], chunked[0], atol=1e-6)
    assert torch.allclose(whole[1].float(), chunked[1].float(), atol=1e-6)


def test_equal_responses_are_computed_once_with_the_gradient_of_all():
    policy = PolicyModel(tiny_llama())
    response = torch.tensor([7, 8, 2])
    prompts, responses = [torch.tensor([5, 6])], [[response, torch.tensor([9, 2]), response.clone(), response.clone()]]
    gradients = []
    for together in (True, False):
        owners, own = (prompts, responses) if together else (prompts * 4, [[response] for response in responses[0]])
        packed = pack(owners, own, device=policy.device)
        policy.model.zero_grad()
        log_pi = policy.forward(packed, temperature=1.0).log_pi_N
        (log_pi * torch.arange(len(log_pi))).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.model.parameters()]))
        assert len(packed.input_ids_T) == (2 + 2 + 1 if together else 3 * (2 + 2) + (2 + 1))
    assert torch.allclose(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)


def test_batches_are_filled_in_order_up_to_the_budget_and_what_exceeds_it_runs_alone():
    # 3 + 4 = 7 of 8, then 9 alone, then 2 + 6 = 8 of 8, then 1
    assert split_by_budget([3, 4, 9, 2, 6, 1], max_tokens=8, cost=lambda batch, item: item) == [
        [3, 4],
        [9],
        [2, 6],
        [1],
    ]
    assert split_by_budget([], max_tokens=8, cost=lambda batch, item: item) == []


def test_a_prompt_is_paid_once_per_batch_and_again_in_the_next():
    # (prompt, length of the response); a prompt has 4 tokens: 4 + 3 + 3 = 10, then 4 + 5 = 9
    pairs = [("a", 3), ("a", 3), ("a", 5), ("b", 1)]

    def cost(batch, pair):
        return pair[1] + (0 if batch and batch[-1][0] == pair[0] else 4)

    assert split_by_budget(pairs, max_tokens=10, cost=cost) == [pairs[:2], pairs[2:3], pairs[3:]]


def test_an_item_may_be_refused_for_another_reason_than_tokens():
    batches = split_by_budget(
        range(5), max_tokens=100, cost=lambda batch, item: 1, joins=lambda batch, item: len(batch) < 2
    )
    assert batches == [[0, 1], [2, 3], [4]]


def test_batches_hold_similar_lengths_within_the_budget():
    assert length_batches([3, 9, 3], token_budget=512) == [[0, 2, 1]]
    assert length_batches([10, 10, 10], token_budget=20) == [[0, 1], [2]]
    assert length_batches([50], token_budget=20) == [[0]]
    # 1 x 900 with 8 x 100 would be 8100 padded tokens for 1700 real ones
    assert length_batches([900, *[100] * 8], token_budget=10_000) == [[1, 2, 3, 4, 5, 6, 7, 8], [0]]
