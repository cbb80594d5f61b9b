"""Batches of one prompt, which have fresh and old responses side by side, and importance weights."""

import math
from collections import Counter

import numpy as np
import pytest
from replay_builders import Groups, prompt, replay, responses, trajectory
from test_replay_sampling import NAMES, assert_frequencies, drawn_responses

from tba.config import ReplayConfig
from tba.replay import ReplayBuffer
from tba.replay.batching import LOG_IMPORTANCE, pack_group
from tba.types import TrajectoryGroup


def two_ages(*, old, fresh, **settings):
    """A prompt with responses (0,), (1,), ... received at step 0 and (1000,), (1001,), ... at step 5. An old one is worth
    its number."""
    buffer, group = replay(**settings), Groups()
    buffer.add(group("a", [[i] for i in range(old)], rewards=[float(i) for i in range(old)]), step=0)
    buffer.add(group("a", [[1000 + i] for i in range(fresh)]), step=5)
    return buffer


def drawn_tokens(buffer, K, times):
    """[times][K] tokens of batches of one prompt."""
    return [[token for (token,) in responses(buffer.sample(1, K, step=5))[0]] for _ in range(times)]


def num_fresh(buffer, K, times) -> Counter:
    """How often so many of the K responses were fresh ones."""
    return Counter(sum(token >= 1000 for token in drawn) for drawn in drawn_tokens(buffer, K, times))


def test_a_share_m_of_the_responses_is_fresh():
    # 3 of 4 are fresh; the other is one of the 20 + 20 - 3 that are left, 20 of them old
    buffer = two_ages(old=20, fresh=20, on_policy_probability=0.75)
    assert_frequencies(num_fresh(buffer, 4, 3000), {3: 20 / 37, 4: 17 / 37})


def test_a_share_between_whole_numbers_is_right_on_average():
    # 0.3 of 4 = 1.2 fresh ones; the fresh one that is left is one of 901, three of which are drawn
    buffer = two_ages(old=900, fresh=2, on_policy_probability=0.3)
    found = num_fresh(buffer, 4, 3000)
    mean = sum(number * count for number, count in found.items()) / 3000
    assert mean == pytest.approx(1.2 + 0.8 * 3 / 901, abs=5 * math.sqrt(0.16 / 3000))


@pytest.mark.parametrize("weights", [{}, {"inverse_temperature": 5.0}])
def test_no_response_is_drawn_twice_while_there_are_enough(weights):
    buffer = two_ages(old=3, fresh=3, on_policy_probability=0.5, **weights)
    for drawn in drawn_tokens(buffer, 6, 100):
        assert len(set(drawn)) == 6
    assert buffer.sample(1, 9, step=5).totals.responses == 6  # more than there are: places without weight


def test_half_of_the_old_ones_ignores_the_reward():
    # of 4 old ones 2 are uniform; the other 2 are the best of the rest: old 19 and 18, or those next to them
    buffer = two_ages(old=20, fresh=1, on_policy_probability=0.0, inverse_temperature=50.0)
    low = sum(token < 16 or token >= 1000 for drawn in drawn_tokens(buffer, 4, 500) for token in drawn)
    # a uniform one of 21 is below 16 or fresh with probability 17 / 21
    assert low / 500 == pytest.approx(2 * 17 / 21, abs=5 * math.sqrt(2 * 17 / 21 * 4 / 21 / 500))


def test_with_m_1_nothing_old_is_drawn_also_where_too_few_are_fresh():
    buffer = two_ages(old=20, fresh=3, on_policy_probability=1.0)
    assert sorted(buffer.sample(1, 8, step=5).token_ids_N.unique().tolist()) == [1000, 1001, 1002]


def weighted(log_ratios, **settings):
    """Equal prompts, and their last group; response i has reference / behaviour probability exp(log_ratios[i])."""
    buffer, make_group = replay(on_policy_probability=0.0, importance_weighted=True, **settings), Groups()
    for name in NAMES:
        group = make_group(name, [[i, i] for i in range(len(log_ratios))])
        for member, log_ratio in zip(group.trajectories, log_ratios):
            member.log_ref[:] = member.completion.behaviour_log_probs + log_ratio / 2
        buffer.add(group, step=0)
    return buffer, group


def test_old_responses_are_drawn_by_reference_over_behaviour():
    buffer, _ = weighted([0.0, -math.log(2), -math.log(4)])
    counts = drawn_responses(buffer, 1, 4000)
    assert_frequencies(counts, {((0, 0),): 4 / 7, ((1, 1),): 2 / 7, ((2, 2),): 1 / 7})


def test_importance_multiplies_the_softmax_of_the_reward():
    buffer, group = weighted([0.0, -math.log(3)], inverse_temperature=1.0)
    better = Groups()
    better.count = len(NAMES)
    for name in NAMES:  # a newer copy with another reward: e^log6 / 3 = 2 against 1
        again = better(name, [[1, 1]], rewards=[math.log(6)])
        again.trajectories[0].log_ref[:] = group.trajectories[1].log_ref
        buffer.add(again, step=0)
    assert_frequencies(drawn_responses(buffer, 1, 3000), {((0, 0),): 1 / 3, ((1, 1),): 2 / 3})


def test_importance_is_clipped_and_unknown_behaviour_counts_as_1():
    _, group = weighted([5.0, -50.0, 0.0])
    unknown = group.trajectories[2]
    unknown.completion.behaviour_log_probs[:] = np.nan
    packed = pack_group(TrajectoryGroup(id="x", prompt=group.prompt, trajectories=group.trajectories), ("r",))
    np.testing.assert_allclose(packed.columns["log_importance"], [LOG_IMPORTANCE[1], LOG_IMPORTANCE[0], 0.0])


def test_few_fresh_responses_are_not_repeated_while_old_ones_are_left():
    buffer = two_ages(old=20, fresh=1, on_policy_probability=0.75)
    for drawn in drawn_tokens(buffer, 4, 50):
        assert len(set(drawn)) == 4
        assert 1000 in drawn


def test_places_of_one_prompt_share_one_draw():
    buffer = replay(on_policy_probability=1.0, fresh_steps=10)
    buffer.add(Groups()("a", [[i] for i in range(32)]), step=0)
    drawn = [tokens for own in responses(buffer.sample(4, 8, step=0)) for tokens in own]
    assert sorted(drawn) == [(i,) for i in range(32)]
    twice = responses(buffer.sample(5, 8, step=0))  # 40 of 32: repeats, but not inside a place
    assert all(len(set(own)) == 8 for own in twice)


def test_old_prompts_are_visited_again_by_a_share_of_the_places():
    buffer, group = replay(on_policy_probability=0.5), Groups()
    for i in range(30):
        buffer.add(group(f"old{i}", [[1], [2]]), step=0)
    for i in range(10):
        buffer.add(group(f"new{i}", [[1], [2]]), step=5)
    names = Counter(buffer.sample(1, 2, step=5).prompt_ids[0][:3] for _ in range(2000))
    # half the places take a fresh prompt, the others any of 40, 30 of them old
    assert abs(names["old"] - 750) < 5 * math.sqrt(2000 * 0.375 * 0.625)


def test_a_cut_off_response_is_drawn_by_the_reward_it_will_train_with():
    # e^4 and e^0 by their scores, but the first was cut off and counts -1: e^-1 : e^0
    buffer = ReplayBuffer(
        ReplayConfig(on_policy_probability=0.0, inverse_temperature=1.0),
        fresh_steps=1,
        seed=0,
        reward_names=("r",),
        reward_weights=(1.0,),
        truncated_reward=-1.0,
    )
    members = (trajectory([0], 4.0, finish="length"), trajectory([1], 0.0))
    for i, name in enumerate(NAMES):
        buffer.add(TrajectoryGroup(id=f"other.0/{i}", prompt=prompt(name), trajectories=members), step=0)
    share = 1 / (1 + math.e)
    assert_frequencies(drawn_responses(buffer, 1, 3000), {((0,),): share, ((1,),): 1 - share})
