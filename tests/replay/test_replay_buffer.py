"""Adding, replacing, evicting, sampling: worked out by hand."""

import dataclasses
import tracemalloc

import numpy as np
import pytest
import torch
from replay_builders import Groups, contents, prompt, replay, responses, trajectory

from tba.config import ReplayConfig, TrainConfig
from tba.objectives.objective import leave_one_out
from tba.replay import ReplayBuffer, ReplayEmpty, batching
from tba.trainer.batch import batch_metrics, combine
from tba.types import NO_ROW, GroupId, TrajectoryGroup


def tokens_of(buffer):
    return [tokens for _, _, tokens, _ in contents(buffer)]


def test_an_empty_buffer_says_so_instead_of_crashing():
    with pytest.raises(ReplayEmpty, match="empty: add groups"):
        replay().sample(2, 2, step=0)


def test_a_group_id_is_stored_once():
    buffer, group = replay(), Groups()("a", [[1], [2]])
    assert buffer.add(group, step=0) == 2
    assert buffer.add(group, step=1) == 0
    assert len(buffer) == 2


def test_a_restarted_searcher_numbers_its_groups_anew_and_what_the_old_one_sends_again_is_ignored():
    buffer, made = replay(), Groups()("a", [[1], [2]])
    sent = [
        ("searcher-0.aa/0", 2),
        ("searcher-0.aa/1", 2),
        ("searcher-0.bb/0", 2),
        ("searcher-0.aa/0", 0),
        ("searcher-0.aa/1", 0),
        ("searcher-0.aa/2", 2),
        ("searcher-0.bb/0", 0),
        ("searcher-1.aa/0", 2),
    ]
    for group_id, stored in sent:
        assert buffer.add(dataclasses.replace(made, id=group_id), step=0) == stored, group_id


@pytest.mark.parametrize("text", ["", "g1", "searcher-0/1", "searcher-0.aa/", "searcher-0.aa/-1", "s.aa/x", ".aa/1"])
def test_a_group_id_of_another_form_is_refused(text):
    with pytest.raises(ValueError, match=r"is not SENDER.INCARNATION/NUMBER"):
        GroupId.parse(text)


def test_a_group_id_is_written_as_it_is_read():
    parts = GroupId(sender="searcher-12", incarnation="5f3a91c2", number=41)
    assert str(parts) == "searcher-12.5f3a91c2/41"
    assert GroupId.parse("searcher-12.5f3a91c2/41") == parts


def test_the_newer_of_two_equal_responses_wins_and_becomes_the_newest():
    buffer, group = replay(), Groups()
    buffer.add(group("a", [[1, 2], [3]], rewards=[0.0, 0.0]), step=0)
    assert buffer.add(group("a", [[1, 2]], rewards=[1.0]), step=0) == 1
    assert contents(buffer) == [("a", 0, (3,), 0.0), ("a", 0, (1, 2), 1.0)]


def test_of_equal_responses_in_one_group_the_last_is_kept():
    buffer = replay()
    assert buffer.add(Groups()("a", [[1], [2], [1]], rewards=[0.0, 0.0, 7.0]), step=0) == 2
    assert contents(buffer) == [("a", 0, (2,), 0.0), ("a", 0, (1,), 7.0)]


def test_equal_responses_of_different_prompts_are_both_kept():
    buffer, group = replay(), Groups()
    buffer.add(group("a", [[1]]), step=0)
    buffer.add(group("b", [[1]]), step=0)
    assert len(buffer) == 2


def test_without_deduplication_copies_stay():
    buffer, group = replay(deduplicate=False), Groups()
    buffer.add(group("a", [[1], [1]]), step=0)
    buffer.add(group("a", [[1]]), step=0)
    assert tokens_of(buffer) == [(1,), (1,), (1,)]


def test_the_oldest_of_a_prompt_go_when_it_is_full():
    buffer, group = replay(capacity_per_prompt=3), Groups()
    buffer.add(group("a", [[1], [2]]), step=0)
    buffer.add(group("b", [[9]]), step=0)
    buffer.add(group("a", [[3], [4]]), step=0)
    assert tokens_of(buffer) == [(2,), (9,), (3,), (4,)]


def test_the_oldest_of_all_go_when_the_buffer_is_full():
    buffer, group = replay(capacity=3), Groups()
    buffer.add(group("a", [[1], [2]]), step=0)
    buffer.add(group("b", [[3], [4]]), step=0)
    assert tokens_of(buffer) == [(2,), (3,), (4,)]
    buffer.add(group("c", [[5]]), step=0)
    assert tokens_of(buffer) == [(3,), (4,), (5,)]
    assert buffer.num_prompts == 2


def test_a_prompt_whose_responses_are_all_gone_is_never_drawn():
    buffer, group = replay(capacity=2, on_policy_probability=0.5), Groups()
    for name in "abc":
        buffer.add(group(name, [[1], [2]]), step=0)
    drawn = {name for _ in range(50) for name in buffer.sample(1, 2, step=0).prompt_ids}
    assert drawn == {"c"}


def test_of_a_group_larger_than_the_capacity_the_last_responses_are_kept():
    buffer = replay(capacity_per_prompt=2)
    assert buffer.add(Groups()("a", [[1], [2], [3]]), step=0) == 2
    assert tokens_of(buffer) == [(2,), (3,)]


def test_one_response_of_one_prompt_fills_any_batch():
    buffer = replay(on_policy_probability=0.5, inverse_temperature=1.0)
    buffer.add(Groups()("a", [[1, 2, 3]]), step=0)
    batch = buffer.sample(3, 4, step=0)
    assert batch.prompt_ids == ("a", "a", "a")
    assert responses(batch) == [[(1, 2, 3)] * 4] * 3
    assert batch.weight_PK.tolist() == [[1.0, 0.0, 0.0, 0.0]] * 3
    assert batch.sampled_PK.tolist() == [[True, False, False, False]] * 3


def test_every_field_of_the_batch_is_what_was_stored():
    buffer = replay(reward_names=("x", "y"), reward_weights=(2.0, 0.5), on_policy_probability=1.0)
    first = trajectory([4, 5, 6], version=3, mask=[True, False, True], rewards={"x": 1.0, "y": 4.0})
    second = trajectory([7], version=5, finish="length", rewards={"x": float("nan"), "y": 2.0})
    group = Groups()("a", [])
    buffer.add(TrajectoryGroup(id="other.0/0", prompt=group.prompt, trajectories=(first, second)), step=6)
    batch = buffer.sample(1, 2, step=6)
    order = [0, 1] if batch.truncated_PK[0].tolist() == [False, True] else [1, 0]
    ids, masks = [[4, 5, 6], [7]], [[True, False, True], [True]]
    expected = [token for r in order for token in ids[r]]
    assert batch.token_ids_N.tolist() == expected
    assert batch.token_ids_N.dtype == batch.offsets.dtype == torch.int64
    assert batch.loss_mask_N.tolist() == [chosen for r in order for chosen in masks[r]]
    assert batch.behaviour_N.tolist() == [-(token + 0.25) for token in expected]
    assert batch.policy_N.tolist() == [-(token + 0.5) for token in expected]
    assert batch.log_ref_N.tolist() == [-(token + 0.75) for token in expected]
    # 2 * 1 + 0.5 * 4 = 4; the second's x does not apply: 0.5 * 2 = 1
    assert batch.reward_PK.tolist() == [[(4.0, 1.0)[r] for r in order]]
    assert batch.rewards["y"].tolist() == [[(4.0, 2.0)[r] for r in order]]
    assert batch.rewards["x"].isnan().tolist() == [[(False, True)[r] for r in order]]
    assert batch.version_PK.tolist() == [[(3, 5)[r] for r in order]]
    assert batch.weight_PK.tolist() == [[1.0, 1.0]]
    assert batch.prompt_tokens[0].tolist() == group.prompt.token_ids.tolist()
    assert (batch.totals.prompts, batch.totals.responses, batch.totals.tokens) == (1, 2, 3)  # one token was not chosen


def test_a_batch_never_mixes_reference_versions():
    buffer, group = replay(on_policy_probability=0.5), Groups()
    buffer.add(group("a", [[1], [2]], reference=0), step=0)
    buffer.add(group("a", [[1], [3]], reference=1), step=0)
    buffer.add(group("b", [[4]], reference=0), step=0)
    for _ in range(20):
        assert {tokens for K in responses(buffer.sample(2, 2, step=0)) for tokens in K} <= {(1,), (3,)}
        old = buffer.sample(2, 2, step=0, reference_version=0)
        assert {tokens for K in responses(old) for tokens in K} <= {(1,), (2,), (4,)}
    with pytest.raises(ReplayEmpty, match=r"reference version 2, only of \[0, 1\]"):
        buffer.sample(1, 1, step=0, reference_version=2)


def test_dropping_a_reference_removes_its_responses_and_refuses_late_ones():
    buffer, group = replay(), Groups()
    buffer.add(group("a", [[1], [2]], reference=0), step=0)
    buffer.add(group("a", [[3]], reference=1), step=0)
    assert buffer.drop_reference(1) == 2
    assert buffer.add(group("b", [[4]], reference=0), step=0) == 0
    assert tokens_of(buffer) == [(3,)]
    assert buffer.num_prompts == 1
    assert buffer.drop_reference(2) == 1
    with pytest.raises(ReplayEmpty):
        buffer.sample(1, 1, step=0)
    buffer.add(group("a", [[5]], reference=2), step=0)
    assert tokens_of(buffer) == [(5,)]


def test_groups_of_a_dropped_reference_wait_no_longer():
    buffer, group = replay(max_uses=1, deduplicate=False, max_waiting_groups=2), Groups()
    buffer.add(group("a", [[1], [2]], reference=0), step=0)
    buffer.add(group("b", [[3], [4]], reference=0), step=0)
    buffer.drop_reference(1)
    buffer.add(group("a", [[5], [6]], reference=1), step=1)
    buffer.add(group("b", [[7], [8]], reference=1), step=1)
    assert buffer.sample(2, 2, step=1).prompt_ids == ("a", "b")


def test_a_group_of_several_reference_versions_is_an_error():
    group = Groups()("a", [])
    mixed = TrajectoryGroup(
        id="other.0/0", prompt=group.prompt, trajectories=(trajectory([1], reference=0), trajectory([2], reference=1))
    )
    with pytest.raises(ValueError, match=r"mixes reference versions \[0, 1\]"):
        replay().add(mixed, step=0)


def test_an_error_in_a_group_leaves_the_buffer_as_it_was():
    buffer = replay()
    for bad, message in (
        (trajectory([]), "no tokens"),
        (trajectory([1, 2], mask=[True]), r"2 tokens, but .* \[1, 2, 2, 2\]"),
        (trajectory([1], rewards={"q": 1.0}), r"rewards \['q'\]; the buffer knows \['r'\]"),
    ):
        group = TrajectoryGroup(id="other.0/0", prompt=Groups()("a", []).prompt, trajectories=(bad,))
        with pytest.raises(ValueError, match=message):
            buffer.add(group, step=0)
    assert len(buffer) == buffer.num_prompts == 0
    assert buffer.add(Groups()("a", [[1]]), step=0) == 1


def test_a_token_that_the_policy_did_not_choose_keeps_its_id_and_unknown_log_probs_stay_nan():
    buffer, group = replay(), Groups()("a", [])
    imported = trajectory([0, 7, 0], mask=[True, False, False])
    imported.completion.behaviour_log_probs[:] = imported.completion.policy_log_probs[:] = np.nan
    buffer.add(dataclasses.replace(group, trajectories=(imported,)), step=0)
    batch = buffer.sample(1, 1, step=0)
    assert batch.token_ids_N.tolist() == [0, 7, 0]
    assert batch.loss_mask_N.tolist() == [True, False, False]
    assert batch.behaviour_N.isnan().all()
    assert batch.policy_N.isnan().all()


def test_responses_are_named_by_the_order_of_their_arrival():
    buffer, group = replay(max_uses=2, deduplicate=False), Groups()
    buffer.add(group("a", [[5], [6]]), step=0)
    buffer.add(group("b", [[7]]), step=0)
    batch = buffer.sample(2, 2, step=0)
    names = dict(zip(batch.token_ids_N.tolist(), batch.rows_PK.flatten().tolist()))
    assert (names[5], names[6]) == (0, 1)
    assert batch.rows_PK[1].tolist() == [2, NO_ROW]


def test_an_empty_group_stores_nothing():
    buffer = replay()
    lost = TrajectoryGroup(id="other.0/0", prompt=Groups()("a", []).prompt, trajectories=(), num_lost=4)
    assert buffer.add(lost, step=0) == 0
    with pytest.raises(ReplayEmpty):
        buffer.sample(1, 1, step=0)


def test_ages_are_counted():
    buffer, group = replay(), Groups()
    buffer.add(group("a", [[1], [2]], version=2), step=4)
    buffer.add(group("b", [[1], [2]], version=4), step=4)
    for _ in range(2):
        buffer.sample(2, 4, step=5)  # there are two of each prompt: no more are drawn
    # Two responses of version 2 and two of version 4, at step 5: ages 3 and 1.
    stats = buffer.stats()
    assert (stats["age_mean"], stats["age_max"], stats["prompts"], stats["tokens"]) == (2.0, 3.0, 2.0, 4.0)


def test_the_same_seed_samples_the_same_and_the_generator_state_resumes_it():
    def run():
        buffer, group = replay(on_policy_probability=0.5, inverse_temperature=1.0, seed=3), Groups()
        for name in "abcd":
            buffer.add(group(name, [[i] for i in range(6)], rewards=range(6)), step=0)
        return buffer, [responses(buffer.sample(2, 3, step=0)) for _ in range(5)]

    (one, first), (two, second) = run(), run()
    assert first == second
    two.rng.bit_generator.state = one.rng.bit_generator.state
    assert responses(one.sample(2, 3, step=0)) == responses(two.sample(2, 3, step=0))


def test_not_applicable_and_infinite_rewards_give_finite_scores():
    rewards = np.array([[np.nan, np.nan], [np.inf, 1.0], [-np.inf, np.nan], [np.inf, -np.inf]], np.float32)
    score = batching.combine_rewards(rewards, np.array([1.0, 1.0]))
    largest = np.finfo(np.float32).max
    assert score.tolist() == [0.0, largest, -largest, 0.0]


def test_a_response_leaves_after_it_was_used_so_often():
    buffer, groups = replay(max_uses=2, on_policy_probability=1.0), Groups()
    buffer.add(groups("a", [[5], [6]]), step=0)
    buffer.add(groups("b", [[7], [8]]), step=0)
    buffer.sample(2, 2, step=0)
    assert len(buffer) == 4
    buffer.sample(1, 2, step=0)
    assert len(buffer) == 2
    buffer.sample(1, 2, step=0)
    with pytest.raises(ReplayEmpty):
        buffer.sample(1, 1, step=0)


def test_a_queue_serves_groups_in_the_order_of_their_arrival():
    buffer, groups = replay(max_uses=1, deduplicate=False, fresh_steps=2), Groups()
    trained = []
    for step in range(40):  # a searcher three times as fast as the trainer
        for number in range(3 * step, 3 * step + 3):
            buffer.add(groups(f"p{number}", [[5], [6]]), step=step)
        trained += buffer.sample(1, 2, step=step).prompt_ids
    assert trained == [f"p{number}" for number in range(40)]


def test_two_groups_of_a_prompt_that_are_used_up_in_one_batch_leave_and_a_third_stays():
    buffer, groups = replay(max_uses=1, deduplicate=False), Groups()
    for first in (1, 3, 5):
        buffer.add(groups("a", [[first], [first + 1]]), step=0)
    assert sorted(tokens for K in responses(buffer.sample(2, 2, step=0)) for tokens in K) == [(1,), (2,), (3,), (4,)]
    assert tokens_of(buffer) == [(5,), (6,)]
    assert sorted(responses(buffer.sample(1, 2, step=0))[0]) == [(5,), (6,)]
    assert len(buffer) == 0


def test_the_oldest_groups_leave_a_queue_in_which_too_many_wait():
    buffer, groups = replay(max_uses=1, deduplicate=False, max_waiting_groups=4), Groups()
    trained = []
    for step in range(
        10
    ):  # three arrive, one is trained: two of them wait, then four, then the oldest two leave each step
        for number in range(3 * step, 3 * step + 3):
            buffer.add(groups(f"p{number}", [[5], [6]]), step=step)
        trained += buffer.sample(1, 2, step=step).prompt_ids
    assert trained[:2] == ["p0", "p2"]  # step 1 has p1 to p5: five wait, p1 leaves
    assert trained[-1] == "p26"  # step 9 has p26 to p29
    assert buffer.stats()["expired"] == 30 * 2 - 2 * 10 - 2 * 3


def test_a_queue_takes_no_more_memory_with_the_steps():
    buffer, groups, used = replay(max_uses=1, capacity=100), Groups(), []
    tracemalloc.start()
    for step in range(1, 2001):
        buffer.add(groups(f"p{step % 7}", [[step], [step + 1]]), step=step)
        buffer.sample(1, 2, step=step)
        if step in (1000, 2000):
            used.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert used[1] - used[0] < 50_000, "of 1,000 steps"


def test_a_queue_trains_nothing_on_what_a_draw_left_over():
    buffer, groups = replay(max_uses=1, deduplicate=False), Groups()
    buffer.add(groups("a", [[token] for token in range(24)]), step=0)
    assert len(set(buffer.sample(1, 20, step=0).rows_PK.flatten().tolist())) == 20
    with pytest.raises(ReplayEmpty):
        buffer.sample(1, 20, step=0)


def test_a_queue_takes_a_prompt_twice_only_where_others_do_not_fill_the_batch():
    buffer, groups = replay(max_uses=1, deduplicate=False), Groups()
    for name, token in (("a", 1), ("a", 2), ("b", 3), ("c", 4)):
        buffer.add(groups(name, [[token], [token]]), step=0)
    assert buffer.can_fill(4, prompts_of_task=3)
    assert not buffer.can_fill(5, prompts_of_task=3)
    assert buffer.sample(2, 2, step=0).prompt_ids == ("a", "b")
    rest = buffer.sample(2, 2, step=0)
    assert rest.prompt_ids == ("a", "c")
    assert rest.token_ids_N.tolist() == [2, 2, 4, 4]


def test_a_queue_of_two_uses_comes_round_again():
    buffer, groups = replay(max_uses=2, deduplicate=False), Groups()
    for name in "abc":
        buffer.add(groups(name, [[1], [2]]), step=0)
    drawn = [buffer.sample(1, 2, step=0).prompt_ids[0] for _ in range(6)]
    assert drawn == ["a", "b", "c", "a", "b", "c"]
    assert len(buffer) == 0


def test_responses_beyond_the_lag_limit_leave_and_those_without_a_lag_stay():
    buffer, groups = replay(deduplicate=False), Groups()
    buffer.add(groups("a", [[5], [6]], version=0), step=0)
    buffer.add(groups("b", [[7], [8]], version=3), step=3)
    imported = groups("c", [[9], [10]], version=0)
    for member in imported.trajectories:
        member.completion.policy_log_probs[:] = np.nan
    buffer.add(imported, step=0)
    assert buffer.expire(0) == 0
    assert buffer.expire(1) == 2
    assert {name for name, *_ in contents(buffer)} == {"b", "c"}
    assert not buffer.can_fill(3, prompts_of_task=3)
    buffer.add(groups("a", [[11], [12]], version=4), step=4)  # in the rows that became free
    assert buffer.can_fill(3, prompts_of_task=3)
    assert buffer.expire(4) == 2
    assert {name for name, *_ in contents(buffer)} == {"a", "c"}
    assert buffer.stats()["expired"] == 4


def test_prompts_that_are_always_lost_are_not_waited_for_and_all_others_are():
    buffer, groups = replay(deduplicate=False), Groups()
    for name in "abc":
        buffer.add(groups(name, [[5], [6]]), step=0)
    assert not buffer.can_fill(4, prompts_of_task=5, lost={"d"}), "e is still to come"
    assert buffer.can_fill(4, prompts_of_task=5, lost={"d", "e"})
    assert not buffer.can_fill(4, prompts_of_task=5, lost={"a", "b"}), "what was stored before is counted once"
    assert not buffer.can_fill(4, prompts_of_task=100, lost={"d", "e"}), "others fill the batch"


def test_an_expired_group_is_not_counted_in_the_queue():
    buffer, groups = replay(max_uses=1, deduplicate=False), Groups()
    buffer.add(groups("a", [[5], [6]], version=0), step=0)
    buffer.add(groups("b", [[7], [8]], version=3), step=3)
    buffer.expire(2)
    assert buffer.can_fill(1, prompts_of_task=2)
    assert not buffer.can_fill(2, prompts_of_task=2)
    assert buffer.sample(1, 2, step=4).prompt_ids == ("b",)


def test_the_gradient_of_a_short_group_is_the_one_of_its_own_responses():
    """RLOO's estimate with n of 8 rewards known: mean over the n of A g = sum (r - mean) (g - mean) / (n - 1)."""
    rng = np.random.default_rng(0)
    for n in (8, 7, 4, 2):
        rewards, g = rng.normal(size=n), rng.normal(size=n)
        buffer = replay(on_policy_probability=1.0, deduplicate=False)
        buffer.add(Groups()("a", [[i] for i in range(n)], rewards=rewards.tolist()), step=0)
        batch = combine(buffer.sample(1, 8, step=0), TrainConfig(), reward_weights={"r": 1.0})
        advantage = leave_one_out(batch.reward_PK.double(), batch.weight_PK.double())
        order = batch.token_ids_N.tolist()  # a response's token is its index
        got = float((advantage * batch.weight_PK * torch.tensor(g[order])[None]).sum() / batch.totals.responses)
        want = ((rewards - rewards.mean()) * (g - g.mean())).sum() / (n - 1)
        assert got == pytest.approx(want, rel=1e-5)


def test_with_one_use_every_response_is_sampled_exactly_once():
    buffer, groups = replay(max_uses=1), Groups()
    for index, name in enumerate("abcdef"):
        buffer.add(groups(name, [[10 * index + 1], [10 * index + 2]]), step=0)
    seen = [token for _ in range(3) for token in buffer.sample(2, 2, step=0).token_ids_N.tolist()]
    assert sorted(seen) == sorted(10 * index + k for index in range(6) for k in (1, 2))


def test_recomputing_the_reference_rewrites_log_ref_and_nothing_else():
    buffer, group = replay(deduplicate=False), Groups()
    buffer.add(group("a", [[5, 6], [7]]), step=0)
    buffer.add(group("b", [[8, 9, 10], [11]]), step=0)
    before = buffer.sample(2, 2, step=0)
    scored = buffer.recompute_reference(4, lambda prompts, ids: [-100.0 - tokens for tokens in ids])
    after = buffer.sample(2, 2, step=0, reference_version=4)
    assert scored == 4
    assert torch.equal(after.log_ref_N, -100.0 - after.token_ids_N.float())
    assert torch.equal(after.behaviour_N, -(after.token_ids_N + 0.25).float())
    assert sorted(after.token_ids_N.tolist()) == sorted(before.token_ids_N.tolist())
    buffer.add(group("a", [[12]], reference=4), step=1)
    assert buffer.num_prompts == 2, "the prompt keeps its entry"


def test_step_values_are_stored_where_the_objective_needs_them():
    members = [trajectory([5, 6, 7]), trajectory([8])]
    values = [np.array([0.5, np.nan, 0.25], np.float32), np.array([0.75], np.float32)]
    members = [dataclasses.replace(member, step_values=own) for member, own in zip(members, values)]
    group = TrajectoryGroup(id="other.0/0", prompt=prompt("a"), trajectories=tuple(members))
    buffer = ReplayBuffer(
        ReplayConfig(), fresh_steps=1, seed=0, reward_names=("r",), reward_weights=(1.0,), step_values=True
    )
    buffer.add(group, step=0)
    batch = buffer.sample(1, 2, step=0)
    by_token = dict(zip(batch.token_ids_N.tolist(), batch.step_values_N.tolist()))
    assert (by_token[5], by_token[7], by_token[8]) == (0.5, 0.25, 0.75)
    assert np.isnan(by_token[6])
    without = TrajectoryGroup(id="other.0/1", prompt=prompt("b"), trajectories=(trajectory([5]),))
    with pytest.raises(ValueError, match="no Monte-Carlo values of its steps"):
        buffer.add(without, step=0)


def test_no_lag_is_negative_where_responses_are_younger_than_the_trainer():
    """A trainer that resumed at step 4 takes in what the one before it had generated with its version 9."""
    buffer, groups = replay(fresh_steps=2), Groups()
    buffer.add(groups("a", [[1, 2], [3]], version=9), step=4)
    buffer.add(groups("b", [[4, 5], [6]], version=3), step=4)
    batch = buffer.sample(2, 2, step=4)
    assert sorted(batch.version_PK.flatten().tolist()) == [3, 3, 4, 4]
    assert (buffer.stats()["age_mean"], buffer.stats()["age_max"]) == (0.5, 1.0)
    weighed = combine(batch, TrainConfig(), reward_weights={"r": 1.0})
    metrics = batch_metrics(weighed, batch.policy_N, step=4)
    assert (metrics["off_policy/lag_mean"], metrics["off_policy/lag_max"]) == (0.5, 1.0)


def test_responses_of_a_version_that_is_gone_expire_as_those_of_the_step_they_came_at():
    buffer, groups = replay(), Groups()
    buffer.add(groups("a", [[1, 2], [3]], version=9), step=4)
    assert buffer.expire(4) == 0
    assert buffer.expire(5) == 2
