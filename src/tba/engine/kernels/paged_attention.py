"""Attention of a decode step over pages: the new token is normed, rotated, stored and attends, in one kernel.

A page holds PAGE positions of one sequence for all layers, [M, 2 (keys, values), K, PAGE, D]. Pages lie in chunks that may
be anywhere, so a page is named by the offset of its first number from the first chunk, which may be negative. Samples of
one prompt share its whole pages. Positions and tables are read on the device: one captured graph serves all lengths.

A program has a slot and a key/value head; heads that share keys are rows of one tile. Few slots with long contexts are
served by several programs each (`splits`), and pages that samples share are read once for all of them, with the queries of
all members as rows of one tile. A part is the attention of one query head over some of its keys, with the log-sum of their
scores; -inf where there were none. Parts of a slot are those of its own pages, then those of the pages that it shares with
its group; they are merged by their log-sums. Scores are kept in powers of two, which cost less.

Axes: N slots, H query heads, K key/value heads, D head dimension, M layers, P pages of a slot, G groups of slots that share
a prompt, R members of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

PAGE = 64
LOG2_E = 1.4426950408889634
PROGRAMS_PER_PROCESSOR = 2
"""Number of programs of the shared pass that a multiprocessor holds at once."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PageView:
    """Where the keys and values of the slots lie, and how far each slot is.

    PageView(base=chunks[0], table=table, positions=state[:, 1], done=state[:, 5], members=members, shared=shared)
    """

    base: Tensor
    """First chunk [pages, M, 2, K, PAGE, D]: offsets count from its first number."""
    table: Tensor
    """Offsets of each slot's pages, int64 [S, P]; 0 where there is none."""
    positions: Tensor
    """Position of the token that each slot feeds, [N], of any stride."""
    done: Tensor
    """Whether a slot has nothing to do (not 0), [N], of any stride: its pages are neither read nor written."""
    members: Tensor
    """Slots of each group, int32 [G, R], -1 = none. A slot is in one group at most."""
    shared: Tensor
    """Number of leading pages that a slot's group reads for it, int32 [S]: the same for all members of a group."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How the work of one kernel is cut: Launch(block=64, warps=2, stages=3)"""

    block: int
    """Number of keys of one tile: at most PAGE, or two pages."""
    warps: int
    stages: int
    """Number of tiles in flight, the one at work included."""
    rows: int = 16
    """Largest number of queries, of several members of a group, in a tile; without meaning for a slot's own keys."""


@triton.jit
def _load_pairs(heads, dim, inside):
    """Numbers of heads [rows, D] in fp32, and the other one of each one's pair; the two lie side by side.

    To exchange them among threads costs more than to load them, and tensors that are joined of two come in a layout from
    which matrix products read slowly.
    """
    x = tl.load(heads + dim[None, :], mask=inside, other=0.0)
    partner = tl.load(heads + (dim ^ 1)[None, :], mask=inside, other=0.0)
    return x.to(tl.float32), partner.to(tl.float32)


@triton.jit
def _norm_rotate(
    x, partner, dim, cos, sin, weight, epsilon, D: tl.constexpr, HAS_NORM: tl.constexpr, IS_ROTATED: tl.constexpr
):  # fmt: skip
    """Heads [rows, D] normed and rotated; `sin` has the sign with which the partner is added."""
    if HAS_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / D + epsilon)[:, None]
        x = x * scale * tl.load(weight + dim, mask=dim < D, other=0.0)[None, :]
        partner = partner * scale * tl.load(weight + (dim ^ 1), mask=dim < D, other=0.0)[None, :]
    if IS_ROTATED:
        x = x * cos[None, :] + partner * sin[None, :]
    return x


@triton.jit
def cap_scores(scores, cap, HAS_CAP: tl.constexpr):  # noqa: ANN201
    """Scores in powers of two; factors are those of `score_factors`."""
    if HAS_CAP:
        scores = cap * (2.0 / (1.0 + tl.exp(-2.0 * scores)) - 1.0)  # cap * tanh(scores)
    return scores


@triton.jit
def absorb(scores, v, largest, total, mixed):  # noqa: ANN201
    """Take a block of keys into the running soft-max: largest score, sum of weights, weighted values."""
    new_largest = tl.maximum(largest, tl.max(scores, axis=1))
    # A row that has seen nothing yet has -inf: subtracting it would give NaN.
    anchor = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights, shrink = tl.exp2(scores - anchor[:, None]), tl.exp2(largest - anchor)
    total = total * shrink + tl.sum(weights, axis=1)
    mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_largest, total, mixed


@triton.jit
def _attend_pages(
    qkv, base, table, positions, done, shared, rotations, query_norm, key_norm, sinks, out, sums, query,
    table_stride, position_stride, done_stride, layer_start, scale, cap, window, epsilon,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, ROTATED: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr, IS_SHARED: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    slot, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split = 0 if SPLITS == 1 else tl.program_id(2)
    GROUP: tl.constexpr = H // K
    LOG2_E: tl.constexpr = 1.4426950408889634
    row, dim, step = tl.arange(0, ROWS), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK)
    head = kv_head * GROUP + row
    real, own = (row[:, None] < GROUP) & (dim[None, :] < D), dim[None, :] < D
    pages = table + slot * table_stride
    keys = base + layer_start + kv_head * PAGE * D
    values = keys + K * PAGE * D
    # Loads in order of what they need, so that each round of them is under way at once: nothing, the position, the page.
    runs = tl.load(done + slot * done_stride) == 0
    position = tl.load(positions + slot * position_stride).to(tl.int32)
    first = 0
    if IS_SHARED:
        first = tl.load(shared + slot) * PAGE
    heads = qkv + slot * (H + 2 * K) * D
    new_heads = heads + (H + kv_head + tl.arange(0, 1)[:, None]) * D
    q, q_partner = _load_pairs(heads + head[:, None] * D, dim, real)
    new_k, new_k_partner = _load_pairs(new_heads, dim, own)
    new_v = tl.load(new_heads + K * D + dim[None, :], mask=own, other=0.0).to(base.dtype.element_ty)
    # A slot that is done may have lost its pages: at position 0 it reads no keys, and below it stores none.
    position = tl.where(runs, position, 0)

    last = position
    if HAS_WINDOW:
        # Whole blocks, none of which reaches over the end of a page.
        ALIGNED: tl.constexpr = BLOCK if BLOCK < PAGE else PAGE
        first = tl.maximum(first, tl.maximum(0, position + 1 - window) // ALIGNED * ALIGNED)
    if SPLITS > 1:
        # Whole blocks for each split; the last splits may have none, and write a log-sum of -inf.
        share = tl.cdiv(tl.cdiv(tl.maximum(last - first, 0), BLOCK), SPLITS) * BLOCK
        first += split * share
        last = tl.minimum(last, first + share)
    new_page = tl.load(pages + position // PAGE)
    # A block's page is looked up one block ahead: inside the same turn of the loop it would take a stage of the pipeline.
    page = tl.multiple_of(tl.load(pages + first // PAGE, mask=first < last, other=0), PAGE)
    page_after = page
    if BLOCK > PAGE:
        page_after = tl.multiple_of(tl.load(pages + first // PAGE + 1, mask=first + PAGE < last, other=0), PAGE)

    cos, sin = 1.0, 0.0
    if ROTATED > 0:
        turn = rotations + position * 2 * ROTATED + dim // 2 * 2
        cos = tl.load(turn, mask=dim < 2 * ROTATED, other=1.0)
        sin = tl.load(turn + 1, mask=dim < 2 * ROTATED, other=0.0)
        # (a, b) turns to (a cos - b sin, b cos + a sin): the first of a pair takes its partner with a minus.
        sin = tl.where(dim % 2 == 0, -sin, sin)
    q = _norm_rotate(q, q_partner, dim, cos, sin, query_norm, epsilon, D, HAS_NORM, ROTATED > 0)
    new_k = _norm_rotate(new_k, new_k_partner, dim, cos, sin, key_norm, epsilon, D, HAS_NORM, ROTATED > 0)
    q, new_k = q.to(base.dtype.element_ty), new_k.to(base.dtype.element_ty)

    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, BLOCK_D), tl.float32)
    if split == 0:
        # The new token, whose key is seen as it is stored, and the sink, a score from which nothing is read.
        largest = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), axis=1) * scale
        largest = cap_scores(largest, cap, HAS_CAP)
        total += 1.0
        mixed += new_v.to(tl.float32)
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=row < GROUP, other=0.0) * LOG2_E
            score, largest = largest, tl.maximum(largest, sink)
            shrink = tl.exp2(score - largest)
            total, mixed = shrink + tl.exp2(sink - largest), mixed * shrink[:, None]

    for start in range(first, last, BLOCK):
        place, following = start + step, start + BLOCK
        offset = page + (start % PAGE + step[:, None]) * D
        page = tl.multiple_of(tl.load(pages + following // PAGE, mask=following < last, other=0), PAGE)
        if BLOCK > PAGE:
            offset = tl.where(step[:, None] < PAGE, offset, page_after + (step[:, None] - PAGE) * D)
            beyond = following + PAGE
            page_after = tl.multiple_of(tl.load(pages + beyond // PAGE, mask=beyond < last, other=0), PAGE)
        inside = (place[:, None] < last) & own
        k = tl.load(keys + offset + dim[None, :], mask=inside, other=0.0)
        v = tl.load(values + offset + dim[None, :], mask=inside, other=0.0)
        scores = cap_scores(tl.dot(q, tl.trans(k), input_precision="ieee") * scale, cap, HAS_CAP)
        # Keys before the new token only: its own was taken in above, and may not be stored yet.
        seen = place < last
        if HAS_WINDOW:
            seen = seen & (place > position - window)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        largest, total, mixed = absorb(scores, v, largest, total, mixed)

    if (split == 0) & runs:
        place = tl.multiple_of(new_page, PAGE) + (position % PAGE) * D + dim[None, :]
        tl.store(keys + place, new_k, mask=own)
        tl.store(values + place, new_v, mask=own)
        if IS_SHARED:
            # Normed and rotated, for the shared pass, which starts after this kernel.
            tl.store(query + (slot * H + head[:, None]) * D + dim[None, :], q, mask=real)
    # Own parts first, [0, SPLITS); those of shared pages come behind them.
    part = (slot * H + head) * PARTS + split
    filled = real & (total[:, None] > 0)  # a part without keys writes its log-sum of -inf alone
    mixed = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + part[:, None] * D + dim[None, :], mixed, mask=filled)
    if PARTS > 1:
        tl.store(sums + part, largest + tl.log2(total), mask=row < GROUP)


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
    # Which tiles have members is read on the device: groups change between replays of one graph.
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
        # Slots beyond N, done, or alone: their rows of the tile compute nothing that is stored.
        active = active & (num_pages > 0)
        place = slot * H + kv_head * GROUP + head
        is_query = active[:, None] & (dim[None, :] < D)
        q = tl.load(query + place[:, None] * D + dim[None, :], mask=is_query, other=0.0)
        # Any active member's row will do: the leading pages are the same for all of them.
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
    """Write the last `splits` parts [N, H, parts, D] of slots that share pages, and their sums [N, H, parts]; `factors` are
    those of `score_factors`."""
    assert launch.block <= PAGE
    count, num_heads, dim = query_NHD.shape
    num_kv, num_members = view.base.shape[3], view.members.shape[1]
    if num_members & (num_members - 1):
        raise ValueError(f"members must have a power of two of columns, got {num_members}: fill up with -1.")
    # Rows of a tile: members times query heads of one key head, both powers of two.
    heads = triton.next_power_of_2(num_heads // num_kv)
    members = max(1, min(num_members, launch.rows // heads))
    num_tiles = view.members.numel() // members
    # As many programs as run at once.
    processors = (
        0 if not query_NHD.is_cuda else torch.cuda.get_device_properties(query_NHD.device).multi_processor_count
    )
    most = PROGRAMS_PER_PROCESSOR * processors or 3
    _attend_shared[(min(num_tiles * num_kv * splits, most),)](
        query_NHD, view.base, view.table, view.positions, view.done, view.members, view.shared, parts, sums,
        view.table.stride(0), view.positions.stride(0), view.done.stride(0), layer * 2 * num_kv * PAGE * dim,
        *factors, window or 0, count, num_tiles,
        H=num_heads, K=num_kv, D=dim, BLOCK_D=max(16, triton.next_power_of_2(dim)), MEMBERS=members, HEADS=heads,
        ROWS=max(16, members * heads), TILES=triton.next_power_of_2(num_tiles), PAGE=PAGE, BLOCK=launch.block,
        SPLITS=splits, PARTS=sums.shape[2], HAS_CAP=has_cap, HAS_WINDOW=window is not None,
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip


@triton.jit
def _merge_parts(
    parts, sums, done, shared, out, done_stride,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    OWN: tl.constexpr,
):  # fmt: skip
    slot, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part, dim = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    # Slots outside of groups have garbage in their shared parts, which nobody wrote.
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
    """Write the attention over all keys, of the parts [N, H, parts, D] and their sums [N, H, parts]. The first `own` parts
    are there for every slot, the others for those that share pages."""
    count, num_heads, num_parts, dim = parts.shape
    _merge_parts[(count, num_heads)](
        parts, sums, view.done, view.shared, out_NHD, view.done.stride(0),
        H=num_heads, D=dim, BLOCK_D=triton.next_power_of_2(dim), PARTS=num_parts,
        BLOCK=triton.next_power_of_2(num_parts), OWN=own, num_warps=2 if num_parts <= 16 else 4,
    )  # fmt: skip


def score_factors(scale: float, cap: float | None) -> tuple[float, float]:
    """Factors of query x key and of its tanh that give scores in powers of two."""
    return (scale * LOG2_E, 0.0) if cap is None else (scale / cap, cap * LOG2_E)


def attend_pages(
    qkv: Tensor,
    view: PageView,
    layer: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    cap: float | None = None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    rotations: Tensor | None = None,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    epsilon: float = 0.0,
    splits: int = 1,
    shared: bool = False,
    shared_splits: int = 16,
    launch: Launch | None = None,
    shared_launch: Launch | None = None,
) -> Tensor:
    """Each slot's new token over its pages up to and including itself -> [N, H * D] in the dtype of the pages.

    `qkv` [N, (H + 2 K) * D] is what the projection gives; `rotations` is real [positions, rotated pairs, 2] (cos, sin), or
    None. The new keys and values are stored. `splits` programs divide the keys of a slot and head. With `shared`, pages
    that `view.shared` counts are read once for all members of a group, by `shared_splits` programs.
    """
    assert qkv.is_contiguous()
    assert view.table.stride(1) == 1
    assert view.members.is_contiguous()
    count, dim, dtype, device = qkv.shape[0], head_dim, view.base.dtype, qkv.device
    factors = score_factors(scale, cap)
    unused = qkv  # a pointer for arguments that a constant switches off
    out = torch.empty(count, num_heads, dim, dtype=dtype, device=device)
    num_parts = splits + (shared_splits if shared else 0)
    in_parts = num_parts > 1
    # fp32: parts are rounded once, when they are merged.
    parts = torch.empty(count, num_heads, num_parts, dim, device=device) if in_parts else out
    sums = torch.empty(count, num_heads, num_parts, device=device) if in_parts else unused
    query = torch.empty_like(out) if shared else unused
    launch = launch or default_launch(dim, dtype)
    _attend_pages[(count, num_kv_heads, splits)](
        qkv, view.base, view.table, view.positions, view.done, view.shared,
        unused if rotations is None else rotations, unused if query_norm is None else query_norm,
        unused if key_norm is None else key_norm, unused if sinks_H is None else sinks_H,
        parts, sums, query,
        view.table.stride(0), view.positions.stride(0), view.done.stride(0), layer * 2 * num_kv_heads * PAGE * dim,
        *factors, window or 0, epsilon,
        H=num_heads, K=num_kv_heads, D=dim, ROWS=max(16, triton.next_power_of_2(num_heads // num_kv_heads)),
        BLOCK_D=max(16, triton.next_power_of_2(dim)), ROTATED=0 if rotations is None else rotations.shape[1],
        PAGE=PAGE, BLOCK=launch.block, SPLITS=splits, PARTS=num_parts, IS_SHARED=shared,
        HAS_NORM=query_norm is not None, HAS_CAP=cap is not None, HAS_WINDOW=window is not None,
        HAS_SINKS=sinks_H is not None, num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    if shared:
        attend_shared(
            query, view, layer, parts, sums, splits=shared_splits, factors=factors, has_cap=cap is not None,
            window=window, launch=shared_launch or default_shared_launch(dim, dtype),
        )  # fmt: skip
    if in_parts:
        merge_parts(parts, sums, view, out, own=splits)
    return out.view(count, num_heads * dim)


def default_launch(dim: int, dtype: torch.dtype) -> Launch:
    """Tiles of a slot's own keys, of a size that stays in registers and shared memory; the fastest on an H200 for heads of
    64 and 128 numbers, at 192 and at 640 keys."""
    if dtype.itemsize > 2:
        return Launch(block=64 if dim <= 64 else 32, warps=4, stages=2)
    if dim > 128:
        return Launch(block=32, warps=4, stages=2)
    return Launch(block=32, warps=1, stages=3) if dim <= 64 else Launch(block=64, warps=2, stages=2)


def default_shared_launch(dim: int, dtype: torch.dtype) -> Launch:
    """Tiles of shared keys. Tensor cores of an H100 or H200 take 64 rows and four warps at once; fp32 does without them."""
    if dtype.itemsize > 2:
        return Launch(block=32, warps=4, stages=2, rows=16)
    return Launch(block=64 if dim <= 128 else 32, warps=4, stages=3 if dim <= 128 else 2, rows=64)
