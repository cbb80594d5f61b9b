"""Log-probs of chosen tokens from hidden states, without holding the logits of all tokens at once.

Logits go to fp32 before the soft-max, here as in the engine and the reference.
Axes: M tokens whose probability is wanted, D hidden, V vocabulary.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOGITS_PER_CHUNK = 2**25
"""Logits held at once (128 MiB in fp32); beyond it chunks are recomputed in the backward pass."""
LOGITS_PER_CHUNK_CUDA = 2**30
"""The same on a GPU (2 GiB in bf16)."""


def chosen_log_probs(
    hidden_MD: Tensor,
    head_VD: Tensor,
    targets_M: Tensor,
    *,
    temperature: float,
    bias_V: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """-> (log-prob of each target [M], entropy of each distribution [M] without gradient), both fp32."""
    if hidden_MD.is_cuda and bias_V is None and softcap is None and importlib.util.find_spec("triton") is not None:
        from tba.kernels.logits import chosen_log_probs as fused

        return fused(hidden_MD, head_VD, targets_M, temperature=temperature, logits_at_once=LOGITS_PER_CHUNK_CUDA)
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
