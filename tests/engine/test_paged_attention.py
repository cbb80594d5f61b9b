"""Attention over pages against a slow computation of its own, on a GPU, or on a CPU with TRITON_INTERPRET=1.

TRITON_INTERPRET=1 python -m pytest tests/engine/test_paged_attention.py        (needs `pip install triton`)
"""

import os
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: it comes with torch for CUDA.")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("kernels need a GPU, or TRITON_INTERPRET=1", allow_module_level=True)
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
# The interpreter multiplies matrices of bf16 wrongly.
HALF = torch.float16 if INTERPRETED else torch.bfloat16
PAGE = 64
NUM_LAYERS, LAYER, PAGES_PER_SLOT, MAX_MEMBERS = 2, 1, 5, 16
EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class Heads:
    """How heads compute: Heads(num=14, num_kv=2, dim=64, window=100)"""

    num: int = 14
    num_kv: int = 2
    dim: int = 64
    rotated: int | None = None
    """Number of leading dimensions that are rotated; None = all."""
    window: int | None = None
    cap: float | None = None
    sinks: bool = False
    norms: bool = False


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A slot at a position: Slot(130, group=0, shared=2, done=False)"""

    position: int
    done: bool = False
    group: int | None = None
    shared: int = 0


SLOTS = [Slot(position=p) for p in (0, 1, 63, 64, 65, 257)]
SLOTS += [Slot(position=100, done=True), Slot(position=128), Slot(position=191)]

SHARING = [
    Slot(position=191, group=3, shared=2),
    Slot(position=70),
    Slot(position=128, group=3, shared=2),
    Slot(position=64, group=0, shared=1),
    Slot(position=319, group=3, shared=2),
    Slot(position=127, group=0, shared=1),
    Slot(position=5),
    Slot(position=200, done=True, group=3, shared=2),
]


class Pages:
    """Slots with random keys and values, in pages of two chunks, the first of which lies behind the other."""

    def __init__(self, heads: Heads, slots: list[Slot], dtype: torch.dtype) -> None:
        self.heads, self.slots, self.dtype = heads, slots, dtype
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(DEVICE)

        per_chunk = len(slots) * PAGES_PER_SLOT // 2 + 2
        shape = (2 * per_chunk, NUM_LAYERS, 2, heads.num_kv, PAGE, heads.dim)
        self.storage = randn(*shape).to(dtype)
        self.per_chunk, self.page_size = per_chunk, self.storage[0].numel()
        self.base = self.storage[per_chunk:]
        # Page 0 of the first chunk is scratch; the others are dealt out in no order.
        free = [int(i) for i in torch.randperm(2 * per_chunk, generator=generator) if i != per_chunk]
        self.pages: list[list[int]] = []
        for slot in slots:
            mates = [p for p, other in zip(self.pages, slots) if slot.shared and other.group == slot.group]
            lead = mates[0][: slot.shared] if mates else []
            self.pages.append(lead + [free.pop() for _ in range(slot.position // PAGE + 1 - len(lead))])
        self.table = torch.zeros(len(slots), PAGES_PER_SLOT, dtype=torch.int64)
        for index, (slot, pages) in enumerate(zip(slots, self.pages)):
            if not slot.done:  # which leaves scratch to a slot that is done
                self.table[index, : len(pages)] = torch.tensor([(page - per_chunk) * self.page_size for page in pages])
            # What must not be read spoils what reads it.
            self.storage[pages[-1], :, :, :, slot.position % PAGE :] = float("nan")
        self.storage[per_chunk] = float("nan")

        self.state = torch.tensor([[9, slot.position, int(slot.done)] for slot in slots], device=DEVICE)
        self.shared = torch.tensor([slot.shared for slot in slots], dtype=torch.int32, device=DEVICE)
        self.members = torch.full((len(slots), MAX_MEMBERS), -1, dtype=torch.int32)
        for group in {slot.group for slot in slots} - {None}:
            mine = [index for index, slot in enumerate(slots) if slot.group == group]
            columns = torch.randperm(MAX_MEMBERS, generator=generator)[: len(mine)]
            self.members[group, columns] = torch.tensor(mine, dtype=torch.int32)
        self.qkv = randn(len(slots), (heads.num + 2 * heads.num_kv) * heads.dim).to(dtype)
        pairs = (heads.dim if heads.rotated is None else heads.rotated) // 2
        angles = randn(PAGES_PER_SLOT * PAGE, pairs)
        self.rotations = torch.stack([angles.cos(), angles.sin()], dim=-1) if pairs else None
        self.norms = [randn(heads.dim) if heads.norms else None for _ in range(2)]
        self.sinks = randn(heads.num) if heads.sinks else None

    def attend(self, **options) -> Tensor:
        from tba.engine.kernels.paged_attention import PageView, attend_pages

        heads = self.heads
        view = PageView(
            base=self.base,
            table=self.table.to(DEVICE),
            positions=self.state[:, 1],
            done=self.state[:, 2],
            members=self.members.to(DEVICE),
            shared=self.shared,
        )
        return attend_pages(
            self.qkv,
            view,
            LAYER,
            num_heads=heads.num,
            num_kv_heads=heads.num_kv,
            head_dim=heads.dim,
            scale=heads.dim**-0.5,
            cap=heads.cap,
            window=heads.window,
            sinks_H=self.sinks,
            rotations=self.rotations,
            query_norm=self.norms[0],
            key_norm=self.norms[1],
            epsilon=EPSILON,
            **options,
        )

    # --- the same, slowly --------------------------------------------------------------------------------------------

    def new_token(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of a slot's new token, rounded: [H, D], [K, D], [K, D]"""
        heads = self.heads
        sizes = [heads.num, heads.num_kv, heads.num_kv]
        query, key, value = self.qkv[index].float().view(-1, heads.dim).split(sizes)
        query, key = (self._turn(index, self._normed(x, weight)) for x, weight in zip((query, key), self.norms))
        return query.to(self.dtype), key.to(self.dtype), value.to(self.dtype)

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else x * (x.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * weight

    def _turn(self, index: int, x: Tensor) -> Tensor:
        if self.rotations is None:
            return x
        cos, sin = self.rotations[self.slots[index].position].unbind(-1)
        x, width = x.clone(), 2 * len(cos)
        even, odd = x[:, 0:width:2].clone(), x[:, 1:width:2].clone()
        x[:, 0:width:2], x[:, 1:width:2] = even * cos - odd * sin, even * sin + odd * cos
        return x

    def expected(self) -> tuple[Tensor, Tensor]:
        """What every slot at work should give, NaN for the others, and what should be stored afterwards."""
        heads, group = self.heads, self.heads.num // self.heads.num_kv
        out = torch.full((len(self.slots), heads.num, heads.dim), float("nan"), dtype=torch.float64, device=DEVICE)
        storage = self.storage.clone()
        for index, slot in enumerate(self.slots):
            if slot.done:
                continue
            query, key, value = self.new_token(index)
            page = storage[self.pages[index][slot.position // PAGE], LAYER]
            page[0, :, slot.position % PAGE], page[1, :, slot.position % PAGE] = key, value
            first = 0 if heads.window is None else max(0, slot.position + 1 - heads.window)
            places = [(self.pages[index][p // PAGE], p % PAGE) for p in range(first, slot.position + 1)]
            seen = torch.stack([storage[page, LAYER, :, :, place] for page, place in places]).double()
            for head in range(heads.num):
                keys, values = seen[:, 0, head // group], seen[:, 1, head // group]
                scores = keys @ query[head].double() * heads.dim**-0.5
                if heads.cap is not None:
                    scores = heads.cap * torch.tanh(scores / heads.cap)
                if self.sinks is not None:
                    scores = torch.cat([scores, self.sinks[head, None].double()])
                out[index, head] = scores.softmax(0)[: len(values)] @ values
        return out.flatten(1), storage


def check(heads: Heads, slots: list[Slot], dtype: torch.dtype, **options) -> None:
    pages = Pages(heads, slots, dtype)
    want, storage = pages.expected()
    got = pages.attend(**options).double()
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    at_work = [index for index, slot in enumerate(slots) if not slot.done]
    torch.testing.assert_close(got[at_work], want[at_work], atol=tolerance, rtol=tolerance)
    assert got.isfinite().all()
    # A norm in another order of operations may round to the number's neighbour; nothing else may differ at all.
    changed = (pages.storage != storage) & ~(pages.storage.isnan() & storage.isnan())
    torch.testing.assert_close(pages.storage[changed], storage[changed], atol=tolerance, rtol=tolerance)
    news = sum(2 * heads.num_kv * heads.dim for _ in at_work)
    assert changed.sum() <= news


KINDS = {
    "plain": Heads(),
    "a head each": Heads(num=2, num_kv=2),
    "eight heads, 128 dimensions": Heads(num=8, num_kv=1, dim=128),
    "96 dimensions": Heads(num=4, num_kv=2, dim=96),
    "window of one": Heads(num=4, window=1),
    "short window": Heads(num=4, window=50),
    "window of pages": Heads(num=4, window=128),
    "cap": Heads(num=4, cap=2.0),
    "sinks": Heads(num=4, sinks=True),
    "norms": Heads(num=4, norms=True),
    "partly rotated": Heads(num=4, dim=96, rotated=32),
    "not rotated": Heads(num=4, rotated=0),
    "everything": Heads(num=6, dim=96, rotated=64, window=90, cap=3.0, sinks=True, norms=True),
}
HALVES = ("plain", "eight heads, 128 dimensions", "everything")
cases = pytest.mark.parametrize(
    ("heads", "dtype"),
    [(heads, torch.float32) for heads in KINDS.values()] + [(KINDS[name], HALF) for name in HALVES],
    ids=[*KINDS, *(f"{name}, half precision" for name in HALVES)],
)


@cases
def test_one_kernel_rotates_stores_and_attends(heads, dtype):
    check(heads, SLOTS, dtype)


@pytest.mark.parametrize("block", [16, 32, 128])
@pytest.mark.parametrize("heads", [KINDS["plain"], KINDS["short window"]], ids=["plain", "window"])
def test_blocks_of_parts_of_a_page_or_two_pages_give_the_same(block, heads):
    from tba.engine.kernels.paged_attention import Launch

    check(heads, SLOTS, torch.float32, launch=Launch(block=block, warps=2, stages=2))


@cases
def test_parts_of_the_keys_are_merged_to_the_attention_over_all(heads, dtype):
    check(heads, SLOTS, dtype, splits=4)


@cases
def test_a_shared_prompt_is_read_once_for_the_members_of_its_group(heads, dtype):
    check(heads, SHARING, dtype, splits=1, shared=True, shared_splits=2)


@pytest.mark.parametrize(("splits", "shared_splits"), [(1, 1), (1, 8), (4, 2)])
def test_own_and_shared_pages_are_split_apart_from_each_other(splits, shared_splits):
    check(KINDS["everything"], SHARING, torch.float32, splits=splits, shared=True, shared_splits=shared_splits)


def test_groups_that_fill_several_tiles():
    slots = [Slot(position=128 + 7 * i, group=2, shared=2) for i in range(13)]
    check(Heads(num=8, num_kv=1), slots, torch.float32, shared=True, shared_splits=2)


def test_a_member_whose_group_does_not_read_for_it_reads_its_pages_itself():
    alone = [replace(slot, shared=0) if slot.group == 0 else slot for slot in SHARING]
    check(Heads(num=4), alone, torch.float32, shared=True)


def test_members_beyond_the_slots_of_the_graph_are_left_out():
    pages = Pages(Heads(num=4), SHARING, torch.float32)
    want, _ = pages.expected()
    pages.qkv, pages.state = pages.qkv[:3], pages.state[:3]
    torch.testing.assert_close(pages.attend(shared=True).double(), want[:3], atol=1e-5, rtol=1e-5)
