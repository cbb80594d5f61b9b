"""Keys and values in pages: which there are, who uses them, and which each slot has.

A page holds PAGE positions of one sequence for all layers, [M, 2 (keys, values), K, PAGE, D]. Pages are cut from chunks
[pages, M, 2, K, PAGE, D] that are allocated when they are needed, up to a bound, and are never moved or freed while the pool
lives: a captured graph stays valid when the pool grows. The host names a page by its number; kernels name it by the offset
of its first element from the first chunk, which is negative where a later chunk lies below it. Page 0 is scratch: it stands
wherever a table has no page, has no owner and is never allocated.

A slot's positions lie in the pages of its row, in order. A prompt is computed once into pages of its own; a response that
starts from it shares the whole ones and copies the last, which it will write into. Prompts that begin alike share whole
pages, found by the tokens that they hold. Slots get pages as they need them, so memory follows the tokens that are there.
Moving a response to another slot moves its row, nothing else.

A decode step reads each slot's pages by one program or by several, and what samples of a prompt share once for all of them.
Both cost kernels that merge what they find; they pay where contexts are long.

The host's tables are ahead of the device's: `flush` brings it what has changed, in one copy, before anything runs.

Axes: M layers, K key/value heads, D head dimension, T tokens of a pass, S slots, P pages of the longest sequence, G groups
of slots that share a prompt, R members of a group.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tba.engine.decoder.spec import DecoderSpec
from tba.engine.native.kept_turns import TURNS_PER_SLOT, KeptTurn, KeptTurns, TurnKey
from tba.models.flash_attention import counted
from tba.types import on_device

logger = logging.getLogger("tba.engine")

PAGE = 64
"""Number of positions of a page, as the kernels have it (kernels/paged_attention.py)."""
SCRATCH = 0
LEAST_CHUNK_BYTES = {"cpu": 2**20, "cuda": 2**28}
"""Size of the first chunk, by device; later ones are a quarter of all before, and never smaller: few chunks, little more
memory than is used."""
LARGEST_CHUNK_BYTES = 2**32
CACHE_BYTES = 2**30
"""Most memory for pages on a CPU, where nothing else was said."""
CACHE_SHARE = 4
"""On a GPU pages get at most one part in this many of its memory, and half of what is free: the trainer may be on it too."""
MOST_MEMBERS = 16
"""Most slots whose queries are rows of one tile: larger groups are cut."""
LEAST_SHARED_PAGES = 8
"""Shared prompts of fewer pages are read by each slot for itself: a pass more costs more than it saves."""
KEYS_PER_SPLIT = 1024
"""Up to so many keys of a slot are read by one program; beyond, several divide them."""
MOST_SPLITS = 16
FEW_PROGRAMS = 4096
"""Number of programs from which on more of them fill a GPU no better."""


def default_cache_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return CACHE_BYTES
    free, total = torch.cuda.mem_get_info(device)
    return min(total // CACHE_SHARE, free // 2)


class PageRefs(NamedTuple):
    """Some pages of one chunk: their places in it, and which of the pages asked for they are (None = all); int64."""

    chunk: Tensor
    places: Tensor
    rows: Tensor | None


class PagePool:
    """Pages and who uses them. All bookkeeping is the host's, on arrays of page numbers."""

    def __init__(
        self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device, *, page_size: int = PAGE, max_bytes: int
    ) -> None:
        self.device, self.dtype, self.page_size = device, dtype, page_size
        self._shape = (spec.num_layers, 2, spec.num_kv_heads, page_size, spec.head_dim)
        self.page_bytes = int(np.prod(self._shape)) * dtype.itemsize
        # Two at least: scratch, and one to use.
        self.max_pages = max(2, max_bytes // self.page_bytes)
        """Most pages that there may be, scratch included."""
        self.chunks: list[Tensor] = []
        self.offsets = np.zeros(0, dtype=np.int64)
        """Offset of each page from the first chunk, in elements."""
        self.references = np.zeros(0, dtype=np.int64)
        self._chunk_of = np.zeros(0, dtype=np.int64)
        self._place = np.zeros(0, dtype=np.int64)
        """Place of each page in its chunk."""
        self._free = np.zeros(0, dtype=np.int64)
        """Unused pages: the first `num_free`; the last of these is taken next."""
        self.num_free = 0
        self._add_chunk(min(self.max_pages, max(2, LEAST_CHUNK_BYTES[device.type] // self.page_bytes)))

    @property
    def num_pages(self) -> int:
        """Number of pages that memory is allocated for, scratch included."""
        return len(self.references)

    @property
    def num_available(self) -> int:
        """Number of pages that can be had: unused ones, and those that may still be allocated."""
        return self.num_free + self.max_pages - self.num_pages

    @property
    def base(self) -> Tensor:
        return self.chunks[0]

    def allocate(self, count: int) -> np.ndarray | None:
        """Numbers of `count` pages with one user each; None where there are not so many, and nothing is taken."""
        while self.num_free < count:
            if not self._grow(count - self.num_free):
                return None
        # Host's bookkeeping only: what an earlier user left in the page stays, behind the new one's position.
        self.num_free -= count
        pages = self._free[self.num_free : self.num_free + count].copy()
        self.references[pages] = 1
        return pages

    def share(self, pages: np.ndarray) -> None:
        """One more user for each of these, which are distinct."""
        self.references[pages] += 1

    def release(self, pages: np.ndarray) -> np.ndarray:
        """One user less for each, as often as it is named -> the pages that are unused now."""
        # Unbuffered: a page named twice loses two users, which plain indexing would count as one.
        np.subtract.at(self.references, pages, 1)
        freed = np.unique(pages[self.references[pages] == 0])
        self._give_back(freed)
        return freed

    def release_all(self) -> None:
        self.references[:] = 0
        # Descending, scratch left out: the lowest number is taken first.
        self._free = np.arange(self.num_pages - 1, SCRATCH, -1, dtype=np.int64)
        self.num_free = len(self._free)

    def locate(self, pages: np.ndarray) -> list[PageRefs]:
        return [
            PageRefs(
                self.chunks[chunk], self._upload(self._place[pages[rows]]), self._upload(rows) if several else None
            )
            for chunk, rows, several in self._by_chunk(pages)
        ]

    def read(self, located: list[PageRefs], layer: int) -> Tensor:
        """Keys and values of a layer, [pages, 2, K, PAGE, D], in the order that they were asked for."""
        if len(located) == 1 and located[0].rows is None:
            return located[0].chunk[located[0].places, layer]
        count = sum(len(part.places) for part in located)
        found = torch.empty(count, *self._shape[1:], dtype=self.dtype, device=self.device)
        for part in located:
            assert part.rows is not None
            found[part.rows] = part.chunk[part.places, layer]
        return found

    def store(
        self, pages: np.ndarray, places: np.ndarray, tokens: np.ndarray, keys_MTKD: Tensor, values_MTKD: Tensor
    ) -> None:
        """Put token `tokens[i]` of a pass at position `places[i]` of page `pages[i]`, in all layers."""
        for chunk, rows, _ in self._by_chunk(pages):
            index = np.stack((self._place[pages[rows]], places[rows], tokens[rows]))
            page, place, token = self._upload(index)
            for part, table in enumerate((keys_MTKD, values_MTKD)):
                # Two index tensors apart from each other put their common axis first: [tokens, M, K, D].
                self.chunks[chunk][:, :, part][page, :, :, place] = table[:, token].transpose(0, 1)

    def copy(self, sources: np.ndarray, targets: np.ndarray) -> None:
        for source, rows, _ in self._by_chunk(sources):
            # Gathered into a new tensor first: a target may lie in the chunk that is read.
            found = self.chunks[source][self._upload(self._place[sources[rows]])]
            for target, own, several in self._by_chunk(targets[rows]):
                part = found[self._upload(own)] if several else found
                self.chunks[target][self._upload(self._place[targets[rows][own]])] = part

    def _by_chunk(self, pages: np.ndarray) -> Iterator[tuple[int, np.ndarray, bool]]:
        """(chunk, which of the pages lie there, whether there are others) for each chunk that has some."""
        chunks = self._chunk_of[pages]
        found = np.unique(chunks)
        for chunk in found.tolist():
            yield chunk, np.flatnonzero(chunks == chunk), len(found) > 1

    def _upload(self, numbers: np.ndarray) -> Tensor:
        return on_device(torch.from_numpy(np.ascontiguousarray(numbers)), self.device)

    def _give_back(self, pages: np.ndarray) -> None:
        self._free[self.num_free : self.num_free + len(pages)] = pages
        self.num_free += len(pages)

    def _grow(self, missing: int) -> bool:
        """Allocate another chunk -> whether there is one. The bound comes down to what there is where memory has run out."""
        allowed = self.max_pages - self.num_pages
        if allowed < missing:
            return False
        least, most = (size // self.page_bytes for size in (LEAST_CHUNK_BYTES[self.device.type], LARGEST_CHUNK_BYTES))
        wanted = max(missing, min(most, max(least, self.num_pages // 4)))
        for count in (min(allowed, wanted), missing):
            try:
                self._add_chunk(count)
                return True
            except torch.OutOfMemoryError as error:
                reason = error  # there may be memory for what is needed now, if not for a chunk of the usual size
        # Lowered for good: a memory that is full would be asked for more at every step.
        self.max_pages = self.num_pages
        size = self.num_pages * self.page_bytes / 2**30
        logger.warning("keys and values stay at %.3g GiB, and more responses wait: %.300s", size, reason)
        return False

    def _add_chunk(self, count: int) -> None:
        # Zeros, not garbage: masked keys have weight 0, and 0 x NaN would be NaN.
        chunk = torch.zeros(count, *self._shape, dtype=self.dtype, device=self.device)
        self.chunks.append(chunk)
        first, size = self.num_pages, chunk.element_size()
        # Kernels reach every chunk from the base pointer by elements, so distances must be whole numbers of them.
        apart, rest = divmod(chunk.data_ptr() - self.base.data_ptr(), size)
        assert rest == 0, "chunks must lie a whole number of elements apart"
        self.offsets = np.append(self.offsets, apart + chunk.stride(0) * np.arange(count))
        self.references = np.append(self.references, np.zeros(count, dtype=np.int64))
        self._chunk_of = np.append(self._chunk_of, np.full(count, len(self.chunks) - 1))
        self._place = np.append(self._place, np.arange(count))
        # Lower numbers are taken first: what is in use stays in few chunks.
        new = np.arange(first + count - 1, max(first, SCRATCH + 1) - 1, -1)
        old, self._free, self.num_free = self._free[: self.num_free], np.zeros(self.num_pages, dtype=np.int64), 0
        self._give_back(new)
        self._give_back(old)


class PrefixIndex:
    """Whole pages by what they hold: the weights' version, the tokens, and the page before, which stands for all tokens
    before them. A user of a page also uses the pages before it, so none of these is freed before it."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._pages: dict[tuple[int, int, bytes], int] = {}
        self._keys: dict[int, tuple[int, int, bytes]] = {}

    def find(self, ids: np.ndarray, version: int) -> np.ndarray:
        found: list[int] = []
        # `found` is the chain's memory too: the key of a page names the page that was found before it.
        for key in self._chain(ids, version, found):
            page = self._pages.get(key)
            if page is None:
                break
            found.append(page)
        return np.array(found, dtype=np.int64)

    def add(self, ids: np.ndarray, version: int, pages: np.ndarray) -> np.ndarray:
        """The whole pages of a sequence hold its tokens now -> the pages to use for them: others where those held the same
        before."""
        held: list[int] = []
        for key, page in zip(self._chain(ids, version, held), pages.tolist()):
            # The first page with this content stays the one; later prompts go over to it.
            known = self._pages.setdefault(key, page)
            self._keys[known] = key
            held.append(known)
        return np.array(held, dtype=np.int64)

    def forget(self, pages: np.ndarray) -> None:
        for page in pages.tolist():
            key = self._keys.pop(page, None)
            if key is not None:
                del self._pages[key]

    def clear(self) -> None:
        self._pages.clear()
        self._keys.clear()

    def _chain(self, ids: np.ndarray, version: int, before: list[int]) -> Iterator[tuple[int, int, bytes]]:
        """Keys of a sequence's whole pages, in order; `before` gets the page of each before the next key is asked for."""
        size = self._page_size
        for start in range(0, len(ids) // size * size, size):
            yield version, before[-1] if before else -1, ids[start : start + size].tobytes()


# --- how a decode step reads pages -------------------------------------------------------------------------------------


class PagePlan(NamedTuple):
    """How a decode step reads pages: PagePlan(splits=4, shared=True). A captured graph is for one plan."""

    splits: int
    """Number of programs that divide the keys of a slot and head."""
    shared: bool
    """Whether pages that samples of a prompt share are read once for all of them."""


class PromptGroups:
    """Slots whose first pages are the same, in groups: a pass over these pages serves all members."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.members = torch.full((num_slots, MOST_MEMBERS), -1, dtype=torch.int32, device=device)
        """Slots of each group, [G, R]; -1 = none."""
        self.shared = torch.zeros(num_slots, dtype=torch.int32, device=device)
        """Number of leading pages of each slot that its group reads for it, [S]."""
        self.num_shared = np.zeros(num_slots, dtype=np.int64)

    @torch.inference_mode()
    def update(self, pages_SP: np.ndarray, num_whole_S: np.ndarray) -> None:
        """Find the groups of the first slots, by their page numbers; `num_whole` are those that a slot never writes into."""
        able = np.flatnonzero(num_whole_S >= LEAST_SHARED_PAGES)
        if len(able) < 2 and not self.num_shared.any():
            return
        members = np.full(self.members.shape, -1, dtype=np.int64)
        shared = np.zeros(len(self.num_shared), dtype=np.int64)
        if len(able) >= 2:
            # Pages are shared in order from the first on: those with the same one here have the same ones before it.
            name = pages_SP[able, LEAST_SHARED_PAGES - 1]
            order = np.argsort(name, kind="stable")
            slots, name = able[order], name[order]
            begins, sizes = _runs(np.append(True, name[1:] != name[:-1]))
            # Groups larger than a tile are cut: a rank of 0 begins the next one.
            rank = (np.arange(len(slots)) - np.repeat(begins, sizes)) % MOST_MEMBERS
            begins, sizes = _runs(rank == 0)
            group = np.repeat(np.arange(len(begins)), sizes)
            members[group, rank] = slots
            # A slot alone shares nothing: its own pass reads its pages.
            members[np.flatnonzero(sizes == 1)] = -1
            # Up to the first page in which a member differs from its group's first, and never one that a member writes into.
            longest = int(num_whole_S[slots].max())
            rows = pages_SP[slots, :longest]
            alike = rows == rows[begins][group]
            lengths = np.where(alike.all(axis=1), longest, np.argmin(alike, axis=1))
            common = np.minimum.reduceat(np.minimum(lengths, num_whole_S[slots]), begins)
            common[sizes == 1] = 0
            shared[slots] = common[group]
        if shared.any() or self.num_shared.any():
            both = np.concatenate((members, shared[:, None]), axis=1, dtype=np.int32)
            uploaded = on_device(torch.from_numpy(both), self.shared.device)
            # In place: captured graphs read these tensors by their addresses.
            self.members.copy_(uploaded[:, :MOST_MEMBERS])
            self.shared.copy_(uploaded[:, MOST_MEMBERS])
        self.num_shared = shared


def _runs(is_first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    begins = np.flatnonzero(is_first)
    return begins, np.diff(np.append(begins, len(is_first)))


# --- the cache ---------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class PagedPrompt:
    """A prompt whose keys and values are in pages, or are going to be."""

    ids: np.ndarray
    """Tokens of the prompt and what follows it, int64, but the last: that is fed at the first decode step."""
    version: int
    pages: np.ndarray
    """Page numbers: as many as all the tokens need."""
    num_computed: int = 0
    """Number of tokens whose keys and values are in the pages."""

    @property
    def ready(self) -> bool:
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
        self.num_whole = np.zeros(num_slots, dtype=np.int64)
        """Number of leading pages that each slot never writes into: its prompt's whole ones."""
        self.table = torch.zeros(num_slots, width, dtype=torch.int64, device=device)
        """Offsets of the same pages, int64 [S, P]."""
        self.groups = PromptGroups(num_slots, device)
        self._stale = np.zeros(num_slots, dtype=np.int64)
        """Number of leading entries of each row that may be others on the device."""
        self._copies: list[tuple[int, int]] = []
        """Pages to be copied, from and to."""
        self._groups_changed = False
        self.turns = KeptTurns[np.ndarray](TURNS_PER_SLOT * num_slots, self._release)

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
        # The response writes into the prompt's last page unless that is full: it gets a copy while others start from it.
        copies = int(is_partial > 0 and not is_last)
        own = max(0, self.num_pages(num_positions) - len(prompt.pages)) + copies
        # Not as many as there are: a running response without its next page would be taken out again.
        if own + num_spare > self.pool.num_available:
            return False
        # It may fail all the same: a pool that cannot grow learns it here, and its bound comes down.
        new = self.pool.allocate(own)
        if new is None:
            return False
        kept = prompt.pages
        if not is_last:
            kept = prompt.pages[:num_whole]
            self.pool.share(kept)
        if copies:
            # Copied at `flush`: the prompt's page is complete, and no step runs before.
            self._copies.append((int(prompt.pages[-1]), int(new[0])))
        row = np.concatenate((kept, new))
        self.numbers[slot, : len(row)] = row
        self.counts[slot], self.num_whole[slot] = len(row), num_whole
        self._stale[slot] = max(self._stale[slot], len(row))
        self._groups_changed = True
        return True

    def hold(self, running: np.ndarray, positions: np.ndarray) -> bool:
        """Give running slots pages for so many positions each -> whether there were so many; else nothing changes."""
        # Whole pages beyond those that a slot has; negative where it has more than it needs.
        missing = -(-positions // self.page_size) - self.counts[running]
        short = missing > 0
        if not short.any():
            return True
        chosen, missing = running[short], missing[short]
        pages = self.pool.allocate(int(missing.sum()))
        if pages is None:
            return False
        rows = np.repeat(chosen, missing)
        columns = self.counts[rows] + counted(missing)
        self.numbers[rows, columns] = pages
        self.counts[chosen] += missing
        self._stale[chosen] = np.maximum(self._stale[chosen], self.counts[chosen])
        return True

    def keep(self, key: TurnKey, slot: int, num_positions: int) -> KeptTurn[np.ndarray]:
        """Keep the whole pages of a response that leaves its slot."""
        pages = self.numbers[slot, : num_positions // self.page_size].copy()
        self.pool.share(pages)
        return self.turns.keep(key, pages)

    def name(self, key: TurnKey, turn: KeptTurn[np.ndarray], ids: np.ndarray, version: int) -> None:
        """The tokens of a turn have come: what goes on from it finds its pages by them."""
        if self.turns.has(key, turn):
            turn.ids, turn.stored = ids, self._held(ids[: len(turn.stored) * self.page_size], version, turn.stored)

    def release(self, slots: Sequence[int]) -> None:
        """Take the pages of slots away; those without another user are free."""
        chosen = np.asarray(slots)
        # Noted while the counts are still there: so many entries of the device's row name pages that it loses.
        self._stale[chosen] = np.maximum(self._stale[chosen], self.counts[chosen])
        used = np.arange(self.numbers.shape[1]) < self.counts[chosen, None]
        # Steps under way may still read these pages: whoever gets them writes later in the same stream.
        self._release(self.numbers[chosen][used])
        self.numbers[chosen], self.counts[chosen], self.num_whole[chosen] = SCRATCH, 0, 0
        self._groups_changed = True

    def move(self, sources: Sequence[int], targets: Sequence[int], num_keys: int) -> None:
        taken, given = np.asarray(sources), np.asarray(targets)
        # Both rows are others now: the old one is cleared, and the new one has the old one's pages.
        for slots in (taken, given):
            self._stale[slots] = np.maximum(self._stale[slots], self.counts[taken])
        for table in (self.numbers, self.counts, self.num_whole):
            table[given] = table[taken]
        self.numbers[taken], self.counts[taken], self.num_whole[taken] = SCRATCH, 0, 0
        self._groups_changed = True

    def clear(self) -> None:
        self.turns.clear()
        self.pool.release_all()
        self.prefixes.clear()
        self.numbers[:], self.counts[:], self.num_whole[:] = SCRATCH, 0, 0
        self._copies.clear()
        self._stale[:] = 0
        self.table.zero_()
        self._groups_changed = True

    @torch.inference_mode()
    def wipe(self) -> None:
        for chunk in self.pool.chunks:
            chunk.zero_()

    # --- prompts -----------------------------------------------------------------------------------------------------

    def begin(self, ids: np.ndarray, version: int, *, num_spare: int) -> PagedPrompt | None:
        """Pages for a prompt: whole ones that hold its beginning already are shared. None where there are not so many free,
        and `num_spare` more."""
        # By version too; for one that comes again with other weights, `forget_prefixes` clears them at every load.
        shared = self.prefixes.find(ids, version)
        missing = self.num_pages(len(ids)) - len(shared)
        own = self.pool.allocate(missing) if missing + num_spare <= self.pool.num_available else None
        if own is None:
            return None
        # After the allocation: where that fails nothing has changed.
        self.pool.share(shared)
        pages = np.concatenate((shared, own))
        return PagedPrompt(ids=ids, version=version, pages=pages, num_computed=len(shared) * self.page_size)

    def note_computed(self, prompt: PagedPrompt, num_computed: int) -> None:
        """So many tokens of a prompt are in its pages: others that begin alike may share them."""
        prompt.num_computed = num_computed
        # Whole pages only: a response writes into a page that its prompt has not filled.
        prompt.pages = self._held(prompt.ids[:num_computed], prompt.version, prompt.pages)

    def _held(self, ids: np.ndarray, version: int, pages: np.ndarray) -> np.ndarray:
        """Whole pages of these tokens may be found from now on -> the pages, others where those held the same before."""
        held = self.prefixes.add(ids, version, pages)
        own = pages[: len(held)]
        is_other = held != own
        if is_other.any():  # computed side by side with one that begins alike: one copy is enough
            self.pool.share(held[is_other])
            self._release(own[is_other])
        return np.concatenate((held, pages[len(held) :]))

    def drop(self, prompt: PagedPrompt) -> None:
        self._release(prompt.pages)

    def forget_prefixes(self) -> None:
        """Prompts that are computed from now on share no page with those before, and turns are computed again."""
        self.turns.clear()
        self.prefixes.clear()

    def _release(self, pages: np.ndarray) -> None:
        self.prefixes.forget(self.pool.release(pages))

    # --- the device --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def flush(self) -> None:
        if self._copies:
            sources, targets = np.array(self._copies).T
            self.pool.copy(sources, targets)
            self._copies.clear()
        slots = np.flatnonzero(self._stale)
        if len(slots):
            # Flat indices into the table, of the leading entries of each row that has changed.
            places = np.repeat(slots, self._stale[slots]) * self.numbers.shape[1] + counted(self._stale[slots])
            self._stale[:] = 0
            offsets = self.pool.offsets[self.numbers.reshape(-1)[places]]
            where, what = on_device(torch.from_numpy(np.stack((places, offsets))), self.device)
            self.table.view(-1)[where] = what

    def plan(self, num_slots: int) -> PagePlan:
        """How the next decode steps over the first slots read pages; prompt groups are brought up to date."""
        if self._groups_changed:
            self._groups_changed = False
            self.groups.update(self.numbers[:num_slots], self.num_whole[:num_slots])
        # Pages that a group reads for a slot are no work of its own programs.
        own = self.counts[:num_slots] - self.groups.num_shared[:num_slots]
        num_keys, num_programs = int(own.max(initial=0)) * self.page_size, num_slots * self.spec.num_kv_heads
        # No more programs than keys pay for, than fill the GPU, or than MOST_SPLITS.
        wanted = min(num_keys / KEYS_PER_SPLIT, FEW_PROGRAMS / num_programs, MOST_SPLITS)
        # A power of two, for each number of them is a graph of its own.
        splits = 1
        while splits < wanted:
            splits *= 2
        return PagePlan(splits=splits, shared=bool(self.groups.num_shared.any()))


def side_by_side(pages: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Pages [rows * pages, 2, K, PAGE, D] -> keys and values [2, rows, K, L, D]."""
    return pages.unflatten(0, shape).permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
