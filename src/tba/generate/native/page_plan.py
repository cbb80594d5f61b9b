"""How a decode step reads pages: each slot's by one program or by several, and what samples of a prompt share once for all.

Reading in parts, and a pass over shared pages, cost kernels that merge what they find; they pay where contexts are long.

Axes: S slots, P pages, G groups of slots that share a prompt, R members of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tba.policy.packing import on_device

MOST_MEMBERS = 16
"""Most slots whose queries are rows of one tile: larger groups are cut."""
LEAST_SHARED_PAGES = 8
"""Shared prompts of fewer pages are read by each slot for itself: a pass more costs more than it saves."""
KEYS_PER_SPLIT = 1024
"""Up to so many keys of a slot are read by one program; beyond, several divide them."""
MOST_SPLITS = 16
FEW_PROGRAMS = 4096
"""Number of programs from which on more of them fill a GPU no better."""


@dataclass(frozen=True, kw_only=True)
class PagePlan:
    """How a decode step reads pages: PagePlan(splits=4, shared=True). A captured graph is for one plan."""

    splits: int = 1
    """Number of programs that divide the keys of a slot and head."""
    shared: bool = False
    """Whether pages that samples of a prompt share are read once for all of them."""


def num_splits(num_keys: int, num_programs: int) -> int:
    """Number of programs for the longest slot's keys, where there are `num_programs` slots times heads: a power of two, for
    each number of them is a graph of its own."""
    wanted = min(num_keys / KEYS_PER_SPLIT, FEW_PROGRAMS / num_programs, MOST_SPLITS)
    splits = 1
    while splits < wanted:
        splits *= 2
    return splits


class PromptGroups:
    """Slots whose first pages are the same, in groups: a pass over these pages serves all members."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.members = torch.full((num_slots, MOST_MEMBERS), -1, dtype=torch.int32, device=device)
        """Slots of each group, [G, R]; -1 = none."""
        self.shared = torch.zeros(num_slots, dtype=torch.int32, device=device)
        """Number of leading pages of each slot that its group reads for it, [S]."""
        self.num_shared = np.zeros(num_slots, dtype=np.int64)
        """The same on the host."""

    @property
    def any_shared(self) -> bool:
        return bool(self.num_shared.any())

    @torch.inference_mode()
    def update(self, pages_SP: np.ndarray, num_whole_S: np.ndarray) -> None:
        """Find the groups of the first slots, by their page numbers; `num_whole` are those that a slot never writes into."""
        able = np.flatnonzero(num_whole_S >= LEAST_SHARED_PAGES)
        if len(able) < 2 and not self.any_shared:
            return
        members, shared = self._found(pages_SP, num_whole_S, able)
        if shared.any() or self.any_shared:
            both = np.concatenate((members, shared[:, None]), axis=1, dtype=np.int32)
            uploaded = on_device(torch.from_numpy(both), self.shared.device)
            self.members.copy_(uploaded[:, :MOST_MEMBERS])
            self.shared.copy_(uploaded[:, MOST_MEMBERS])
        self.num_shared = shared

    def _found(self, pages_SP: np.ndarray, num_whole_S: np.ndarray, able: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Members [G, R] of each group, and how many pages each slot shares."""
        members = np.full(self.members.shape, -1, dtype=np.int64)
        shared = np.zeros(len(self.num_shared), dtype=np.int64)
        if len(able) < 2:
            return members, shared
        # Pages are shared in order from the first on: those with the same one here have the same ones before it.
        name = pages_SP[able, LEAST_SHARED_PAGES - 1]
        order = np.argsort(name, kind="stable")
        slots, name = able[order], name[order]
        begins, sizes = _runs(np.append(True, name[1:] != name[:-1]))
        rank = (np.arange(len(slots)) - np.repeat(begins, sizes)) % MOST_MEMBERS
        begins, sizes = _runs(rank == 0)
        group = np.repeat(np.arange(len(begins)), sizes)
        members[group, rank] = slots
        members[np.flatnonzero(sizes == 1)] = -1
        # Up to the first page in which a member differs from its group's first, and never a page that one writes into.
        longest = int(num_whole_S[slots].max())
        rows = pages_SP[slots, :longest]
        alike = rows == rows[begins][group]
        lengths = np.where(alike.all(axis=1), longest, np.argmin(alike, axis=1))
        common = np.minimum.reduceat(np.minimum(lengths, num_whole_S[slots]), begins)
        common[sizes == 1] = 0
        shared[slots] = common[group]
        return members, shared


def _runs(is_first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Begins and sizes of the runs that start where the flag is set."""
    begins = np.flatnonzero(is_first)
    return begins, np.diff(np.append(begins, len(is_first)))
