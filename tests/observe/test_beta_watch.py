"""Beta put beside the rewards' spread."""

import logging

import pytest

from tba.observe.watches import RECENT, BetaWatch, rounded_beta


def metrics(*, reached: float, spread: float, beta: float) -> dict[str, float]:
    return {"tb/target_reached": reached, "tb/reward_spread": spread, "beta": beta}


def test_a_proposed_beta_is_a_round_number_that_is_no_larger():
    assert [rounded_beta(value) for value in (0.0078, 0.005, 0.0199, 3.0, 0.1)] == [0.005, 0.005, 0.01, 2.0, 0.1]


def test_spread_and_beta_are_told_at_the_first_batches_where_beta_is_small_enough(caplog):
    watch = BetaWatch()
    lines = [watch.step(step, metrics(reached=0.0, spread=0.2, beta=0.01)) for step in range(1, 7)]
    assert [line for line in lines if line] == [
        "rewards of one prompt lie 0.2 apart (standard deviation), which is 20 times objective.beta=0.01."
    ]
    assert not caplog.records


def test_a_beta_that_is_large_for_the_rewards_is_a_warning_with_a_smaller_one(caplog):
    watch = BetaWatch()
    with caplog.at_level(logging.WARNING):
        lines = [watch.step(step, metrics(reached=0.0, spread=0.1, beta=0.05)) for step in range(1, 7)]
    assert lines == [None] * 6
    (record,) = caplog.records
    assert "2 times objective.beta=0.05" in record.getMessage()
    assert "Set objective.beta=0.005" in record.getMessage()


def test_a_policy_near_its_target_is_told_once_and_in_the_summary(caplog):
    watch = BetaWatch()
    with caplog.at_level(logging.WARNING):
        for step in range(1, 3 * RECENT):
            watch.step(step, metrics(reached=0.3 if step <= RECENT else 0.6, spread=2.0, beta=0.1))
    (record,) = caplog.records
    # The mean of the last 20 exceeds .4 at the seventh of .6: (13 x .3 + 7 x .6) / 20 = .405.
    assert record.getMessage().startswith(f"step {RECENT + 7}: the policy has come 40% of the way")
    summary = watch.summary()
    assert summary["target_reached"] == pytest.approx(0.6)
    assert "objective.beta=0.1" in summary["message"]
    assert "0.02" in summary["message"]


def test_without_a_target_nothing_is_said():
    watch = BetaWatch()
    assert watch.step(1, {"beta": 0.1}) is None
    assert watch.summary() is None
