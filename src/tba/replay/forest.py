"""Many sum-trees in one array: draw by weight and change weights in O(log n), for many trees in one NumPy pass.

A tree of `size` leaves (a power of two) is a heap of 2 * size numbers: node 1 is the root, node n has children 2n and
2n + 1, leaf i is node size + i. Inner nodes are always recomputed from their children, never adjusted by a difference:
rounding errors cannot pile up, and a tiny weight is seen exactly once a huge one is gone.

Axis letters: M trees, D draws.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np


class SumForest:
    def __init__(self) -> None:
        self._pairs = np.zeros((1024, 2), np.float64)
        """Siblings side by side: row base / 2 + n holds the children of node n of the tree at `base`."""
        self._used = 0
        self._free: dict[int, list[int]] = defaultdict(list)

    @property
    def _nodes(self) -> np.ndarray:
        return self._pairs.reshape(-1)

    def allocate(self, size: int) -> int:
        """Room for a tree, whose base is returned; `rebuild` fills it."""
        if self._free[size]:
            return self._free[size].pop()
        base, self._used = self._used, self._used + 2 * size
        if self._used > self._pairs.size:
            grown = np.zeros((max(2 * len(self._pairs), self._used // 2), 2), np.float64)
            grown[: len(self._pairs)] = self._pairs
            self._pairs = grown
        return base

    def release(self, base: int, size: int) -> None:
        self._free[size].append(base)

    def total(self, base: int) -> float:
        return float(self._nodes[base + 1])

    def rebuild(self, base: int, weights: np.ndarray) -> None:
        """Set all leaves of one tree."""
        nodes, size = self._nodes, len(weights)
        nodes[base + size : base + 2 * size] = weights
        while size > 1:
            size //= 2
            nodes[base + size : base + 2 * size] = self._pairs[base // 2 + size : base // 2 + 2 * size].sum(axis=1)

    def set(self, bases: np.ndarray, sizes: np.ndarray, slots: np.ndarray, weights: np.ndarray) -> None:
        """Change leaves; entry i is leaf slots[i] of the tree at bases[i]. No leaf is named twice."""
        nodes, halves, node = self._nodes, bases // 2, sizes + slots
        nodes[bases + node] = weights
        for _ in range(int(sizes.max()).bit_length() - 1):
            node = np.maximum(node >> 1, 1)  # shallow trees compute their root again
            pairs = self._pairs[halves + node]
            nodes[bases + node] = pairs[:, 0] + pairs[:, 1]

    def descend(self, bases: np.ndarray, sizes: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
        """[M], [M], [M, D] numbers in [0, 1) -> [M, D] leaves, each with probability weight / total.

        Never a leaf of weight zero while the tree has another, whatever the rounding.
        """
        order = np.argsort(-sizes, kind="stable")
        depth_M = np.round(np.log2(sizes[order])).astype(np.int64)
        half_M1 = bases[order, None] // 2
        node_MD = np.ones(uniforms.shape, np.int64)
        target_MD = uniforms[order] * self._nodes[bases[order, None] + 1]
        for level in range(int(depth_M[0]), 0, -1):
            deep = int(np.searchsorted(-depth_M, -level, side="right"))  # the deepest trees start first
            node, target = node_MD[:deep], target_MD[:deep]
            pairs = self._pairs[half_M1[:deep] + node]
            left = pairs[..., 0]
            go_right = (target >= left) & (pairs[..., 1] > 0)
            target -= left * go_right
            node *= 2
            node += go_right
        slots_MD = np.empty_like(node_MD)
        slots_MD[order] = node_MD - sizes[order, None]
        return slots_MD
