"""Kernels that choose the next token of every slot by the rules of tba/engine/sampling.py: all of them, so that every
decode step can be captured, whatever its responses ask for.

The first kernel finds where top_k and top_p cut; rows that ask for neither leave it at once. The second takes the largest
logit and the sums of exponentials of each chunk of the vocabulary. The third finds the chunk in which the cumulated
probability reaches u, then the token inside it, and writes everything a decode step leaves behind. But for the first, logits
are read once, and one chunk of them again.

What is kept is a beginning of the tokens in the order of likelihood, of equal ones the lower id first. Two numbers say where
it ends: the rank of the last token kept, an integer in the order of the logits, and the last id kept of that rank.

Axes: N slots, V vocabulary, C chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096
"""Number of logits that one program reads at once."""
GAMMA = tl.constexpr(-7046029254386353131)
MIX_1 = tl.constexpr(-4658895280553007687)
MIX_2 = tl.constexpr(-7723592293110705685)
"""GAMMA, MIX_1 and MIX_2 are 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB as signed numbers."""
LOWEST = tl.constexpr(-2139095041)
"""Rank of -inf."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _logits(logits, row, column, V, cap, HAS_CAP: tl.constexpr):
    """Logits of a row, soft-capped; -inf beyond the vocabulary."""
    inside = column < V
    value = tl.load(logits + row.to(tl.int64) * V + column, mask=inside, other=float("-inf")).to(tl.float32)
    if HAS_CAP:
        value = tl.where(inside, cap * (2.0 / (1.0 + tl.exp(-2.0 * value / cap)) - 1.0), float("-inf"))
    return value


@triton.jit
def _allowed(value, is_stop, column, V, forbids):
    """The same logits with stop tokens at -inf where they are forbidden."""
    # Rows that forbid nothing load nothing: the mask is empty for them.
    stop = tl.load(is_stop + column, mask=column < tl.where(forbids, V, 0), other=0) != 0
    return tl.where(stop, float("-inf"), value)


@triton.jit
def _rank(value, SHIFT: tl.constexpr):
    """Integers in the order of the numbers. SHIFT leaves out bits that are alike in all of them: bf16 has 16."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)  # there are two zeros
    # Negative floats order the other way round as integers: all bits but the sign are turned.
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _number(rank, SHIFT: tl.constexpr):
    # Bits that were left out are 0 in the float, which are ones in a negative number's rank.
    full = (rank << SHIFT) | tl.where(rank < 0, (1 << SHIFT) - 1, 0)
    return (full ^ ((full >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _from_rank(
    logits, is_stop, row, floor, peak, heat, forbids, V, cap,
    HAS_CAP: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Number of tokens of at least this rank, and the sum of their exponentials."""
    count, mass = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = _allowed(_logits(logits, row, column, V, cap, HAS_CAP), is_stop, column, V, forbids)
        reaches = (column < V) & (_rank(value, SHIFT) >= floor)
        count += reaches.to(tl.int32)
        mass += tl.where(reaches, tl.exp((value - peak) / heat), 0.0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _find_cuts(
    logits, is_stop, num_tokens, min_new_tokens, top_k, greedy, done, top_p, temperature, cuts, last_ids,
    int_stride, float_stride, V, cap,
    HAS_CAP: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    k, p = tl.load(top_k + row * int_stride).to(tl.int32), tl.load(top_p + row * float_stride)
    is_cut = ((k > 0) & (k < V)) | (p < 1.0)
    is_idle = (tl.load(done + row * int_stride) != 0) | (tl.load(greedy + row * int_stride) != 0)
    # Keeps everything: every row has a cut, and rows that ask for none leave with this one.
    tl.store(cuts + row, LOWEST >> SHIFT)
    tl.store(last_ids + row, V)
    if is_idle | (is_cut == 0):
        return
    forbids = tl.load(num_tokens + row * int_stride) < tl.load(min_new_tokens + row * int_stride)
    heat = tl.load(temperature + row * float_stride)
    # Largest allowed logit of the row: exponentials below are of differences to it.
    peaks = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = _allowed(_logits(logits, row, column, V, cap, HAS_CAP), is_stop, column, V, forbids)
        peaks = tl.maximum(peaks, value)
    peak = tl.max(peaks, axis=0)
    highest = _rank(peak, SHIFT).to(tl.int64)

    # top_k: the highest rank that k tokens reach. In 64 bits: the distance of two ranks needs 33.
    k = tl.where((k > 0) & (k < V), k, V)
    low, high = tl.full((), LOWEST >> SHIFT, tl.int64), highest
    while (low < high) & (k < V):
        middle = high - (high - low) // 2
        count, _ = _from_rank(
            logits, is_stop, row, middle.to(tl.int32), peak, heat, forbids, V, cap, HAS_CAP, SHIFT, BLOCK
        )
        low, high = tl.where(count >= k, middle, low), tl.where(count >= k, high, middle - 1)
    # Rank of the k-th token (without top_k the lowest). Of the tokens that have it, as many stay as k still allows.
    floor = low
    above, mass_above = _from_rank(
        logits, is_stop, row, (floor + 1).to(tl.int32), peak, heat, forbids, V, cap, HAS_CAP, SHIFT, BLOCK
    )
    ties = k - above
    weight = tl.exp((_number(floor.to(tl.int32), SHIFT) - peak) / heat)
    # top_p counts shares of what top_k left, ties at its rank included as far as they stay.
    target = p * (mass_above + ties * weight)

    # top_p: the highest rank at which the mass reaches the target; what top_k left reaches it at its own.
    high = tl.where(p < 1.0, highest, floor)
    while low < high:
        middle = high - (high - low) // 2
        _, mass = _from_rank(
            logits, is_stop, row, middle.to(tl.int32), peak, heat, forbids, V, cap, HAS_CAP, SHIFT, BLOCK
        )
        low, high = tl.where(mass >= target, middle, low), tl.where(mass >= target, high, middle - 1)
    # How many tokens of the last rank stay, lower ids first.
    most = tl.where(low == floor, ties, V)
    if p < 1.0:
        _, mass_above = _from_rank(
            logits, is_stop, row, (low + 1).to(tl.int32), peak, heat, forbids, V, cap, HAS_CAP, SHIFT, BLOCK
        )
        weight = tl.exp((_number(low.to(tl.int32), SHIFT) - peak) / heat)
        needed = tl.where(weight > 0.0, tl.ceil((target - mass_above) / weight), most)
        # In floats first: of weights that are almost nothing more are needed than an integer holds.
        most = tl.maximum(tl.minimum(needed, most.to(tl.float32)).to(tl.int32), 1)
    # Id of the last tied token that stays: ties are counted in the order of ids.
    seen, last = 0, -1
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = _allowed(_logits(logits, row, column, V, cap, HAS_CAP), is_stop, column, V, forbids)
        tied = ((column < V) & (_rank(value, SHIFT) == low.to(tl.int32))).to(tl.int32)
        number = seen + tl.cumsum(tied, axis=0)
        last = tl.maximum(last, tl.max(tl.where((tied != 0) & (number <= most), column, -1), axis=0))
        seen += tl.sum(tied, axis=0)
    tl.store(cuts + row, low.to(tl.int32))
    tl.store(last_ids + row, last)


@triton.jit
def _kept(value, column, cut, last_id, SHIFT: tl.constexpr):
    rank = _rank(value, SHIFT)
    return tl.where((rank > cut) | ((rank == cut) & (column <= last_id)), value, float("-inf"))


@triton.jit
def _finite(peak):
    """A maximum that may be subtracted: a chunk of which nothing is allowed has -inf as its largest logit, and -inf - -inf
    is NaN."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def _chunk_sums(
    logits, is_stop, num_tokens, min_new_tokens, greedy, temperature, policy_temperature, cuts, last_ids,
    largest, total, policy_largest, policy_total, best, int_stride, float_stride, V, C, cap,
    HAS_CAP: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0), tl.program_id(1)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    value = _logits(logits, row, column, V, cap, HAS_CAP)
    place = row * C + chunk
    policy_peak = tl.max(value, axis=0)
    # Most rows forbid and cut nothing and are trained at the temperature they are sampled at: one sum serves both.
    allowed, peak = value, policy_peak
    forbids = tl.load(num_tokens + row * int_stride) < tl.load(min_new_tokens + row * int_stride)
    if forbids:
        allowed = _allowed(value, is_stop, column, V, forbids)
        peak = tl.max(allowed, axis=0)  # a forbidden token may be far above the allowed ones
    tl.store(policy_largest + place, policy_peak)
    tl.store(largest + place, peak)
    if tl.load(greedy + row * int_stride) != 0:
        tl.store(best + place, tl.min(tl.where(allowed == peak, column, V), axis=0))
    cut, last_id = tl.load(cuts + row), tl.load(last_ids + row)
    is_cut = (cut > (LOWEST >> SHIFT)) | (last_id < V)
    kept = allowed
    if is_cut:
        kept = _kept(allowed, column, cut, last_id, SHIFT)
    heat, cool = tl.load(temperature + row * float_stride), tl.load(policy_temperature + row * float_stride)
    # Differences to the chunk's peak, which is at temperature 1. 2^x is what the hardware computes.
    mass = tl.sum(tl.exp2((kept - _finite(peak)) * (LOG2_E / heat)), axis=0)
    policy_mass = mass
    if forbids | is_cut | (heat != cool):
        policy_mass = tl.sum(tl.exp2((value - _finite(policy_peak)) * (LOG2_E / cool)), axis=0)
    tl.store(total + place, mass)
    tl.store(policy_total + place, policy_mass)


@triton.jit
def _shift(z, bits: tl.constexpr):
    """Logical shift to the right: Triton's shift of a signed number drags the sign along."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


@triton.jit
def _uniform(key, token_number):
    # Rules 2 and 3 of sampling.py: int64 products wrap around as unsigned ones do.
    z = key + (token_number + 1) * GAMMA
    z = (z ^ _shift(z, 30)) * MIX_1
    z = (z ^ _shift(z, 27)) * MIX_2
    z = z ^ _shift(z, 31)
    return (_shift(z, 40).to(tl.float32) + 0.5) * (1.0 / 16777216.0)


@triton.jit
def _choose(
    logits, cuts, last_ids, largest, total, policy_largest, policy_total, best, is_stop,
    ids, positions, num_tokens, limits, min_new_tokens, keys, greedy, done, temperature, policy_temperature,
    tokens, behaviour, policy, int_stride, float_stride, table_stride, V, C, cap,
    HAS_CAP: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if tl.load(done + row * int_stride) != 0:
        return
    chunk = tl.arange(0, CHUNKS)
    real = chunk < C
    peaks = tl.load(largest + row * C + chunk, mask=real, other=float("-inf"))
    peak = tl.max(peaks, axis=0)
    heat = tl.load(temperature + row * float_stride)
    # Sums of chunks are relative to their own peaks: brought to the peak of the row here.
    weights = tl.load(total + row * C + chunk, mask=real, other=0.0) * tl.exp((peaks - peak) / heat)
    mass = tl.sum(weights, axis=0)
    number = tl.load(num_tokens + row * int_stride)
    target = _uniform(tl.load(keys + row * int_stride), number) * mass
    reached = tl.cumsum(weights, axis=0)
    last_chunk = tl.max(tl.where(weights > 0.0, chunk, 0), axis=0)
    # Chunks whose cumulated mass stays at or below the target lie before the chosen one.
    chosen = tl.minimum(tl.sum(tl.where(real & (reached <= target), 1, 0), axis=0), last_chunk)
    before = tl.sum(tl.where(chunk < chosen, weights, 0.0), axis=0)

    column = chosen * BLOCK + tl.arange(0, BLOCK)
    forbids = number < tl.load(min_new_tokens + row * int_stride)
    allowed = _allowed(_logits(logits, row, column, V, cap, HAS_CAP), is_stop, column, V, forbids)
    # The same cuts as in the sums: a token outside them must have no share in this chunk.
    kept = _kept(allowed, column, tl.load(cuts + row), tl.load(last_ids + row), SHIFT)
    # With the peak of the row, so that it adds up with `before`.
    probability = tl.exp((kept - peak) / heat)
    inner = tl.cumsum(probability, axis=0)
    # Where sums round to less than u's share, the last token that can come: not one that was cut off.
    offset = tl.sum(tl.where(inner <= target - before, 1, 0), axis=0)
    last = tl.max(tl.where(probability > 0.0, tl.arange(0, BLOCK), 0), axis=0)
    sampled = chosen * BLOCK + tl.minimum(offset, last)
    is_greedy = tl.load(greedy + row * int_stride) != 0
    first_best = tl.min(tl.where(peaks == peak, tl.load(best + row * C + chunk, mask=real, other=V), V), axis=0)
    # Of logits that are all NaN none is the best; what is chosen must be a token all the same.
    token = tl.minimum(tl.where(is_greedy, first_best, sampled), V - 1)

    # Read again at the chosen token: the policy's log-prob knows no cut and no forbidden token.
    logit = tl.load(logits + row.to(tl.int64) * V + token).to(tl.float32)
    if HAS_CAP:
        logit = cap * (2.0 / (1.0 + tl.exp(-2.0 * logit / cap)) - 1.0)
    cool = tl.load(policy_temperature + row * float_stride)
    policy_peaks = tl.load(policy_largest + row * C + chunk, mask=real, other=float("-inf"))
    policy_peak = tl.max(policy_peaks, axis=0)
    policy_weights = tl.load(policy_total + row * C + chunk, mask=real, other=0.0)
    policy_mass = tl.sum(policy_weights * tl.exp((policy_peaks - policy_peak) / cool), axis=0)
    log_pi = (logit - policy_peak) / cool - tl.log(policy_mass)
    # The slot moves on below, on the device: the host learns of it by its next snapshot.
    place = row * table_stride + number
    tl.store(tokens + place, token.to(tl.int64))
    tl.store(behaviour + place, tl.where(is_greedy, 0.0, (logit - peak) / heat - tl.log(mass)))
    tl.store(policy + place, log_pi)
    tl.store(ids + row * int_stride, token.to(tl.int64))
    tl.store(positions + row * int_stride, tl.load(positions + row * int_stride) + 1)
    tl.store(num_tokens + row * int_stride, number + 1)
    ends = (tl.load(is_stop + token) != 0) | (number + 1 >= tl.load(limits + row * int_stride))
    # NaN is no token's log-prob: the response ends, and the host raises when it takes it out.
    tl.store(done + row * int_stride, (ends | (log_pi != log_pi)).to(tl.int64))


@dataclass(frozen=True, kw_only=True, eq=False)
class Columns:
    """Views of the slots' tables, one number per slot; all integers share a stride, all floats share one."""

    ids: Tensor
    positions: Tensor
    num_tokens: Tensor
    limits: Tensor
    keys: Tensor
    top_k: Tensor
    greedy: Tensor
    min_new_tokens: Tensor
    done: Tensor
    temperature: Tensor
    policy_temperature: Tensor
    top_p: Tensor
    tokens: Tensor
    """Tokens written so far, int64 [S, longest response]."""
    behaviour: Tensor
    policy: Tensor


def choose_tokens(logits_NV: Tensor, columns: Columns, is_stop_V: Tensor, *, cap: float | None = None) -> None:
    """Sample or take the best for every slot that is not done; record token and log-probs; move the slot on."""
    rows, size = logits_NV.shape
    chunks, device = triton.cdiv(size, CHUNK), logits_NV.device
    cuts, last_ids = torch.empty(2, rows, dtype=torch.int32, device=device)
    largest, total, policy_largest, policy_total = torch.empty(4, rows, chunks, device=device)
    best = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    float_stride, int_stride = columns.temperature.stride(0), columns.ids.stride(0)
    options = {
        "HAS_CAP": cap is not None,
        # A capped logit is no bf16 number any more, so it keeps all of its bits.
        "SHIFT": 16 if logits_NV.dtype == torch.bfloat16 and cap is None else 0,
        "BLOCK": min(CHUNK, triton.next_power_of_2(size)),
    }
    # All three run for every step, so that one captured graph serves rows of any settings.
    _find_cuts[(rows,)](
        logits_NV, is_stop_V, columns.num_tokens, columns.min_new_tokens, columns.top_k, columns.greedy, columns.done,
        columns.top_p, columns.temperature, cuts, last_ids, int_stride, float_stride, size, cap or 0.0,
        num_warps=8, **options,
    )  # fmt: skip
    _chunk_sums[(rows, chunks)](
        logits_NV, is_stop_V, columns.num_tokens, columns.min_new_tokens, columns.greedy, columns.temperature,
        columns.policy_temperature, cuts, last_ids, largest, total, policy_largest, policy_total, best,
        int_stride, float_stride, size, chunks, cap or 0.0, num_warps=4, **options,
    )  # fmt: skip
    _choose[(rows,)](
        logits_NV, cuts, last_ids, largest, total, policy_largest, policy_total, best, is_stop_V,
        columns.ids, columns.positions, columns.num_tokens, columns.limits, columns.min_new_tokens, columns.keys,
        columns.greedy, columns.done, columns.temperature, columns.policy_temperature,
        columns.tokens, columns.behaviour, columns.policy,
        int_stride, float_stride, columns.tokens.stride(0), size, chunks, cap or 0.0,
        CHUNKS=triton.next_power_of_2(chunks), num_warps=8, **options,
    )  # fmt: skip
