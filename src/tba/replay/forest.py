"""Many sum-trees in one array: draw by weight and change weights in O(log n), for many leaves in one NumPy pass.

Every inner node is the sum of 16 children, so that a tree of 128 leaves has two levels and one of 262,144 has five; a
level is a few NumPy calls, whatever its width. Sums are always recomputed from the children, never adjusted by a
difference: rounding errors cannot pile up, and a tiny weight is seen exactly once a huge one is gone.

Axis letters: D draws, F = 16 children.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

FANOUT = 16
"""Also the smallest tree."""


@lru_cache(maxsize=64)
def level_starts(size: int) -> tuple[tuple[int, ...], int]:
    """Where each level of a tree of `size` leaves (a power of two) begins, root level first, and its length in all.

    level_starts(128) == ((128, 0), 144): 128 leaves, then 8 sums in a level of 16.
    """
    starts, end = [0], size
    while size > FANOUT:
        starts.insert(0, end)
        size //= FANOUT
        end += max(size, FANOUT)
    return tuple(starts), end


class SumForest:
    """A tree is named by its base, where its leaves begin, and its number of leaves."""

    def __init__(self) -> None:
        self._blocks = np.zeros((256, FANOUT), np.float64)
        """Siblings side by side."""
        self._used = 0
        self._free: dict[int, list[int]] = defaultdict(list)

    @property
    def _nodes(self) -> np.ndarray:
        return self._blocks.reshape(-1)

    def allocate(self, size: int) -> int:
        """Room for a tree, whose base is returned; `rebuild` fills it."""
        if self._free[size]:
            return self._free[size].pop()
        base, self._used = self._used, self._used + level_starts(size)[1]
        if self._used > self._blocks.size:
            grown = np.zeros((max(2 * len(self._blocks), self._used // FANOUT), FANOUT), np.float64)
            grown[: len(self._blocks)] = self._blocks
            self._blocks = grown
        return base

    def release(self, base: int, size: int) -> None:
        self._free[size].append(base)

    def totals(self, bases: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
        """Sums of all weights, of trees of any sizes."""
        roots = [(base + level_starts(size)[0][0]) // FANOUT for base, size in zip(bases, sizes)]
        return self._blocks[roots].sum(axis=1)

    def rebuild(self, base: int, weights: np.ndarray) -> None:
        """Set all leaves of one tree."""
        starts, length = level_starts(len(weights))
        nodes = self._nodes[base : base + length]
        nodes[: len(weights)], nodes[len(weights) :] = weights, 0.0
        sums = weights
        for start in starts[-2::-1]:
            sums = sums.reshape(-1, FANOUT).sum(axis=1)
            nodes[start : start + len(sums)] = sums

    def set(self, bases: np.ndarray | int, size: int, slots: np.ndarray, weights: np.ndarray) -> None:
        """Change leaves of trees of one size: entry i is leaf slots[i] of the tree at bases[i]; none is named twice."""
        starts, _ = level_starts(size)
        nodes = self._nodes
        nodes[bases + slots] = weights
        for level in range(len(starts) - 1, 0, -1):
            slots = slots // FANOUT
            sums = self._blocks[(bases + starts[level]) // FANOUT + slots].sum(axis=1)
            nodes[bases + starts[level - 1] + slots] = sums

    def descend(self, bases: np.ndarray, size: int, uniforms: np.ndarray) -> np.ndarray:
        """Numbers in [0, 1) [D] -> leaves [D] of the trees at bases [D], each with probability weight / total.

        Never a leaf of weight zero while its tree has another, whatever the rounding.
        """
        slots_D, draws = np.zeros(len(bases), np.int64), np.arange(len(bases))
        target_D = np.full(len(bases), np.inf)
        for level, start in enumerate(level_starts(size)[0]):
            sums_DF = self._blocks[(bases + start) // FANOUT + slots_D].cumsum(axis=1)
            total_D = sums_DF[:, -1]
            target_D = uniforms * total_D if level == 0 else target_D
            target_D = np.minimum(target_D, np.nextafter(total_D, 0.0))  # some sum lies above it, so a child is found
            child_D = (sums_DF <= target_D[:, None]).sum(axis=1)
            target_D = target_D - np.where(child_D > 0, sums_DF[draws, child_D - 1], 0.0)
            slots_D = slots_D * FANOUT + child_D
        return slots_D
