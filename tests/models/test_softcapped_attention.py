"""The one soft-capped attention against loops over single queries and keys."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tba.models.packed_attention import additive, softcapped_attention


def slowly(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, *, scale: float, cap: float) -> Tensor:
    """query [H, T, D], key and value [K, L, D], seen bool [T, L] -> [H, T, D], one query after the other."""
    group, rows = query.shape[0] // key.shape[0], []
    for head in range(query.shape[0]):
        for token in range(query.shape[1]):
            keys = [index for index in range(key.shape[1]) if seen[token, index]]
            scores = [(query[head, token] * key[head // group, index]).sum() * scale for index in keys]
            weights = [torch.exp(cap * torch.tanh(score / cap)) for score in scores]
            mixed = sum(weight * value[head // group, index] for weight, index in zip(weights, keys))
            rows.append(mixed / sum(weights))
    return torch.stack(rows).view(*query.shape)


def states(heads: int, kv_heads: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, 4, 6), (kv_heads, 5, 6), (kv_heads, 5, 6))
    return [(3 * torch.randn(shape, generator=generator)).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("cap", [2.0, 50.0])
def test_outputs_and_gradients_are_those_of_a_loop(heads, kv_heads, cap):
    seen = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)
    query, key, value = states(heads, kv_heads)
    found = softcapped_attention(query[None], key[None], value[None], additive(seen), scale=0.3, cap=cap)[0]
    want = slowly(query, key, value, seen, scale=0.3, cap=cap)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    gradients, expected = (torch.autograd.grad((out * weights).sum(), (query, key, value)) for out in (found, want))
    for got, right in zip(gradients, expected):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)


def test_without_a_mask_a_token_sees_itself_and_what_came_before():
    query, key, value = (state[:, :4] for state in states(2, 2))
    found = softcapped_attention(query, key, value, None, scale=0.5, cap=3.0)
    want = slowly(query, key, value, torch.ones(4, 4, dtype=torch.bool).tril(), scale=0.5, cap=3.0)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


def test_a_large_score_is_squashed_to_the_cap():
    # Scores 1000 and 0 become 2 and 0: the first key has weight e^2 / (e^2 + 1), not 1.
    query, key = torch.tensor([[[1.0]]]), torch.tensor([[[1000.0], [0.0]]])
    value = torch.tensor([[[1.0], [0.0]]])
    found = softcapped_attention(query, key, value, torch.zeros(1, 2), scale=1.0, cap=2.0)
    assert found.item() == pytest.approx(math.exp(2) / (math.exp(2) + 1))
