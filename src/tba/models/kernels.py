"""Triton kernels of a training step, for CUDA. Imported only where a GPU is used; with TRITON_INTERPRET=1 they run on a CPU,
for tests. Attention of a decode step, and how it chooses tokens, are in tba/engine/kernels.

- `merge`: two attentions of the same queries, over a response's own keys and its prompt's, merged by their log-sums.
- `sum_copies`: the gradients of keys that several sequences have seen, summed.
- `accumulate`: gradients of all parameters added to their fp32 sums in one launch. A model has hundreds of parameters, most
  of them small: one launch each takes the host longer than the device, and PyTorch's kernels for lists of tensors add only
  numbers of one type.
- `chosen_log_probs`: log-probs of chosen tokens with their gradient, which serve training and scoring. Logits are computed
  from hidden states chunk by chunk of rows, once forward and once backward, or kept between the two where there is memory.

Axes: T queries, H query heads, K key/value heads, D head dimension, M tokens, E hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tba.types import on_device

BLOCK = CHUNK = 4096  # number of elements that one program adds, and of logits that one program reads at once
ALIGNMENT = 16
"""Bytes that addresses and lengths of the sums are multiples of, so that they are read and written in wide pieces."""


# --- attention -------------------------------------------------------------------------------------------------------


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
    # Relative to the larger log-sum: the exponentials cannot overflow.
    merged = larger + tl.log(tl.exp(a - larger) + tl.exp(b - larger))
    # One of a head's D columns writes the head's log-sum.
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
    d_keys, d_values, first, places, keys_out, values_out, T,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    for step in tl.static_range(TOKENS):
        token = tl.program_id(0).to(tl.int64) * TOKENS + step
        if token < T:
            of_key, of_value = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
            # One program sums all copies of a token, in their order: no atomics, and the same sum in every run.
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


# --- sums of gradients -----------------------------------------------------------------------------------------------


@triton.jit
def _accumulate(
    addresses, sizes, tensor_of, start_of, N, IS_FIRST: tl.constexpr, IS_BF16: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    tensor, start = tl.load(tensor_of + program), tl.multiple_of(tl.load(start_of + program), 16)
    # Addresses are data: first those of the sums, then those of the gradients, N each.
    total = tl.multiple_of(tl.load(addresses + tensor).to(tl.pointer_type(tl.float32)), 16)
    kind = tl.bfloat16 if IS_BF16 else tl.float16
    gradient = tl.multiple_of(tl.load(addresses + N + tensor).to(tl.pointer_type(kind)), 16)
    element, size = start + tl.arange(0, BLOCK), tl.load(sizes + tensor)
    if start + BLOCK <= size:  # without a mask numbers are read and written in wide pieces
        value = tl.load(gradient + element).to(tl.float32)
        if not IS_FIRST:
            value += tl.load(total + element)
        tl.store(total + element, value)
    else:
        inside = element < size
        value = tl.load(gradient + element, mask=inside).to(tl.float32)
        if not IS_FIRST:
            value += tl.load(total + element, mask=inside)
        tl.store(total + element, value, mask=inside)


@lru_cache(maxsize=8)
def _programs(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Number of elements of each tensor; tensor and first element of each program."""
    lengths = torch.tensor(sizes)
    counts = (lengths + BLOCK - 1) // BLOCK
    tensor_of = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), counts)
    ends = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    start_of = ((torch.arange(len(tensor_of)) - ends) * BLOCK).to(torch.int32)
    return on_device(lengths, device), on_device(tensor_of, device), on_device(start_of, device)


def can_accumulate(sums: Sequence[Tensor] | None, gradients: Sequence[Tensor]) -> bool:
    """Whether `accumulate` serves these tensors: gradients of one half-precision type, everything contiguous and aligned."""
    first = gradients[0]
    return first.dtype in (torch.bfloat16, torch.float16) and all(
        tensor.dtype == wanted
        and tensor.is_contiguous()
        and tensor.data_ptr() % ALIGNMENT == 0
        and tensor.numel() < 2**31
        for wanted, tensors in ((first.dtype, gradients), (torch.float32, sums or ()))
        for tensor in tensors
    )


def accumulate(sums: Sequence[Tensor] | None, gradients: Sequence[Tensor]) -> list[Tensor]:
    """fp32 sums with the gradients added, in place; None = the gradients are the first, and the sums are new tensors."""
    device, sizes = gradients[0].device, tuple(gradient.numel() for gradient in gradients)
    if sums is None:
        # Parts of one fp32 tensor, each beginning at a multiple of ALIGNMENT bytes: one allocation instead of hundreds.
        step = ALIGNMENT // 4
        padded = [-(-size // step) * step for size in sizes]
        parts = torch.empty(sum(padded), dtype=torch.float32, device=device).split(padded)
        totals = [part[:size].view(like.shape) for part, size, like in zip(parts, sizes, gradients)]
    else:
        totals = list(sums)
    # Cached by the sizes, which are those of the model in every step; addresses of gradients are not.
    lengths, tensor_of, start_of = _programs(sizes, device)
    addresses = on_device(torch.tensor([tensor.data_ptr() for tensor in (*totals, *gradients)]), device)
    _accumulate[(len(tensor_of),)](
        addresses, lengths, tensor_of, start_of, len(sizes),
        IS_FIRST=sums is None, IS_BF16=gradients[0].dtype == torch.bfloat16, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return totals


# --- log-probs of chosen tokens --------------------------------------------------------------------------------------


@triton.jit
def _sums_of(place, inverse_temperature, V, BLOCK: tl.constexpr):
    """Log-sum of a row's logits, and the entropy of their distribution."""
    peak, total, weighted = float("-inf"), 0.0, 0.0
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < V
        value = tl.load(place + column, mask=inside, other=float("-inf")).to(tl.float32) * inverse_temperature
        new_peak = tl.maximum(peak, tl.max(value, axis=0))
        # What was summed relative to the old peak is brought to the new one.
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
        # Not the logits, M x V numbers: backward computes them from these, chunk by chunk.
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
            # fp32: one product a chunk is added, and half precision would lose the small ones.
            d_head_VE = torch.zeros(head_VE.shape, dtype=torch.float32, device=head_VE.device)
        block = min(CHUNK, triton.next_power_of_2(size))
        for start in range(0, count, ctx.rows):
            part = slice(start, min(start + ctx.rows, count))
            logits = hidden_ME[part] @ head_VE.t()
            _to_gradients[(logits.shape[0], triton.cdiv(size, block))](
                logits, targets_M[part], log_sum_M[part], gradient_M[part], ctx.inverse_temperature, size,
                BLOCK=block, num_warps=8,
            )  # fmt: skip
            # The logits have become gradients in place (`_to_gradients`).
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
    """Log-prob of each target [M], and entropy of each distribution [M] without gradient, both fp32. `keep`: hold M x V
    numbers until the backward pass, which is then shorter by a matrix product; otherwise no more than `logits_at_once`."""
    hidden_ME = hidden_ME.contiguous()
    if keep and torch.is_grad_enabled() and (hidden_ME.requires_grad or head_VE.requires_grad):
        return _KeptLogProbs.apply(hidden_ME, head_VE, targets_M, 1.0 / temperature)
    # Rows of a chunk, so that rows x V logits are held at once.
    rows = max(1, logits_at_once // head_VE.shape[0])
    return _ChosenLogProbs.apply(hidden_ME, head_VE, targets_M, 1.0 / temperature, rows)
