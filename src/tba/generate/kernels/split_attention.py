"""Decode attention in parts: one pass over a prompt's pages for all of its samples, and parts merged by log-sums.

A part is the attention of one query head over some of its keys, with the log-sum of their scores in powers of two; -inf
where there were none. Parts of a slot are those of its own pages (paged_attention.py), then those of the pages that
it shares with its group, for which the queries of all members are rows of one tile.

Axes: N slots, H query heads, K key/value heads, D head dimension, G groups, R members of a group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from tba.generate.kernels.paged_attention import PAGE, absorb, cap_scores

if TYPE_CHECKING:
    from tba.generate.kernels.paged_attention import Launch, PageView

PROGRAMS_PER_PROCESSOR = 2
"""Number of programs of the shared pass that a multiprocessor holds at once."""


@triton.jit(do_not_specialize=["N", "num_tiles"])
def _attend_shared(
    query, base, table, positions, done, members, shared, parts, sums,
    table_stride, position_stride, done_stride, layer_start, scale, cap, window, N, num_tiles,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MEMBERS: tl.constexpr, HEADS: tl.constexpr,
    ROWS: tl.constexpr, TILES: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    PARTS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Tiles are runs of MEMBERS entries of `members`; only those with a member are work, and programs share it evenly."""
    GROUP: tl.constexpr = H // K
    row, dim, step = tl.arange(0, ROWS), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK)
    tile, entry = tl.arange(0, TILES), tl.arange(0, MEMBERS)
    of_tile = members + tile[:, None] * MEMBERS + entry[None, :]
    filled = tl.max(tl.load(of_tile, mask=tile[:, None] < num_tiles, other=-1), axis=1) >= 0
    rank = tl.cumsum(filled.to(tl.int32), axis=0)
    num_items = tl.max(rank, axis=0) * (K * SPLITS)
    keys_of_layer = base + layer_start
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        split, kv_head = item % SPLITS, item // SPLITS % K
        chosen = tl.sum(tl.where(filled & (rank == item // (SPLITS * K) + 1), tile, 0), axis=0)
        member, head = row // HEADS, row % HEADS
        slot = tl.load(members + chosen * MEMBERS + member, mask=member < MEMBERS, other=-1)
        active = (slot >= 0) & (slot < N) & (head < GROUP)
        active = active & (tl.load(done + slot * done_stride, mask=active, other=1) == 0)
        num_pages = tl.load(shared + slot, mask=active, other=0)
        active = active & (num_pages > 0)
        place = slot * H + kv_head * GROUP + head
        is_query = active[:, None] & (dim[None, :] < D)
        q = tl.load(query + place[:, None] * D + dim[None, :], mask=is_query, other=0.0)
        pages = table + tl.maximum(tl.max(tl.where(active, slot, -1), axis=0), 0).to(tl.int64) * table_stride

        first, last = 0, tl.max(num_pages, axis=0) * PAGE
        if HAS_WINDOW:
            position = tl.load(positions + slot * position_stride, mask=active, other=0).to(tl.int32)
            earliest = tl.min(tl.where(active, position, 1 << 30), axis=0) + 1 - window
            first = tl.minimum(tl.maximum(earliest, 0) // BLOCK * BLOCK, last)
        share = tl.cdiv(tl.cdiv(last - first, BLOCK), SPLITS) * BLOCK
        first += split * share
        last = tl.minimum(last, first + share)
        keys = keys_of_layer + kv_head * PAGE * D
        values = keys + K * PAGE * D
        largest = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        mixed = tl.zeros((ROWS, BLOCK_D), tl.float32)
        page = tl.multiple_of(tl.load(pages + first // PAGE, mask=first < last, other=0), PAGE)
        for start in range(first, last, BLOCK):
            # Blocks are whole, and all of their keys are before every member's position.
            offset = page + (start % PAGE + step[:, None]) * D + dim[None, :]
            following = start + BLOCK
            page = tl.multiple_of(tl.load(pages + following // PAGE, mask=following < last, other=0), PAGE)
            if D == BLOCK_D:
                k, v = tl.load(keys + offset), tl.load(values + offset)
            else:
                k = tl.load(keys + offset, mask=dim[None, :] < D, other=0.0)
                v = tl.load(values + offset, mask=dim[None, :] < D, other=0.0)
            scores = cap_scores(tl.dot(q, tl.trans(k), input_precision="ieee") * scale, cap, HAS_CAP)
            if HAS_WINDOW:
                seen = (start + step)[None, :] > (position - window)[:, None]
                scores = tl.where(seen, scores, float("-inf"))
            largest, total, mixed = absorb(scores, v, largest, total, mixed)

        part = place * PARTS + PARTS - SPLITS + split
        mixed = mixed / total[:, None]
        tl.store(parts + part[:, None] * D + dim[None, :], mixed, mask=is_query & (total[:, None] > 0))
        tl.store(sums + part, largest + tl.log2(total), mask=active)


def attend_shared(
    query_NHD: Tensor,
    view: PageView,
    layer: int,
    parts: Tensor,
    sums: Tensor,
    *,
    splits: int,
    factors: tuple[float, float],
    has_cap: bool,
    window: int | None,
    launch: Launch,
) -> None:
    """Write the last `splits` parts [N, H, parts, D] of slots that share pages, and their sums [N, H, parts].

    `factors` are those of `score_factors`.
    """
    assert launch.block <= PAGE
    count, num_heads, dim = query_NHD.shape
    num_kv, num_members = view.base.shape[3], view.members.shape[1]
    if num_members & (num_members - 1):
        raise ValueError(f"members must have a power of two of columns, got {num_members}: fill up with -1.")
    heads = triton.next_power_of_2(num_heads // num_kv)
    members = max(1, min(num_members, launch.rows // heads))
    num_tiles = view.members.numel() // members
    _attend_shared[(_num_programs(query_NHD.device, num_tiles * num_kv * splits),)](
        query_NHD, view.base, view.table, view.positions, view.done, view.members, view.shared, parts, sums,
        view.table.stride(0), view.positions.stride(0), view.done.stride(0), layer * 2 * num_kv * PAGE * dim,
        *factors, window or 0, count, num_tiles,
        H=num_heads, K=num_kv, D=dim, BLOCK_D=max(16, triton.next_power_of_2(dim)), MEMBERS=members, HEADS=heads,
        ROWS=max(16, members * heads), TILES=triton.next_power_of_2(num_tiles), PAGE=PAGE, BLOCK=launch.block,
        SPLITS=splits, PARTS=sums.shape[2], HAS_CAP=has_cap, HAS_WINDOW=window is not None,
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip


def _num_programs(device: torch.device, num_items: int) -> int:
    """As many as run at once."""
    if device.type != "cuda":
        return min(num_items, 3)
    return min(num_items, PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def _merge_parts(
    parts, sums, done, shared, out, done_stride,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    OWN: tl.constexpr,
):  # fmt: skip
    slot, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part, dim = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    num_parts = OWN
    if PARTS > OWN:
        in_group = (tl.load(done + slot * done_stride) == 0) & (tl.load(shared + slot) > 0)
        num_parts = tl.where(in_group, PARTS, OWN)
    start = (slot * H + head) * PARTS
    sum_of = tl.load(sums + start + part, mask=part < num_parts, other=float("-inf"))
    is_filled = sum_of > float("-inf")
    x = tl.load(
        parts + (start + part[:, None]) * D + dim[None, :], mask=is_filled[:, None] & (dim[None, :] < D), other=0.0
    )
    # The part with the new token is never empty, so the largest is a number.
    weights = tl.exp2(sum_of - tl.max(sum_of, axis=0))
    merged = tl.sum(x * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    tl.store(out + (slot * H + head) * D + dim, merged.to(out.dtype.element_ty), mask=dim < D)


def merge_parts(parts: Tensor, sums: Tensor, view: PageView, out_NHD: Tensor, *, own: int) -> None:
    """Write the attention over all keys, of the parts [N, H, parts, D] and their sums [N, H, parts].

    The first `own` parts are there for every slot, the others for those that share pages.
    """
    count, num_heads, num_parts, dim = parts.shape
    _merge_parts[(count, num_heads)](
        parts, sums, view.done, view.shared, out_NHD, view.done.stride(0),
        H=num_heads, D=dim, BLOCK_D=triton.next_power_of_2(dim), PARTS=num_parts,
        BLOCK=triton.next_power_of_2(num_parts), OWN=own, num_warps=2 if num_parts <= 16 else 4,
    )  # fmt: skip
