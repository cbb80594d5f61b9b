"""Attention over a right-padded batch of sequences, optionally after a shared beginning (prefill, checks, scoring).

Axes: B sequences, T tokens of the longest, L keys, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tba.models.decoder import DecoderSpec

WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""All but cuDNN's, which plans a tenth of a second for every new shape: prompts have many."""


def attention(spec: DecoderSpec, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """query [B, H, T, D], key and value [B, K, L, D], mask added to the scores or None = causal -> [B, H, T, D]."""
    scale = spec.query_scales[layer]
    if spec.attention_cap is None:
        return _fused_attention(query, key, value, mask, scale=scale, group=spec.group)
    if mask is None:
        mask = additive(torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril())
    key, value = key.repeat_interleave(spec.group, dim=1), value.repeat_interleave(spec.group, dim=1)
    scores = torch.matmul(query, key.transpose(-1, -2)) * scale
    scores = torch.tanh(scores / spec.attention_cap) * spec.attention_cap
    return torch.matmul((scores + mask).softmax(dim=-1), value)


def _fused_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scale: float, group: int
) -> Tensor:
    if not query.is_cuda:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=group > 1
        )
    if mask is not None and group > 1:  # no kernel on CUDA takes both a mask and grouped heads, but cuDNN's
        key, value, group = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1), 1
    with sdpa_kernel(WITHOUT_PLANS):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=group > 1
        )


def additive(seen: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """0 where a key is seen, -inf elsewhere: made once, it saves every layer the conversion."""
    return torch.zeros(seen.shape, device=seen.device, dtype=dtype).masked_fill_(~seen, float("-inf"))


def _as_block(heads_NHD: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """[B * T, H, D] -> [B, H, T, D]"""
    return heads_NHD.unflatten(0, shape).transpose(1, 2).to(dtype)


class CausalAttention:
    """Right-padded sequences, each seeing itself only. Padding comes last, so no real token ever sees it.

    Keeps every layer's keys and values when `keep` is set, else those of the layer at work.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        num_rows: int,
        num_columns: int,
        *,
        keep: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`dtype` of queries, keys and values: on CUDA the engine's own, which the fast kernels want."""
        self.spec = spec
        self.dtype = dtype
        self.shape = (num_rows, num_columns)
        self.keep = keep
        self._tables: tuple[Tensor, Tensor] | None = None
        """Keys and values [layers kept, B, T, K, D]; made when the device is known."""
        self.masks: dict[int, Tensor] = {}

    @property
    def keys(self) -> Tensor:
        """[layers kept, B, K, T, D], a view."""
        assert self._tables is not None, "nothing is stored yet"
        return self._tables[0].transpose(2, 3)

    @property
    def values(self) -> Tensor:
        """[layers kept, B, K, T, D], a view."""
        assert self._tables is not None, "nothing is stored yet"
        return self._tables[1].transpose(2, 3)

    def room(self, layer: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where the keys and values [N, K, D] of a layer lie; who fills it needs no `store`."""
        spec = self.spec
        if self._tables is None:
            shape = (spec.num_layers if self.keep else 1, *self.shape, spec.num_kv_heads, spec.head_dim)
            keys, values = (torch.empty(shape, dtype=self.dtype, device=device) for _ in range(2))
            self._tables = (keys, values)
        keys, values = (table[layer if self.keep else 0].flatten(0, 1) for table in self._tables)
        return keys, values

    def store(self, layer: int, key_NKD: Tensor, value_NKD: Tensor) -> None:
        keys, values = self.room(layer, key_NKD.device)
        keys.copy_(key_NKD)
        values.copy_(value_NKD)

    def attend(self, layer: int, query_NHD: Tensor) -> Tensor:
        query = _as_block(query_NHD, self.shape, self.dtype)
        mask = self._mask(self.spec.windows[layer], query.device)
        kept = layer if self.keep else 0
        attended = attention(self.spec, layer, query, self.keys[kept], self.values[kept], mask)
        return attended.transpose(1, 2).flatten(2).flatten(0, 1)

    def _mask(self, window: int | None, device: torch.device) -> Tensor | None:
        columns = self.shape[1]
        if window is None or window >= columns:
            return None
        if window not in self.masks:
            seen = torch.ones(columns, columns, dtype=torch.bool, device=device)
            self.masks[window] = additive(seen.tril().triu(1 - window), self.dtype)
        return self.masks[window]


class SharedPrefixAttention:
    """Right-padded continuations, each seeing its row of already computed prefixes, then itself.

    `prefix` holds per layer keys and values [P, K, L, D]; `rows_B` says which of them each row continues, `lengths_P`
    how much of each is real. The tokens of row b have positions lengths_P[rows_B[b]] + 0, 1, ...
    """

    def __init__(
        self, spec: DecoderSpec, prefix: CausalAttention, rows_B: Tensor, lengths_P: Tensor, num_columns: int
    ) -> None:
        self.spec = spec
        self.prefix = prefix
        self.rows_B = rows_B
        self.shape = (rows_B.shape[0], num_columns)
        self.lengths_B = lengths_P[rows_B]
        self.masks = {window: self._mask(window) for window in set(spec.windows)}

    def store(self, layer: int, key_NKD: Tensor, value_NKD: Tensor) -> None:
        own_key = _as_block(key_NKD, self.shape, self.prefix.dtype)
        own_value = _as_block(value_NKD, self.shape, self.prefix.dtype)
        self.key = torch.cat((self.prefix.keys[layer][self.rows_B], own_key), dim=2)
        self.value = torch.cat((self.prefix.values[layer][self.rows_B], own_value), dim=2)

    def attend(self, layer: int, query_NHD: Tensor) -> Tensor:
        query = _as_block(query_NHD, self.shape, self.prefix.dtype)
        attended = attention(self.spec, layer, query, self.key, self.value, self.masks[self.spec.windows[layer]])
        return attended.transpose(1, 2).flatten(2).flatten(0, 1)

    def _mask(self, window: int | None) -> Tensor:
        """[B, 1, T, prefix columns + T]."""
        device, columns = self.rows_B.device, self.shape[1]
        prefix_index = torch.arange(self.prefix.shape[1], device=device)
        offset = torch.arange(columns, device=device)
        length = self.lengths_B[:, None]
        real = torch.cat((prefix_index < length, (offset >= 0).expand(self.shape)), dim=1)
        position_BL = torch.cat((prefix_index.expand(self.shape[0], -1), length + offset), dim=1)
        behind = (length + offset)[:, :, None] - position_BL[:, None]
        seen = (behind >= 0) & real[:, None]
        return additive(seen if window is None else seen & (behind < window), self.prefix.dtype)[:, None]
