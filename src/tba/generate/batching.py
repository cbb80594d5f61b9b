"""Grouping ragged sequences into padded batches with little padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tba.generate.transfer import on_device

MIN_PADDED_TOKENS = 512
"""Batches below this many tokens are never split: a small batch costs as much in calls as its padding in arithmetic."""


def length_batches(lengths: Sequence[int], *, token_budget: int, max_padding: float = 0.25) -> list[list[int]]:
    """Indices in batches of similar length: at most `token_budget` padded tokens (a longer one alone), and at most
    `max_padding` of them padding.

    length_batches([3, 9, 3], token_budget=512) == [[0, 2, 1]]
    """
    batches: list[list[int]] = []
    real = 0
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        length = max(1, lengths[index])
        batch = batches[-1] if batches else []
        padded = (len(batch) + 1) * length
        wasteful = padded > MIN_PADDED_TOKENS and padded - (real + length) > max_padding * padded
        if not batch or padded > token_budget or wasteful:
            batches.append([index])
            real = length
        else:
            batch.append(index)
            real += length
    return batches


def padded(rows: Sequence[np.ndarray], *, columns: int, device: torch.device) -> Tensor:
    """Right-padded with 0 -> int64 [rows, columns]."""
    table = np.zeros((len(rows), columns), dtype=np.int64)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    return on_device(torch.from_numpy(table), device)
