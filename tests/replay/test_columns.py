"""The responses of a group as columns, against the trajectories that they were made from."""

import dataclasses
import math
import pickle

import numpy as np
import pytest
from replay_builders import Groups, replay, trajectory

from tba.runtime.columns import ResponseColumns, columns_of, pack_responses


def test_columns_lie_end_to_end_and_cut_into_the_same_responses():
    members = (
        trajectory([5, 6, 7], 1.0, version=3, index=8),
        trajectory([9], 0.5, version=2, finish="length", index=9),
    )
    columns = pack_responses(members, "test.0/0")
    assert columns.token_ids.tolist() == [5, 6, 7, 9]
    assert columns.policy.tolist() == [-5.5, -6.5, -7.5, -9.5]
    assert columns.lengths.tolist() == [3, 1]
    assert columns.starts.tolist() == [0, 3]
    assert columns.versions.tolist() == [3, 2]
    assert columns.finishes == ["stop", "length"]
    assert [t.completion.token_ids.tolist() for t in columns] == [[5, 6, 7], [9]]
    assert [(t.rewards, t.completion.sample_index) for t in columns] == [({"r": 1.0}, 8), ({"r": 0.5}, 9)]
    assert columns[1].log_ref.tolist() == [-9.75]
    assert columns[-1].completion.version_spans == ((0, 2),)
    assert [t.completion.sample_index for t in columns[:1]] == [8]


def test_a_version_is_the_oldest_of_its_spans():
    member = trajectory([1, 2, 3])
    member = dataclasses.replace(
        member, completion=dataclasses.replace(member.completion, version_spans=((0, 7), (1, 4), (2, 9)))
    )
    assert pack_responses([member], "test.0/0").versions.tolist() == [4]


def test_of_a_rollout_that_lost_everything_there_are_columns_of_nothing():
    columns = pack_responses((), "test.0/0")
    assert not columns
    assert list(columns) == []
    assert columns.combined_rewards({"r": 1.0}) == []


def test_components_that_a_response_has_not_are_nan_and_add_nothing():
    same = pack_responses(
        [trajectory([1], rewards={"b": 2.0, "a": math.nan}), trajectory([2], rewards={"b": 3.0, "a": 1.0})], "g"
    )
    np.testing.assert_array_equal(same.components(["a", "b", "c"]), [[math.nan, 2, math.nan], [1, 3, math.nan]])
    assert same.combined_rewards({"a": 10.0, "b": 0.5}) == [1.0, 11.5]
    other = pack_responses([trajectory([1], rewards={"b": 2.0}), trajectory([2], rewards={"a": 1.0, "b": 3.0})], "g")
    np.testing.assert_array_equal(other.components(["a", "b"]), [[math.nan, 2], [1, 3]])
    assert other.combined_rewards({"a": 10.0, "b": 0.5}) == [1.0, 11.5]
    none = pack_responses([trajectory([1], rewards={}), trajectory([2], rewards={})], "g")
    np.testing.assert_array_equal(none.components(["a"]), [[math.nan], [math.nan]])
    assert none.combined_rewards({"a": 10.0}) == [0.0, 0.0]


def test_an_array_of_another_length_than_the_tokens_is_an_error_that_names_the_sample():
    short = dataclasses.replace(trajectory([1, 2], index=5), step_values=np.array([0.5], np.float32))
    with pytest.raises(ValueError, match=r"group test\.0/3: sample 5 has 2 tokens, but Monte-Carlo values of 1"):
        pack_responses([short], "test.0/3")


def test_columns_are_sent_and_stored_as_they_are():
    """Trajectories and the columns that arrived make the same buffer, and packing again makes nothing new."""
    group = Groups()("a", [[1, 2], [3], [1, 2], [4, 5, 6]], rewards=[0.0, 1.0, 0.25, 0.5])
    sent = dataclasses.replace(group, trajectories=pack_responses(group.trajectories, group.id))
    arrived = pickle.loads(pickle.dumps(sent))
    assert isinstance(arrived.trajectories, ResponseColumns)
    assert columns_of(arrived) is arrived.trajectories
    batches = []
    for each in (group, arrived):
        buffer = replay(inverse_temperature=1.0)
        assert buffer.add(each, step=0) == 3  # [1, 2] came twice
        batches.append(buffer.sample(1, 3, step=0))
    one, other = batches
    assert sorted(one.reward_PK.flatten().tolist()) == [0.25, 0.5, 1.0]
    for name in ("token_ids_N", "policy_N", "log_ref_N", "reward_PK", "offsets"):
        assert getattr(one, name).tolist() == getattr(other, name).tolist()
