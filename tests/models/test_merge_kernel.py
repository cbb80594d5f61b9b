"""Merging two attentions, against one attention over both sets of keys; on a GPU, or on a CPU with TRITON_INTERPRET=1."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: it comes with torch for CUDA.")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("kernels need a GPU, or TRITON_INTERPRET=1", allow_module_level=True)
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
T, H, D = 5, 3, 24


def attention(scores_HTS: torch.Tensor, values_SHD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, H, D] and log-sums [H, T]."""
    return torch.einsum("hts,shd->thd", scores_HTS.softmax(-1), values_SHD), scores_HTS.logsumexp(-1)


@pytest.mark.parametrize("distance", [0.0, 30.0, 500.0])
def test_it_is_the_attention_over_both_sets_of_keys(distance):
    """Also where one set counts for nothing, at a distance that fp32 cannot exponentiate."""
    from tba.models.kernels import merge

    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(H, T, 7, generator=generator)
    scores[:, ::2, :4] += distance
    values = torch.randn(7, H, D, generator=generator)
    want, want_sums = attention(scores.double(), values.double())
    one, one_sums = attention(scores[..., :4], values[:4])
    other, other_sums = attention(scores[..., 4:], values[4:])
    out = torch.full((T + 2, H, D), 9.0, device=DEVICE)
    sums = torch.full((H, T + 2), 9.0, device=DEVICE)
    merge(*(part.to(DEVICE) for part in (one, one_sums, other, other_sums)), out[2:], sums[:, 2:])
    assert (out[:2] == 9.0).all()
    assert (sums[:, :2] == 9.0).all()
    assert (out[2:].cpu() - want).abs().max() < 1e-5
    assert (sums[:, 2:].cpu() - want_sums).abs().max() < 1e-5 * max(1.0, distance)
