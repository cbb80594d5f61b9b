"""Kernels of a layer without its attention: norms, rotation, activations and embedding, for decode steps and for passes over
whole sequences. The matrix products of decode steps are here too. (paged_attention.py has the rotation in a decode step.)

A row is a token; in a decode step it is a slot too. The residual stream is fp32, the rest has the engine's dtype; sums are
fp32. Positions are read on the device, so one captured graph serves all lengths.

The products of a decode step have few rows, one for each slot, against the matrices of a layer. At some hundred rows a
product takes 3 to 15 us, and what counts is that all multiprocessors have work, and that nothing is launched in between. So
- a gated MLP's product computes a tile of gate and the same tile of up, and stores activation(gate) * up;
- a product that is added to the residual stream (attention's output, the MLP's) is cut along its inner axis too, where its
  tiles alone would leave multiprocessors idle: the parts are stored in fp32, and the norm that follows adds them up.
For large matrices cuBLAS, whose tiles are shared by several multiprocessors, is the faster: `choose_tile` says which.

Axes: N rows, E hidden or inner axis, X columns (rows of the matrix), H query heads, K key/value heads, D head dimension,
F MLP width, P parts.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

ROTATING_PROGRAMS = 2048
"""Number of programs that fill a GPU: up to so many heads a program rotates one, beyond that it takes several."""
LARGEST_TILE = 8192
"""Largest count of numbers that one program rotates: more would not stay in registers."""
Kind = Literal["plain", "gated", "parts"]
"""The operation after a product: nothing but its bias, the gated activation, or the sum of its parts by another kernel."""
MOST_ROWS = 256
"""Most rows for which these products are made; beyond that cuBLAS serves."""
MOST_PARTS = 8
PROGRAMS = 264
"""Number of programs that are at work at once: two on each multiprocessor of an H200."""


@triton.jit
def _add_norm(
    x_NE, delta, bias_E, weight_E, out_NE, N, E, epsilon, delta_scale,
    PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < E
    x = tl.load(x_NE + row * E + column, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        added = tl.load(delta + row * E + column, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):  # unrolled: all parts are under way at once
            added += tl.load(delta + (part * N + row) * E + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            added += tl.load(bias_E + column, mask=inside, other=0.0).to(tl.float32)
        # Parts in a fixed order, bias last: the sum is the same in every run.
        x += added * delta_scale
        # The residual stream before the norm: the next layer adds to it.
        tl.store(x_NE + row * E + column, x, mask=inside)
    if HAS_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / E + epsilon)
        x = x * scale * tl.load(weight_E + column, mask=inside, other=0.0)
    tl.store(out_NE + row * E + column, x.to(out_NE.dtype.element_ty), mask=inside)


def add_norm(
    x_NE: Tensor,
    delta: Tensor | None,
    weight_E: Tensor | None,
    epsilon: float,
    dtype: torch.dtype,
    *,
    bias_E: Tensor | None = None,
    delta_scale: float = 1.0,
) -> Tensor:
    """RMS norm [N, E] in `dtype` of x + delta_scale x (delta + bias); the sum is kept in x, which is fp32 where there is a
    delta. No weight = no norm. A delta of three axes [parts, N, E] is the sum of its parts (`linear_parts`)."""
    rows, size = x_NE.shape
    out = torch.empty(rows, size, dtype=dtype, device=x_NE.device)
    block = triton.next_power_of_2(size)
    unused = x_NE  # a pointer for arguments that a constant switches off
    parts = 0 if delta is None else delta.shape[0] if delta.ndim == 3 else 1
    _add_norm[(rows,)](
        x_NE, unused if delta is None else delta, unused if bias_E is None else bias_E,
        unused if weight_E is None else weight_E, out, rows, size, epsilon, delta_scale,
        PARTS=parts, HAS_BIAS=bias_E is not None, HAS_NORM=weight_E is not None, BLOCK=block,
        num_warps=min(16, max(4, block // 256)),
    )  # fmt: skip
    return out


@triton.jit
def _rotate_store(
    qkv, positions, rotations, query_norm, key_norm, query, keys, values,
    position_stride, row_stride, head_stride, epsilon,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, ROTATED: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column, pair = tl.arange(0, 2 * PAIRS), tl.arange(0, PAIRS)
    # Heads lie as the projection gives them: H queries, K keys, K values.
    inside = (head[:, None] < H + 2 * K) & (column[None, :] < D)
    is_query, is_value = head[:, None] < H, head[:, None] >= H + K
    position = tl.load(positions + row * position_stride)
    x = tl.load(qkv + (row * (H + 2 * K) + head[:, None]) * D + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / D + epsilon)
        for_query = tl.load(query_norm + column, mask=column < D, other=0.0)
        for_key = tl.load(key_norm + column, mask=column < D, other=0.0)
        weight = tl.where(is_query, for_query[None, :], for_key[None, :])
        x = tl.where(is_value, x, x * scale[:, None] * weight)
    if ROTATED > 0:
        turn = tl.load(rotations + position * 2 * ROTATED + column, mask=column < 2 * ROTATED, other=0.0)
        cos, sin = tl.split(tl.reshape(turn, (PAIRS, 2)))
        # Values and numbers beyond the rotated ones turn by an angle of 0: cos 1, sin 0.
        stays = is_value | (pair[None, :] >= ROTATED)
        cos, sin = tl.where(stays, 1.0, cos[None, :]), tl.where(stays, 0.0, sin[None, :])
        even, odd = tl.split(tl.reshape(x, (HEADS, PAIRS, 2)))
        x = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (HEADS, 2 * PAIRS))
    x = x.to(query.dtype.element_ty)
    tl.store(query + (row * H + head[:, None]) * D + column[None, :], x, mask=inside & is_query)
    # Keys and values may be views of a larger table, so their strides are given; query is contiguous.
    place = row * row_stride + column[None, :]
    key_place, value_place = place + (head[:, None] - H) * head_stride, place + (head[:, None] - H - K) * head_stride
    tl.store(keys + key_place, x, mask=inside & (head[:, None] >= H) & (head[:, None] < H + K))
    tl.store(values + value_place, x, mask=inside & is_value)


def rotate_and_store(
    qkv: Tensor,
    positions_N: Tensor,
    rotations: Tensor | None,
    keys: Tensor,
    values: Tensor,
    *,
    num_heads: int,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    epsilon: float = 0.0,
) -> Tensor:
    """Norm and rotate query and key heads, put keys and values where they belong -> query [N, H, D] in the dtype of keys.

    `keys` and `values` are [N, K, D] and lie alike.
    `rotations` is real [positions, rotated pairs, 2] (cos, sin), or None; the two numbers of a pair lie side by side.
    """
    count, num_kv, dim = qkv.shape[0], keys.shape[1], keys.shape[-1]
    query = torch.empty(count, num_heads, dim, dtype=keys.dtype, device=qkv.device)
    pairs, all_heads = triton.next_power_of_2(dim // 2), num_heads + 2 * num_kv
    # Few tokens: one head a program, so that all multiprocessors work. Many: several, so that programs are few.
    share = triton.next_power_of_2(triton.cdiv(count * all_heads, ROTATING_PROGRAMS))
    heads = min(share, triton.next_power_of_2(all_heads), max(1, LARGEST_TILE // (2 * pairs)))
    unused = positions_N  # a pointer for arguments that a constant switches off
    _rotate_store[(count, triton.cdiv(all_heads, heads))](
        qkv, positions_N, unused if rotations is None else rotations,
        unused if query_norm is None else query_norm, unused if key_norm is None else key_norm,
        query, keys, values,
        positions_N.stride(0), keys.stride(0), keys.stride(1), epsilon,
        H=num_heads, K=num_kv, D=dim, HEADS=heads, PAIRS=pairs, ROTATED=0 if rotations is None else rotations.shape[1],
        HAS_NORM=query_norm is not None, num_warps=min(8, max(1, heads * pairs // 512)),
    )  # fmt: skip
    return query


@triton.jit
def _activated(gate, GELU: tl.constexpr):
    """SiLU, or GELU by its tanh formula."""
    if GELU:
        # tanh(z) = 2 sigmoid(2 z) - 1
        z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate / (1.0 + tl.exp(-2.0 * z))
    else:
        gate = gate / (1.0 + tl.exp(-gate))
    return gate


@triton.jit
def _gated(inner, out, F, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    gate = tl.load(inner + row * 2 * F + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(inner + row * 2 * F + F + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * F + column, (_activated(gate, GELU) * up).to(out.dtype.element_ty), mask=inside)


def gated(inner_N2F: Tensor, *, gelu: bool) -> Tensor:
    """Product activation(gate) * up [N, F], gate first; the activation is SiLU, or GELU by its tanh formula."""
    rows, size = inner_N2F.shape[0], inner_N2F.shape[1] // 2
    out = torch.empty(rows, size, dtype=inner_N2F.dtype, device=inner_N2F.device)
    block = min(1024, triton.next_power_of_2(size))
    _gated[(rows, triton.cdiv(size, block))](inner_N2F, out, size, GELU=gelu, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _embed(ids, table_VE, out_NE, id_stride, E, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < E
    x = tl.load(table_VE + tl.load(ids + row * id_stride) * E + column, mask=inside, other=0.0)
    # As in transformers, the product has the matrix's dtype.
    x = (x.to(tl.float32) * scale).to(x.dtype)
    tl.store(out_NE + row * E + column, x.to(tl.float32), mask=inside)


def embed(ids_N: Tensor, table_VE: Tensor, scale: float) -> Tensor:
    """Rows of the table times the scale, in fp32 [N, E]."""
    rows, size = ids_N.shape[0], table_VE.shape[1]
    out = torch.empty(rows, size, device=table_VE.device)
    block = triton.next_power_of_2(size)
    _embed[(rows,)](
        ids_N, table_VE, out, ids_N.stride(0), size, scale,
        BLOCK=block, num_warps=min(16, max(4, block // 256)),
    )  # fmt: skip
    return out


# --- matrix products of a decode step --------------------------------------------------------------------------------


class Tile(NamedTuple):
    """How a product is cut: Tile(rows=128, columns=64, depth=64, parts=8, warps=4, stages=4)"""

    rows: int
    columns: int
    depth: int
    parts: int
    warps: int
    stages: int


@triton.jit
def _product(
    x_tiles, weight_tiles, bias, out, N, X, E, PARTS,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    tile, part = tl.program_id(0), tl.program_id(1)
    # Programs that read the same columns of weights follow each other: memory is read once, its cache by the others.
    row_tiles = tl.cdiv(N, ROWS)
    first_row, first_column = (tile % row_tiles) * ROWS, tile // row_tiles * COLUMNS
    # Whole steps for each part; the last parts may have fewer, or none, and then store zeros.
    steps = tl.cdiv(tl.cdiv(E, DEPTH), PARTS)
    start = part * steps * DEPTH
    end = tl.minimum(E, start + steps * DEPTH)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    # Gate and up have their own sums over the same tiles of x, which are read once.
    up = tl.zeros((ROWS, COLUMNS), tl.float32) if GATED else total
    for place in range(start, end, DEPTH):
        x = x_tiles.load([first_row, place])
        total = tl.dot(x, weight_tiles.load([first_column, place]).T, total, input_precision="ieee")
        if GATED:
            # Rows X and on of the matrix are up's: X is the width of one half.
            up = tl.dot(x, weight_tiles.load([X + first_column, place]).T, up, input_precision="ieee")
    row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < X, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias + X + column, mask=column < X, other=0.0).to(tl.float32)[None, :]
    if GATED:
        total = _activated(total, GELU) * up
    # 64 bits: parts times rows times columns may pass 2^31.
    place = (part * N + row[:, None]).to(tl.int64) * X + column[None, :]
    inside = (row[:, None] < N) & (column[None, :] < X)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


def linear(x_NE: Tensor, weight_XE: Tensor, bias_X: Tensor | None, tile: Tile) -> Tensor:
    """x times the matrix, plus its bias -> [N, X] in the dtype of x."""
    out = x_NE.new_empty(x_NE.shape[0], weight_XE.shape[0])
    return _launch(x_NE, weight_XE, bias_X, out, tile)


def gated_linear(x_NE: Tensor, weight_2FE: Tensor, bias_2F: Tensor | None, tile: Tile, *, gelu: bool) -> Tensor:
    """activation(gate) * up [N, F], gate first; the activation is SiLU, or GELU by its tanh formula."""
    out = x_NE.new_empty(x_NE.shape[0], weight_2FE.shape[0] // 2)
    return _launch(x_NE, weight_2FE, bias_2F, out, tile, gated=True, gelu=gelu)


def linear_parts(x_NE: Tensor, weight_XE: Tensor, tile: Tile) -> Tensor:
    """Parts [P, N, X] in fp32 whose sum is x times the matrix."""
    out = x_NE.new_empty(tile.parts, x_NE.shape[0], weight_XE.shape[0], dtype=torch.float32)
    return _launch(x_NE, weight_XE, None, out, tile)


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tile: Tile, *, gated: bool = False, gelu: bool = False
) -> Tensor:
    rows, inner = x.shape
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    x_tiles = TensorDescriptor(x, [rows, inner], [inner, 1], [tile.rows, tile.depth])
    weight_tiles = TensorDescriptor(weight, list(weight.shape), [inner, 1], [tile.columns, tile.depth])
    _product[(triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns), tile.parts)](
        x_tiles, weight_tiles, weight if bias is None else bias, out, rows, columns, inner, tile.parts,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, GATED=gated, GELU=gelu, HAS_BIAS=bias is not None,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def choose_tile(kind: Kind, x_NE: Tensor, weight: Tensor) -> Tile | None:
    """How a product is cut; None = cuBLAS serves, because it is faster or because the kernel cannot. Measured on an H200
    with the shapes of 0.5B, 1.1B and 7B models at 32 to 256 rows (notes/)."""
    (rows, inner), size = x_NE.shape, weight.numel()
    # Tile loads by the hardware need rows of a multiple of 16 bytes: 8 numbers in half precision.
    serves = x_NE.dtype in (torch.bfloat16, torch.float16) and _is_hopper(x_NE.device) and inner % 8 == 0
    if not serves or rows > MOST_ROWS or size > _largest(kind, rows):
        return None
    if kind == "parts" and rows > 128 and inner <= 2 * weight.shape[0]:
        return None  # short sums: cuBLAS is as fast, and its result need not be added up
    if kind == "plain":
        return Tile(rows=64, columns=32, depth=128, parts=1, warps=4, stages=4)
    if kind == "gated":
        columns, depth = (64, 64) if rows > 64 else (32, 128)
        return Tile(rows=64, columns=columns, depth=depth, parts=1, warps=4, stages=3)
    if rows > 128:
        tile = Tile(rows=128, columns=64, depth=64, parts=1, warps=4, stages=4)
    elif rows > 64:
        tile = Tile(rows=64, columns=64, depth=128, parts=1, warps=4, stages=3)
    else:
        tile = Tile(rows=64, columns=32, depth=128, parts=1, warps=4, stages=4)
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(weight.shape[0], tile.columns)
    # As many parts as fill the GPU once, and no more than the inner axis has steps.
    parts = min(MOST_PARTS, PROGRAMS // tiles, triton.cdiv(inner, tile.depth))
    return tile._replace(parts=max(1, parts))


@cache
def _is_hopper(device: torch.device) -> bool:
    """Whether the device loads tiles by itself (tensor memory access): Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _largest(kind: Kind, rows: int) -> int:
    """Largest number of weights of a matrix for which our product is the faster."""
    if kind == "plain":
        return 1 << 21
    return 5 << 20 if kind == "parts" and rows > 128 else 1 << 24
