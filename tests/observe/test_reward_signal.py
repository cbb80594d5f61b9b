"""Rewards that never tell the responses to a prompt apart are told."""

import logging
import math

import numpy as np
import pytest

from tba.observe.watches import FIRST_WARNING, WARN_AGAIN_TIMES, RewardSignal, no_signal_lines
from tba.trainer.checkpoint import restore, take_snapshot
from tba.types import Completion, Prompt, Trajectory, TrajectoryGroup


def group(prompt: str, count: int) -> TrajectoryGroup:
    """Responses of one token, each cut off."""
    one = np.zeros(1, np.float32)
    given = {"token_ids": np.array([5], np.int32), "behaviour_log_probs": one, "policy_log_probs": one}
    completions = [
        Completion(prompt_id=prompt, sample_index=i, version_spans=((0, 0),), finish="length", **given)
        for i in range(count)
    ]
    trajectories = [
        Trajectory(completion=c, rewards={}, log_ref=one, reference_version=0, loss_mask=one > -1) for c in completions
    ]
    asked = Prompt(id=prompt, text=f"about {prompt}", token_ids=np.array([3], np.int32))
    return TrajectoryGroup(id="g", prompt=asked, trajectories=trajectories)


def after(*groups: tuple[str, list[float]]) -> RewardSignal:
    signal = RewardSignal()
    for prompt, rewards in groups:
        texts = [f"text {i}" for i in range(len(rewards))]
        signal.count(group(prompt, len(rewards)), rewards, lambda texts=texts: texts)
    return signal


def test_it_is_told_after_the_first_responses_and_then_seldom(caplog):
    with caplog.at_level(logging.WARNING):
        after(*[(f"p{i}", [0.0] * 4) for i in range(FIRST_WARNING // 4 - 1)])
        assert not caplog.records
        after(*[(f"p{i}", [0.0] * 4) for i in range(WARN_AGAIN_TIMES * FIRST_WARNING // 4)])
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        "so far no response was rewarded: 64 responses",
        "so far no response was rewarded: 512 responses",
    ]


@pytest.mark.parametrize(
    "groups",
    [
        [("a", [0.0, 0.0]), ("a", [0.0, 1.0])],
        [
            ("a", [0.0, 0.0]),
            ("b", [0.0, 0.0]),
            ("a", [1.0, 1.0]),
        ],  # replay draws the responses of two rollouts together
        [("a", [0.0]), ("b", [1.0])],  # one sample a prompt: an objective that allows it compares prompts
    ],
)
def test_rewards_that_differ_are_no_news(groups):
    assert after(*groups).summary() is None


def test_a_run_without_responses_or_with_rewards_that_are_never_applicable_says_nothing_about_them():
    assert after().summary() is after(("a", [math.nan, math.nan])).summary() is None


def test_the_end_has_two_responses_of_different_groups_with_their_rewards_and_survives_a_checkpoint():
    signal = after(("a", [math.nan, 1.0, 1.0]), ("b", [0.0, 0.0]), ("c", [0.0, 0.0]))
    found = restore(*take_snapshot(signal)).summary()
    message = "all rewards within each prompt are equal, so there is no gradient: 6 responses to 3 prompts"
    assert found["message"] == message
    assert no_signal_lines(found, max_new_tokens=8) == [
        f"{message}. Nothing could be learned. Two of them:",
        "  prompt 'about a', response 'text 1', reward 1, cut off at generate.max_new_tokens=8",
        "  prompt 'about b', response 'text 0', reward 0, cut off at generate.max_new_tokens=8",
    ]
