"""Packed attention through PyTorch's FlashAttention: no padding, no gathered blocks, shared prompts read once.

A branch (a response that shares its prompt's pass) sees its root and its own past. Both parts are computed apart and merged
by their log-sums; in the backward pass each part gets the *merged* output and log-sum, which makes its share of the gradient
exact: probabilities are exp(score - merged log-sum) wherever the key lies.

Axes: T packed tokens, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LARGEST_HEAD = 256
OLDEST = (8, 0)
"""Compute capability: Ampere."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FlashPlan:
    """Cumulated lengths of the packed sequences, as FlashAttention takes them (int32, on the device).

    FlashPlan.make(root_lengths=[3], branch_lengths=[2, 1], branch_roots=[0, 0], device=...): roots 0-2, branches 3-4 and 5.
    """

    num_root_tokens: int
    roots: Tensor
    longest_root: int
    branches: Tensor | None
    """Each branch by itself; None = there are none."""
    longest_branch: int
    queries_of_root: Tensor | None
    """All branch tokens of a root as one sequence: they lie side by side."""
    most_queries: int

    @classmethod
    def make(
        cls,
        *,
        root_lengths: Sequence[int],
        branch_lengths: Sequence[int],
        branch_roots: Sequence[int],
        device: torch.device,
    ) -> FlashPlan:
        queries = [0] * len(root_lengths)
        for root, length in zip(branch_roots, branch_lengths):
            queries[root] += length
        has_branches = len(branch_lengths) > 0
        return cls(
            num_root_tokens=sum(root_lengths),
            roots=_cumulated(root_lengths, device),
            longest_root=max(root_lengths),
            branches=_cumulated(branch_lengths, device) if has_branches else None,
            longest_branch=max(branch_lengths, default=0),
            queries_of_root=_cumulated(queries, device) if has_branches else None,
            most_queries=max(queries),
        )


def _cumulated(lengths: Sequence[int], device: torch.device) -> Tensor:
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return ends.to(device, non_blocking=True)


def can_use_flash(query: Tensor, *, window: int | None, longest: int, softcap: float | None) -> bool:
    return (
        query.is_cuda
        and torch.cuda.get_device_capability(query.device) >= OLDEST
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] <= LARGEST_HEAD
        and query.shape[-1] % 8 == 0
        and softcap is None
        and (window is None or window >= longest)
    )


def flash_attention(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, plan: FlashPlan, scale: float) -> Tensor:
    """-> [T, H, D]"""
    return _PackedFlash.apply(q_THD, k_TKD, v_TKD, plan, scale)


class _PackedFlash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: FlashPlan, scale: float) -> Tensor:
        R = plan.num_root_tokens
        out_roots, sums_roots = _forward(
            q[:R], k[:R], v[:R], plan.roots, plan.roots, plan.longest_root, plan.longest_root, True, scale
        )
        out, sums = out_roots, [sums_roots]
        if plan.branches is not None:
            longest = plan.longest_branch
            own, own_sums = _forward(q[R:], k[R:], v[R:], plan.branches, plan.branches, longest, longest, True, scale)
            assert plan.queries_of_root is not None
            root, root_sums = _forward(
                q[R:],
                k[:R],
                v[:R],
                plan.queries_of_root,
                plan.roots,
                plan.most_queries,
                plan.longest_root,
                False,
                scale,
            )
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            out[:R] = out_roots
            sums.append(_merge(own, own_sums, root, root_sums, out[R:]))
        ctx.save_for_backward(q, k, v, out, *sums)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, sums_roots, *rest = ctx.saved_tensors
        plan, scale = ctx.plan, ctx.scale
        d_out, R = d_out.contiguous(), plan.num_root_tokens
        longest = plan.longest_root
        dq_roots, dk_roots, dv_roots = _backward(
            d_out[:R], q[:R], k[:R], v[:R], out[:R], sums_roots, plan.roots, plan.roots, longest, longest, True, scale
        )
        if plan.branches is None:
            return dq_roots, dk_roots, dv_roots, None, None
        (merged_sums,) = rest
        longest = plan.longest_branch
        branch = (d_out[R:], q[R:])
        dq_own, dk_own, dv_own = _backward(
            *branch, k[R:], v[R:], out[R:], merged_sums, plan.branches, plan.branches, longest, longest, True, scale
        )
        dq_root, dk_root, dv_root = _backward(
            *branch, k[:R], v[:R], out[R:], merged_sums,
            plan.queries_of_root, plan.roots, plan.most_queries, plan.longest_root, False, scale,
        )  # fmt: skip
        dq, dk, dv = (torch.empty_like(states) for states in (q, k, v))
        dq[:R] = dq_roots
        torch.add(dq_own, dq_root, out=dq[R:])
        for whole, roots, seen, own in ((dk, dk_roots, dk_root, dk_own), (dv, dv_roots, dv_root, dv_own)):
            torch.add(roots, seen, out=whole[:R])
            whole[R:] = own
        return dq, dk, dv, None, None


def _merge(own: Tensor, own_sums: Tensor, root: Tensor, root_sums: Tensor, out: Tensor) -> Tensor:
    """Write the attention over both keys to `out`; returns its log-sums."""
    if importlib.util.find_spec("triton") is not None:
        from tba.kernels.merge import merge

        return merge(own, own_sums, root, root_sums, out)
    sums_HT = torch.logaddexp(own_sums, root_sums)
    shares = (torch.exp(part - sums_HT).t()[:, :, None] for part in (own_sums, root_sums))
    out.copy_(own * next(shares) + root * next(shares))
    return sums_HT


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    most_q: int,
    most_k: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output [T, H, D] and log-sums [H, T]."""
    out, sums, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, ends_q, ends_k, most_q, most_k, 0.0, causal, False, scale=scale
    )
    return out, sums


def _backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor,
    ends_q: Tensor, ends_k: Tensor, most_q: int, most_k: int, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    # No dropout, so the random state that the operator asks for is never read.
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        d_out, q, k, v, out, sums.contiguous(), ends_q, ends_k, most_q, most_k, 0.0, causal, unused, unused, scale=scale
    )
