"""Kernels over logits: the next token of every slot, and the log-probs of chosen tokens with their gradient.

`choose_tokens` serves decode steps: the logits are read once, and one chunk of them again. Its first kernel takes each chunk
of the vocabulary's largest logit and sum of exponentials; the second finds the chunk in which the cumulated probability
reaches u, then the token inside it, and writes everything a decode step leaves behind. The rules are those of
tba/generate/sampling.py, without truncation and forbidden tokens.

`chosen_log_probs` serves training and scoring: logits are computed from hidden states chunk by chunk of rows, read once
forward and once backward.

Axes: N slots, M tokens, E hidden, V vocabulary, C chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


@triton.jit
def _scaled(logits, row, column, inside, V, cap, HAS_CAP: tl.constexpr):
    value = tl.load(logits + row.to(tl.int64) * V + column, mask=inside, other=float("-inf")).to(tl.float32)
    if HAS_CAP:
        value = tl.where(inside, cap * (2.0 / (1.0 + tl.exp(-2.0 * value / cap)) - 1.0), float("-inf"))
    return value


@triton.jit
def _chunk_sums(
    logits, temperature, policy_temperature, stride, largest, total, policy_total, best, V, C, cap,
    HAS_CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0), tl.program_id(1)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    value = _scaled(logits, row, column, column < V, V, cap, HAS_CAP)
    peak = tl.max(value, axis=0)
    place = row * C + chunk
    tl.store(largest + place, peak)
    tl.store(best + place, tl.min(tl.where(value == peak, column, V), axis=0))
    # Differences to the chunk's peak: the peak itself is at temperature 1, so both sums share it.
    tl.store(total + place, tl.sum(tl.exp((value - peak) / tl.load(temperature + row * stride)), axis=0))
    policy = tl.exp((value - peak) / tl.load(policy_temperature + row * stride))
    tl.store(policy_total + place, tl.sum(policy, axis=0))


@triton.jit
def _shift(z, bits: tl.constexpr):
    """Logical shift to the right: Triton's shift of a signed number drags the sign along."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


@triton.jit
def _uniform(key, token_number):
    z = key + (token_number + 1) * GAMMA
    z = (z ^ _shift(z, 30)) * MIX_1
    z = (z ^ _shift(z, 27)) * MIX_2
    z = z ^ _shift(z, 31)
    return (_shift(z, 40).to(tl.float32) + 0.5) * (1.0 / 16777216.0)


@triton.jit
def _choose(
    logits, largest, total, policy_total, best, is_stop,
    ids, positions, num_tokens, limits, keys, greedy, done, temperature, policy_temperature,
    tokens, behaviour, policy, int_stride, float_stride, table_stride, V, C, cap,
    HAS_CAP: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if tl.load(done + row * int_stride) != 0:
        return
    chunk = tl.arange(0, CHUNKS)
    real = chunk < C
    peaks = tl.load(largest + row * C + chunk, mask=real, other=float("-inf"))
    peak = tl.max(peaks, axis=0)
    heat = tl.load(temperature + row * float_stride)
    weights = tl.load(total + row * C + chunk, mask=real, other=0.0) * tl.exp((peaks - peak) / heat)
    mass = tl.sum(weights, axis=0)
    number = tl.load(num_tokens + row * int_stride)
    target = _uniform(tl.load(keys + row * int_stride), number) * mass
    reached = tl.cumsum(weights, axis=0)
    last_chunk = tl.max(tl.where(weights > 0.0, chunk, 0), axis=0)
    chosen = tl.minimum(tl.sum(tl.where(real & (reached <= target), 1, 0), axis=0), last_chunk)
    before = tl.sum(tl.where(chunk < chosen, weights, 0.0), axis=0)

    column = chosen * BLOCK + tl.arange(0, BLOCK)
    value = _scaled(logits, row, column, column < V, V, cap, HAS_CAP)
    probability = tl.exp((value - peak) / heat)
    inner = tl.cumsum(probability, axis=0)
    offset = tl.sum(tl.where(inner <= target - before, 1, 0), axis=0)
    last = tl.max(tl.where(probability > 0.0, tl.arange(0, BLOCK), 0), axis=0)
    sampled = chosen * BLOCK + tl.minimum(offset, last)
    is_greedy = tl.load(greedy + row * int_stride) != 0
    first_best = tl.min(tl.where(peaks == peak, tl.load(best + row * C + chunk, mask=real, other=V), V), axis=0)
    token = tl.where(is_greedy, first_best, sampled)

    logit = tl.load(logits + row.to(tl.int64) * V + token).to(tl.float32)
    if HAS_CAP:
        logit = cap * (2.0 / (1.0 + tl.exp(-2.0 * logit / cap)) - 1.0)
    cool = tl.load(policy_temperature + row * float_stride)
    policy_weights = tl.load(policy_total + row * C + chunk, mask=real, other=0.0) * tl.exp((peaks - peak) / cool)
    place = row * table_stride + number
    tl.store(tokens + place, token.to(tl.int64))
    tl.store(behaviour + place, tl.where(is_greedy, 0.0, (logit - peak) / heat - tl.log(mass)))
    tl.store(policy + place, (logit - peak) / cool - tl.log(tl.sum(policy_weights, axis=0)))
    tl.store(ids + row * int_stride, token.to(tl.int64))
    tl.store(positions + row * int_stride, tl.load(positions + row * int_stride) + 1)
    tl.store(num_tokens + row * int_stride, number + 1)
    ends = (tl.load(is_stop + token) != 0) | (number + 1 >= tl.load(limits + row * int_stride))
    tl.store(done + row * int_stride, ends.to(tl.int64))


@dataclass(frozen=True, kw_only=True, eq=False)
class Columns:
    """Views of the slots' tables, one number per slot; all integers share a stride, all floats share one."""

    ids: Tensor
    positions: Tensor
    num_tokens: Tensor
    limits: Tensor
    keys: Tensor
    greedy: Tensor
    done: Tensor
    temperature: Tensor
    policy_temperature: Tensor
    tokens: Tensor
    """Tokens written so far, int64 [S, longest response]."""
    behaviour: Tensor
    policy: Tensor


def choose_tokens(logits_NV: Tensor, columns: Columns, is_stop_V: Tensor, *, cap: float | None = None) -> None:
    """Sample or take the best for every slot that is not done; record token and log-probs; move the slot on."""
    rows, size = logits_NV.shape
    chunks = triton.cdiv(size, CHUNK)
    block = min(CHUNK, triton.next_power_of_2(size))
    largest, total, policy_total = (torch.empty(rows, chunks, device=logits_NV.device) for _ in range(3))
    best = torch.empty(rows, chunks, dtype=torch.int32, device=logits_NV.device)
    float_stride, int_stride = columns.temperature.stride(0), columns.ids.stride(0)
    _chunk_sums[(rows, chunks)](
        logits_NV, columns.temperature, columns.policy_temperature, float_stride, largest, total, policy_total, best,
        size, chunks, cap or 0.0, HAS_CAP=cap is not None, BLOCK=block, num_warps=8,
    )  # fmt: skip
    _choose[(rows,)](
        logits_NV, largest, total, policy_total, best, is_stop_V,
        columns.ids, columns.positions, columns.num_tokens, columns.limits, columns.keys, columns.greedy, columns.done,
        columns.temperature, columns.policy_temperature, columns.tokens, columns.behaviour, columns.policy,
        int_stride, float_stride, columns.tokens.stride(0), size, chunks, cap or 0.0,
        HAS_CAP=cap is not None, BLOCK=block, CHUNKS=triton.next_power_of_2(chunks), num_warps=8,
    )  # fmt: skip


# --- log-probs of chosen tokens, with gradient ----------------------------------------------------------------------


@triton.jit
def _row_sums(logits, targets, log_prob, entropy, log_sum, inverse_temperature, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    peak, total, weighted = float("-inf"), 0.0, 0.0
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < V
        value = tl.load(logits + row * V + column, mask=inside, other=float("-inf")).to(tl.float32)
        value = value * inverse_temperature
        new_peak = tl.maximum(peak, tl.max(value, axis=0))
        shrink = tl.exp(peak - new_peak)
        weight = tl.exp(value - new_peak)
        total = total * shrink + tl.sum(weight, axis=0)
        weighted = weighted * shrink + tl.sum(tl.where(inside, weight * value, 0.0), axis=0)
        peak = new_peak
    log_total = peak + tl.log(total)
    chosen = tl.load(logits + row * V + tl.load(targets + row)).to(tl.float32) * inverse_temperature
    tl.store(log_prob + row, chosen - log_total)
    tl.store(entropy + row, log_total - weighted / total)
    tl.store(log_sum + row, log_total)


@triton.jit
def _to_gradients(logits, targets, log_sum, gradient, inverse_temperature, V, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    inside = column < V
    value = tl.load(logits + row * V + column, mask=inside, other=float("-inf")).to(tl.float32)
    probability = tl.exp(value * inverse_temperature - tl.load(log_sum + row))
    is_target = tl.where(column == tl.load(targets + row), 1.0, 0.0)
    slope = tl.load(gradient + row) * inverse_temperature * (is_target - probability)
    tl.store(logits + row * V + column, slope.to(logits.dtype.element_ty), mask=inside)


class _ChosenLogProbs(torch.autograd.Function):
    """Forward keeps hidden states and one number per token; backward computes the logits of a chunk again."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ME: Tensor, head_VE: Tensor, targets_M: Tensor, inverse_temperature: float, rows: int
    ) -> tuple[Tensor, Tensor]:
        count, size = hidden_ME.shape[0], head_VE.shape[0]
        log_prob_M, entropy_M, log_sum_M = (torch.empty(count, device=hidden_ME.device) for _ in range(3))
        for start in range(0, count, rows):
            part = slice(start, min(start + rows, count))
            logits = hidden_ME[part] @ head_VE.t()
            _row_sums[(logits.shape[0],)](
                logits, targets_M[part], log_prob_M[part], entropy_M[part], log_sum_M[part], inverse_temperature, size,
                BLOCK=min(CHUNK, triton.next_power_of_2(size)), num_warps=8,
            )  # fmt: skip
        ctx.save_for_backward(hidden_ME, head_VE, targets_M, log_sum_M)
        ctx.inverse_temperature, ctx.rows = inverse_temperature, rows
        ctx.mark_non_differentiable(entropy_M)
        return log_prob_M, entropy_M

    @staticmethod
    def backward(ctx: Any, gradient_M: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_ME, head_VE, targets_M, log_sum_M = ctx.saved_tensors
        count, size = hidden_ME.shape[0], head_VE.shape[0]
        gradient_M = gradient_M.contiguous()
        d_hidden_ME = torch.empty_like(hidden_ME)
        d_head_VE = None  # a frozen head (LoRA) needs none
        if ctx.needs_input_grad[1]:
            d_head_VE = torch.zeros(head_VE.shape, dtype=torch.float32, device=head_VE.device)
        block = min(CHUNK, triton.next_power_of_2(size))
        for start in range(0, count, ctx.rows):
            part = slice(start, min(start + ctx.rows, count))
            logits = hidden_ME[part] @ head_VE.t()
            _to_gradients[(logits.shape[0], triton.cdiv(size, block))](
                logits, targets_M[part], log_sum_M[part], gradient_M[part], ctx.inverse_temperature, size,
                BLOCK=block, num_warps=8,
            )  # fmt: skip
            torch.mm(logits, head_VE, out=d_hidden_ME[part])
            if d_head_VE is not None:
                d_head_VE += logits.t() @ hidden_ME[part]
        return d_hidden_ME, None if d_head_VE is None else d_head_VE.to(head_VE.dtype), None, None, None


def chosen_log_probs(
    hidden_ME: Tensor, head_VE: Tensor, targets_M: Tensor, *, temperature: float, logits_at_once: int
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target [M], and entropy of each distribution [M] without gradient, both fp32."""
    rows = max(1, logits_at_once // head_VE.shape[0])
    return _ChosenLogProbs.apply(hidden_ME.contiguous(), head_VE, targets_M, 1.0 / temperature, rows)
