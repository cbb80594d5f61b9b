"""Gradients of many parameters added at once, against adding them one by one; on a GPU, or on a CPU with
TRITON_INTERPRET=1."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: it comes with torch for CUDA.")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("kernels need a GPU, or TRITON_INTERPRET=1", allow_module_level=True)
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def test_sums_are_those_of_fp32():
    from tba.models.kernels import BLOCK, accumulate, can_accumulate

    generator = torch.Generator().manual_seed(0)
    shapes = [(3,), (BLOCK // 8, 8), (1,), (2, BLOCK + 5), (7, 9)]
    first, second = (
        [torch.randn(shape, generator=generator).to(DEVICE).bfloat16() for shape in shapes] for _ in range(2)
    )
    assert can_accumulate(None, first)
    sums = accumulate(None, first)
    for got, gradient in zip(sums, first):
        assert got.shape == gradient.shape
        assert torch.equal(got, gradient.float())
    assert can_accumulate(sums, second)
    for got, one, other in zip(accumulate(sums, second), first, second):
        assert torch.equal(got, one.float() + other.float())


def test_others_than_contiguous_gradients_of_one_half_precision_type_are_left_alone():
    from tba.models.kernels import can_accumulate

    wide, half = torch.zeros(4, 8, device=DEVICE), torch.zeros(4, 8, device=DEVICE, dtype=torch.bfloat16)
    assert not can_accumulate(None, [wide])
    assert not can_accumulate(None, [half, half.to(torch.float16)])
    assert not can_accumulate(None, [half, half.t()])
    assert not can_accumulate([wide.t()], [half])
    assert can_accumulate([wide], [half])
