"""Pages of keys and values: cut from chunks, allocated on demand, shared by counting references.

A page holds PAGE positions of one sequence for all layers, [M, 2 (keys, values), K, PAGE, D]. Chunks [pages, M, 2, K, PAGE,
D] are allocated when they are needed, up to a bound, and are never moved or freed while the pool lives: a captured graph
stays valid when the pool grows. The host names a page by its number; kernels name it by the offset of its first element
from the first chunk, which is negative where a later chunk lies below it.

Page 0 is scratch: it stands wherever a table has no page, belongs to nobody and is never allocated.

`PrefixIndex` finds whole pages by the tokens that they hold, so that prompts which begin alike share them.

Axes: M layers, K key/value heads, D head dimension, T tokens of a pass.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tba.generate.decoder.spec import DecoderSpec
from tba.policy.packing import on_device

logger = logging.getLogger("tba.generate")

PAGE = 64
"""Number of positions of a page, as the kernels have it (kernels/paged_attention.py)."""
SCRATCH = 0
"""Number of the page that stands where there is none."""
LEAST_CHUNK_BYTES = {"cpu": 2**20, "cuda": 2**28}
"""Size of the first chunk, by device; later ones are a quarter of all before, and never smaller: few chunks, little more
memory than is used."""
LARGEST_CHUNK_BYTES = 2**32
CACHE_BYTES = 2**30
"""Most memory for pages on a CPU, where nothing else was said."""
CACHE_SHARE = 4
"""On a GPU pages get at most one part in this many of its memory, and half of what is free: the trainer may be on it too."""


def default_cache_bytes(device: torch.device) -> int:
    """Most memory for the keys and values of one engine, where nothing else was said."""
    if device.type != "cuda":
        return CACHE_BYTES
    free, total = torch.cuda.mem_get_info(device)
    return min(total // CACHE_SHARE, free // 2)


class PageRefs(NamedTuple):
    """Some pages of one chunk."""

    chunk: Tensor
    places: Tensor
    """Places in the chunk, int64 on the device."""
    rows: Tensor | None
    """Which of the pages asked for these are, int64 on the device; None = all of them."""


class PagePool:
    """Pages and who uses them. All bookkeeping is the host's, on arrays of page numbers."""

    def __init__(
        self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device, *, page_size: int = PAGE, max_bytes: int
    ) -> None:
        self.device, self.dtype, self.page_size = device, dtype, page_size
        self._shape = (spec.num_layers, 2, spec.num_kv_heads, page_size, spec.head_dim)
        self.page_bytes = int(np.prod(self._shape)) * dtype.itemsize
        self.max_pages = max(2, max_bytes // self.page_bytes)
        """Most pages that there may be, scratch included."""
        self.chunks: list[Tensor] = []
        self.offsets = np.zeros(0, dtype=np.int64)
        """Offset of each page from the first chunk, in elements."""
        self.references = np.zeros(0, dtype=np.int64)
        """Number of users of each page."""
        self._chunk_of = np.zeros(0, dtype=np.int64)
        self._place = np.zeros(0, dtype=np.int64)
        """Place of each page in its chunk."""
        self._free = np.zeros(0, dtype=np.int64)
        """Pages that nobody uses: the first `num_free`; the last of these is taken next."""
        self.num_free = 0
        self._add_chunk(min(self.max_pages, max(2, LEAST_CHUNK_BYTES[device.type] // self.page_bytes)))

    @property
    def num_pages(self) -> int:
        """Number of pages that memory is allocated for, scratch included."""
        return len(self.references)

    @property
    def num_available(self) -> int:
        """Number of pages that can be had: those nobody uses, and those that may still be allocated."""
        return self.num_free + self.max_pages - self.num_pages

    @property
    def base(self) -> Tensor:
        """The first chunk, from which offsets count."""
        return self.chunks[0]

    def allocate(self, count: int) -> np.ndarray | None:
        """Numbers of `count` pages with one user each; None where there are not so many, and nothing is taken."""
        while self.num_free < count:
            if not self._grow(count - self.num_free):
                return None
        self.num_free -= count
        pages = self._free[self.num_free : self.num_free + count].copy()
        self.references[pages] = 1
        return pages

    def share(self, pages: np.ndarray) -> None:
        """One more user for each of these, which are distinct."""
        self.references[pages] += 1

    def release(self, pages: np.ndarray) -> np.ndarray:
        """One user less for each, as often as it is named -> the pages that nobody uses any more."""
        np.subtract.at(self.references, pages, 1)
        freed = np.unique(pages[self.references[pages] == 0])
        self._give_back(freed)
        return freed

    def release_all(self) -> None:
        """Nobody uses any page any more."""
        self.references[:] = 0
        self._free = np.arange(self.num_pages - 1, SCRATCH, -1, dtype=np.int64)
        self.num_free = len(self._free)

    def locate(self, pages: np.ndarray) -> list[PageRefs]:
        """Where pages lie, chunk by chunk, for `read`."""
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
        """Copy whole pages."""
        for source, rows, _ in self._by_chunk(sources):
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
                reason = error
        self.max_pages = self.num_pages
        size = self.num_pages * self.page_bytes / 2**30
        logger.warning("keys and values stay at %.3g GiB, and more responses wait: %.300s", size, reason)
        return False

    def _add_chunk(self, count: int) -> None:
        # Zeros, not garbage: masked keys have weight 0, and 0 x NaN would be NaN.
        chunk = torch.zeros(count, *self._shape, dtype=self.dtype, device=self.device)
        self.chunks.append(chunk)
        first, size = self.num_pages, chunk.element_size()
        apart, rest = divmod(chunk.data_ptr() - self.base.data_ptr(), size)
        assert rest == 0, "chunks must lie a whole number of elements apart"
        self.offsets = np.append(self.offsets, apart + chunk.stride(0) * np.arange(count))
        self.references = np.append(self.references, np.zeros(count, dtype=np.int64))
        self._chunk_of = np.append(self._chunk_of, np.full(count, len(self.chunks) - 1))
        self._place = np.append(self._place, np.arange(count))
        # Lower numbers are taken first: what is in use stays in few chunks.
        new = np.arange(first + count - 1, max(first, SCRATCH + 1) - 1, -1)
        old, self._free = self._free[: self.num_free], np.zeros(self.num_pages, dtype=np.int64)
        self._give_back_in_order(new, old)

    def _give_back_in_order(self, *parts: np.ndarray) -> None:
        self.num_free = 0
        for pages in parts:
            self._give_back(pages)


class PrefixIndex:
    """Whole pages by what they hold: the weights' version, the tokens, and the page before, which stands for all tokens
    before them. Whoever uses a page uses those before it too, so none of these is freed, and given to others, before it."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._pages: dict[tuple[int, int, bytes], int] = {}
        self._keys: dict[int, tuple[int, int, bytes]] = {}

    def find(self, ids: np.ndarray, version: int) -> np.ndarray:
        """Pages that hold the beginning of a sequence, as many as there are."""
        found: list[int] = []
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
            known = self._pages.setdefault(key, page)
            self._keys[known] = key
            held.append(known)
        return np.array(held, dtype=np.int64)

    def forget(self, pages: np.ndarray) -> None:
        """Nobody uses these pages any more."""
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
