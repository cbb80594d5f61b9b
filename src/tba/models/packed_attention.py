"""Attention over packed sequences, for any transformers model that uses the attention interface.

On CUDA in half precision FlashAttention does this without padding (flash_attention.py); elsewhere as follows. All tokens of
a micro-batch lie end to end in one row, so no linear layer computes on padding. Only inside attention are they laid out in
blocks: *roots* are causal sequences that start at position 0 (a prompt), *branches* continue a root (a response that shares
its prompt's pass with the others of its group) and see the root's tokens and their own past.

Axes: T packed tokens, H heads, D head dim, R roots, B branches, L longest root, M longest branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from tba.models.flash_attention import FlashPlan, can_use_flash, flash_attention

NAME = "tba_packed"
MAY_BE_IGNORED = frozenset({"dropout", "position_ids", "use_cache", "output_attentions", "output_hidden_states"})
"""Arguments of transformers' attention functions that change nothing here: dropout is off, positions are in the keys."""


@dataclass(kw_only=True, eq=False)  # not frozen: torch.compile would look inside, and compile again for other lengths
class PackedLayout:
    """Where each sequence lies in the packed row.

    PackedLayout(root_lengths=[3], branch_lengths=[2, 1], branch_roots=[0, 0], device=cpu): tokens 0-2 are the root,
    3-4 and 5 are two branches of it. Roots come first, then branches, each in order.
    """

    root_lengths: Sequence[int]
    branch_lengths: Sequence[int] = ()
    branch_roots: Sequence[int] = ()
    device: torch.device
    longest: int = field(init=False)  # largest number of tokens that a token may see, itself included
    flash_plan: FlashPlan = field(init=False)
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # An upper bound: the longest branch need not be one of the longest root.
        self.longest = max(self.root_lengths) + max(self.branch_lengths, default=0)
        self.flash_plan = FlashPlan.make(
            root_lengths=self.root_lengths,
            branch_lengths=self.branch_lengths,
            branch_roots=self.branch_roots,
            device=self.device,
        )

    @cached_property
    def _lengths(self) -> tuple[Tensor, Tensor, Tensor]:
        return (
            torch.tensor(self.root_lengths, dtype=torch.long),
            torch.tensor(self.branch_lengths, dtype=torch.long),
            torch.tensor(self.branch_roots, dtype=torch.long),
        )

    @cached_property
    def root_index_RL(self) -> Tensor:
        """Packed index of each root token; padding repeats the root's first token (it is never attended to)."""
        return _indices_of(self._lengths[0], first=0).to(self.device)

    @cached_property
    def branch_index_BM(self) -> Tensor:
        """Packed index of each branch token; padding repeats the branch's first token."""
        return _indices_of(self._lengths[1], first=sum(self.root_lengths)).to(self.device)

    @cached_property
    def branch_key_index(self) -> Tensor:
        """Packed index [B, L + M] of the keys that a branch may see: its root's tokens, then its own."""
        _, _, branch_roots = self._lengths
        return torch.cat([self.root_index_RL[branch_roots.to(self.device)], self.branch_index_BM], dim=1)

    def fits_flash(self, window: int | None) -> bool:
        """Whether FlashAttention serves a sliding window, as it serves one that leaves everything in sight."""
        return window is None or not self.flash_plan.is_in_parts or window >= self.longest

    @cached_property
    def unpack_T(self) -> Tensor:
        """For each packed token its row in the blocks' outputs (roots flattened, then branches flattened)."""
        root_lengths, branch_lengths, _ = self._lengths
        rows = [_rows_of(root_lengths, 0)]
        if len(branch_lengths):
            rows.append(_rows_of(branch_lengths, len(root_lengths) * int(root_lengths.max())))
        return torch.cat(rows).to(self.device)

    def root_mask(self, window: int | None) -> Tensor | None:
        """Mask of the roots. None = plain causal; a boolean mask where a sliding window is shorter than the longest root."""
        length = max(self.root_lengths)
        if window is None or window >= length:
            return None
        position = torch.arange(length, device=self.device)
        distance = position[:, None] - position
        return (distance >= 0) & (distance < window)

    def branch_mask(self, window: int | None) -> Tensor:
        """Boolean [B, 1, M, L + M]: the root's real tokens and the own past, inside the window."""
        # Kept, because every layer of a pass asks for the same few masks.
        if window in self._masks:
            return self._masks[window]
        root_lengths, branch_lengths, branch_roots = self._lengths
        own_root = root_lengths[branch_roots]
        root_column, own_column = torch.arange(int(root_lengths.max())), torch.arange(int(branch_lengths.max()))
        key_position = torch.cat([root_column.expand(len(own_root), -1), own_root[:, None] + own_column], dim=1)
        real = torch.cat([root_column < own_root[:, None], own_column < branch_lengths[:, None]], dim=1)
        query_position = own_root[:, None] + own_column
        distance = query_position[:, :, None] - key_position[:, None, :]
        # By positions and not by columns: roots are padded, so columns of a branch do not tell how far apart tokens are.
        seen = real[:, None, :] & (distance >= 0)
        if window is not None:
            seen &= distance < window
        # A padded query would see nothing and give NaN, which poisons gradients even where its output is unused.
        seen |= (own_column >= branch_lengths[:, None])[:, :, None]
        self._masks[window] = seen[:, None].to(self.device)
        return self._masks[window]


def _indices_of(lengths: Tensor, *, first: int) -> Tensor:
    """Packed indices of sequences that lie end to end from `first` on, a row each; padding repeats a row's first."""
    starts, column = first + lengths.cumsum(0) - lengths, torch.arange(int(lengths.max()))
    return torch.where(column < lengths[:, None], starts[:, None] + column, starts[:, None])


def _rows_of(lengths: Tensor, first: int) -> Tensor:
    width = int(lengths.max())
    column = torch.arange(width)
    rows = first + torch.arange(len(lengths))[:, None] * width + column
    return rows[column < lengths[:, None]]


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    packed_layout: PackedLayout | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention function of the transformers interface; query [1, H, T, D] -> output [1, T, H, D]. `s_aux` [H] are the
    logits of attention sinks (GPT-OSS)."""
    # A layer that computed without the layout would let every sequence of the row see those before it.
    if packed_layout is None:
        raise ValueError("the model does not hand keyword arguments on to its attention")
    # An argument that is not known here may change what the model computes: the model is refused.
    unknown = [name for name, value in others.items() if value is not None and name not in MAY_BE_IGNORED]
    if unknown or is_causal is False:
        raise ValueError(f"its attention takes {unknown[0] if unknown else 'is_causal=False'}, which is not known here")
    q_THD, k_THD, v_THD = (states[0].transpose(0, 1) for states in (query, key, value))
    attended = attend_packed(
        q_THD, k_THD, v_THD, packed_layout, scaling=scaling, window=sliding_window, softcap=softcap, sinks_H=s_aux
    )
    return attended[None], None


def attend_packed(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    layout: PackedLayout,
    *,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attention inside the layout's sequences; keys and values may have fewer heads -> [T, H, D]."""
    if sinks_H is not None or not layout.fits_flash(window) or not can_use_flash(q_THD, v_THD, softcap=softcap):
        return _attend_in_blocks(q_THD, k_THD, v_THD, layout, scaling, window, softcap, sinks_H)
    scale = scaling if scaling is not None else q_THD.shape[-1] ** -0.5
    # FlashAttention has one head size. Columns of zeros in the values give columns of zeros in the output.
    size, missing = v_THD.shape[-1], q_THD.shape[-1] - v_THD.shape[-1]
    values = v_THD if missing == 0 else pad(v_THD, (0, missing))
    attended = flash_attention(q_THD, k_THD, values, layout.flash_plan, scale, window)
    return attended if missing == 0 else attended[..., :size]


@torch.compiler.disable  # lengths and masks are plain Python: a compiled layer stops here and goes on after
def _attend_in_blocks(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    layout: PackedLayout,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    def attend(query_index: Tensor, key_index: Tensor, mask: Tensor | None) -> Tensor:
        """Gather blocks, attend, and return the rows [blocks * longest query, H, D]."""
        q, k, v = (
            states.index_select(0, index.flatten()).view(*index.shape, *states.shape[1:]).transpose(1, 2)
            for states, index in ((q_THD, query_index), (k_THD, key_index), (v_THD, key_index))
        )
        is_grouped = q.shape[1] != k.shape[1]
        if sinks_H is not None:
            assert softcap is None, "no model has both"
            # A sink is one more key, of zeros, whose score is its logit and whose value is nothing.
            scores = _with_sinks(mask, sinks_H.to(q.dtype), q.shape[2], k.shape[2])
            k, v = pad(k, (0, 0, 0, 1)), pad(v, (0, 0, 0, 1))
            out = scaled_dot_product_attention(q, k, v, attn_mask=scores, scale=scaling, enable_gqa=is_grouped)
        elif softcap is None:
            is_causal = mask is None
            out = scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=is_causal, scale=scaling, enable_gqa=is_grouped
            )
        else:
            scale = scaling if scaling is not None else q.shape[-1] ** -0.5
            out = softcapped_attention(q, k, v, None if mask is None else additive(mask), scale=scale, cap=softcap)
        return out.transpose(1, 2).flatten(0, 1)

    # Roots and branches are two blocks, each padded to its own longest: one block would pad prompts to whole responses.
    blocks = [attend(layout.root_index_RL, layout.root_index_RL, layout.root_mask(window))]
    if layout.branch_lengths:
        blocks.append(attend(layout.branch_index_BM, layout.branch_key_index, layout.branch_mask(window)))
    # Padding is dropped by not being picked.
    rows = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
    return rows.index_select(0, layout.unpack_T)


def softcapped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scale: float, cap: float
) -> Tensor:
    """Attention with scores cap * tanh(score / cap), as in Gemma 2: query [..., H, T, D], key and value [..., K, L, D]. The
    mask is added to them; None = causal. No fused kernel of PyTorch caps scores: all passes come here."""
    mask = causal_mask(query, key) if mask is None else mask
    group = query.shape[-3] // key.shape[-3]
    if group > 1:
        key, value = key.repeat_interleave(group, dim=-3), value.repeat_interleave(group, dim=-3)
    # Capped before the mask is added: tanh would turn -inf into a finite score.
    scores = torch.tanh(torch.matmul(query, key.transpose(-1, -2)) * (scale / cap)) * cap + mask
    # The soft-max is fp32 whatever the model's dtype: sums over many keys lose their small terms in half precision.
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype), value)


def causal_mask(query: Tensor, key: Tensor) -> Tensor:
    seen = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    return additive(seen, query.dtype)


def additive(seen: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """A mask to add to scores: 0 where a key is seen, -inf elsewhere. Made once, it saves every layer the conversion."""
    return torch.zeros(seen.shape, device=seen.device, dtype=dtype).masked_fill_(~seen, float("-inf"))


def _with_sinks(mask: Tensor | None, sinks_H: Tensor, queries: int, keys: int) -> Tensor:
    """Bias of the scores: 0 where a key is seen, and the sinks' logits as one more column."""
    if mask is None:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=sinks_H.device).tril()
    seen = torch.zeros(mask.shape, dtype=sinks_H.dtype, device=sinks_H.device).masked_fill(~mask, float("-inf"))
    blocks = 1 if mask.ndim == 2 else mask.shape[0]
    seen = seen.view(blocks, 1, queries, keys).expand(-1, len(sinks_H), -1, -1)
    return torch.cat([seen, sinks_H[None, :, None, None].expand(blocks, -1, queries, 1)], dim=-1)
