"""Packed attention through PyTorch's FlashAttention: no padding, no masks, shared prompts computed once.

A branch (a response that shares its prompt's pass) sees its root and its own past. Its keys and values are gathered from
both, which is little to copy where several query heads share them, so that all sequences, roots and branches, are one call
of FlashAttention forward and one backward; the gradients of a root's keys are then summed over all that have seen them.

Where prompts are so long that gathered keys would be many times the tokens, both parts are computed apart and merged by
their log-sums; in the backward pass each part gets the *merged* output and log-sum, which makes its share of the gradient
exact. Forward and backward are operators of their own, so that a compiled layer is one graph with attention in its middle.

Axes: T packed tokens, R of them in roots, S gathered keys, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tba.types import on_device

LARGEST_HEAD, OLDEST = 256, (8, 0)  # head size, and oldest compute capability, that has the kernels: Ampere
MOST_GATHERED = 4
"""Largest number of gathered keys per token. Reading and writing a gathered key and its gradients for every query head costs
about a third of what computing a query's two parts apart and merging them does."""


class Sizes(NamedTuple):
    """Numbers that the host must know beforehand: Sizes(gathered=17, root_tokens=5, longest_query=3, longest_key=5) or, in
    parts, Sizes(gathered=-1, root_tokens=5, longest_root=3, longest_branch=5, most_queries=5)"""

    gathered: int  # number of gathered keys; 0 = there are no branches, -1 = roots and branches are computed in parts
    root_tokens: int
    longest_query: int = 0  # largest number of queries of one sequence
    longest_key: int = 0
    longest_root: int = 0
    longest_branch: int = 0
    most_queries: int = 0  # largest number of branch tokens of one root

    @property
    def longest(self) -> tuple[int, int]:
        """Largest numbers of queries and of keys of one sequence."""
        return self.longest_query, self.longest_key

    def cut(self, window: int) -> int | None:
        """A sliding window that leaves some key out of sight, else None; 0 = there is none."""
        return window if 0 < window < self.longest_key else None


class Places(NamedTuple):
    """Where sequences and keys lie, int32. Cumulated lengths begin with 0, as FlashAttention takes them.

    Of roots 0-2 and their branches 3-4 and 5, whose keys are gathered from tokens 0-2, 0-2 3-4, 0-2 5:
    Places(queries=[0, 3, 5, 6], keys=[0, 3, 8, 12], gathered=[0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5],
    first=[0, 3, 6, 9, 10, 11, 12], copies=[0, 3, 8, 1, 4, 9, 2, 5, 10, 6, 7, 11], queries_of_root=[])
    """

    queries: Any  # cumulated lengths of all sequences, roots and then branches; in parts those of the roots alone
    keys: Any  # cumulated numbers of keys that these sequences see; in parts the cumulated lengths of the branches
    gathered: Any  # token that each gathered key is of
    first: Any  # [T + 1]: where the copies of each token begin in `copies`
    copies: Any  # places of the tokens among the gathered keys, token after token
    queries_of_root: Any
    """Cumulated lengths, in parts, of all branch tokens of a root as one sequence: they lie side by side."""


@dataclass(kw_only=True, eq=False)  # not frozen, and no integers: torch.compile would compile again for other lengths
class FlashPlan:
    """How FlashAttention computes packed sequences. All places are one tensor: one copy to the device, and no tensor
    whose size depends on the layout, for which torch.compile would compile again."""

    places: Tensor  # the tensors of `Places` one after the other, on the device
    sizes: Tensor  # numbers of `Sizes`, then the lengths of the tensors of `Places`, on the CPU
    is_in_parts: bool
    """Whether roots and branches are computed apart: a sliding window that cuts across both has no place in either part."""

    @classmethod
    def make(
        cls,
        *,
        root_lengths: Sequence[int],
        branch_lengths: Sequence[int],
        branch_roots: Sequence[int],
        device: torch.device,
    ) -> FlashPlan:
        roots, branches = np.array(root_lengths), np.array(branch_lengths, dtype=np.int64)
        # Branches lie in the order of their roots (`pack`): runs of one root are taken together below.
        root_of, nothing = np.array(branch_roots, dtype=np.int64), np.zeros(0)
        tokens = int(roots.sum() + branches.sum())
        is_little = bool(tokens + roots[root_of].sum() <= MOST_GATHERED * tokens)
        if is_little:
            # All sequences in one call: a root sees itself; a branch sees its root and itself.
            keys, queries = np.concatenate([roots, roots[root_of] + branches]), np.concatenate([roots, branches])
            sizes = Sizes(
                gathered=int(keys.sum()) if len(branches) else 0,
                root_tokens=int(roots.sum()),
                longest_query=int(queries.max()),
                longest_key=int(keys.max()),
            )
            gathered, first, copies = _gathered(roots, branches, root_of) if len(branches) else (nothing,) * 3
            places = Places(_cumulated(queries), _cumulated(keys), gathered, first, copies, nothing)
        else:
            # Roots, branches by themselves, and all branch tokens of each root as one sequence over the root's keys.
            queries = np.bincount(root_of, weights=branches, minlength=len(roots)).astype(np.int64)
            sizes = Sizes(
                gathered=-1,
                root_tokens=int(roots.sum()),
                longest_root=int(roots.max()),
                longest_branch=int(branches.max()),
                most_queries=int(queries.max()),
            )
            ends = (_cumulated(roots), _cumulated(branches))
            places = Places(*ends, nothing, nothing, nothing, _cumulated(queries))
        # `_read` cuts it again by the lengths behind the sizes.
        numbers = np.concatenate(places).astype(np.int32)
        return cls(
            places=on_device(torch.from_numpy(numbers), device),
            sizes=torch.tensor([*sizes, *map(len, places)]),
            is_in_parts=not is_little,
        )

    def read(self) -> tuple[Sizes, Places]:
        return _read(self.places, self.sizes)


def _read(places: Tensor, sizes: Tensor) -> tuple[Sizes, Places]:
    numbers, count = sizes.tolist(), len(Sizes._fields)
    return Sizes(*numbers[:count]), Places(*places.split(numbers[count:]))


def _gathered(roots: np.ndarray, branches: np.ndarray, root_of: np.ndarray) -> tuple[np.ndarray, ...]:
    """`gathered`, `first` and `copies` of the places."""
    root_starts, R = roots.cumsum() - roots, int(roots.sum())
    branch_starts = R + branches.cumsum() - branches
    seen, lengths = roots[root_of], roots[root_of] + branches
    key_starts = R + lengths.cumsum() - lengths
    within = counted(lengths)
    # Each gathered key of a branch: place `within` its root, or behind that its own token.
    of_root = np.repeat(root_starts[root_of], lengths) + within
    of_branch = np.repeat(branch_starts - seen, lengths) + within
    gathered_S = np.concatenate([np.arange(R), np.where(within < np.repeat(seen, lengths), of_root, of_branch)])
    # A root's token is a key of its root and of each of its branches, which lie side by side; a branch's of itself.
    members = np.bincount(root_of, minlength=len(roots))
    copies_R = np.repeat(members + 1, roots)
    token, copy = np.repeat(np.arange(R), copies_R), counted(copies_R)
    branch = np.repeat(np.repeat(members.cumsum() - members, roots), copies_R) + copy - 1
    position = np.repeat(counted(roots), copies_R)
    of_roots = np.where(copy == 0, token, key_starts[np.maximum(branch, 0)] + position)
    of_branches = np.repeat(key_starts + seen, branches) + counted(branches)
    first_T = np.concatenate([[0], copies_R.cumsum(), copies_R.sum() + 1 + np.arange(branches.sum())])
    return gathered_S, first_T, np.concatenate([of_roots, of_branches])


def counted(lengths: np.ndarray) -> np.ndarray:
    """Place of each item in its own run: [3, 2] -> [0, 1, 2, 0, 1]."""
    return np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)


def _cumulated(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], lengths.cumsum()])


def can_use_flash(query: Tensor, value: Tensor, *, softcap: float | None) -> bool:
    """Whether FlashAttention serves these states, given that the plan serves the sliding window."""
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


def flash_attention(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, plan: FlashPlan, scale: float, window: int | None = None
) -> Tensor:
    """Attention inside the plan's sequences -> [T, H, D]; `window` is the number of last keys that a query sees."""
    states = (q_THD.contiguous(), k_TKD.contiguous(), v_TKD.contiguous())
    out, _ = _packed_flash(*states, plan.places, plan.sizes, scale, window or 0)
    return out


# --- the operators -----------------------------------------------------------------------------------------------------

PLAN = "Tensor places, Tensor sizes, float scale, int window"


@torch.library.custom_op(
    "tba::packed_flash", mutates_args=(), schema=f"(Tensor q, Tensor k, Tensor v, {PLAN}) -> (Tensor, Tensor)"
)
def _packed_flash(
    q: Tensor, k: Tensor, v: Tensor, places: Tensor, sizes: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Output [T, H, D] and log-sums [H, T]."""
    known, at = _read(places, sizes)
    if known.gathered < 0:
        return _forward_in_parts(q, k, v, at, known, scale)
    if known.gathered:
        k, v = k.index_select(0, at.gathered), v.index_select(0, at.gathered)
    return _forward(q, k, v, at.queries, at.keys, *known.longest, causal=True, scale=scale, window=known.cut(window))


@torch.library.custom_op(
    "tba::packed_flash_backward",
    mutates_args=(),
    schema=f"(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor sums, {PLAN}) -> (Tensor, Tensor, Tensor)",
)
def _packed_flash_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor,
    places: Tensor, sizes: Tensor, scale: float, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v."""
    known, at = _read(places, sizes)
    if known.gathered < 0:
        return _backward_in_parts(d_out, q, k, v, out, sums, at, known, scale)
    if known.gathered:
        k, v = k.index_select(0, at.gathered), v.index_select(0, at.gathered)
    dq, dk, dv = _backward(
        d_out, q, k, v, out, sums,
        at.queries, at.keys, *known.longest, causal=True, scale=scale, window=known.cut(window),
    )  # fmt: skip
    if not known.gathered:
        return dq, dk, dv
    # A root's key was copied for each of its branches: its gradient [T, K, D] is the sum over the copies [S, K, D].
    if dk.is_cuda and importlib.util.find_spec("triton") is not None:
        from tba.models.kernels import sum_copies

        return (dq, *sum_copies(dk, dv, at.first, at.copies))
    # Many copies of one key are added: in half precision small gradients would be lost.
    wide = torch.promote_types(dk.dtype, torch.float32)
    whole = (torch.zeros(len(at.first) - 1, *part.shape[1:], dtype=wide, device=part.device) for part in (dk, dv))
    dk, dv = (total.index_add_(0, at.gathered, part.to(wide)).to(part.dtype) for total, part in zip(whole, (dk, dv)))
    return dq, dk, dv


def _of_parts(at: Places, sizes: Sizes) -> Iterator[tuple[Tensor, Tensor, int, int]]:
    """Cumulated lengths and the longest of queries and of keys: roots, branches over their own keys, and branches over all
    keys of their roots, which lie before them."""
    root, branch = sizes.longest_root, sizes.longest_branch
    yield at.queries, at.queries, root, root
    yield at.keys, at.keys, branch, branch
    yield at.queries_of_root, at.queries, sizes.most_queries, root


def _forward_in_parts(q: Tensor, k: Tensor, v: Tensor, at: Places, sizes: Sizes, scale: float) -> tuple[Tensor, Tensor]:
    R, (roots, branches, both) = sizes.root_tokens, _of_parts(at, sizes)
    out_roots, sums_roots = _forward(q[:R], k[:R], v[:R], *roots, causal=True, scale=scale)
    own, own_sums = _forward(q[R:], k[R:], v[R:], *branches, causal=True, scale=scale)
    root, root_sums = _forward(q[R:], k[:R], v[:R], *both, causal=False, scale=scale)
    out, sums = torch.empty_like(q), sums_roots.new_empty(q.shape[1], q.shape[0])
    out[:R], sums[:, :R] = out_roots, sums_roots
    if out.is_cuda and importlib.util.find_spec("triton") is not None:
        from tba.models.kernels import merge

        merge(own, own_sums, root, root_sums, out[R:], sums[:, R:])
        return out, sums
    sums[:, R:] = merged = torch.logaddexp(own_sums, root_sums)
    own_share, root_share = (torch.exp(part - merged).t()[:, :, None] for part in (own_sums, root_sums))
    out[R:] = own * own_share + root * root_share
    return out, sums


def _backward_in_parts(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, at: Places, sizes: Sizes, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    R, (roots, branches, both) = sizes.root_tokens, _of_parts(at, sizes)
    found = (d_out[:R], q[:R], k[:R], v[:R], out[:R], sums[:, :R])
    dq_roots, dk_roots, dv_roots = _backward(*found, *roots, causal=True, scale=scale)
    outs, of_sums = out[R:], sums[:, R:].contiguous()
    dq_own, dk_own, dv_own = _backward(
        d_out[R:], q[R:], k[R:], v[R:], outs, of_sums, *branches, causal=True, scale=scale
    )
    dq_root, dk_root, dv_root = _backward(
        d_out[R:], q[R:], k[:R], v[:R], outs, of_sums, *both, causal=False, scale=scale
    )
    dq, dk, dv = (torch.empty_like(states) for states in (q, k, v))
    dq[:R] = dq_roots
    torch.add(dq_own, dq_root, out=dq[R:])
    for whole, roots_part, seen, own in ((dk, dk_roots, dk_root, dk_own), (dv, dv_roots, dv_root, dv_own)):
        # A root's keys were seen by the root itself and by its branches.
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
    *tensors, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])


def _gradients(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    # Log-sums are for the backward pass only: their gradient is never asked for.
    gradients = _packed_flash_backward(d_out.contiguous(), *ctx.saved_tensors, ctx.scale, ctx.window)
    return (*gradients, None, None, None, None)


_packed_flash.register_autograd(_gradients, setup_context=_keep)


def _forward(
    q: Tensor, k: Tensor, v: Tensor,
    ends_q: Tensor, ends_k: Tensor, most_q: int, most_k: int, *, causal: bool, scale: float, window: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output [T, H, D] and log-sums [H, T] of one set of sequences. Where causal, the last query of a sequence sees its last
    key, and every other query as many fewer as it lies before."""
    # Of at most one query the operator concludes that every sequence has exactly one, where query heads share keys, and
    # folds the heads into queries; a root without a response has none. It is an upper bound, so a higher one is as right.
    most_q = max(most_q, 2)
    out, sums, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, ends_q, ends_k, most_q, most_k, 0.0, causal, False, scale=scale, **_sides(window)
    )
    return out, sums


def _backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor,
    ends_q: Tensor, ends_k: Tensor, most_q: int, most_k: int, *, causal: bool, scale: float, window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    # No dropout, so the random state that the operator asks for is never read.
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        d_out, q, k, v, out, sums.contiguous(), ends_q, ends_k, max(most_q, 2), most_k, 0.0, causal, unused, unused,
        scale=scale, **_sides(window),
    )  # fmt: skip


def _sides(window: int | None) -> dict[str, int]:
    """Numbers of keys before and after a query's own that it sees."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
