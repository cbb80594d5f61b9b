"""Which pages each slot has: tables, prompts that wait with their pages, and what samples of one prompt share.

A slot's positions lie in the pages of its row, in order. A prompt is computed once into pages of its own; a response that
starts from it shares the whole ones and copies the last, which it will write into. Slots get pages as they need them, so
memory follows the tokens that are there. Moving a response to another slot moves its row, nothing else.

The host's tables are ahead of the device's: `flush` brings it what has changed, in one copy, before anything runs.

Axes: S slots, P pages of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tba.generate.decoder.spec import DecoderSpec
from tba.generate.native.page_plan import PagePlan, PromptGroups, num_splits
from tba.generate.native.page_pool import PAGE, SCRATCH, PagePool, PrefixIndex
from tba.generate.native.slots import SlotTable
from tba.policy.packing import on_device


@dataclass(kw_only=True, eq=False)
class PagedPrompt:
    """A prompt whose keys and values are in pages, or are going to be."""

    ids: np.ndarray
    """Tokens of the prompt and what follows it, int64, but the last: that is fed at the first decode step."""
    version: int
    """Version of the weights that compute it."""
    pages: np.ndarray
    """Page numbers: as many as all the tokens need."""
    num_computed: int = 0
    """Number of tokens whose keys and values are in the pages."""

    @property
    def ready(self) -> bool:
        """Whether a response may start from it."""
        return self.num_computed == len(self.ids)


class PagedCache:
    """Keys and values of all slots, in pages; the tables on the device never move."""

    def __init__(
        self,
        spec: DecoderSpec,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_length: int,
        max_bytes: int,
        page_size: int = PAGE,
    ) -> None:
        self.spec, self.device, self.dtype, self.page_size = spec, device, dtype, page_size
        self.pool = PagePool(spec, dtype, device, page_size=page_size, max_bytes=max_bytes)
        self.prefixes = PrefixIndex(page_size)
        width = -(-max_length // page_size)
        self.numbers = np.full((num_slots, width), SCRATCH, dtype=np.int64)
        """Page numbers, a row per slot."""
        self.counts = np.zeros(num_slots, dtype=np.int64)
        """Number of pages of each slot."""
        self.num_whole = np.zeros(num_slots, dtype=np.int64)
        """Number of leading pages that each slot never writes into: its prompt's whole ones."""
        self.table = torch.zeros(num_slots, width, dtype=torch.int64, device=device)
        """Offsets of the same pages, int64 [S, P]."""
        self.groups = PromptGroups(num_slots, device)
        self._added: list[np.ndarray] = []
        """Places in the flat table that got a page which the device does not know yet."""
        self._stale = np.zeros(num_slots, dtype=np.int64)
        """Number of leading entries of each row that may be others on the device."""
        self._copies: list[tuple[int, int]] = []
        """Pages to be copied, from and to."""
        self._groups_changed = False

    @property
    def num_positions(self) -> int:
        """Number of positions that a slot may come to have."""
        return self.numbers.shape[1] * self.page_size

    def num_pages(self, num_positions: int) -> int:
        return -(-num_positions // self.page_size)

    def check_fits(self, num_positions: int, what: str) -> None:
        """Raise where a response could not run even if it were alone."""
        # One page more than its own: while other samples of its prompt wait, the prompt keeps its last page.
        needed, allowed = self.num_pages(num_positions) + 1, self.pool.max_pages - 1
        if needed > allowed:
            raise ValueError(
                f"{what} may need {num_positions} tokens of keys and values, {needed} pages of {self.pool.page_bytes:,} "
                f"bytes, and all that this engine may have is {allowed}: shorten the prompt (task.max_prompt_tokens) or the "
                "response (generate.max_new_tokens), or leave it more memory (fewer searchers on the device, "
                "max_cache_bytes)."
            )

    # --- slots -------------------------------------------------------------------------------------------------------

    def start(
        self, slot: int, prompt: PagedPrompt, *, num_positions: int, most_positions: int, is_last: bool, num_spare: int
    ) -> bool:
        """Give a slot a prompt's pages and those for its next positions -> whether there are so many, and `num_spare` more.

        `is_last` says that no other response starts from the prompt: the slot takes over what is the prompt's.
        """
        num_whole, is_partial = divmod(len(prompt.ids), self.page_size)
        copies = int(is_partial > 0 and not is_last)
        own = max(0, self.num_pages(num_positions) - len(prompt.pages)) + copies
        if own + num_spare > self.pool.num_available:
            return False
        new = self.pool.allocate(own)
        if new is None:
            return False
        kept = prompt.pages
        if not is_last:
            kept = prompt.pages[:num_whole]
            self.pool.share(kept)
        if copies:
            self._copies.append((int(prompt.pages[-1]), int(new[0])))
        row = np.concatenate((kept, new))
        self.numbers[slot, : len(row)] = row
        self.counts[slot], self.num_whole[slot] = len(row), num_whole
        self._stale[slot] = max(self._stale[slot], len(row))
        self._groups_changed = True
        return True

    def hold(self, slots: SlotTable, num_steps: int) -> bool:
        """Give every running slot pages for `num_steps` more tokens -> whether there were so many; else nothing changes."""
        running, positions = slots.reach(num_steps)
        missing = -(-positions // self.page_size) - self.counts[running]
        short = missing > 0
        if not short.any():
            return True
        chosen, missing = running[short], missing[short]
        pages = self.pool.allocate(int(missing.sum()))
        if pages is None:
            return False
        rows = np.repeat(chosen, missing)
        columns = self.counts[rows] + _ramp(missing)
        self.numbers[rows, columns] = pages
        self.counts[chosen] += missing
        self._added.append(rows * self.numbers.shape[1] + columns)
        return True

    def release(self, slots: Sequence[int]) -> None:
        """Take the pages of slots away; those that nobody else uses are free."""
        chosen = np.asarray(slots)
        self._stale[chosen] = np.maximum(self._stale[chosen], self.counts[chosen])
        used = np.arange(self.numbers.shape[1]) < self.counts[chosen, None]
        self._release(self.numbers[chosen][used])
        self.numbers[chosen], self.counts[chosen], self.num_whole[chosen] = SCRATCH, 0, 0
        self._groups_changed = True

    def move(self, sources: Sequence[int], targets: Sequence[int], num_keys: int) -> None:
        """Give the pages of slots to other slots, which have none."""
        taken, given = np.asarray(sources), np.asarray(targets)
        for slots in (taken, given):
            self._stale[slots] = np.maximum(self._stale[slots], self.counts[taken])
        for table in (self.numbers, self.counts, self.num_whole):
            table[given] = table[taken]
        self.numbers[taken], self.counts[taken], self.num_whole[taken] = SCRATCH, 0, 0
        self._groups_changed = True

    def clear(self) -> None:
        """All slots and prompts give their pages back."""
        self.pool.release_all()
        self.prefixes.clear()
        self.numbers[:], self.counts[:], self.num_whole[:] = SCRATCH, 0, 0
        self._added.clear()
        self._copies.clear()
        self._stale[:] = 0
        self.table.zero_()
        self._groups_changed = True

    @torch.inference_mode()
    def wipe(self) -> None:
        """Set all keys and values to zero, those in use too."""
        for chunk in self.pool.chunks:
            chunk.zero_()

    # --- prompts -----------------------------------------------------------------------------------------------------

    def begin(self, ids: np.ndarray, version: int, *, num_spare: int) -> PagedPrompt | None:
        """Pages for a prompt: whole ones that hold its beginning already are shared. None where there are not so many free,
        and `num_spare` more."""
        shared = self.prefixes.find(ids, version)
        missing = self.num_pages(len(ids)) - len(shared)
        own = self.pool.allocate(missing) if missing + num_spare <= self.pool.num_available else None
        if own is None:
            return None
        self.pool.share(shared)
        pages = np.concatenate((shared, own))
        return PagedPrompt(ids=ids, version=version, pages=pages, num_computed=len(shared) * self.page_size)

    def note_computed(self, prompt: PagedPrompt, num_computed: int) -> None:
        """So many tokens of a prompt are in its pages: others that begin alike may share them."""
        prompt.num_computed = num_computed
        held = self.prefixes.add(prompt.ids[:num_computed], prompt.version, prompt.pages)
        own = prompt.pages[: len(held)]
        is_other = held != own
        if is_other.any():  # computed side by side with one that begins alike: one copy is enough
            self.pool.share(held[is_other])
            self._release(own[is_other])
            prompt.pages[: len(held)] = held

    def drop(self, prompt: PagedPrompt) -> None:
        """Nobody starts from a prompt any more."""
        self._release(prompt.pages)

    def forget_prefixes(self) -> None:
        """Prompts that are computed from now on share no page with those before."""
        self.prefixes.clear()

    def _release(self, pages: np.ndarray) -> None:
        self.prefixes.forget(self.pool.release(pages))

    # --- the device --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def flush(self) -> None:
        """Bring the device's tables and pages up to date."""
        if self._copies:
            sources, targets = np.array(self._copies).T
            self.pool.copy(sources, targets)
            self._copies.clear()
        if self._added or self._stale.any():
            # A place may be named twice: both times it gets what the host's table says now.
            slots, width = np.flatnonzero(self._stale), self.numbers.shape[1]
            places = np.concatenate(
                (*self._added, np.repeat(slots, self._stale[slots]) * width + _ramp(self._stale[slots]))
            )
            self._added.clear()
            self._stale[:] = 0
            offsets = self.pool.offsets[self.numbers.reshape(-1)[places]]
            where, what = on_device(torch.from_numpy(np.stack((places, offsets))), self.device)
            self.table.view(-1)[where] = what

    def plan(self, num_slots: int) -> PagePlan:
        """How the next decode steps over the first slots read pages; prompt groups are brought up to date."""
        if self._groups_changed:
            self._groups_changed = False
            self.groups.update(self.numbers[:num_slots], self.num_whole[:num_slots])
        own = self.counts[:num_slots] - self.groups.num_shared[:num_slots]
        num_keys = int(own.max(initial=0)) * self.page_size
        splits = num_splits(num_keys, num_slots * self.spec.num_kv_heads)
        return PagePlan(splits=splits, shared=self.groups.any_shared)


def _ramp(counts: np.ndarray) -> np.ndarray:
    """0, 1, ... for each count, one after the other: [2, 3] -> [0, 1, 0, 1, 2]."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
