"""Sums over the copies of a token, against index_add; on a GPU, or on a CPU with TRITON_INTERPRET=1."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: it comes with torch for CUDA.")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("kernels need a GPU, or TRITON_INTERPRET=1", allow_module_level=True)
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


@pytest.mark.parametrize("heads", [1, 3])
def test_gradients_of_gathered_keys_are_summed_over_all_that_have_seen_them(heads):
    from tba.models.flash_attention import FlashPlan
    from tba.models.kernels import sum_copies

    lengths = {"root_lengths": [5, 1, 4], "branch_lengths": [4, 6, 2, 1], "branch_roots": [0, 0, 0, 2]}
    _, at = FlashPlan.make(**lengths, device=DEVICE).read()
    generator = torch.Generator().manual_seed(0)
    dk, dv = (torch.randn(len(at.gathered), heads, 24, generator=generator).to(DEVICE) for _ in range(2))
    tokens = sum(lengths["root_lengths"]) + sum(lengths["branch_lengths"])
    for got, part in zip(sum_copies(dk, dv, at.first, at.copies), (dk, dv)):
        want = torch.zeros(tokens, heads, 24, device=DEVICE).index_add_(0, at.gathered, part)
        assert got.shape == want.shape
        assert (got - want).abs().max() < 1e-5
