"""Log-probs and entropies of chosen tokens from hidden states, without holding the logits of all tokens at once. Logits go
to fp32 before the soft-max, here as in the engine and the reference. On CUDA kernels do it (kernels.py), on a CPU in
fp32 a function with a backward pass of its own.

On a CPU logits are computed some rows at a time; each few rows go through max, exp and sums while they lie in the core's
cache. With e = exp(z - max z) and s = sum e, both of a row:

    log pi(t) = z_t - max z - log s        entropy = log s - sum e (z - max z) / s
    d log pi(t) / dz = (onehot(t) - e / s)

So e, with s taken off at the chosen token, is the gradient but for a factor that each row has: the backward pass is two
matrix products with it. It is kept for that if it is small enough; otherwise it is computed once more.

Axes: M tokens whose probability is wanted, R and B some of them, D hidden, V vocabulary.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

LOGITS_PER_CHUNK, LOGITS_PER_CHUNK_CUDA = 2**25, 2**30
"""Number of logits held at once (128 MiB in fp32; 2 GiB in bf16); beyond it chunks are recomputed in the backward pass."""
KEPT_LOGITS_SHARE = 0.25
"""Part of a GPU's free memory that the logits of a micro-batch may take from its forward to its backward pass."""
LOGITS_AT_ONCE, LOGITS_IN_CACHE = 2**23, 2**18
"""Number of logits of one matrix product on a CPU (256 rows of 32,000 words: fewer make slower products, more leave the
caches), and of those that go through all other operations together: two matrices of so many fill a 2 MiB L2 cache."""
KEPT_LOGITS = 2**26
"""Most logits that are kept from the forward to the backward pass (256 MiB in fp32); beyond it they are computed twice."""


def chosen_log_probs(
    hidden_MD: Tensor,
    head_VD: Tensor,
    targets_M: Tensor,
    *,
    temperature: float,
    bias_V: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target [M], and entropy of each distribution [M] without gradient, both fp32 (fp64 of hidden states
    in fp64)."""
    if hidden_MD.is_cuda and bias_V is None and softcap is None and importlib.util.find_spec("triton") is not None:
        from tba.models.kernels import chosen_log_probs as fused

        # Whether the logits of all tokens fit into their part of the memory that is free now: what else the backward pass
        # needs of the forward pass is there already. It decides which of two backward passes is prepared.
        keep = hidden_MD.requires_grad
        if keep:
            size, device = hidden_MD.shape[0] * head_VD.shape[0] * hidden_MD.element_size(), hidden_MD.device
            unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            keep = size <= KEPT_LOGITS_SHARE * (torch.cuda.mem_get_info(device)[0] + unused)
        at_once = LOGITS_PER_CHUNK_CUDA
        return fused(hidden_MD, head_VD, targets_M, temperature=temperature, logits_at_once=at_once, keep=keep)
    if hidden_MD.device.type == "cpu" and hidden_MD.dtype in (torch.float32, torch.float64):
        return _ChosenLogProbsOnCpu.apply(hidden_MD, head_VD, bias_V, targets_M, temperature, softcap)
    rows = max(1, LOGITS_PER_CHUNK // head_VD.shape[0])

    def chunk(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return _log_probs_of_chunk(hidden, head_VD, targets, temperature, bias_V, softcap)

    if hidden_MD.shape[0] <= rows:
        return chunk(hidden_MD, targets_M)
    parts = [
        checkpoint(chunk, hidden, targets, use_reentrant=False)
        for hidden, targets in zip(hidden_MD.split(rows), targets_M.split(rows))
    ]
    return torch.cat([log_prob for log_prob, _ in parts]), torch.cat([entropy for _, entropy in parts])


def _log_probs_of_chunk(
    hidden_MD: Tensor,
    head_VD: Tensor,
    targets_M: Tensor,
    temperature: float,
    bias_V: Tensor | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    logits_MV = torch.nn.functional.linear(hidden_MD, head_VD, bias_V).to(
        torch.promote_types(hidden_MD.dtype, torch.float32)
    )
    if softcap is not None:
        logits_MV = softcap * torch.tanh(logits_MV / softcap)
    log_probs_MV = torch.log_softmax(logits_MV / temperature, dim=-1)
    with torch.no_grad():
        entropy_M = -(log_probs_MV.exp() * log_probs_MV).sum(dim=-1)
    return log_probs_MV.gather(1, targets_M[:, None])[:, 0], entropy_M


# --- on a CPU in fp32 or fp64 ---------------------------------------------------------------------------------------


class _ChosenLogProbsOnCpu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        head_VD: Tensor,
        bias_V: Tensor | None,
        targets_M: Tensor,
        temperature: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        rows, words = len(hidden_MD), len(head_VD)
        trains = any(ctx.needs_input_grad)
        slopes_MV = None
        if trains and rows * words <= KEPT_LOGITS:
            # By NumPy, which asks for huge pages: to touch it for the first time takes half as long.
            numpy_dtype = np.float64 if hidden_MD.dtype == torch.float64 else np.float32
            slopes_MV = torch.from_numpy(np.empty((rows, words), dtype=numpy_dtype))
        log_prob_M, entropy_M, sum_M = (hidden_MD.new_empty(rows) for _ in range(3))
        for part in _parts(rows, words):
            # Rows of the kept matrix, to be filled with slopes; None: slopes are not kept.
            own_RV = None if slopes_MV is None else slopes_MV[part]
            found = _compute(hidden_MD[part], head_VD, bias_V, targets_M[part], temperature, softcap, slopes_RV=own_RV)
            log_prob_M[part], entropy_M[part], sum_M[part] = found
        if trains:
            ctx.save_for_backward(hidden_MD, head_VD, bias_V, targets_M, sum_M, slopes_MV)
            ctx.settings = temperature, softcap
        ctx.mark_non_differentiable(entropy_M)
        return log_prob_M, entropy_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_M: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_MD, head_VD, bias_V, targets_M, sum_M, slopes_MV = ctx.saved_tensors
        wants_hidden, wants_head, wants_bias = ctx.needs_input_grad[:3]
        # Slopes are -s d log pi / d (W h / temperature): -s and the temperature come in here, one number a row.
        factor_M1 = (gradient_M / (sum_M * -ctx.settings[0]))[:, None]
        d_hidden_MD = torch.zeros_like(hidden_MD) if wants_hidden else None
        d_head_VD = torch.empty_like(head_VD) if wants_head else None
        d_bias_V = torch.zeros_like(bias_V) if wants_bias else None
        (rows, words), kept = (hidden_MD.shape[0], head_VD.shape[0]), 0.0  # what lies in a new matrix does not count
        # Kept slopes are one product over all rows; others are computed again, some rows at a time.
        for part in _parts(rows, words) if slopes_MV is None else [slice(0, rows)]:
            if not factor_M1[part].any():  # tokens without weight
                continue
            if slopes_MV is not None:
                slopes_RV = slopes_MV[part]
            else:
                slopes_RV = hidden_MD.new_empty(len(hidden_MD[part]), words)
                _compute(hidden_MD[part], head_VD, bias_V, targets_M[part], *ctx.settings, slopes_RV=slopes_RV)
            if d_hidden_MD is not None:
                torch.mm(slopes_RV, head_VD, out=d_hidden_MD[part]).mul_(factor_M1[part])
            if d_head_VD is not None:
                d_head_VD.addmm_(slopes_RV.t(), hidden_MD[part] * factor_M1[part], beta=kept)
                kept = 1.0
            if d_bias_V is not None:
                d_bias_V.addmv_(slopes_RV.t(), factor_M1[part, 0])
        if d_head_VD is not None and not kept:  # no token had weight
            d_head_VD.zero_()
        return d_hidden_MD, d_head_VD, d_bias_V, None, None, None


def _parts(rows: int, words: int, at_once: int | None = None) -> Iterator[slice]:
    size = max(1, (at_once or LOGITS_AT_ONCE) // words)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def _compute(
    hidden_RD: Tensor,
    head_VD: Tensor,
    bias_V: Tensor | None,
    targets_R: Tensor,
    temperature: float,
    softcap: float | None,
    *,
    slopes_RV: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob and entropy [R], and s [R], of z = cap tanh((W h + b) / cap) / temperature. `slopes_RV` is filled with
    -s d log pi / d (W h / temperature)."""
    rows, words = len(hidden_RD), len(head_VD)
    logits_RV = torch.mm(hidden_RD, head_VD.t())
    spare_BV = hidden_RD.new_empty(min(rows, max(1, LOGITS_IN_CACHE // words)), words) if slopes_RV is None else None
    log_prob_R, entropy_R, sum_R = (hidden_RD.new_empty(rows) for _ in range(3))
    for part in _parts(rows, words, LOGITS_IN_CACHE):
        # All in place and in cache.
        z_BV, target_B1 = logits_RV[part], targets_R[part, None]
        bent_BV: Tensor | None = None
        if bias_V is not None:
            z_BV += bias_V
        if softcap is not None:
            z_BV.div_(softcap).tanh_()
            bent_BV = 1.0 - z_BV.square()  # the slope of the soft cap
            z_BV *= softcap
        if temperature != 1.0:
            z_BV /= temperature
        # From here on z is relative to the row's largest logit.
        z_BV -= z_BV.amax(dim=1, keepdim=True)
        e_BV = slopes_RV[part] if slopes_RV is not None else spare_BV[: len(z_BV)]  # type: ignore[index]
        torch.exp(z_BV, out=e_BV)
        sum_R[part] = sum_B = e_BV.sum(dim=1)
        log_prob_R[part] = z_BV.gather(1, target_B1)[:, 0] - sum_B.log()
        # z is used up here: the chosen logit has been read before.
        entropy_R[part] = sum_B.log() - z_BV.mul_(e_BV).sum(dim=1) / sum_B
        if slopes_RV is not None:
            # e - s onehot = -s d log pi / dz: the sign and s come off in the backward pass.
            e_BV.scatter_add_(1, target_B1, -sum_B[:, None])
            if bent_BV is not None:
                e_BV.mul_(bent_BV)
    return log_prob_R, entropy_R, sum_R
