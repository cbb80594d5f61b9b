"""Keys and values in pages: shared, allocated as tokens come, bounded; long prompts computed between decode steps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from test_engine_ahead import StepsAhead
from tiny_models import (
    by_key,
    keep_in_pages,
    make_prompt,
    make_requests,
    make_tiny_model,
    make_weights_of,
    plain_log_probs,
)

from tba.engine.decoder.build import make_decoder
from tba.engine.native import paged_cache
from tba.engine.native.engine import NativeEngine
from tba.engine.native.paged_cache import SCRATCH, PagePool, PrefixIndex
from tba.types import Prompt, Request, Sampling

PAGE = 4


@pytest.fixture(autouse=True)
def _pages(monkeypatch):
    keep_in_pages(monkeypatch, page_size=PAGE)


def make(*, pages: int | None = None, slots=4, ahead=False, **changes) -> NativeEngine:
    """An engine with memory for so many pages, scratch included; None = for all."""
    settings = {"stop_ids": [2, 3, 4], "seed": 3, "slots": slots, "max_length": 48, **changes}
    model = make_tiny_model("llama")
    size = 3 * 2 * 2 * PAGE * 8 * 4  # layers x (keys, values) x heads x positions x head dimension x bytes
    engine = NativeEngine(model, max_cache_bytes=None if pages is None else pages * size, **settings)
    assert engine.cache.pool.page_bytes == size
    if ahead:
        engine._fused = StepsAhead(engine)
    return engine


def generated(engine, requests, sampling, *, samples=3, **options):
    return by_key(engine.generate(requests, samples_per_prompt=samples, sampling=sampling, **options))


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, completion in expected.items():
        assert found[key].token_ids.tolist() == completion.token_ids.tolist()
        assert found[key].finish == completion.finish
        assert found[key].version_spans == completion.version_spans
        np.testing.assert_allclose(found[key].policy_log_probs, completion.policy_log_probs, atol=1e-5)
        np.testing.assert_allclose(found[key].behaviour_log_probs, completion.behaviour_log_probs, atol=1e-5)


def num_used(engine) -> int:
    """Number of pages that somebody uses."""
    return int((engine.cache.pool.references > 0).sum())


def taken_out(monkeypatch) -> list[int]:
    """Fills with the place of every response that is taken out for want of room."""
    orders, take_out = [], NativeEngine._take_out

    def noting(self, slot, queue):
        orders.append(int(self._slots.orders[slot]))
        take_out(self, slot, queue)

    monkeypatch.setattr(NativeEngine, "_take_out", noting)
    return orders


# --- memory that follows the tokens ----------------------------------------------------------------------------------


def test_samples_share_the_whole_pages_of_their_prompt():
    engine, seen = make(slots=4), []
    sampling = Sampling(max_new_tokens=2, min_new_tokens=2)
    look = lambda: seen.append((num_used(engine), engine.cache.numbers[:4].copy()))  # noqa: E731
    generated(engine, make_requests(19), sampling, samples=4, between_steps=look)
    # 18 tokens are prefilled: 4 whole pages and 2 tokens of a fifth. Each sample has the four and its own copy of the fifth.
    used, numbers = seen[0]
    assert (numbers[:, :4] == numbers[0, :4]).all()
    assert len(set(numbers[:, 4])) == 4
    assert (numbers[:, 6:] == SCRATCH).all()
    assert used == 4 + 4 * 2  # room for 8 steps from position 18 on, but for 21 positions at most
    assert num_used(engine) == 0


def test_slots_hold_as_many_pages_as_they_have_tokens():
    engine, seen = make(slots=1), []
    sampling = Sampling(max_new_tokens=30, min_new_tokens=30)
    look = lambda: seen.append(int(engine.cache.counts[0]))  # noqa: E731
    generated(engine, make_requests(6), sampling, samples=1, between_steps=look)
    assert seen == sorted(seen)
    assert seen[0] == 4  # room for 8 steps: 13 positions
    assert seen[-1] == 9  # 35 positions: the last token is never fed


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("pages", [15, 30])
def test_with_little_memory_the_youngest_are_taken_out_and_say_the_same_in_the_end(pages, ahead, monkeypatch):
    orders = taken_out(monkeypatch)
    requests = [
        Request(prompt=request.prompt, prefix_ids=np.array([9, 8, 7][:index], dtype=np.int32))
        for index, request in enumerate(make_requests(12, 3, 9, 20))
    ]
    sampling = Sampling(max_new_tokens=28, min_new_tokens=20, temperature=1.2, policy_temperature=1.0)
    expected = generated(make(), requests, sampling)
    assert not orders
    engine = make(pages=pages, ahead=ahead)
    assert_same(generated(engine, requests, sampling), expected)
    assert orders
    assert num_used(engine) == 0
    assert engine.cache.pool.num_pages <= pages


def test_the_oldest_response_is_never_taken_out(monkeypatch):
    orders = taken_out(monkeypatch)
    sampling = Sampling(max_new_tokens=30, min_new_tokens=30)
    generated(make(pages=16), make_requests(10, 10, 10), sampling, samples=1)
    assert orders
    assert 0 not in orders


def test_a_response_that_was_taken_out_keeps_the_version_that_chose_each_token(monkeypatch):
    orders, versions = taken_out(monkeypatch), itertools.count(1)
    engine = make(pages=18)
    weights = make_weights_of(make_tiny_model("llama", seed=1), 0)
    chosen = {}

    def load_and_look():
        if next(versions) % 7 == 0:
            engine.load(type(weights)(version=engine.version + 1, tensors=weights.tensors))
        for slot, response in engine._slots.items():
            token = int(engine.state.column("num_tokens", slot + 1)[slot])
            chosen[response.order, token] = engine.version

    sampling = Sampling(max_new_tokens=25, min_new_tokens=25)
    found = generated(engine, make_requests(8, 8, 8, 8), sampling, samples=1, between_steps=load_and_look)
    assert orders
    for completion in found.values():
        order = int(completion.prompt_id[1:])
        for token in range(25):
            assert (
                chosen[order, token] == [version for first, version in completion.version_spans if first <= token][-1]
            )
        firsts = [first for first, _ in completion.version_spans]
        assert firsts == sorted(set(firsts))
        assert firsts[0] == 0


def test_draining_waits_for_responses_that_were_taken_out(monkeypatch):
    orders = taken_out(monkeypatch)
    models = {0: make_tiny_model("llama"), 6: make_tiny_model("llama", seed=1)}
    engine = make(pages=16, update="drain")

    def between_steps():
        if engine._queue.resumed() and engine.version == 0:
            engine.load(make_weights_of(models[6], 6))

    requests, sampling = make_requests(10, 10, 10, 10, 10, 10), Sampling(max_new_tokens=24, min_new_tokens=24)
    found = generated(engine, requests, sampling, samples=1, between_steps=between_steps)
    assert orders
    assert {completion.version for completion in found.values()} == {0, 6}
    for completion in found.values():
        ((_, version),) = completion.version_spans
        prompt = requests[int(completion.prompt_id[1:])].prompt.token_ids
        expected = plain_log_probs(models[version], prompt, completion.token_ids)
        np.testing.assert_allclose(completion.policy_log_probs, expected, atol=1e-4)


def test_a_response_that_could_not_run_alone_is_refused_with_what_to_change():
    engine, sampling = make(pages=9), Sampling(max_new_tokens=20)
    with pytest.raises(
        ValueError, match=r"'p0' with its response may need 29 tokens .* 9 pages .* may have is 8: shorten"
    ):
        generated(engine, make_requests(9), sampling)
    assert len(generated(engine, make_requests(8), sampling)) == 3


def test_growing_moves_nothing():
    engine = make(slots=8)
    pool, sampling = engine.cache.pool, Sampling(max_new_tokens=30, min_new_tokens=30)
    before = (pool.base.data_ptr(), engine.cache.table.data_ptr(), len(pool.chunks))
    generated(engine, make_requests(*[17] * 8), sampling, samples=1)
    assert (pool.base.data_ptr(), engine.cache.table.data_ptr()) == before[:2]
    assert len(pool.chunks) > before[2]
    elements = [chunk.data_ptr() // 4 for chunk in pool.chunks]
    starts = np.cumsum([0, *(len(chunk) for chunk in pool.chunks)])[:-1]
    assert (pool.offsets[starts] == np.array(elements) - elements[0]).all()


def test_the_devices_table_says_what_the_hosts_says():
    engine, seen = make(slots=4), []

    def look():
        offsets = engine.cache.pool.offsets[engine.cache.numbers]
        engine.cache.flush()
        seen.append(np.array_equal(engine.cache.table.numpy(), offsets))

    requests = [
        Request(prompt=request.prompt, sampling=Sampling(max_new_tokens=3 + 5 * index % 17, min_new_tokens=3))
        for index, request in enumerate(make_requests(9, 2, 17, 5, 8))
    ]
    generated(engine, requests, requests[0].sampling, between_steps=look)
    assert len(seen) > 10
    assert all(seen)


# --- prompts ---------------------------------------------------------------------------------------------------------


def prefilled_parts(engine) -> list[tuple[int, int]]:
    """Fills as the engine prefills: (first token, one behind the last) of each part."""
    parts, batch = [], engine._prefill.batch

    def noting(found):
        parts.extend((part.start, part.end) for part in found)
        batch(found)

    engine._prefill.batch = noting
    return parts


def test_a_long_prompt_is_computed_in_parts_while_others_run_and_at_once_when_none_does():
    long, short = make_prompt("long", 30), make_prompt("short", 5)
    sampling = Sampling(max_new_tokens=12, min_new_tokens=12)
    engine = make(slots=2)
    parts, steps = prefilled_parts(engine), []
    requests = [Request(prompt=short), None, Request(prompt=long)]
    look = lambda: steps.append(len(parts))  # noqa: E731
    found = generated(engine, iter(requests), sampling, samples=1, between_steps=look)
    assert parts == [(0, 4), (0, 8), (8, 16), (16, 24), (24, 29)]
    assert max(np.diff(steps)) == 1  # a decode step follows every part
    for prompt in (long, short):
        expected = plain_log_probs(make_tiny_model("llama"), prompt.token_ids, found[prompt.id, 0].token_ids)
        np.testing.assert_allclose(found[prompt.id, 0].policy_log_probs, expected, atol=1e-4)
    parts.clear()
    generated(engine, [Request(prompt=long)], sampling, samples=1)
    assert parts == [(0, 29)]


def test_prompts_that_fit_into_a_turn_are_not_cut_to_fill_another():
    engine = make(slots=4)
    parts = prefilled_parts(engine)
    requests = iter(
        [*make_requests(4), None, *(Request(prompt=make_prompt(f"q{length}", length)) for length in (6, 7, 8))]
    )
    generated(engine, requests, Sampling(max_new_tokens=12, min_new_tokens=12), samples=1)
    assert parts == [(0, 3), (0, 5), (0, 6), (0, 7)]  # 8 tokens a turn hold one of them


@pytest.mark.parametrize("family", ["mistral-window", "gemma2", "gpt-oss", "gpt2", "qwen3"])
def test_parts_see_what_came_before_them_as_the_family_does(family):
    model = make_tiny_model(family)
    engine = NativeEngine(model, stop_ids=[2], seed=0, slots=3, max_length=48)
    requests = make_requests(3, 31, 22)
    found = generated(engine, iter([requests[0], None, *requests[1:]]), Sampling(max_new_tokens=15), samples=2)
    for (prompt_id, _), completion in found.items():
        prompt = requests[int(prompt_id[1:])].prompt.token_ids
        expected = plain_log_probs(model, prompt, completion.token_ids)
        np.testing.assert_allclose(completion.policy_log_probs, expected, atol=1e-4)


def test_prompts_that_begin_alike_are_computed_once_as_far_as_they_do():
    whole = make_prompt("whole", 40).token_ids
    prompt = make_prompt("p", 5)
    requests = [
        Request(prompt=type(prompt)(id=f"p{length}", token_ids=whole[:length], text="")) for length in (20, 27, 40, 6)
    ]
    engine = make(slots=8, max_length=64)
    parts, sampling = prefilled_parts(engine), Sampling(max_new_tokens=6, min_new_tokens=6)
    found = generated(engine, requests, sampling, samples=2)
    # The longest first; two share its whole pages of 4 and compute the rest. The shortest is too short to wait for it, but
    # its first page is not kept twice.
    assert sorted(parts) == [(0, 5), (0, 39), (16, 19), (24, 26)]
    for (prompt_id, _), completion in found.items():
        expected = plain_log_probs(make_tiny_model("llama"), whole[: int(prompt_id[1:])], completion.token_ids)
        np.testing.assert_allclose(completion.policy_log_probs, expected, atol=1e-4)
    assert num_used(engine) == 0
    assert not engine.cache.prefixes._pages


def test_a_prompt_does_not_wait_for_a_longer_one_that_has_no_room():
    """The longer one may begin only where a page stays free for each of the 30 responses before it: there are too few."""
    ids = make_prompt("b", 24).token_ids
    requests = [Request(prompt=Prompt(id=str(size), token_ids=ids[:size], text="")) for size in (20, 24)]
    sampling = Sampling(max_new_tokens=3)
    assert len(generated(make(pages=20, slots=60), requests, sampling, samples=30)) == 60


def test_a_prefix_of_other_weights_is_not_shared():
    engine, calls = make(slots=2, max_length=64), itertools.count()
    whole = make_prompt("whole", 30)
    prompts = [type(whole)(id=f"p{index}", token_ids=whole.token_ids, text="") for index in range(3)]
    requests = iter([Request(prompt=prompts[0]), None, Request(prompt=prompts[1]), None, Request(prompt=prompts[2])])

    def between_steps():
        if next(calls) == 1:
            engine.load(make_weights_of(make_tiny_model("llama", seed=1), 1))

    sampling = Sampling(max_new_tokens=9, min_new_tokens=9)
    found = generated(engine, requests, sampling, samples=1, between_steps=between_steps)
    assert found["p2", 0].version_spans == ((0, 1),)
    expected = plain_log_probs(make_tiny_model("llama", seed=1), whole.token_ids, found["p2", 0].token_ids)
    np.testing.assert_allclose(found["p2", 0].policy_log_probs, expected, atol=1e-4)


# --- parts of the cache ----------------------------------------------------------------------------------------------


def make_pool(pages: int) -> PagePool:
    spec = make_decoder(make_tiny_model("llama"), max_length=48, dtype=torch.float32, device=torch.device("cpu")).spec
    size = 3 * 2 * 2 * PAGE * 8 * 4
    return PagePool(spec, torch.float32, torch.device("cpu"), page_size=PAGE, max_bytes=pages * size)


def test_pages_are_free_when_their_last_user_goes():
    pool = make_pool(40)
    pages = pool.allocate(3)
    assert SCRATCH not in pages
    pool.share(pages[:2])
    assert pool.release(pages).tolist() == [pages[2]]
    assert sorted(pool.release(pages[:2]).tolist()) == sorted(pages[:2].tolist())
    assert pool.num_available == 39
    assert pool.allocate(40) is None
    assert len(set(pool.allocate(39).tolist())) == 39
    assert pool.num_available == 0


def test_tokens_and_pages_are_copied_across_chunks():
    pool = make_pool(60)
    pages = pool.allocate(50)
    assert len(pool.chunks) > 1
    rng = np.random.default_rng(0)
    chosen, places = rng.permutation(pages)[:30], rng.integers(PAGE, size=30)
    keys, values = torch.randn(2, 3, 40, 2, 8)
    tokens = rng.permutation(40)[:30]
    pool.store(chosen, places, tokens, keys, values)
    copies = rng.permutation(np.setdiff1d(pages, chosen))[:20]
    pool.copy(chosen[:20], copies)
    for asked, count in ((chosen, 30), (copies, 20)):
        for layer in range(3):
            found = pool.read(pool.locate(asked), layer)
            for index in range(count):
                assert torch.equal(found[index, 0, :, places[index]], keys[layer, tokens[index]])
                assert torch.equal(found[index, 1, :, places[index]], values[layer, tokens[index]])


def test_slots_with_the_same_first_pages_are_a_group_of_at_most_sixteen(monkeypatch):
    monkeypatch.setattr(paged_cache, "LEAST_SHARED_PAGES", 4)
    engine = make(slots=24, max_length=64)
    cache = engine.cache
    # 20 samples of one prompt (pages 1 to 6), two of another (7 to 11) and one that shares only 4 pages with the first.
    rows = [[1, 2, 3, 4, 5, 6]] * 20 + [[7, 8, 9, 10, 11]] * 2 + [[1, 2, 3, 4, 12]]
    for slot, row in enumerate(rows):
        cache.numbers[slot, : len(row)], cache.counts[slot], cache.num_whole[slot] = row, len(row), len(row)
    cache.groups.update(cache.numbers, cache.num_whole)
    members, shared = cache.groups.members.numpy(), cache.groups.shared
    found = {tuple(slots[slots >= 0].tolist()) for slots in members if slots[0] >= 0}
    assert found == {tuple(range(16)), (16, 17, 18, 19, 22), (20, 21)}
    assert shared.tolist() == [6] * 16 + [4] * 4 + [5] * 2 + [4] + [0]


def test_a_prefix_is_found_page_by_page_and_gone_with_its_pages():
    index, ids = PrefixIndex(2), np.arange(7)
    index.add(ids, 3, np.array([5, 9, 4, 8]))
    assert index.find(ids, 3).tolist() == [5, 9, 4]
    assert index.find(np.array([0, 1, 2, 3, 9, 9]), 3).tolist() == [5, 9]
    assert index.find(ids, 4).tolist() == []
    assert index.find(ids[2:], 3).tolist() == []
    longer = np.append(ids, 9)
    assert index.add(longer, 3, np.array([15, 19, 14, 18])).tolist() == [5, 9, 4, 18]  # computed twice: the first stay
    assert index.find(longer, 3).tolist() == [5, 9, 4, 18]
    index.forget(np.array([18, 4, 15]))
    assert index.find(longer, 3).tolist() == [5, 9]
