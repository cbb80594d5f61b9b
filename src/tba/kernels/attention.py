"""Attention kernels: a decode step's query over its slot's keys; two attentions of the same queries merged; gradients of
keys that several sequences have seen, summed.

`attend` reads the slots' own positions on the device, so one captured graph serves all lengths. `merge` joins attention
over two sets of keys (a response's own and its prompt's) by their log-sums.

Axes: N slots, T queries, H query heads, K key/value heads, D head dimension, L positions of the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _attend(
    query, keys, values, positions, sinks, out, position_stride, scale, cap, L, window,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_L: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    slot, kv_head = tl.program_id(0), tl.program_id(1)
    end = tl.load(positions + slot * position_stride) + 1
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(0, end - window) // BLOCK_L * BLOCK_L
    row, dim, step = tl.arange(0, ROWS), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_L)
    heads = kv_head * GROUP + row
    real = (row[:, None] < GROUP) & (dim[None, :] < D)
    q = tl.load(query + (slot * H + heads[:, None]) * D + dim[None, :], mask=real, other=0.0)
    base = (slot * K + kv_head).to(tl.int64) * L * D
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if HAS_SINKS:  # a score of which nothing is read
        largest = tl.load(sinks + heads, mask=row < GROUP, other=0.0)
        total = tl.full((ROWS,), 1.0, tl.float32)
    mixed = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for start in range(first, end, BLOCK_L):
        place = start + step
        inside = (place[:, None] < end) & (dim[None, :] < D)
        k = tl.load(keys + base + place[:, None] * D + dim[None, :], mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_CAP:
            scores = cap * (2.0 / (1.0 + tl.exp(-2.0 * scores / cap)) - 1.0)
        seen = place < end
        if HAS_WINDOW:
            seen = seen & (place >= end - window)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        # A block wholly outside the window leaves -inf: subtracting it would give NaN.
        anchor = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp(scores - anchor[:, None])
        shrink = tl.exp(largest - anchor)
        total = total * shrink + tl.sum(weights, axis=1)
        v = tl.load(values + base + place[:, None] * D + dim[None, :], mask=inside, other=0.0)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = new_largest
    mixed = mixed / total[:, None]
    tl.store(out + (slot * H + heads[:, None]) * D + dim[None, :], mixed.to(out.dtype.element_ty), mask=real)


def attend(
    query_NHD: Tensor,
    keys_SKLD: Tensor,
    values_SKLD: Tensor,
    positions_N: Tensor,
    *,
    scale: float,
    cap: float | None = None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Each slot's query over its own keys up to its position -> [N, H * D]. Heads that share keys share their reading.
    `sinks_H` are scores in fp32 that take part in the soft-max."""
    count, num_heads, dim = query_NHD.shape
    num_kv, length = keys_SKLD.shape[1], keys_SKLD.shape[2]
    group = num_heads // num_kv
    out = torch.empty_like(query_NHD)
    _attend[(count, num_kv)](
        query_NHD, keys_SKLD, values_SKLD, positions_N, query_NHD if sinks_H is None else sinks_H, out,
        positions_N.stride(0), scale, cap or 0.0, length, window or 0,
        H=num_heads, K=num_kv, D=dim, GROUP=group, ROWS=max(16, triton.next_power_of_2(group)),
        BLOCK_D=max(16, triton.next_power_of_2(dim)), BLOCK_L=64 if dim <= 128 else 32,
        HAS_CAP=cap is not None, HAS_WINDOW=window is not None, HAS_SINKS=sinks_H is not None, num_warps=2,
        num_stages=3 if keys_SKLD.element_size() == 2 else 2,  # fp32 tiles of three stages do not fit everywhere
    )  # fmt: skip
    return out.view(count, num_heads * dim)


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
