"""The mixed rule, by frequencies. Seeds are fixed; limits are 5 standard deviations or the 0.9999 quantile."""

import math
from collections import Counter

import numpy as np
import pytest
from replay_builders import Groups, replay, responses

CHI_SQUARE_9999 = {1: 15.1, 2: 18.4, 3: 21.1, 5: 25.7, 9: 33.7}
"""0.9999 quantiles by degrees of freedom."""


def assert_frequencies(counts, probabilities):
    total = sum(counts.values())
    assert set(counts) <= set(probabilities)
    statistic = sum((counts[key] - total * p) ** 2 / (total * p) for key, p in probabilities.items())
    assert statistic < CHI_SQUARE_9999[len(probabilities) - 1], dict(counts)


NAMES = [f"p{i}" for i in range(50)]
"""Prompts with the same responses. A batch of all of them is as many independent draws, at a tenth of the cost of as many
batches of one; and what one prompt's draw did to another's would show."""


def drawn_responses(buffer, K, times, step=0):
    """How often each set of K responses of a prompt was drawn, in batches that hold every prompt once."""
    P = buffer.num_prompts
    assert times % P == 0
    counts = Counter()
    for _ in range(times // P):
        batch = buffer.sample(P, K, step=step)
        assert len(set(batch.prompt_ids)) == P
        counts.update(tuple(sorted(own)) for own in responses(batch))
    return counts


def equal_prompts(scores, names=NAMES, **settings):
    """A buffer in which every prompt has the responses (0,), (1,), ... with these scores."""
    buffer, group = replay(on_policy_probability=0.0, **settings), Groups()
    for name in names:
        buffer.add(group(name, [[i] for i in range(len(scores))], rewards=scores), step=0)
    return buffer


def test_a_share_m_of_the_places_is_fresh():
    buffer, group = replay(on_policy_probability=0.7), Groups()
    for i in range(10):
        buffer.add(group(f"old{i}", [[1]]), step=0)
    for i in range(10):
        buffer.add(group(f"new{i}", [[1]]), step=5)
    names = Counter(buffer.sample(1, 1, step=5).prompt_ids[0][:3] for _ in range(4000))
    # fresh places draw a new prompt, the others one of 20, half of them new: 0.7 + 0.3 / 2 = 0.85
    assert abs(names["new"] - 3400) < 5 * math.sqrt(4000 * 0.85 * 0.15)


def test_fresh_places_draw_the_newest_responses_and_the_others_draw_all():
    for m, expected in ((1.0, {((2,),): 1.0}), (0.0, {((1,),): 0.5, ((2,),): 0.5})):
        buffer, group = replay(on_policy_probability=m), Groups()
        for step, tokens in ((0, [1]), (3, [2])):
            for name in NAMES:
                buffer.add(group(name, [tokens]), step=step)
        counts = drawn_responses(buffer, 1, 600, step=3)
        if m == 1.0:
            assert set(counts) == {((2,),)}
        else:
            assert_frequencies(counts, expected)


def test_fresh_responses_are_drawn_uniformly_without_replacement():
    buffer, group = replay(on_policy_probability=1.0, inverse_temperature=5.0), Groups()
    for name in NAMES:
        buffer.add(group(name, [[0], [1], [2]], rewards=[0.0, 1.0, 2.0]), step=0)
    counts = drawn_responses(buffer, 2, 3000)
    assert_frequencies(counts, {((0,), (1,)): 1 / 3, ((0,), (2,)): 1 / 3, ((1,), (2,)): 1 / 3})


def test_all_groups_of_the_last_fresh_steps_are_fresh():
    buffer, group = replay(on_policy_probability=1.0, fresh_steps=2), Groups()
    for step in range(4):
        buffer.add(group("a", [[step]]), step=step)
    # at step 4 those received at step 3 (4 - 3 < 2); at step 3 those of steps 2 and 3
    assert set(drawn_responses(buffer, 1, 100, step=3)) == {((2,),), ((3,),)}
    assert set(drawn_responses(buffer, 1, 20, step=4)) == {((3,),)}


def test_the_fresh_set_is_topped_up_with_the_newest_groups():
    buffer, group = replay(on_policy_probability=1.0), Groups()
    for step, name in enumerate("abcda"):
        buffer.add(group(name, [[step]]), step=step)
    # long after: of the groups a0 b1 c2 d3 a4 the newest of two prompts are d3 and a4, of four b1 c2 d3 a4
    for _ in range(20):
        assert sorted(buffer.sample(2, 1, step=90).prompt_ids) == ["a", "d"]
    batch = buffer.sample(4, 1, step=90)
    assert sorted(batch.prompt_ids) == ["a", "b", "c", "d"]
    assert {name: tokens for name, (tokens,) in zip(batch.prompt_ids, responses(batch))}["a"] == (4,)


@pytest.mark.parametrize("m", [0.0, 1.0])
def test_every_prompt_comes_once_before_any_comes_again(m):
    buffer, group = replay(on_policy_probability=m), Groups()
    for name in "abcdef":
        buffer.add(group(name, [[1]]), step=0)
    for _ in range(20):
        rounds = [buffer.sample(2, 1, step=0).prompt_ids for _ in range(3)]
        assert sorted(sum(rounds, ())) == list("abcdef")


@pytest.mark.parametrize("m", [0.0, 1.0])
def test_prompts_are_drawn_uniformly(m):
    buffer, group = replay(on_policy_probability=m), Groups()
    for name in "abcdef":
        buffer.add(group(name, [[1]]), step=0)
    firsts = Counter()
    for _ in range(1200):
        firsts[buffer.sample(3, 1, step=0).prompt_ids[0]] += 1
        buffer.sample(3, 1, step=0)  # the others: then every prompt may come first again
    assert_frequencies(firsts, dict.fromkeys("abcdef", 1 / 6))


def test_after_a_prompt_has_left_in_the_middle_of_a_round_the_others_come_once():
    buffer, group = replay(on_policy_probability=0.0, capacity=6), Groups()
    for name in "abcdef":
        buffer.add(group(name, [[1]]), step=0)
    drawn = set(buffer.sample(2, 1, step=0).prompt_ids)
    left = sorted(set("abcdef") - drawn)
    buffer.add(group(left[-1], [[2], [3]]), step=0)  # the oldest two leave, a and b
    rest = [name for name in left if name not in "ab"]
    assert {buffer.sample(1, 1, step=0).prompt_ids[0] for _ in rest} == set(rest)


def test_a_new_group_of_a_drawn_prompt_can_be_drawn_at_once():
    buffer, group = replay(on_policy_probability=1.0), Groups()
    for name in "ab":
        buffer.add(group(name, [[1]]), step=0)
    first = buffer.sample(1, 1, step=0).prompt_ids[0]
    buffer.add(group(first, [[2]]), step=0)
    assert {buffer.sample(1, 1, step=0).prompt_ids[0] for _ in range(2)} == {"a", "b"}


@pytest.mark.parametrize("m", [0.0, 0.3, 0.5, 1.0])
def test_no_prompt_repeats_in_a_batch_while_there_are_others(m):
    buffer, group = replay(on_policy_probability=m), Groups()
    for step, name in enumerate("abcde"):
        buffer.add(group(name, [[1], [2]]), step=step)
    for _ in range(100):
        assert len(set(buffer.sample(5, 2, step=4).prompt_ids)) == 5
        assert max(Counter(buffer.sample(7, 2, step=4).prompt_ids).values()) == 2


def test_inverse_temperature_zero_is_uniform():
    counts = drawn_responses(equal_prompts([0.0, 5.0, 9.0], inverse_temperature=0.0), 2, 3000)
    assert_frequencies(counts, {((0,), (1,)): 1 / 3, ((0,), (2,)): 1 / 3, ((1,), (2,)): 1 / 3})


def test_old_responses_are_drawn_by_the_softmax_of_their_score():
    # exp(2 * score) = 1, 2, 4
    scores = [0.0, math.log(2) / 2, math.log(4) / 2]
    counts = drawn_responses(equal_prompts(scores, inverse_temperature=2.0), 1, 4000)
    assert_frequencies(counts, {((0,),): 1 / 7, ((1,),): 2 / 7, ((2,),): 4 / 7})


def test_two_without_replacement_follow_the_law_of_drawing_one_after_the_other():
    # weights 1, 2, 4: {0, 1} = 1/7 * 2/6 + 2/7 * 1/5 = 11/105; {0, 2} = 1/7 * 4/6 + 4/7 * 1/3 = 30/105; {1, 2} = 64/105
    counts = drawn_responses(equal_prompts([0.0, math.log(2), math.log(4)], inverse_temperature=1.0), 2, 6000)
    assert_frequencies(counts, {((0,), (1,)): 11 / 105, ((0,), (2,)): 30 / 105, ((1,), (2,)): 64 / 105})


def test_the_law_holds_when_one_weight_dwarfs_the_rest():
    # 0 weighs e^12 more: it is always in the pair but for 1 in 50,000; the other follows 1 : 3
    counts = drawn_responses(equal_prompts([12.0, 0.0, math.log(3)], inverse_temperature=1.0), 2, 3000)
    assert_frequencies(counts, {((0,), (1,)): 0.25, ((0,), (2,)): 0.75})


def test_the_law_holds_where_weights_underflow():
    # relative to the first, the others are exp(-1e5) = 0 in any float; among themselves they weigh 1 : 1 : 2
    scores = [1e5, 0.0, 0.0, math.log(2)]
    counts = drawn_responses(equal_prompts(scores, inverse_temperature=1.0), 2, 3000)
    assert_frequencies(counts, {((0,), (1,)): 0.25, ((0,), (2,)): 0.25, ((0,), (3,)): 0.5})


@pytest.mark.parametrize(
    "scores",
    [
        [3e38, -3e38, 0.0, 1.0],
        [float("inf"), float("-inf"), 0.0, float("nan")],
        [float("-inf")] * 4,
        [1000.0, 2000.0, 3000.0, 4000.0],
        [-1e9, -2e9, -3e9, -4e9],
    ],
)
def test_any_scores_terminate_with_distinct_responses(scores):
    buffer = equal_prompts(scores, inverse_temperature=3.0)
    for K in (1, 2, 3, 4):
        for tokens in drawn_responses(buffer, K, 50):
            assert len(set(tokens)) == K
    assert len(responses(buffer.sample(1, 9, step=0))[0]) == 9


def test_responses_too_large_for_noise_are_drawn_uniformly_among_equals():
    counts = drawn_responses(equal_prompts([3e38, -3e38, -3e38, -3e38], inverse_temperature=1.0), 2, 1500)
    assert_frequencies(counts, {((0,), (1,)): 1 / 3, ((0,), (2,)): 1 / 3, ((0,), (3,)): 1 / 3})


def test_the_law_is_right_after_the_largest_score_is_evicted():
    buffer = replay(on_policy_probability=0.0, inverse_temperature=1.0, capacity_per_prompt=2)
    group = Groups()
    for name in NAMES:
        buffer.add(group(name, [[0], [1]], rewards=[5000.0, 0.0]), step=0)
        buffer.add(group(name, [[2]], rewards=[math.log(3)]), step=0)
    assert_frequencies(drawn_responses(buffer, 1, 2000), {((1,),): 0.25, ((2,),): 0.75})


def test_the_law_is_right_after_a_far_larger_score_arrives():
    buffer, group = replay(on_policy_probability=0.0, inverse_temperature=1.0), Groups()
    for name in NAMES:
        buffer.add(group(name, [[0]], rewards=[0.0]), step=0)
        buffer.add(group(name, [[1], [2]], rewards=[5000.0, 5000.0 + math.log(3)]), step=0)
    assert_frequencies(drawn_responses(buffer, 1, 2000), {((1,),): 0.25, ((2,),): 0.75})


@pytest.mark.parametrize("settings", [{}, {"inverse_temperature": 1.0}])
def test_of_fewer_than_k_each_is_drawn_once(settings):
    batch = equal_prompts([0.0, math.log(3)], **settings).sample(1, 3, step=0)
    drawn = [tokens for tokens, weight in zip(responses(batch)[0], batch.weight_PK[0].tolist()) if weight]
    assert sorted(drawn) == [(0,), (1,)]
    assert batch.weight_PK.sum() == batch.totals.responses == 2


@pytest.mark.parametrize(("inverse_temperature", "high_share"), [(0.0, 0.5), (1.0, 0.75)])
def test_the_law_holds_for_many_responses_of_a_prompt_some_of_which_came_again(inverse_temperature, high_share):
    buffer, group = (
        replay(on_policy_probability=0.0, inverse_temperature=inverse_temperature, capacity_per_prompt=5000),
        Groups(),
    )
    scores = [math.log(3) * (i % 2) for i in range(4000)]
    for name in "ab":
        buffer.add(group(name, [[i] for i in range(4000)], rewards=scores), step=0)
        buffer.add(
            group(name, [[i] for i in range(1000, 2000)], rewards=scores[1000:2000]), step=0
        )  # 1000 leave the middle
    drawn = np.array([own for _ in range(150) for own in responses(buffer.sample(2, 20, step=0))])[:, :, 0]
    assert all(len(set(row)) == 20 for row in drawn.tolist())
    high = int((drawn % 2 == 1).sum())
    assert abs(high - 6000 * high_share) < 5 * math.sqrt(6000 * high_share * (1 - high_share))
    assert_frequencies(Counter((drawn // 400).ravel().tolist()), dict.fromkeys(range(10), 0.1))


def test_fresh_draws_reach_every_newest_response_of_a_large_prompt():
    buffer, group = replay(on_policy_probability=1.0, capacity_per_prompt=9000), Groups()
    buffer.add(group("a", [[i] for i in range(3000)]), step=0)
    buffer.add(group("a", [[i] for i in range(2000, 6000)]), step=1)
    drawn = {tokens[0] for _ in range(400) for tokens in responses(buffer.sample(1, 64, step=1))[0]}
    assert min(drawn) >= 2000
    # 25,600 draws from 4,000: about exp(-6.4) = 1.7 in 1,000 are missed
    assert len(drawn) > 3970
