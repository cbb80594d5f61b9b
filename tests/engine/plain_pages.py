"""Attention of a decode step over pages in plain PyTorch: the specification of the kernels, and what tests run on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tba.engine.decoder.spec import DecoderSpec
from tba.engine.native.engine import NativeEngine
from tba.engine.native.paged_cache import PagedCache, side_by_side
from tba.engine.native.slot_cache import attend_rows, key_mask
from tba.engine.native.slots import SlotState
from tba.types import on_device


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
        keys, values = side_by_side(self.pool.read(self.located, layer), self.shape).flatten(1, 2)
        mask = self.masks[self.spec.windows[layer]]
        # A page may come from a response whose numbers were broken: weight 0 x NaN would be NaN.
        values = values.masked_fill((mask == float("-inf")).transpose(1, 2), 0.0)
        return attend_rows(self.spec, layer, query_NHD, keys.transpose(-1, -2), values, mask, sinks_H)


def read_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decode steps read pages where an engine has them; without the kernels no engine does but those of tests."""
    reads_slots = NativeEngine._attention

    def attention(engine: NativeEngine, count: int, num_keys: int):
        if isinstance(engine.cache, PagedCache):
            return PagedAttention(engine.decoder.spec, engine.cache, engine.state, count, num_keys)
        return reads_slots(engine, count, num_keys)

    monkeypatch.setattr(NativeEngine, "_attention", attention)
