"""The parts of the buffer on their own."""

import numpy as np
import pytest

from tba.replay.prompts import DrawWithoutReplacement, PromptEntry
from tba.replay.storage import AgeOrder, TokenIndex, TokenStore, pack_tokens, unpack_ids
from tba.replay.sum_trees import SumTrees, level_starts


def records(*tokens):
    ids = np.array(tokens, np.int32)
    zeros = np.zeros(len(ids), np.float32)
    return pack_tokens(ids, np.ones(len(ids), np.bool_), zeros, zeros, zeros)


def test_a_token_the_policy_did_not_choose_keeps_its_id_and_its_mask():
    zeros = np.zeros(3, np.float32)
    packed = pack_tokens(np.array([0, 7, 0]), np.array([True, False, False]), zeros, zeros, zeros)
    assert packed[:, 0].tolist() == [0, -8, -1]
    ids, chosen = unpack_ids(packed)
    assert ids.tolist() == [0, 7, 0]
    assert chosen.tolist() == [True, False, False]


def test_unknown_log_probs_stay_nan():
    nan = np.full(1, np.nan, np.float32)
    packed = pack_tokens(np.array([3]), np.array([True]), np.zeros(1, np.float32), nan, nan)
    assert np.isnan(packed.view(np.float32)[0]).tolist()[2:] == [True, True]


def test_the_token_store_gives_back_the_segment_with_most_dead_tokens_and_keeps_the_rows_readable():
    store = TokenStore(10, segment_tokens=4)
    # segments of 4: rows 0 and 1 fill the first, rows 2 and 3 the second
    store.write(np.arange(4), records(*range(8)), np.array([2, 2, 2, 2]))
    store.free(np.array([0]))
    store.free(np.array([2]))
    assert (store.used_tokens, store.dead_tokens, store.num_compactions) == (8, 4, 0)
    store.write(np.array([4]), records(8, 9), np.array([2]))
    store.free(np.array([4]))
    # 6 dead are more than a segment: the third, all dead, goes first, or one of the half dead; 4 dead may stay
    assert store.dead_tokens <= 4
    assert store.read(np.array([3, 1]))[:, 0].tolist() == [6, 7, 2, 3]


def test_a_response_longer_than_a_segment_gets_one_of_its_own():
    store = TokenStore(2, segment_tokens=4)
    store.write(np.array([1]), records(*range(100)), np.array([100]))
    assert store.read(np.array([1]))[:, 0].tolist() == list(range(100))


def test_a_tree_has_a_level_for_every_factor_of_sixteen():
    assert level_starts(16) == ((0,), 16)
    assert level_starts(128) == ((128, 0), 144)
    assert level_starts(512) == ((512 + 32, 512, 0), 512 + 32 + 16)


@pytest.mark.parametrize("size", [16, 32, 256, 4096])
def test_a_descent_finds_the_leaf_whose_cumulative_weight_contains_the_target(size):
    rng = np.random.default_rng(0)
    weights = rng.integers(0, 3, size).astype(np.float64)  # whole numbers: sums are exact
    trees = SumTrees()
    other, base = trees.allocate(16), trees.allocate(size)
    trees.rebuild(other, np.ones(16))
    trees.rebuild(base, np.zeros(size))
    trees.set(base, size, np.arange(size), weights)
    assert trees.totals([base], [size]) == weights.sum()
    uniforms = rng.random(200)
    expected = np.searchsorted(np.cumsum(weights), uniforms * weights.sum(), side="right")
    np.testing.assert_array_equal(trees.descend(np.full(200, base), size, uniforms), expected)
    assert trees.totals([other], [16]) == 16


def test_a_descent_never_ends_at_a_leaf_of_weight_zero():
    trees, rng = SumTrees(), np.random.default_rng(1)
    base = trees.allocate(256)
    uniforms = np.concatenate([[0.0, np.nextafter(1.0, 0.0)], rng.random(50)])
    for scale in (1e-300, 1e-7, 1.0, 1e80):
        weights = np.where(rng.random(256) < 0.9, 0.0, rng.random(256) * scale)
        trees.rebuild(base, weights)
        assert (weights[trees.descend(np.full(52, base), 256, uniforms)] > 0).all()


def test_removed_trees_are_used_again():
    trees = SumTrees()
    base = trees.allocate(64)
    trees.release(base, 64)
    assert trees.allocate(64) == base


def test_every_prompt_is_drawn_once_and_one_that_was_skipped_keeps_its_turn():
    draws, rng = DrawWithoutReplacement(), np.random.default_rng(0)
    for prompt in range(5):
        draws.put(prompt)
    first = [draws.draw(rng, exclude=set()) for _ in range(3)]
    assert len(set(first)) == 3
    left = set(range(5)) - set(first)
    skipped = left.pop()
    assert draws.draw(rng, exclude={skipped}) == left.pop()
    assert draws.draw(rng, exclude=set()) == skipped
    assert draws.draw(rng, exclude={0, 1, 2, 3, 4, 5}) is None


def test_after_a_removal_the_other_prompts_are_drawn():
    draws, rng = DrawWithoutReplacement(), np.random.default_rng(0)
    for prompt in range(6):
        draws.put(prompt)
    drawn = draws.draw(rng, exclude=set())
    draws.remove(drawn)
    gone = next(prompt for prompt in range(6) if prompt != drawn)
    draws.remove(gone)
    assert {draws.draw(rng, exclude=set()) for _ in range(4)} == set(range(6)) - {drawn, gone}
    assert len(draws) == 4


def test_age_order_survives_removals_at_both_ends_and_in_the_middle():
    order = AgeOrder(8)
    order.append(np.array([3, 1, 4]))
    order.append(np.array([5, 2]))
    order.remove([4])
    assert list(order) == [3, 1, 5, 2]
    order.remove([3, 2])
    assert (list(order), order.oldest, order.newest) == ([1, 5], 1, 5)
    order.remove([1, 5])
    order.append(np.array([7]))
    assert list(order) == [7]


def test_the_token_index_finds_rows_of_one_bucket_apart():
    index = TokenIndex(4)
    index.insert([0, 1, 2], [4, 8, 4])  # four buckets: keys 4 and 8 share bucket 0
    assert sorted(index.find([8, 4])) == [(0, 1), (1, 0), (1, 2)]
    index.remove([0])
    assert index.find([4, 8]) == [(0, 2), (1, 1)]
    index.remove([2, 1])
    assert index.find([8]) == []


def test_a_prompt_entry_grows_with_its_rows_and_shrinks_when_compacted():
    entry = PromptEntry(0, "a", np.array([1], np.int32), 0)
    for start in range(0, 100, 10):
        if entry.needs_compacting(10):
            entry.compact(10)
        entry.append(np.arange(start, start + 10), first_arrival=start)
    assert entry.size == 128
    assert entry.oldest(3) == [0, 1, 2]
    assert entry.rows(entry.first_since(97)).tolist() == [97, 98, 99]
    for position in np.flatnonzero(entry.ring >= 5).tolist():
        entry.discard([position])
    assert entry.needs_compacting(1)
    assert entry.compact(1).tolist() == [0, 1, 2, 3, 4]
    assert (entry.size, entry.head, entry.tail, entry.num_rows) == (16, 0, 5, 5)
