"""The learning rate that follows the drift of new responses, worked out by hand.

At the drift asked for here, .2, and 4 nats of entropy an update moves log_pi by .2 x sqrt(signal x 4) nats: .4 x sqrt(.1) =
.12649 at the usual signal.
"""

import math

import pytest
from resolved import resolved

from tba.config import load_config
from tba.trainer.learning_rate import RISE, START, VERSIONS_KEPT, LearningRate

USUAL = 0.4 * 0.1**0.5
"""Nats that an update is to move log_pi by at the usual signal."""


def rate_of(*overrides: str) -> LearningRate:
    settings = ["train.max_steps=200", "train.target_drift=0.2", *overrides]
    return LearningRate(resolved(load_config(None, settings)))


def at(rate: LearningRate, step: int) -> float:
    return rate.at(step, rate.config.progress_at(step))


def begun(*rates: float, overrides: tuple[str, ...] = ()) -> LearningRate:
    """After updates of these rates on new batches, none of which showed a drift. Next comes a rate like the last."""
    rate = rate_of(*overrides)
    for used in rates:
        rate.for_batch(0, 0.0, {}, entropy=4.0)
        rate.rate = used
        rate.made(used, of_new_batch=True)
    return rate


def drifted(nats: float, *, lag: float = 1.0, **found: float) -> dict[str, float]:
    return {"off_policy/drift": nats, "off_policy/drift_lag": lag, **{f"off_policy/{k}": v for k, v in found.items()}}


def see(rate: LearningRate, stiffness: float, *, progress: float = 0.0, **found: float) -> float:
    """Take a batch, one step behind, that drifted by `stiffness` x the last rate; returns the rate of its own update."""
    last = (rate.squares - rate.squares_before[-2]) ** 0.5
    return rate.for_batch(1, progress, drifted(stiffness * last, **found), entropy=4.0)


def test_a_given_schedule_is_used_as_it_is():
    rate = rate_of("train.learning_rate={kind: linear, start: 4e-4, end: 0}")
    for step, expected in ((0, 4e-4), (100, 2e-4), (150, 1e-4)):
        used = rate.for_batch(
            step, rate.config.progress_at(step), drifted(50.0, drift_reward_correlation=0.9), entropy=4.0
        )
        assert used == pytest.approx(expected)
        rate.made(used, of_new_batch=True)
    assert rate.drift(0.0) == 0.0  # the trust region is no wider for it


def test_auto_falls_to_zero_over_the_second_half():
    rate = begun(1e-4)
    # settle .5 of 200 steps: from step 100 on (200 - step) / 100
    assert [at(rate, step) for step in (0, 100, 150, 199, 200)] == pytest.approx([1e-4, 1e-4, 5e-5, 1e-6, 0.0])


def test_the_rate_of_a_run_by_seconds_falls_with_the_time():
    rate = begun(1e-4, overrides=("train.max_steps=null", "train.max_seconds=60"))
    seconds = (0, 30, 45, 60)
    assert [rate.at(7, rate.config.progress_at(7, used)) for used in seconds] == pytest.approx([1e-4, 1e-4, 5e-5, 0.0])
    # both limits: the nearer one, 150 of 200 steps rather than 10 of 60 seconds
    both = begun(1e-4, overrides=("train.max_seconds=60",))
    assert both.at(150, both.config.progress_at(150, 10.0)) == pytest.approx(5e-5)


def test_the_first_update_is_of_the_usual_size_at_a_rate_to_be_found():
    rate = rate_of()
    assert rate.for_batch(0, 0.0, {}, entropy=4.0) == START == 1e-6
    assert rate.size == pytest.approx(0.2 * (0.1 * 4.0) ** 0.5)
    sure = rate_of()
    sure.for_batch(0, 0.0, {}, entropy=0.0)  # taken for .01 nats
    assert sure.size == pytest.approx(0.2 * (0.1 * 0.01) ** 0.5)


def test_the_entropy_is_that_of_the_last_batch_with_weight_within_bounds():
    rate = rate_of()
    rate.for_batch(0, 0.0, {}, entropy=math.nan)  # a batch without weight
    assert math.isnan(rate.entropy)
    rate.for_batch(1, 0.0, {}, entropy=4.0)
    rate.for_batch(2, 0.0, {}, entropy=5.0)
    rate.for_batch(3, 0.0, {}, entropy=math.nan)
    assert rate.size == pytest.approx(0.2 * (0.1 * 5.0) ** 0.5)
    rate.for_batch(4, 0.0, {}, entropy=90.0)  # counts as 10
    assert rate.size == pytest.approx(0.2 * (0.1 * 10.0) ** 0.5)
    short = rate_of("train.max_steps=50")  # a quarter of the steps: twice as far, and up to 40 nats count
    short.for_batch(0, 0.0, {}, entropy=90.0)
    assert short.size == pytest.approx(2.0 * 0.2 * (0.1 * 40.0 * 4.0) ** 0.5)  # what is beyond 10 nats counts in full


@pytest.mark.parametrize(
    ("lag", "size"),
    [
        (1, 3.0),
        (2, 5.0),  # sqrt(3^2 + 4^2)
        (3, 13.0),  # sqrt(3^2 + 4^2 + 12^2)
        (1.5, 17**0.5),  # half-way between 3^2 = 9 and 5^2 = 25
        (2.25, 61**0.5),  # a quarter of the way from 25 to 169
        (3.5, 13.0),  # there were no more updates
        (9, 13.0),
    ],
)
def test_updates_add_up_by_their_squares_over_the_lag(lag, size):
    rate = begun(12e-4, 4e-4, 3e-4)
    rate.for_batch(3, 0.0, drifted(0.6, lag=lag), entropy=4.0)
    assert math.exp(rate.stiffness) == pytest.approx(0.6 / (size * 1e-4))


@pytest.mark.parametrize(
    ("mode", "sizes"),
    [
        # A second update of 5 after the first of 4, whose version was published before: 5^2 + 3^2 since then, and 4^2 more.
        ("mode=async", ((0, 0.0), (1, 34.0), (1.5, 42.0), (2, 50.0))),
        # Where the roles take turns the version is published after it.
        ("mode=fixed_lag", ((0, 0.0), (1, 9.0), (1.5, 29.5), (2, 50.0))),
    ],
)
def test_second_updates_count_in_the_version_that_they_were_made_for(mode, sizes):
    for lag, squares in sizes:
        rate = begun(12e-4, 4e-4, overrides=(mode, *(["replay.max_lag=2"] if "lag" in mode else [])))
        rate.made(5e-4, of_new_batch=False)
        rate.made(3e-4, of_new_batch=True)
        rate.for_batch(3, 0.0, drifted(0.6, lag=lag), entropy=4.0)
        assert rate.batches == (squares > 0)
        if squares:
            assert math.exp(rate.stiffness) == pytest.approx(0.6 / (squares**0.5 * 1e-4))


def test_an_update_after_the_last_version_counts_even_without_lag():
    rate = begun(3e-4)
    rate.made(5e-4, of_new_batch=False)
    rate.for_batch(3, 0.0, drifted(0.6, lag=0.5), entropy=4.0)  # half-way between 5^2 and 5^2 + 3^2
    assert math.exp(rate.stiffness) == pytest.approx(0.6 / (29.5**0.5 * 1e-4))


def test_a_lag_beyond_the_versions_that_are_kept_counts_as_that_of_the_oldest():
    rate = begun(1e-4)
    for _ in range(VERSIONS_KEPT + 100):
        rate.made(1e-4, of_new_batch=True)
    assert len(rate.squares_before) == VERSIONS_KEPT
    rate.for_batch(3, 0.0, drifted(0.6, lag=VERSIONS_KEPT + 50), entropy=4.0)
    assert math.exp(rate.stiffness) == pytest.approx(0.6 / (1e-4 * (VERSIONS_KEPT - 1) ** 0.5))


def test_the_rate_is_the_drift_asked_for_over_the_stiffness():
    rate = begun(1e-4)
    # .4 nats at a rate of 1e-4: a stiffness of 4000
    assert rate.for_batch(1, 0.0, drifted(0.4), entropy=4.0) == pytest.approx(USUAL / 4000)
    assert rate.drift(0.0) == pytest.approx(USUAL)
    assert rate.drift(0.75) == pytest.approx(USUAL / 2)  # the rate has fallen to half


def test_responses_may_be_behind_by_as_many_updates_as_move_two_nats():
    rate = begun(1e-4)
    assert rate.most_lag(0, 0.0) == 0.01  # one prompt of a batch, to learn how far an update goes
    assert rate.most_lag(8, 0.0) == math.inf  # nothing has moved in eight steps
    see(rate, 4000.0)
    assert rate.most_lag(1, 0.0) == pytest.approx(2.0 / USUAL)
    assert rate.most_lag(1, 0.75) == pytest.approx(4.0 / USUAL)  # the rate has fallen to half
    assert rate.most_lag(200, 1.0) == math.inf


def test_a_given_rate_leaves_as_much_lag_as_its_updates_allow():
    rate = begun(1e-4, overrides=("train.learning_rate=1e-4",))
    see(rate, 40_000.0)  # an update of 1e-4 moves log_pi by 4 nats
    assert rate.next_drift(1, 0.0) == pytest.approx(4.0)
    assert rate.most_lag(1, 0.0) == pytest.approx(0.5)  # half of a batch may be one update behind
    assert rate.drift(0.0) == 0.0  # the trust region is that of the objective


def test_the_first_update_of_a_run_by_seconds_knows_how_many_there_will_be():
    rate = rate_of("train.max_steps=null", "train.max_seconds=60")
    rate.for_batch(
        0, 0.0, {}, entropy=4.0, now=0.2
    )  # a fifth of the time is gone as the first gradients are there: 5 steps
    assert rate.horizon_factor == 5.0


def test_without_drift_or_updates_nothing_is_learned():
    rate = begun(1e-4)
    for found in ({}, drifted(0.0), drifted(0.4, lag=0.0)):
        assert rate.for_batch(1, 0.0, found, entropy=4.0) == 1e-4
    assert (rate.batches, rate.drift(0.0)) == (0, 0.0)
    assert rate_of().for_batch(1, 0.0, drifted(0.4), entropy=4.0) == START  # a drift of no update


def test_the_stiffness_is_a_mean_of_logs_over_the_batches_so_far_and_then_over_thirty_two():
    rate = begun(1e-4)
    see(rate, 1000.0)
    see(rate, 32_000.0)  # 1 / (1 + 2 / 3) = .6 of the way: 32 ** .6 = 8
    assert math.exp(rate.stiffness) == pytest.approx(8000.0)
    see(rate, 500.0)  # 1 / (1 + 3 / 3) = half of the way: (1 / 16) ** .5
    assert math.exp(rate.stiffness) == pytest.approx(2000.0)
    for _ in range(100):
        see(rate, 2000.0)
    see(rate, 2000.0 * 2**32)  # a 32nd of the way
    assert math.exp(rate.stiffness) == pytest.approx(4000.0)


def test_a_batch_that_drifted_further_than_the_mean_explains_has_a_rate_of_its_own():
    rate = begun(1e-4)
    assert see(rate, 1000.0) == pytest.approx(USUAL / 1000)
    assert see(rate, 32_000.0) == pytest.approx(USUAL / 32_000)  # the mean is 8000
    assert rate.rate == pytest.approx(USUAL / 8000)
    assert see(rate, 4000.0) == rate.rate == pytest.approx(USUAL / 8000 * 2**0.5)  # one that drifted less has none


def test_the_rate_rises_by_at_most_a_factor_of_two_in_a_step():
    rate = begun(1e-6)
    assert [see(rate, 1000.0) for _ in range(3)] == pytest.approx([2e-6, 4e-6, 8e-6])
    assert see(rate, 1e9) < 1e-9  # and falls at once


def test_a_policy_that_is_sure_of_all_its_responses_does_not_raise_the_rate():
    """It hardly drifts whatever the rate, which rose to 1,000 and more."""
    rate = begun(1e-4)
    for _ in range(50):
        assert rate.for_batch(1, 0.0, drifted(1e-6), entropy=1e-3) == pytest.approx(1e-4)
        rate.moved(0.0, new=None, own=1e-6)  # as in mode=sync
    assert rate.rate == 1e-4
    assert rate.for_batch(1, 0.0, drifted(1.0), entropy=1e-3) < 1e-6  # what runs away is held all the same


def test_the_signal_is_the_mean_agreement_and_counts_as_three_hundredths_at_least():
    rate = begun(1e-4)
    see(rate, 1000.0, drift_reward_correlation=0.5)  # .1 + (.5 - .1) / 2
    assert rate.signal == pytest.approx(0.3)
    assert rate.size == pytest.approx(0.4 * 0.3**0.5)  # .2 x sqrt(.3 x 4)
    see(rate, 1000.0, drift_reward_correlation=0.0)  # .3 - .3 / 3
    assert rate.signal == pytest.approx(0.2)
    see(rate, 1000.0, drift_reward_correlation=-0.2)  # .2 - .4 / 4
    assert rate.signal == pytest.approx(0.1)
    assert see(rate, 1000.0) == pytest.approx(USUAL / 1000)  # in bf16 nothing is known of it
    assert rate.signal == pytest.approx(0.1)
    for _ in range(100):
        see(rate, 1000.0, drift_reward_correlation=-0.1)
    assert rate.size == pytest.approx(0.4 * 0.03**0.5)  # nothing but noise: no less than .03
    before = rate.signal
    see(rate, 1000.0, drift_reward_correlation=before + 0.32)  # a mean over 32 batches in the end
    assert rate.signal == pytest.approx(before + 0.01)


def test_below_a_tenth_of_its_height_the_rate_only_falls():
    rate = begun(1e-4)
    see(rate, 1000.0)
    found, stiffness = rate.rate, rate.stiffness
    assert found == pytest.approx(USUAL / 1000)
    # progress .96: (1 - .96) / .5 = .08 of the height. What drifts is too little to measure,
    assert see(rate, 10.0, progress=0.96) == pytest.approx(0.08 * found)
    assert see(rate, 4000.0, progress=0.96) == pytest.approx(0.08 * USUAL / 4000)  # but a runaway is held
    rate.moved(0.96, new=None, own=1e-9)
    assert (rate.rate, rate.stiffness) == (found, stiffness)
    see(rate, 10.0, progress=0.94)  # .12 of it
    assert rate.stiffness < stiffness


@pytest.mark.parametrize("lag", [1.0, 1.6, 3.0])
@pytest.mark.parametrize("second_updates", [False, True])
def test_a_rate_that_is_a_hundred_times_too_low_is_mended_within_a_dozen_steps(lag, second_updates):
    """A policy whose drift is the root of the sum of the squares of the last rates, times a stiffness that asks for 1e-4."""
    wanted, stiffness, rate = 1e-4, USUAL / 1e-4, begun(1e-6)
    squares = [1e-12]  # between one version and the next, the last first
    for step in range(1, 13):
        second = at(rate, step) if second_updates else 0.0
        rate.made(second, of_new_batch=False)
        whole = int(lag)
        since = second**2 + sum(squares[:whole]) + (lag - whole) * sum(squares[whole : whole + 1])
        used = rate.for_batch(step, 0.0, drifted(stiffness * since**0.5, lag=lag), entropy=4.0)
        assert used < 1.0001 * wanted, "no harm is done on the way"
        rate.made(used, of_new_batch=True)
        squares.insert(0, second**2 + used**2)
    assert at(rate, 13) == pytest.approx(wanted, rel=1e-3)


def test_where_the_roles_take_turns_the_update_drift_of_a_batch_by_its_own_update_stands_in_for_its_drift():
    rate = begun(1e-4, overrides=("mode=sync",))
    rate.moved(0.0, new=None, own=0.1)  # by the update of 1e-4: a stiffness of 1000
    assert rate.rate == pytest.approx(min(RISE * 1e-4, USUAL / 1000))
    rate.made(1e-4, of_new_batch=True)
    rate.moved(0.0, new=None, own=3.2)  # 32 times as far: .6 of the way to it, 8000
    assert rate.rate == pytest.approx(USUAL / 8000)
    rate.moved(0.0, new=None, own=0.0)  # nothing was measured
    rate.made(0.0, of_new_batch=True)
    rate.moved(0.0, new=None, own=0.1)  # nothing moved
    assert rate.rate == pytest.approx(USUAL / 8000)
    assert rate.signal == 0.1


def test_without_lag_a_rate_that_is_a_hundred_times_too_low_is_mended_within_a_dozen_steps():
    rate = begun(1e-6, overrides=("mode=sync",))
    for step in range(1, 13):
        used = rate.for_batch(step, 0.0, {}, entropy=4.0)
        rate.made(used, of_new_batch=True)
        rate.moved(0.0, new=None, own=used * USUAL / 1e-4)
    assert at(rate, 13) == pytest.approx(1e-4)


def test_the_rate_is_part_of_a_checkpoint():
    rate = begun(12e-4, 4e-4, 3e-4)
    see(rate, 1000.0, drift_reward_correlation=0.3)
    rate.made(5e-4, of_new_batch=False)
    rate.scale_down(0.5)
    again = rate_of()
    assert again != rate
    again.load_state(rate.state())
    assert again == rate
    found = drifted(0.3, lag=2.5, drift_reward_correlation=0.2)
    assert again.for_batch(4, 0.0, found, entropy=5.0) == rate.for_batch(4, 0.0, found, entropy=5.0)
    again.made(1e-4, of_new_batch=True)
    assert len(again.squares_before) == len(rate.squares_before) + 1  # nothing is shared


def test_after_a_collapse_a_given_rate_is_halved_and_so_is_the_drift_that_auto_aims_at():
    given, auto = rate_of("train.learning_rate=3e-4"), begun(1e-4)
    see(auto, 1000.0)
    for factor in (0.5, 0.25):
        given.scale_down(factor)
        auto.scale_down(factor)
        assert at(given, 7) == pytest.approx(factor * 3e-4)
        assert auto.size == pytest.approx(factor * USUAL)
        assert at(auto, 7) == pytest.approx(factor * USUAL / 1000)  # at once
        assert see(auto, 1000.0) == pytest.approx(factor * USUAL / 1000)  # and from then on
    again = rate_of("train.learning_rate=3e-4")
    again.load_state(given.state())
    assert at(again, 7) == at(given, 7)


@pytest.mark.parametrize(
    ("limits", "step", "progress", "factor"),
    [
        (["train.max_steps=200"], 0, 0.0, 1.0),
        (["train.max_steps=50"], 10, 0.2, 2.0),  # sqrt(200 / 50)
        (["train.max_steps=800"], 0, 0.0, 0.5),
        (["train.max_steps=5"], 0, 0.0, 5.0),  # sqrt(40) = 6.3
        (["train.max_steps=100000"], 0, 0.0, 0.2),
        (["train.max_seconds=60"], 0, 0.0, 1.0),  # not known yet
        (["train.max_seconds=60"], 4, 0.05, 2.0**0.5),  # the fifth step ends a twentieth: 100 steps
        (["train.max_steps=50", "train.max_seconds=60"], 5, 0.05, 2.0),  # the nearer limit
    ],
)
def test_movements_are_longer_in_a_run_of_few_steps_by_the_root(limits, step, progress, factor):
    config = resolved(load_config(None, [*limits, "train.second_update_after=0"]))
    assert LearningRate(config).horizon(step, progress) == pytest.approx(factor)


@pytest.mark.parametrize(
    "setting",
    ["replay.max_replay_ratio=4", "replay.on_policy_probability=0.5", "train.updates_per_batch=2"],
)
def test_responses_that_were_trained_on_before_say_nothing_of_the_signal(setting):
    seen = begun(1e-4, overrides=(setting,))
    see(seen, 1000.0, drift_reward_correlation=0.9)
    assert seen.signal == 0.1
    assert math.isfinite(seen.stiffness)  # how far they drift counts all the same


def test_where_nothing_lags_the_update_drift_of_a_batch_by_its_own_update_is_told_from_that_of_new_responses():
    rate = begun(1e-4, overrides=("mode=sync",))
    rate.moved(0.0, new=0.1, own=0.4)  # by the first update of 1e-4: a stiffness of 1000
    assert (math.exp(rate.stiffness), rate.own_factor) == pytest.approx((1000.0, 4.0))
    rate.made(1e-4, of_new_batch=True)
    rate.moved(0.0, new=None, own=0.4)
    assert math.exp(rate.stiffness) == pytest.approx(1000.0)
