"""Kernels for the log-probs of chosen tokens with their gradient, which serve training and scoring: logits are computed from
hidden states chunk by chunk of rows, once forward and once backward, or kept between the two where there is memory. How
decode steps choose tokens is in sampling.py.

Axes: M tokens, E hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096
"""Number of logits that one program reads at once."""


@triton.jit
def _sums_of(place, inverse_temperature, V, BLOCK: tl.constexpr):
    """Log-sum of a row's logits, and the entropy of their distribution."""
    peak, total, weighted = float("-inf"), 0.0, 0.0
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < V
        value = tl.load(place + column, mask=inside, other=float("-inf")).to(tl.float32) * inverse_temperature
        new_peak = tl.maximum(peak, tl.max(value, axis=0))
        shrink = tl.exp(peak - new_peak)
        weight = tl.exp(value - new_peak)
        total = total * shrink + tl.sum(weight, axis=0)
        weighted = weighted * shrink + tl.sum(tl.where(inside, weight * value, 0.0), axis=0)
        peak = new_peak
    log_total = peak + tl.log(total)
    return log_total, log_total - weighted / total


@triton.jit
def _row_sums(logits, targets, log_prob, entropy, log_sum, inverse_temperature, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    log_total, spread = _sums_of(logits + row * V, inverse_temperature, V, BLOCK)
    chosen = tl.load(logits + row * V + tl.load(targets + row)).to(tl.float32) * inverse_temperature
    tl.store(log_prob + row, chosen - log_total)
    tl.store(entropy + row, spread)
    tl.store(log_sum + row, log_total)


@triton.jit
def _to_slopes(logits, targets, log_prob, entropy, inverse_temperature, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place, target = logits + row * V, tl.load(targets + row)
    log_total, spread = _sums_of(place, inverse_temperature, V, BLOCK)
    chosen = tl.load(place + target).to(tl.float32) * inverse_temperature
    tl.store(log_prob + row, chosen - log_total)
    tl.store(entropy + row, spread)
    tl.debug_barrier()  # every thread has read the chosen logit before one writes a slope over it
    # The rows that are at work at one time fit in the second-level cache: reading them again costs little.
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < V
        value = tl.load(place + column, mask=inside, other=float("-inf")).to(tl.float32) * inverse_temperature
        slope = tl.where(column == target, 1.0, 0.0) - tl.exp(value - log_total)
        tl.store(place + column, slope.to(logits.dtype.element_ty), mask=inside)


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


class _KeptLogProbs(torch.autograd.Function):
    """Forward turns the logits into slopes, d log-prob / d logits, which backward multiplies: none is computed twice."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ME: Tensor, head_VE: Tensor, targets_M: Tensor, inverse_temperature: float
    ) -> tuple[Tensor, Tensor]:
        count, size = hidden_ME.shape[0], head_VE.shape[0]
        log_prob_M, entropy_M = (torch.empty(count, device=hidden_ME.device) for _ in range(2))
        slopes_MV = hidden_ME @ head_VE.t()
        _to_slopes[(count,)](
            slopes_MV, targets_M, log_prob_M, entropy_M, inverse_temperature, size,
            BLOCK=min(CHUNK, triton.next_power_of_2(size)), num_warps=8,
        )  # fmt: skip
        ctx.save_for_backward(hidden_ME, head_VE, slopes_MV)
        ctx.inverse_temperature = inverse_temperature
        ctx.mark_non_differentiable(entropy_M)
        return log_prob_M, entropy_M

    @staticmethod
    def backward(ctx: Any, gradient_M: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden_ME, head_VE, slopes_MV = ctx.saved_tensors
        # A row's gradient multiplies E numbers of its hidden state here, instead of V slopes.
        factor_M1 = (gradient_M * ctx.inverse_temperature)[:, None]
        d_hidden_ME = ((slopes_MV @ head_VE) * factor_M1).to(hidden_ME.dtype)
        d_head_VE = None  # a frozen head (LoRA) needs none
        if ctx.needs_input_grad[1]:
            d_head_VE = slopes_MV.t() @ (hidden_ME * factor_M1).to(hidden_ME.dtype)
        return d_hidden_ME, d_head_VE, None, None


def chosen_log_probs(
    hidden_ME: Tensor,
    head_VE: Tensor,
    targets_M: Tensor,
    *,
    temperature: float,
    logits_at_once: int,
    keep: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target [M], and entropy of each distribution [M] without gradient, both fp32.

    `keep`: hold M x V numbers until the backward pass, which is then shorter by a matrix product; otherwise no more than
    `logits_at_once` are held at any time.
    """
    hidden_ME = hidden_ME.contiguous()
    if keep and torch.is_grad_enabled() and (hidden_ME.requires_grad or head_VE.requires_grad):
        return _KeptLogProbs.apply(hidden_ME, head_VE, targets_M, 1.0 / temperature)
    rows = max(1, logits_at_once // head_VE.shape[0])
    return _ChosenLogProbs.apply(hidden_ME, head_VE, targets_M, 1.0 / temperature, rows)
