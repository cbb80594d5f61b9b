"""Packed attention through PyTorch's FlashAttention: no padding, no gathered blocks, shared prompts read once.

A branch (a response that shares its prompt's pass) sees its root and its own past. Both parts are computed apart and merged
by their log-sums; in the backward pass each part gets the *merged* output and log-sum, which makes its share of the gradient
exact: probabilities are exp(score - merged log-sum) wherever the key lies.

Forward and backward are operators of their own, so that a compiled layer is one graph with attention in its middle.

Axes: T packed tokens, R of them in roots, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tba.types import on_device

LARGEST_HEAD = 256
OLDEST = (8, 0)
"""Oldest compute capability that has the kernels: Ampere."""


class Sizes(NamedTuple):
    """Numbers of tokens that FlashAttention must know beforehand.

    Sizes(root_tokens=5, longest_root=3, longest_branch=5, most_queries=5)
    """

    root_tokens: int
    longest_root: int
    longest_branch: int
    """Number of tokens of the longest branch; 0 = there are none."""
    most_queries: int
    """Largest number of branch tokens of one root."""


@dataclass(kw_only=True, eq=False)  # not frozen, and no integers: torch.compile would compile again for other lengths
class FlashPlan:
    """Cumulated lengths of the packed sequences, as FlashAttention takes them (int32, on the device).

    FlashPlan.make(root_lengths=[3], branch_lengths=[2, 1], branch_roots=[0, 0], device=...): roots 0-2, branches 3-4 and 5.
    """

    roots: Tensor
    branches: Tensor
    """Cumulated lengths of the branches, each by itself; one of no tokens where there are none."""
    queries_of_root: Tensor
    """Cumulated lengths of all branch tokens of a root as one sequence: they lie side by side."""
    sizes: Tensor
    """Numbers of `Sizes`, on the CPU."""

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
        sizes = Sizes(
            root_tokens=sum(root_lengths),
            longest_root=max(root_lengths),
            longest_branch=max(branch_lengths, default=0),
            most_queries=max(queries),
        )
        return cls(
            roots=_cumulated(root_lengths, device),
            branches=_cumulated(branch_lengths or [0], device),
            queries_of_root=_cumulated(queries, device),
            sizes=torch.tensor(sizes),
        )


def _cumulated(lengths: Sequence[int], device: torch.device) -> Tensor:
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return on_device(ends, device)


def can_use_flash(query: Tensor, value: Tensor, *, softcap: float | None) -> bool:
    """Whether FlashAttention serves these states, given that no sliding window is shorter than a sequence."""
    return (
        query.is_cuda
        and _is_new_enough(query.device)
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] <= LARGEST_HEAD
        and query.shape[-1] % 8 == 0
        and value.shape[-1] <= query.shape[-1]  # smaller values are filled up (DeepSeek: 128 of 192)
        and softcap is None
    )


@torch.compiler.assume_constant_result
def _is_new_enough(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= OLDEST


def flash_attention(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, plan: FlashPlan, scale: float) -> Tensor:
    """Attention inside the plan's sequences -> [T, H, D]."""
    states = (q_THD.contiguous(), k_TKD.contiguous(), v_TKD.contiguous())
    out, _ = _packed_flash(*states, plan.roots, plan.branches, plan.queries_of_root, plan.sizes, scale)
    return out


# --- the operators -----------------------------------------------------------------------------------------------------

PLAN = "Tensor roots, Tensor branches, Tensor queries_of_root, Tensor sizes, float scale"


@torch.library.custom_op(
    "tba::packed_flash", mutates_args=(), schema=f"(Tensor q, Tensor k, Tensor v, {PLAN}) -> (Tensor, Tensor)"
)
def _packed_flash(
    q: Tensor, k: Tensor, v: Tensor,
    roots: Tensor, branches: Tensor, queries_of_root: Tensor, sizes: Tensor, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output [T, H, D] and log-sums [H, T]."""
    R, longest_root, longest_branch, most_queries = sizes.tolist()
    out_roots, sums_roots = _forward(
        q[:R], k[:R], v[:R], roots, roots, longest_root, longest_root, causal=True, scale=scale
    )
    if longest_branch == 0:
        return out_roots, sums_roots
    own, own_sums = _forward(
        q[R:], k[R:], v[R:], branches, branches, longest_branch, longest_branch, causal=True, scale=scale
    )
    root, root_sums = _forward(
        q[R:], k[:R], v[:R], queries_of_root, roots, most_queries, longest_root, causal=False, scale=scale
    )
    out, sums = torch.empty_like(q), sums_roots.new_empty(q.shape[1], q.shape[0])
    out[:R], sums[:, :R] = out_roots, sums_roots
    _merge_parts(own, own_sums, root, root_sums, out[R:], sums[:, R:])
    return out, sums


@torch.library.custom_op(
    "tba::packed_flash_backward",
    mutates_args=(),
    schema=f"(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor sums, {PLAN}) -> (Tensor, Tensor, Tensor)",
)
def _packed_flash_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor,
    roots: Tensor, branches: Tensor, queries_of_root: Tensor, sizes: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v."""
    R, longest_root, longest_branch, most_queries = sizes.tolist()
    dq_roots, dk_roots, dv_roots = _backward(
        d_out[:R], q[:R], k[:R], v[:R], out[:R], sums[:, :R],
        roots, roots, longest_root, longest_root, causal=True, scale=scale,
    )  # fmt: skip
    if longest_branch == 0:
        return dq_roots, dk_roots, dv_roots
    of_branches = (out[R:], sums[:, R:].contiguous())
    dq_own, dk_own, dv_own = _backward(
        d_out[R:], q[R:], k[R:], v[R:], *of_branches,
        branches, branches, longest_branch, longest_branch, causal=True, scale=scale,
    )  # fmt: skip
    dq_root, dk_root, dv_root = _backward(
        d_out[R:], q[R:], k[:R], v[:R], *of_branches,
        queries_of_root, roots, most_queries, longest_root, causal=False, scale=scale,
    )  # fmt: skip
    dq, dk, dv = (torch.empty_like(states) for states in (q, k, v))
    dq[:R] = dq_roots
    torch.add(dq_own, dq_root, out=dq[R:])
    for whole, roots_part, seen, own in ((dk, dk_roots, dk_root, dk_own), (dv, dv_roots, dv_root, dv_own)):
        torch.add(roots_part, seen, out=whole[:R])
        whole[R:] = own
    return dq, dk, dv


@_packed_flash.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *plan: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@_packed_flash_backward.register_fake
def _(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])


def _gradients(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _packed_flash_backward(d_out.contiguous(), *ctx.saved_tensors, ctx.scale)
    return (*gradients, None, None, None, None, None)


_packed_flash.register_autograd(_gradients, setup_context=_keep)


def _merge_parts(own: Tensor, own_sums: Tensor, root: Tensor, root_sums: Tensor, out: Tensor, sums: Tensor) -> None:
    """Write the attention over the own and the root's keys to `out` [T, H, D], its log-sums to `sums` [H, T]."""
    if out.is_cuda and importlib.util.find_spec("triton") is not None:
        from tba.kernels.attention import merge

        merge(own, own_sums, root, root_sums, out, sums)
        return
    sums.copy_(torch.logaddexp(own_sums, root_sums))
    own_share, root_share = (torch.exp(part - sums).t()[:, :, None] for part in (own_sums, root_sums))
    out.copy_(own * own_share + root * root_share)


def _forward(
    q: Tensor, k: Tensor, v: Tensor,
    ends_q: Tensor, ends_k: Tensor, most_q: int, most_k: int, *, causal: bool, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output [T, H, D] and log-sums [H, T] of one set of sequences."""
    # Of at most one query the operator concludes that every sequence has exactly one, where query heads share keys, and
    # folds the heads into queries; a root without a response has none. It is an upper bound, so a higher one is as right.
    most_q = max(most_q, 2)
    out, sums, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, ends_q, ends_k, most_q, most_k, 0.0, causal, False, scale=scale
    )
    return out, sums


def _backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor,
    ends_q: Tensor, ends_k: Tensor, most_q: int, most_k: int, *, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    # No dropout, so the random state that the operator asks for is never read.
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        d_out, q, k, v, out, sums.contiguous(), ends_q, ends_k, most_q, most_k, 0.0, causal, unused, unused, scale=scale
    )
