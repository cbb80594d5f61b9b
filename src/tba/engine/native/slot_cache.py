"""Keys and values with a place of full length for each slot: on a CPU, and where there are no fused kernels.

Key index = position of the token, so what lies behind the position is never seen, and a slot is given to another response
without being wiped. With the fused kernels keys and values lie in pages (paged_cache.py).

Axes: M layers, S slots, N slots that decode, K key/value heads, H query heads, D head dimension, L positions, B prompts of
one prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tba.engine.decoder.layers import attention_with_sinks
from tba.engine.decoder.spec import DecoderSpec
from tba.engine.native.kept_turns import TURNS_PER_SLOT, KeptTurn, KeptTurns, TurnKey
from tba.models.packed_attention import softcapped_attention
from tba.types import on_device

KEY_MULTIPLE = 16
"""Attention runs over a multiple of this many keys: few distinct shapes, and faster matrix kernels."""

POSITIONS_LAST = {"cpu": True, "cuda": False}
"""Whether keys lie with positions last, by device."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SlotPrompt:
    """A prompt of a batch that was prefilled, waiting for slots; prompts of one batch share its tensors.

    The last token of each prompt is left out: it is fed at the first decode step, which yields the first new token.
    """

    keys: Tensor
    """As in the cache: [M, B, K, D, L], or [M, B, K, L, D] on CUDA."""
    values: Tensor
    """[M, B, K, L, D]"""
    row: int
    version: int
    ready: bool = True


class SlotTurn(NamedTuple):
    """Keys and values of one slot, as in the cache, of a response that another request goes on from."""

    keys: Tensor
    values: Tensor


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
        self._starts: list[tuple[int, SlotPrompt]] = []
        self.turns = KeptTurns[SlotTurn](TURNS_PER_SLOT * num_slots)
        self._longest = 0

    @property
    def num_positions(self) -> int:
        return self.values.shape[3]

    def check_fits(self, num_positions: int, what: str) -> None:
        """Slots grow to what is asked for."""

    def start(
        self, slot: int, prompt: SlotPrompt, *, num_positions: int, most_positions: int, is_last: bool, num_spare: int
    ) -> bool:
        # Copied at `flush`: the cache may have to grow first, and prompts of one batch go in one copy.
        self._starts.append((slot, prompt))
        self._longest = max(self._longest, most_positions)
        return True

    @torch.inference_mode()
    def flush(self) -> None:
        """Copy prompts into the slots that start with them, batch by batch."""
        if not self._starts:
            return
        self.reserve(self._longest)
        for batch in {id(prompt.values): prompt for _, prompt in self._starts}.values():
            chosen = [(slot, prompt.row) for slot, prompt in self._starts if prompt.values is batch.values]
            targets, rows = on_device(torch.tensor(chosen), self.values.device).unbind(1)
            self.fork(targets, batch, rows)
        self._starts.clear()

    def hold(self, running: np.ndarray, positions: np.ndarray) -> bool:
        return True  # a slot has room for its longest response from the start

    @torch.inference_mode()
    def keep(self, key: TurnKey, slot: int, num_positions: int) -> KeptTurn[SlotTurn]:
        own = torch.tensor([slot], device=self.values.device)
        keys, values = self.keys[self._keys_upto(own, num_positions)], self.values[:, own, :, :num_positions]
        return self.turns.keep(key, SlotTurn(keys=keys, values=values))

    def name(self, key: TurnKey, turn: KeptTurn[SlotTurn], ids: np.ndarray, version: int) -> None:
        turn.ids = ids

    def release(self, slots: Sequence[int]) -> None:
        """Old keys and values in a slot are never read."""

    def drop(self, prompt: SlotPrompt) -> None:
        """A batch goes with its last prompt."""

    def forget_prefixes(self) -> None:
        """Prompts never share anything, and turns of older weights are computed again."""
        self.turns.clear()

    def clear(self) -> None:
        self._starts.clear()
        self.turns.clear()

    @torch.inference_mode()
    def wipe(self) -> None:
        self.keys.zero_()
        self.values.zero_()

    def arrange(self, keys: Tensor) -> Tensor:
        """Keys [..., L, D] copied into the order that the cache has."""
        return keys.transpose(-1, -2).contiguous() if self.positions_last else keys.clone()

    def reserve(self, length: int) -> None:
        """Grow to at least `length` positions, keeping what is there."""
        if length <= self.num_positions:
            return
        extra = _round_up(length) - self.num_positions
        # Zeros, not garbage: masked keys have weight 0, and 0 x NaN would be NaN.
        self.keys = F.pad(self.keys, (0, extra) if self.positions_last else (0, 0, 0, extra))
        self.values = F.pad(self.values, (0, 0, 0, extra))

    def fork(self, slots: Tensor, prefilled: SlotPrompt, rows: Tensor) -> None:
        """Copy prompt `rows[i]` of a batch into slot `slots[i]`."""
        # What lies beyond the cache is padding: `reserve` was called for the prompt itself.
        length = min(prefilled.values.shape[3], self.values.shape[3])
        self.keys[self._keys_upto(slots, length)] = prefilled.keys[self._keys_upto(rows, length)]
        self.values[:, slots, :, :length] = prefilled.values[:, rows, :, :length]

    @torch.inference_mode()
    def move(self, sources: Sequence[int], targets: Sequence[int], num_keys: int) -> None:
        source, target = on_device(torch.tensor([sources, targets]), self.values.device)
        self.keys[self._keys_upto(target, num_keys)] = self.keys[self._keys_upto(source, num_keys)]
        self.values[:, target, :, :num_keys] = self.values[:, source, :, :num_keys]

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
        # The cache may end inside the last multiple: its own length is the most there is.
        self.num_keys = min(_round_up(num_keys), cache.values.shape[3])
        self.slots = torch.arange(positions.shape[0], device=positions.device)
        # Positions are the same for all layers of a decode step, so masks are made once for each kind of layer.
        dtype = cache.keys.dtype
        self.masks = {window: key_mask(spec, positions, self.num_keys, window, dtype) for window in set(spec.windows)}

    def store(self, layer: int, key_NKD: Tensor, value_NKD: Tensor) -> None:
        dtype = self.cache.keys.dtype
        # A view with positions last in both layouts, so that one assignment serves them.
        keys = self.cache.keys[layer]
        keys = keys if self.cache.positions_last else keys.transpose(-1, -2)
        # Two index tensors apart from each other put their common axis first: the target is [N, K, D] either way.
        keys[self.slots, :, :, self.positions] = key_NKD.to(dtype)
        self.cache.values[layer][self.slots, :, self.positions] = value_NKD.to(dtype)

    def attend(self, layer: int, query_NHD: Tensor, sinks_H: Tensor | None = None) -> Tensor:
        count, length = len(self.slots), self.num_keys
        keys = self.cache.keys[layer, :count].flatten(0, 1)
        keys = (keys if self.cache.positions_last else keys.transpose(-1, -2))[:, :, :length]
        values = self.cache.values[layer, :count].flatten(0, 1)[:, :length]
        return attend_rows(self.spec, layer, query_NHD, keys, values, self.masks[self.spec.windows[layer]], sinks_H)


def attend_rows(
    spec: DecoderSpec, layer: int, query_NHD: Tensor, keys: Tensor, values: Tensor, mask: Tensor, sinks_H: Tensor | None
) -> Tensor:
    """Attention [N, H * D] of one query per slot over keys [N * K, D, L] and values [N * K, L, D]; query heads that share a
    key head are rows of one small matrix product."""
    count, scale, cap = query_NHD.shape[0], spec.query_scales[layer], spec.attention_cap
    # Rows of a product are the query heads of one key head: keys are read once for all of them.
    query = query_NHD.reshape(-1, spec.group, spec.head_dim).to(keys.dtype)
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


def key_mask(spec: DecoderSpec, positions: Tensor, num_keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """0 where a slot's query sees a key, -inf elsewhere -> [N * K, 1, L]."""
    behind = positions[:, None] - torch.arange(num_keys, device=positions.device)
    hidden = behind < 0 if window is None else (behind < 0) | (behind >= window)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    # -inf, not a large number: what an earlier response left behind the position must have a weight of exactly 0.
    mask.masked_fill_(hidden, float("-inf"))
    return mask.repeat_interleave(spec.num_kv_heads, dim=0)[:, None]


def _round_up(num_keys: int) -> int:
    return -(-num_keys // KEY_MULTIPLE) * KEY_MULTIPLE
