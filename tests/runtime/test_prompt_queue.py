"""Rollouts: each is handed out once, finished by somebody, and survives whoever had it."""

import json

import pytest

from tba.runtime.prompt_queue import PromptQueue, RolloutRequest, RolloutSource


def prompt_queue(num_prompts: int = 5, **settings) -> PromptQueue:
    return PromptQueue(num_prompts, **({"seed": 0} | settings))


def test_every_prompt_is_visited_once_an_epoch_in_an_order_of_its_own():
    rollouts = prompt_queue().lease("a", 15)
    epochs = [[rollout.prompt for rollout in rollouts if rollout.epoch == epoch] for epoch in range(3)]
    assert [sorted(prompts) for prompts in epochs] == [[0, 1, 2, 3, 4]] * 3
    assert len({tuple(prompts) for prompts in epochs}) > 1
    assert [rollout.number for rollout in rollouts] == list(range(15))


def test_searchers_share_the_rollouts_without_overlap():
    shared = prompt_queue(shuffle=False)
    first, second, third = shared.lease("a", 2), shared.lease("b", 2), shared.lease("a", 2)
    assert [(rollout.prompt, rollout.epoch) for rollout in (*first, *second, *third)] == [
        (0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (0, 1),
    ]  # fmt: skip


def test_rollouts_of_a_searcher_that_is_gone_are_handed_out_first():
    shared = prompt_queue(shuffle=False)
    shared.lease("a", 3)
    shared.lease("b", 1)
    shared.complete(1)
    assert shared.hand_back("a") == 2
    assert shared.lease("c", 3) == [
        RolloutRequest(number=0, prompt=0, epoch=0), RolloutRequest(number=2, prompt=2, epoch=0),
        RolloutRequest(number=4, prompt=4, epoch=0),
    ]  # fmt: skip


def test_a_late_group_of_a_searcher_that_was_given_up_ends_the_rollout():
    shared = prompt_queue(shuffle=False)
    shared.lease("a", 1)
    shared.hand_back("a")
    shared.complete(0)
    assert [rollout.number for rollout in shared.lease("b", 1)] == [1]


def test_after_a_checkpoint_open_rollouts_are_handed_out_again_and_the_order_goes_on():
    before = prompt_queue()
    before.lease("a", 4)
    before.complete(2)
    saved = json.loads(json.dumps(before.state()))
    after = prompt_queue()
    after.load_state(saved)
    assert [rollout.number for rollout in after.lease("b", 5)] == [0, 1, 3, 4, 5]
    uninterrupted = prompt_queue().lease("a", 12)
    assert after.lease("b", 6) == uninterrupted[6:]


def restored(*, handed_out: int, completed: tuple[int, ...] = ()) -> PromptQueue:
    """A prompt queue of five prompts in order, as a checkpoint knew it."""
    before = prompt_queue(shuffle=False)
    before.lease("a", handed_out)
    for number in completed:
        before.complete(number)
    after = prompt_queue(shuffle=False)
    after.load_state(json.loads(json.dumps(before.state())))
    return after


def numbers(rollouts: list[RolloutRequest]) -> list[int]:
    return [rollout.number for rollout in rollouts]


def test_groups_of_rollouts_that_a_checkpoint_does_not_know_of_complete_them():
    shared = restored(handed_out=2, completed=(0, 1))
    for number in (3, 2, 6):
        shared.complete(number)
    assert numbers(shared.lease("b", 4)) == [4, 5, 7, 8]
    assert shared.lease("b", 1) == [RolloutRequest(number=9, prompt=4, epoch=1)]


def test_a_group_without_a_rollout_completes_none():
    shared = prompt_queue(shuffle=False)
    shared.complete(-1)
    assert numbers(shared.lease("a", 1)) == [0]


def test_a_task_without_prompts_is_refused():
    with pytest.raises(ValueError, match="no prompts"):
        prompt_queue(0)


def test_the_order_depends_on_the_seed_alone():
    whole = prompt_queue().lease("a", 25)
    assert prompt_queue().lease("b", 25) == whole
    assert prompt_queue(seed=1).lease("a", 25) != whole


def test_a_searcher_asks_for_rollouts_before_it_runs_out_of_them():
    asked = []
    stock = RolloutSource(asked.append, size=4)
    assert stock.peek() is None
    assert asked == [4]
    assert stock.peek() is None
    assert asked == [4]  # they are on their way
    stock.add([RolloutRequest(number=number, prompt=0, epoch=0) for number in range(4)])
    taken = []
    for _ in range(3):
        taken.append(stock.peek())
        assert stock.take() == taken[-1]
    stock.peek()
    assert [rollout.number for rollout in taken] == [0, 1, 2]
    assert asked == [4, 3]


def test_rollouts_that_others_left_behind_come_first():
    stock = RolloutSource(lambda count: None, size=2)
    stock.peek()
    stock.add([RolloutRequest(number=8, prompt=0, epoch=0), RolloutRequest(number=9, prompt=0, epoch=0)])
    stock.add([RolloutRequest(number=3, prompt=1, epoch=0)])
    assert [stock.take().number for _ in range(3)] == [3, 8, 9]
