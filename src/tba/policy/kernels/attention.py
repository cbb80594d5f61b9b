"""Kernels around the attention of a training step: two attentions of the same queries merged, over a response's own keys and
its prompt's, by their log-sums; and the gradients of keys that several sequences have seen, summed. Attention of a decode
step is in paged_attention.py.

Axes: T queries, H query heads, K key/value heads, D head dimension.
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


@triton.jit
def _sum_copies(
    d_keys,
    d_values,
    first,
    places,
    keys_out,
    values_out,
    T,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    for step in tl.static_range(TOKENS):
        token = tl.program_id(0).to(tl.int64) * TOKENS + step
        if token < T:
            of_key, of_value = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
            for index in range(tl.load(first + token), tl.load(first + token + 1)):
                place = tl.load(places + index).to(tl.int64) * WIDTH + column
                of_key += tl.load(d_keys + place, mask=inside, other=0.0).to(tl.float32)
                of_value += tl.load(d_values + place, mask=inside, other=0.0).to(tl.float32)
            out = token * WIDTH + column
            tl.store(keys_out + out, of_key.to(keys_out.dtype.element_ty), mask=inside)
            tl.store(values_out + out, of_value.to(values_out.dtype.element_ty), mask=inside)


def sum_copies(dk_SKD: Tensor, dv_SKD: Tensor, first_T: Tensor, places_S: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gathered keys and values, summed in fp32 over the places of each token -> [T, K, D] each. The places of
    token t are places_S[first_T[t] : first_T[t + 1]]."""
    count, width = len(first_T) - 1, dk_SKD.shape[1] * dk_SKD.shape[2]
    dk, dv = (part.new_empty(count, *part.shape[1:]) for part in (dk_SKD, dv_SKD))
    block = triton.next_power_of_2(width)
    tokens = max(1, min(4, 1024 // block))  # programs of a few hundred numbers take longer to start than to run
    _sum_copies[(triton.cdiv(count, tokens),)](
        dk_SKD.contiguous(), dv_SKD.contiguous(), first_T, places_S, dk, dv, count,
        WIDTH=width, BLOCK=block, TOKENS=tokens, num_warps=min(8, max(1, block // 256)),
    )  # fmt: skip
    return dk, dv
