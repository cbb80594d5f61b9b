"""Matrix products of a decode step with what follows them: few rows, one for each slot, against the matrices of a layer.

At some hundred rows a product takes 3 to 15 us, and what counts is that all multiprocessors have work, and that
nothing is launched in between. So
- a gated MLP's product computes a tile of gate and the same tile of up, and stores activation(gate) * up;
- a product that is added to the residual stream (attention's output, the MLP's) is cut along its inner axis too, where its
  tiles alone would leave multiprocessors idle: the parts are stored in fp32, and the norm that follows adds them up.

For large matrices cuBLAS, whose tiles are shared by several multiprocessors, is the faster: `choose_tile` says which.

Axes: N rows, E inner axis, X columns (rows of the matrix), F MLP width, P parts.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

Kind = Literal["plain", "gated", "parts"]
"""What follows a product: nothing but its bias, the gated activation, or the sum of its parts by another kernel."""
MOST_ROWS = 256
"""Most rows for which these products are made; beyond that cuBLAS serves."""
MOST_PARTS = 8
PROGRAMS = 264
"""Number of programs that are at work at once: two on each multiprocessor of an H200."""


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
    steps = tl.cdiv(tl.cdiv(E, DEPTH), PARTS)
    start = part * steps * DEPTH
    end = tl.minimum(E, start + steps * DEPTH)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32) if GATED else total
    for place in range(start, end, DEPTH):
        x = x_tiles.load([first_row, place])
        total = tl.dot(x, weight_tiles.load([first_column, place]).T, total, input_precision="ieee")
        if GATED:
            up = tl.dot(x, weight_tiles.load([X + first_column, place]).T, up, input_precision="ieee")
    row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < X, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias + X + column, mask=column < X, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if GELU:
            # tanh(z) = 2 sigmoid(2 z) - 1
            z = 0.7978845608028654 * (total + 0.044715 * total * total * total)
            total = total / (1.0 + tl.exp(-2.0 * z)) * up
        else:
            total = total / (1.0 + tl.exp(-total)) * up
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
    """How a product is cut; None = cuBLAS serves, because it is faster or because the kernel cannot.

    Measured on an H200 with the shapes of 0.5B, 1.1B and 7B models at 32 to 256 rows (notes/).
    """
    (rows, inner), size = x_NE.shape, weight.numel()
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
