"""The key/value cache of the slots, and the attention of a decode step over it.

In a slot, key index = position of the token, so what lies behind the position is never seen: a slot is given to another
response without being wiped.

Axes: M layers, S slots, N slots that decode, K key/value heads, H query heads, D head dimension, L positions, B prompts of
one prefill.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tba.models.decoder_attention import attention_with_sinks, softcapped_attention
from tba.models.decoder_spec import DecoderSpec

KEY_MULTIPLE = 16
"""Attention runs over a multiple of this many keys: few distinct shapes, and faster matrix kernels."""

POSITIONS_LAST = {"cpu": True, "cuda": False}
"""Whether keys lie with positions last, by device."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Prefilled:
    """Keys and values of a batch of prompts, waiting for slots.

    The last token of each prompt is left out: it is fed at the first decode step, which yields the first new token.
    """

    keys: Tensor
    """As in the cache: [M, B, K, D, L], or [M, B, K, L, D] on CUDA."""
    values: Tensor
    """[M, B, K, L, D]"""
    version: int
    """Version of the weights that computed them."""


class SlotCache:
    """Keys and values of all slots and layers. On a CPU keys lie with positions last: query x key reads them in order;
    on CUDA they lie like values.

    It holds as many positions as the longest response so far may need, so a model's huge context costs nothing;
    addresses change only when it grows.
    """

    def __init__(self, spec: DecoderSpec, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (spec.num_layers, num_slots, spec.num_kv_heads)
        self.positions_last = POSITIONS_LAST[device.type]
        """Whether keys are [M, S, K, D, L] instead of [M, S, K, L, D]."""
        self.values = torch.zeros(*shape, 0, spec.head_dim, dtype=dtype, device=device)
        self.keys = self.arrange(self.values)

    def arrange(self, keys: Tensor) -> Tensor:
        """Keys [..., L, D] copied into the order that the cache has."""
        return keys.transpose(-1, -2).contiguous() if self.positions_last else keys.clone()

    def reserve(self, length: int) -> None:
        """Grow to at least `length` positions, keeping what is there."""
        if length <= self.values.shape[3]:
            return
        extra = _round_up(length) - self.values.shape[3]
        # Zeros, not garbage: masked keys have weight 0, and 0 x NaN would be NaN.
        self.keys = F.pad(self.keys, (0, extra) if self.positions_last else (0, 0, 0, extra))
        self.values = F.pad(self.values, (0, 0, 0, extra))

    def fork(self, slots: Tensor, prefilled: Prefilled, rows: Tensor) -> None:
        """Copy prompt `rows[i]` into slot `slots[i]`."""
        # What lies beyond the cache is padding: `reserve` was called for the prompt itself.
        length = min(prefilled.values.shape[3], self.values.shape[3])
        self.keys[self._keys_upto(slots, length)] = prefilled.keys[self._keys_upto(rows, length)]
        self.values[:, slots, :, :length] = prefilled.values[:, rows, :, :length]

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copy the first `length` positions of slots to other slots."""
        self.keys[self._keys_upto(targets, length)] = self.keys[self._keys_upto(sources, length)]
        self.values[:, targets, :, :length] = self.values[:, sources, :, :length]

    def _keys_upto(self, slots: Tensor, length: int) -> tuple[slice | Tensor, ...]:
        """Index of the first positions of the keys of some slots, or of rows of a prefill."""
        every = slice(None)
        return (
            (every, slots, every, every, slice(length)) if self.positions_last else (every, slots, every, slice(length))
        )


class SlotAttention:
    """One token per slot, each seeing its own slot up to its position, over the keys that the longest of them needs."""

    def __init__(self, spec: DecoderSpec, cache: SlotCache, positions: Tensor, num_keys: int) -> None:
        self.spec, self.cache, self.positions = spec, cache, positions
        self.num_slots = positions.shape[0]
        self.num_keys = min(_round_up(num_keys), cache.values.shape[3])
        self.slots = torch.arange(self.num_slots, device=positions.device)
        # Positions are the same for all layers of a decode step, so masks are made once for each kind of layer.
        self.masks = {window: self._mask(window) for window in set(spec.windows)}

    def store(self, layer: int, key_NKD: Tensor, value_NKD: Tensor) -> None:
        dtype = self.cache.keys.dtype
        keys = self.cache.keys[layer]
        keys = keys if self.cache.positions_last else keys.transpose(-1, -2)
        # Two index tensors apart from each other put their common axis first: the target is [N, K, D] either way.
        keys[self.slots, :, :, self.positions] = key_NKD.to(dtype)
        self.cache.values[layer][self.slots, :, self.positions] = value_NKD.to(dtype)

    def attend(self, layer: int, query_NHD: Tensor, sinks_H: Tensor | None = None) -> Tensor:
        """Query heads that share a key head are rows of one small matrix product."""
        spec, count, length = self.spec, self.num_slots, self.num_keys
        keys = self.cache.keys[layer, :count].flatten(0, 1)
        keys = (keys if self.cache.positions_last else keys.transpose(-1, -2))[:, :, :length]
        values = self.cache.values[layer, :count].flatten(0, 1)[:, :length]
        query = query_NHD.reshape(-1, spec.group, spec.head_dim).to(keys.dtype)
        mask, scale, cap = self.masks[spec.windows[layer]], spec.query_scales[layer], spec.attention_cap
        if sinks_H is not None:
            sinks = sinks_H.view(spec.num_kv_heads, spec.group, 1).repeat(count, 1, 1)
            attended = attention_with_sinks(query, keys.transpose(-1, -2), values, mask, sinks, scale=scale)
        elif cap is None:
            scores = torch.baddbmm(mask, query, keys, alpha=scale)
            # fp32 whatever the cache's dtype: sums over many keys lose their small terms in half precision.
            weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
            attended = torch.bmm(weights, values)
        else:
            attended = softcapped_attention(query, keys.transpose(-1, -2), values, mask, scale=scale, cap=cap)
        return attended.view(count, spec.num_heads * spec.head_dim)

    def _mask(self, window: int | None) -> Tensor:
        """0 where a key is seen, -inf elsewhere -> [S * K, 1, L]."""
        behind = self.positions[:, None] - torch.arange(self.num_keys, device=self.positions.device)
        hidden = behind < 0 if window is None else (behind < 0) | (behind >= window)
        mask = torch.zeros(hidden.shape, dtype=self.cache.keys.dtype, device=hidden.device)
        # -inf, not a large number: what an earlier response left behind the position must have a weight of exactly 0.
        mask.masked_fill_(hidden, float("-inf"))
        return mask.repeat_interleave(self.spec.num_kv_heads, dim=0)[:, None]


class FusedSlotAttention:
    """`SlotAttention` in one kernel: a token is written at its slot's position and sees what lies before.

    Positions are read on the device, so a captured graph serves all lengths.
    """

    def __init__(self, spec: DecoderSpec, cache: SlotCache, positions: Tensor) -> None:
        self.spec, self.cache, self.positions = spec, cache, positions

    def storage(self, layer: int, device: torch.device) -> tuple[Tensor, Tensor]:
        return self.cache.keys[layer], self.cache.values[layer]

    def attend(self, layer: int, query_NHD: Tensor, sinks_H: Tensor | None = None) -> Tensor:
        from tba.kernels.attention import attend

        return attend(
            query_NHD,
            self.cache.keys[layer],
            self.cache.values[layer],
            self.positions,
            scale=self.spec.query_scales[layer],
            cap=self.spec.attention_cap,
            window=self.spec.windows[layer],
            sinks_H=sinks_H,
        )


def _round_up(num_keys: int) -> int:
    return -(-num_keys // KEY_MULTIPLE) * KEY_MULTIPLE
