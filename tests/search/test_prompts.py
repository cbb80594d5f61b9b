"""Which prompts are visited, in which order, and how some visits explore."""

import numpy as np
import pytest

from tba.config import ExploreConfig
from tba.search.prompts import Difficulty, PromptStream, explore
from tba.types import Prompt, Request, Sampling

PROMPTS = [Prompt(id=f"p{i}", token_ids=np.array([1], np.int32), text=str(i)) for i in range(10)]


def stream(**settings) -> PromptStream:
    return PromptStream(PROMPTS, **({"samples_per_prompt": 4, "seed": 0} | settings))


def ids(requests) -> list[str]:
    return [request.prompt.id for request in requests]


def test_every_epoch_visits_all_prompts_once_in_a_new_order():
    visits = stream()
    first, second = ids(visits.take(10)), ids(visits.take(10))
    assert sorted(first) == sorted(second) == sorted(p.id for p in PROMPTS)
    assert first != second


def test_the_order_depends_on_the_seed_alone_and_continues_from_a_cursor():
    whole = ids(stream().take(25))
    assert ids(stream().take(25)) == whole
    assert ids(stream(seed=1).take(25)) != whole
    assert ids(stream(cursor=13).take(12)) == whole[13:]


def test_without_shuffling_prompts_come_in_data_order():
    assert ids(stream(shuffle=False).take(11)) == [*(p.id for p in PROMPTS), "p0"]


def test_shards_are_disjoint_and_cover_everything():
    shards = [ids(stream(shard=i, num_shards=3).take(len(range(i, 10, 3)))) for i in range(3)]
    assert sorted(i for shard in shards for i in shard) == sorted(p.id for p in PROMPTS)
    assert set(shards[1]) == {"p1", "p4", "p7"}


def test_shards_beyond_the_prompts_share_them_without_sharing_randomness():
    """Shards 0 and 10 of 11 both visit p0, with 4 samples a visit: 0-3, 8-11, ... and 4-7, 12-15, ..."""
    first, last = (stream(shard=shard, num_shards=11).take(2) for shard in (0, 10))
    assert ids(first) == ids(last) == ["p0", "p0"]
    assert [request.first_sample for request in first] == [0, 8]
    assert [request.first_sample for request in last] == [4, 12]
    assert [request.first_sample for request in stream(shard=1, num_shards=11).take(2)] == [0, 4]


def test_no_prompts_are_refused():
    with pytest.raises(ValueError, match="no prompts"):
        PromptStream([], samples_per_prompt=4, seed=0)


def test_sample_indices_of_later_visits_follow_on():
    visits = stream()
    assert {request.first_sample for request in visits.take(10)} == {0}
    assert {request.first_sample for request in visits.take(10)} == {4}


def test_a_prompt_solved_three_times_in_a_row_is_skipped_every_other_time():
    difficulty = Difficulty(skip_solved_after=3)
    for _ in range(3):
        assert not difficulty.skips("p0")
        difficulty.record("p0", [True, True])
    assert [difficulty.skips("p0") for _ in range(4)] == [True, False, True, False]
    difficulty.record("p0", [True, False])
    assert not difficulty.skips("p0")
    assert difficulty.skipped == {"solved": 2}


def test_unsolved_prompts_are_skipped_only_when_asked():
    difficulty = Difficulty(skip_solved_after=1)
    for _ in range(5):
        difficulty.record("p0", [False, False])
    assert not difficulty.skips("p0")


def test_a_stream_whose_prompts_are_all_skipped_still_goes_on():
    visits = stream(skips=lambda prompt_id: True)
    assert len(visits.take(3)) == 3


def test_exploring_visits_change_behaviour_but_not_the_policy_temperature():
    config = ExploreConfig(probability=0.3, temperature=(0.5, 2.0), top_p=(0.8, 1.0))
    sampling = Sampling(max_new_tokens=8, temperature=0.7)
    requests = [
        explore(Request(prompt=p, first_sample=4 * v), sampling, config, seed=0) for p in PROMPTS for v in range(100)
    ]
    explored = [request.sampling for request in requests if request.sampling is not None]
    assert 240 < len(explored) < 360  # 1000 visits at 0.3: 300 +- 4 standard deviations of 14.5
    assert all(s.policy_temperature == 0.7 and 0.5 <= s.temperature <= 2.0 and 0.8 <= s.top_p <= 1.0 for s in explored)
    assert np.std([s.temperature for s in explored]) > 0.3
