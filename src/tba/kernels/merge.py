"""Two attentions of the same queries over different keys, merged by their log-sums.

Axes: T queries, H heads, D head dimension.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _merge(
    one, other, sums_one, sums_other, out, sums, T, sums_stride,
    H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside, head = column < H * D, column // D
    a = tl.load(sums_one + head * T + token, mask=inside, other=0.0)
    b = tl.load(sums_other + head * T + token, mask=inside, other=0.0)
    larger = tl.maximum(a, b)
    merged = larger + tl.log(tl.exp(a - larger) + tl.exp(b - larger))
    tl.store(sums + head * sums_stride + token, merged, mask=inside & (column % D == 0))
    place = token * H * D + column
    x = tl.load(one + place, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(other + place, mask=inside, other=0.0).to(tl.float32)
    value = x * tl.exp(a - merged) + y * tl.exp(b - merged)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


def merge(
    one_THD: Tensor, sums_one_HT: Tensor, other_THD: Tensor, sums_other_HT: Tensor, out_THD: Tensor, out_sums_HT: Tensor
) -> None:
    """Write the merged attention to `out_THD` (contiguous) and its log-sums to `out_sums_HT` (tokens side by side)."""
    T, H, D = one_THD.shape
    assert out_THD.is_contiguous()
    assert out_sums_HT.stride(1) == 1
    parts = (part.contiguous() for part in (one_THD, other_THD, sums_one_HT, sums_other_HT))
    block = triton.next_power_of_2(H * D)
    _merge[(T,)](
        *parts, out_THD, out_sums_HT, T, out_sums_HT.stride(0),
        H=H, D=D, BLOCK=block, num_warps=min(8, max(1, block // 256)),
    )  # fmt: skip
