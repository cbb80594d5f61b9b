"""Attention over pages: of a decode step, plain and fused, and of a part of a prompt that comes after others.

The plain attention is the specification of `attend_pages` (kernels/paged_attention.py), and what tests run on a CPU.

Axes: N slots that decode, B prompts, T tokens of the longest part, L positions before it, K key/value heads, H query heads,
D head dimension.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from tba.generate.decoder.attention import CausalAttention, _as_block, attention
from tba.generate.decoder.decoder import Decoder
from tba.generate.decoder.spec import DecoderSpec
from tba.generate.native.kv_cache import attend_rows, key_mask
from tba.generate.native.page_plan import PagePlan
from tba.generate.native.page_pool import PagePool, PageRefs
from tba.generate.native.paged_cache import PagedCache
from tba.generate.native.slots import SlotState
from tba.policy.packed_attention import additive
from tba.policy.packing import on_device


class PagedAttention:
    """One token per slot, each seeing its own pages up to its position."""

    def __init__(self, spec: DecoderSpec, cache: PagedCache, state: SlotState, num_slots: int, num_keys: int) -> None:
        self.spec, self.pool = spec, cache.pool
        self.positions = state.column("positions", num_slots)
        pages = min(cache.num_pages(num_keys), cache.numbers.shape[1])
        self.shape = (num_slots, pages)
        numbers = cache.numbers[:num_slots]
        self.located = self.pool.locate(numbers[:, :pages].reshape(-1))
        live = np.flatnonzero(state.column("done", num_slots).cpu().numpy() == 0)
        self.live = on_device(torch.from_numpy(live), self.pool.device)
        """Slots whose token is kept: one that is done has no business in pages that may be another's by now."""
        positions = self.positions.cpu().numpy()[live]
        self.targets = self.pool.locate(numbers[live, positions // cache.page_size])
        self.places = on_device(torch.from_numpy(positions % cache.page_size), self.pool.device)
        num_keys = pages * cache.page_size
        self.masks = {
            window: key_mask(spec, self.positions, num_keys, window, self.pool.dtype) for window in set(spec.windows)
        }

    def store(self, layer: int, key_NKD: Tensor, value_NKD: Tensor) -> None:
        both = torch.stack((key_NKD, value_NKD), dim=1)[self.live].to(self.pool.dtype)
        for part in self.targets:
            rows = slice(None) if part.rows is None else part.rows
            # Two index tensors apart from each other put their common axis first: [N, 2, K, D].
            part.chunk[:, layer][part.places, :, :, self.places[rows]] = both[rows]

    def attend(self, layer: int, query_NHD: Tensor, sinks_H: Tensor | None = None) -> Tensor:
        keys, values = _side_by_side(self.pool.read(self.located, layer), self.shape).flatten(1, 2)
        mask = self.masks[self.spec.windows[layer]]
        # A page may come from a response whose numbers were broken: weight 0 x NaN would be NaN.
        values = values.masked_fill((mask == float("-inf")).transpose(1, 2), 0.0)
        return attend_rows(self.spec, layer, query_NHD, keys.transpose(-1, -2), values, mask, sinks_H)


class FusedPagedAttention:
    """`PagedAttention` in the kernels of `attend_pages`, from the projection on: positions and tables are read on the
    device, so a captured graph serves all lengths."""

    def __init__(self, decoder: Decoder, cache: PagedCache, state: SlotState, num_slots: int, plan: PagePlan) -> None:
        from tba.generate.kernels.paged_attention import PageView

        self.decoder, self.plan = decoder, plan
        self.view = PageView(
            base=cache.pool.base,
            table=cache.table,
            positions=state.column("positions", num_slots),
            done=state.column("done", num_slots),
            members=cache.groups.members,
            shared=cache.groups.shared,
            num_layers=decoder.spec.num_layers,
        )

    def attend_projected(
        self, layer: int, qkv: Tensor, rotations: Tensor | None, query_norm: Tensor | None, key_norm: Tensor | None
    ) -> Tensor:
        from tba.generate.kernels.paged_attention import attend_pages

        spec = self.decoder.spec
        return attend_pages(
            qkv,
            self.view,
            layer,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.query_scales[layer],
            cap=spec.attention_cap,
            window=spec.windows[layer],
            sinks_H=self.decoder.weights.layers[layer].sinks,
            rotations=rotations,
            query_norm=query_norm,
            key_norm=key_norm,
            epsilon=spec.norm_epsilon,
            splits=self.plan.splits,
            shared=self.plan.shared,
        )


class ContinuedAttention(CausalAttention):
    """Right-padded parts of prompts, each seeing the pages of what came before it, then itself.

    Every part begins with a page, so what came before it fills whole pages.
    """

    def __init__(
        self, spec: DecoderSpec, pool: PagePool, before: list[np.ndarray], num_columns: int, *, dtype: torch.dtype
    ) -> None:
        """`before` are the page numbers of what came before each part."""
        super().__init__(spec, len(before), num_columns, keep=True, dtype=dtype)
        self.pool = pool
        counts = [len(pages) for pages in before]
        table = np.zeros((len(before), max(counts)), dtype=np.int64)
        for row, pages in enumerate(before):
            table[row, : len(pages)] = pages
        self.before_shape = table.shape
        self.is_full = min(counts) == max(counts)
        """Whether every part sees all that is read: then the mask is that of the last queries of one causal sequence."""
        self.located: list[PageRefs] = pool.locate(table.reshape(-1))
        self.num_before = torch.tensor(counts, device=pool.device)[:, None] * pool.page_size

    def attend(self, layer: int, query_NHD: Tensor, sinks_H: Tensor | None = None) -> Tensor:
        spec, window = self.spec, self.spec.windows[layer]
        query = _as_block(query_NHD, self.shape, self.dtype)
        earlier = _side_by_side(self.pool.read(self.located, layer), self.before_shape)
        key, value = (torch.cat((old, own[layer]), dim=2) for old, own in zip(earlier, (self.keys, self.values)))
        in_sight = window is None or window >= key.shape[2]
        if query.is_cuda and self.is_full and in_sight and sinks_H is None and spec.attention_cap is None:
            # Without a mask of T x (L + T) numbers, which long prompts have no memory for.
            bias = causal_lower_right(query.shape[2], key.shape[2])
            attended = F.scaled_dot_product_attention(
                query, key, value, attn_mask=bias, scale=spec.query_scales[layer], enable_gqa=spec.group > 1
            )
        else:
            attended = attention(spec, layer, query, key, value, self._continued_mask(window, query.device), sinks_H)
        return attended.transpose(1, 2).flatten(2).flatten(0, 1)

    def _continued_mask(self, window: int | None, device: torch.device) -> Tensor:
        """Mask [B, 1, T, L + T]."""
        key = -1 if window is None else window
        if key not in self.masks:
            num_before, columns = self.before_shape[1] * self.pool.page_size, self.shape[1]
            own, earlier = torch.arange(columns, device=device), torch.arange(num_before, device=device)
            start = self.num_before
            position_BL = torch.cat((earlier.expand(len(start), -1), start + own), dim=1)
            real_BL = torch.cat((earlier < start, (own >= 0).expand(len(start), -1)), dim=1)
            behind = (start + own)[:, :, None] - position_BL[:, None]
            seen = (behind >= 0) & real_BL[:, None]
            seen = seen if window is None else seen & (behind < window)
            self.masks[key] = additive(seen, self.dtype)[:, None]
        return self.masks[key]


def _side_by_side(pages: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Pages [rows * pages, 2, K, PAGE, D] -> keys and values [2, rows, K, L, D]."""
    return pages.unflatten(0, shape).permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
