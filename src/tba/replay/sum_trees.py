"""Many sum trees in one array: draw by weight and change weights in O(log n), for many leaves in one NumPy pass.

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
"""Number of children of an inner node, and the number of leaves of the smallest tree."""


@lru_cache(maxsize=64)
def level_starts(size: int) -> tuple[tuple[int, ...], int]:
    """Where each level of a tree of `size` leaves (a power of two) begins, root level first, and the length of them all.

    level_starts(128) == ((128, 0), 144): 128 leaves, then 8 sums in a level of 16.
    """
    starts, end = [0], size
    while size > FANOUT:
        starts.insert(0, end)
        size //= FANOUT
        end += max(size, FANOUT)
    return tuple(starts), end


class SumTrees:
    """Trees of different sizes. A tree is named by its base, where its leaves begin, and its size, the number of leaves."""

    def __init__(self) -> None:
        self._blocks = np.zeros((256, FANOUT), np.float64)
        """Nodes of all trees; the 16 children of a node are one line."""
        self._used = 0
        """Number of nodes that belong to a tree, or did before its release."""
        self._free: dict[int, list[int]] = defaultdict(list)
        """Bases of released trees by size."""

    @property
    def _nodes(self) -> np.ndarray:
        return self._blocks.reshape(-1)

    def allocate(self, size: int) -> int:
        """Reserve a tree of `size` leaves and return its base; `rebuild` fills it."""
        if self._free[size]:
            return self._free[size].pop()
        base, self._used = self._used, self._used + level_starts(size)[1]
        if self._used > self._blocks.size:
            grown = np.zeros((max(2 * len(self._blocks), self._used // FANOUT), FANOUT), np.float64)
            grown[: len(self._blocks)] = self._blocks
            self._blocks = grown
        return base

    def release(self, base: int, size: int) -> None:
        """Give a tree back; the next of its size takes its place."""
        self._free[size].append(base)

    def totals(self, bases: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
        """Sum of the weights of each tree; sizes may differ."""
        # Bases and levels are multiples of 16, so that the children of the root are one line of `_blocks`.
        roots = [(base + level_starts(size)[0][0]) // FANOUT for base, size in zip(bases, sizes)]
        return self._blocks[roots].sum(axis=1)

    def rebuild(self, base: int, weights: np.ndarray) -> None:
        """Set the weights of all leaves of one tree."""
        starts, length = level_starts(len(weights))
        nodes = self._nodes[base : base + length]
        # A level narrower than 16 is filled up with zeros: a sum over a whole line is then right.
        nodes[: len(weights)], nodes[len(weights) :] = weights, 0.0
        sums = weights
        for start in starts[-2::-1]:
            sums = sums.reshape(-1, FANOUT).sum(axis=1)
            nodes[start : start + len(sums)] = sums

    def set(self, bases: np.ndarray | int, size: int, leaves: np.ndarray, weights: np.ndarray) -> None:
        """Change weights in trees of one size: weights[i] is for leaf leaves[i] of the tree at bases[i]; no leaf is named
        twice."""
        starts, _ = level_starts(size)
        nodes = self._nodes
        nodes[bases + leaves] = weights
        # Leaves that share a parent both write its sum, which is the same: all their weights are set before.
        parents = leaves
        for level in range(len(starts) - 1, 0, -1):
            parents = parents // FANOUT
            if len(parents) > FANOUT:
                # Neighbours mostly come one after the other, and one of them is enough for their parent.
                others = np.flatnonzero(np.diff(bases + parents, prepend=-1))
                parents, bases = parents[others], bases if isinstance(bases, int) else bases[others]
            sums = self._blocks[(bases + starts[level]) // FANOUT + parents].sum(axis=1)
            nodes[bases + starts[level - 1] + parents] = sums

    def descend(self, bases: np.ndarray, size: int, uniforms: np.ndarray) -> np.ndarray:
        """Numbers in [0, 1) [D] -> leaves [D] of the trees at bases [D], each with probability weight / total.

        A leaf of weight zero is never returned while its tree has another, whatever the rounding.
        """
        node_D, draws = np.zeros(len(bases), np.int64), np.arange(len(bases))
        target_D = np.full(len(bases), np.inf)
        for level, start in enumerate(level_starts(size)[0]):
            sums_DF = self._blocks[(bases + start) // FANOUT + node_D].cumsum(axis=1)
            total_D = sums_DF[:, -1]
            target_D = uniforms * total_D if level == 0 else target_D
            # Rounding may carry the target to the total of this line; below it, some sum lies above and a child is found.
            target_D = np.minimum(target_D, np.nextafter(total_D, 0.0))
            child_D = (sums_DF <= target_D[:, None]).sum(axis=1)
            target_D = target_D - np.where(child_D > 0, sums_DF[draws, child_D - 1], 0.0)
            node_D = node_D * FANOUT + child_D
        return node_D
