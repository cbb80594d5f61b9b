"""One token per slot: what lies between the matrix products of a decode step, a kernel each.

The residual stream is fp32, the rest has the engine's dtype; sums are fp32. Every kernel reads the slots' own positions on
the device, so one captured graph serves all lengths.

Axes: N slots, E hidden, H query heads, K key/value heads, D head dimension, L positions of the cache, F MLP width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_norm(x_NE, delta_NE, weight_E, out_NE, E, epsilon, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < E
    x = tl.load(x_NE + row * E + column, mask=inside, other=0.0)
    if HAS_DELTA:
        x += tl.load(delta_NE + row * E + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(x_NE + row * E + column, x, mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / E + epsilon)
    weight = tl.load(weight_E + column, mask=inside, other=0.0)
    tl.store(out_NE + row * E + column, (x * scale * weight).to(out_NE.dtype.element_ty), mask=inside)


def add_norm(x_NE: Tensor, delta_NE: Tensor | None, weight_E: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """x += delta in place (fp32), then RMS norm -> [N, E] in `dtype`."""
    rows, size = x_NE.shape
    out = torch.empty(rows, size, dtype=dtype, device=x_NE.device)
    block = triton.next_power_of_2(size)
    delta = x_NE if delta_NE is None else delta_NE
    _add_norm[(rows,)](
        x_NE, delta, weight_E, out, size, epsilon, HAS_DELTA=delta_NE is not None, BLOCK=block,
        num_warps=4 if block <= 2048 else 8,
    )  # fmt: skip
    return out


@triton.jit
def _rotate_store(
    qkv, positions, rotations, query_norm, key_norm, query, keys, values,
    position_stride, L, epsilon,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, ROTATED: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_ROTATION: tl.constexpr,
):  # fmt: skip
    slot, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + slot * position_stride)
    pair = tl.arange(0, PAIRS)
    inside = pair < D // 2
    base = qkv + (slot * (H + 2 * K) + head) * D
    even = tl.load(base + 2 * pair, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(base + 2 * pair + 1, mask=inside, other=0.0).to(tl.float32)
    is_value = head >= H + K
    if HAS_NORM:
        scale = 1.0 / tl.sqrt((tl.sum(even * even, axis=0) + tl.sum(odd * odd, axis=0)) / D + epsilon)
        weight = query_norm if head < H else key_norm
        scale_even = scale * tl.load(weight + 2 * pair, mask=inside, other=0.0)
        scale_odd = scale * tl.load(weight + 2 * pair + 1, mask=inside, other=0.0)
        even = tl.where(is_value, even, even * scale_even)
        odd = tl.where(is_value, odd, odd * scale_odd)
    if HAS_ROTATION:
        turns = pair < tl.where(is_value, 0, ROTATED)
        cos = tl.load(rotations + (position * ROTATED + pair) * 2, mask=turns, other=1.0)
        sin = tl.load(rotations + (position * ROTATED + pair) * 2 + 1, mask=turns, other=0.0)
        even, odd = even * cos - odd * sin, even * sin + odd * cos
    kind = query.dtype.element_ty
    if head < H:
        target = query + (slot * H + head) * D
    elif head < H + K:
        target = keys + ((slot * K + head - H) * L + position) * D
    else:
        target = values + ((slot * K + head - H - K) * L + position) * D
    tl.store(target + 2 * pair, even.to(kind), mask=inside)
    tl.store(target + 2 * pair + 1, odd.to(kind), mask=inside)


def rotate_and_store(
    qkv: Tensor,
    positions_N: Tensor,
    rotations: Tensor | None,
    keys_SKLD: Tensor,
    values_SKLD: Tensor,
    *,
    num_heads: int,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    epsilon: float = 0.0,
) -> Tensor:
    """Norm and rotate query and key heads, put keys and values at each slot's position -> query [N, H, D].

    `rotations` is real [positions, rotated pairs, 2] (cos, sin), or None; the two numbers of a pair lie side by side.
    """
    count = qkv.shape[0]
    _, num_kv, length, dim = keys_SKLD.shape
    query = torch.empty(count, num_heads, dim, dtype=keys_SKLD.dtype, device=qkv.device)
    unused = positions_N  # a pointer for arguments that a constant switches off
    _rotate_store[(count, num_heads + 2 * num_kv)](
        qkv, positions_N, unused if rotations is None else rotations,
        unused if query_norm is None else query_norm, unused if key_norm is None else key_norm,
        query, keys_SKLD, values_SKLD, positions_N.stride(0), length, epsilon,
        H=num_heads, K=num_kv, D=dim, PAIRS=triton.next_power_of_2(dim // 2),
        ROTATED=0 if rotations is None else rotations.shape[1],
        HAS_NORM=query_norm is not None, HAS_ROTATION=rotations is not None, num_warps=1,
    )  # fmt: skip
    return query


@triton.jit
def _attend(
    query, keys, values, positions, out, position_stride, scale, cap, L, window,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_L: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
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
) -> Tensor:
    """Each slot's query over its own keys up to its position -> [N, H * D]. Heads that share keys share their reading."""
    count, num_heads, dim = query_NHD.shape
    num_kv, length = keys_SKLD.shape[1], keys_SKLD.shape[2]
    group = num_heads // num_kv
    out = torch.empty_like(query_NHD)
    _attend[(count, num_kv)](
        query_NHD, keys_SKLD, values_SKLD, positions_N, out, positions_N.stride(0), scale, cap or 0.0, length, window or 0,
        H=num_heads, K=num_kv, D=dim, GROUP=group, ROWS=max(16, triton.next_power_of_2(group)),
        BLOCK_D=max(16, triton.next_power_of_2(dim)), BLOCK_L=64 if dim <= 128 else 32,
        HAS_CAP=cap is not None, HAS_WINDOW=window is not None, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out.view(count, num_heads * dim)


@triton.jit
def _gated(inner, out, F, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    gate = tl.load(inner + row * 2 * F + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(inner + row * 2 * F + F + column, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        # tanh(z) = 2 sigmoid(2 z) - 1
        z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate / (1.0 + tl.exp(-2.0 * z))
    else:
        gate = gate / (1.0 + tl.exp(-gate))
    tl.store(out + row * F + column, (gate * up).to(out.dtype.element_ty), mask=inside)


def gated(inner_N2F: Tensor, *, gelu: bool) -> Tensor:
    """activation(gate) * up, gate first -> [N, F]; SiLU, or GELU by its tanh formula."""
    rows, size = inner_N2F.shape[0], inner_N2F.shape[1] // 2
    out = torch.empty(rows, size, dtype=inner_N2F.dtype, device=inner_N2F.device)
    block = min(1024, triton.next_power_of_2(size))
    _gated[(rows, triton.cdiv(size, block))](inner_N2F, out, size, GELU=gelu, BLOCK=block, num_warps=4)
    return out
