"""The learning rate that follows the movement of the policy."""

import math

import pytest
import torch
from builders import ragged_batch, tiny_llama

from tba.config import TrainConfig, load_config
from tba.launch.defaults import with_objective_defaults
from tba.models.policy import PolicyModel
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.train.batch import Budget, agreement
from tba.train.optimizer import LearningRate, MasterAdamW
from tba.train.step import MOST_ENTROPY, TrainStep


def rate_of(*overrides: str) -> LearningRate:
    settings = ["train.max_steps=200", "train.first_learning_rate=1e-4", *overrides]
    if not any(override.startswith("train.second_update_after") for override in overrides):
        settings.append("train.second_update_after=0")
    return LearningRate(with_objective_defaults(load_config(None, settings)))


def at(rate: LearningRate, step: int) -> float:
    return rate.at(step, rate.config.progress_at(step))


def measures(rate: LearningRate, step: int) -> bool:
    return rate.measures(step, rate.config.progress_at(step))


def follow(rate: LearningRate, step: int, metrics: dict[str, float]) -> None:
    rate.follow(step, metrics, rate.config.progress_at(step))


def test_a_given_schedule_is_used_as_it_is():
    rate = rate_of("train.learning_rate=3e-4")
    assert [at(rate, step) for step in (0, 100, 199)] == [3e-4] * 3
    assert not measures(rate, 0)


def test_auto_begins_at_a_tenth_of_the_guess_and_falls_to_zero_over_the_second_half():
    rate = rate_of()
    # settle .5 of 200 steps: from step 100 on (200 - step) / 100
    assert [at(rate, step) for step in (0, 100, 150, 199)] == pytest.approx([1e-5, 1e-5, 5e-6, 1e-7])
    assert at(rate_of("train.settle=0"), 199) == pytest.approx(1e-5)


def test_the_rate_of_a_run_by_seconds_falls_with_the_time():
    rate = rate_of("train.max_steps=null", "train.max_seconds=60")
    seconds = (0, 30, 45, 60)
    assert [rate.at(7, rate.config.progress_at(7, used)) for used in seconds] == pytest.approx([1e-5, 1e-5, 5e-6, 0.0])
    # both limits: the nearer one, 150 of 200 steps rather than 10 of 60 seconds
    both = rate_of("train.max_seconds=60")
    assert both.at(150, both.config.progress_at(150, 10.0)) == pytest.approx(5e-6)


@pytest.mark.parametrize("wrong_by", [0.1, 1.0, 10.0])
def test_a_wrong_guess_is_mended_within_fifty_steps(wrong_by):
    """A policy whose movement is proportional to the rate: .1 at 1e-4."""
    rate = rate_of(f"train.first_learning_rate={wrong_by * 1e-4}")
    highest = 0.0
    for step in range(50):
        used = at(rate, step)
        highest = max(highest, used)
        follow(rate, step, {"movement": 0.1 * used / 1e-4})
    assert at(rate, 50) == pytest.approx(1e-4, rel=0.1)
    assert highest < 2e-4  # and no harm is done on the way


def test_where_nothing_moves_the_rate_stays_within_bounds():
    rate = rate_of()
    for step in range(90):
        follow(rate, step, {"movement": 0.0})
    assert rate.rate == pytest.approx(30 * 1e-4)


def test_a_rate_that_is_found_rises_slowly_and_falls_as_fast_as_before():
    rate = rate_of("train.max_steps=2000")
    for step in range(40):
        follow(rate, step, {"movement": 0.1 * at(rate, step) / 1e-4})
    found = rate.rate
    for step in range(40, 80, 4):  # measured after every fourth step; gradients have become a tenth
        follow(rate, step, {"movement": 0.01 * at(rate, step) / 1e-4})
    assert rate.rate == pytest.approx(found * 1.02**10)
    follow(
        rate, 80, {"movement": 10.0}
    )  # one that goes a hundred times too far: (.1 / 10) ** .3 = .25, a third at most
    assert rate.rate == pytest.approx(found * 1.02**10 * 0.67)


def test_a_rate_that_was_sent_down_comes_back_fast_up_to_where_it_was():
    rate = rate_of("train.max_steps=2000")
    for step in range(40):
        follow(rate, step, {"movement": 0.1 * at(rate, step) / 1e-4})
    highest = rate.found
    for step in range(40, 80, 4):  # 5 nats from the data: sqrt(.2 / 5) ** .3 = .62, a third less at most
        follow(rate, step, {"movement": 0.1, "off_policy/kl": 5.0})
    low = rate.rate
    assert low < highest / 4
    for step in range(80, 200):  # near the data again
        follow(rate, step, {"off_policy/kl": 0.0})
    follow(rate, 200, {"movement": 1e-3})  # (.1 / .001) ** .3 = 4: a quarter more at most
    assert rate.rate == pytest.approx(1.25 * low)
    for step in range(204, 300, 4):
        before = rate.rate
        follow(rate, step, {"movement": 1e-3})
        # To where it was and no further, or slowly beyond it.
        assert rate.rate == pytest.approx(min(1.25 * before, max(highest, 1.02 * before)))
    assert rate.rate > highest


def test_each_response_trained_four_times_halves_the_movement():
    assert rate_of().wanted == pytest.approx(0.1)
    assert rate_of("replay.max_trained_per_generated=4").wanted == pytest.approx(0.05)


def test_a_second_update_on_each_batch_divides_the_movement_by_the_root_of_two():
    rate = rate_of("train.second_update_after=3")
    assert rate.wanted == pytest.approx(0.1 / 2**0.5)
    follow(rate, 0, {"off_policy/agreement": 0.43})  # the batch of a step is new all the same
    assert rate.wanted == pytest.approx(0.11 / 2**0.5)


def test_the_movement_follows_the_share_of_signal_in_recent_updates():
    rate = rate_of()
    follow(rate, 0, {"off_policy/agreement": 0.43})  # .1 + (.43 - .1) / 33 = .11
    assert rate.wanted == pytest.approx(0.11)
    for step in range(1, 500):
        follow(rate, step, {"off_policy/agreement": -0.05})
    assert rate.wanted == pytest.approx(0.07)  # nothing but noise: .7 of the movement
    for step in range(500, 1000):
        follow(rate, step, {"off_policy/agreement": 0.8})
    assert rate.wanted == pytest.approx(0.15)  # half more at most


@pytest.mark.parametrize(
    "setting", ["replay.max_trained_per_generated=4", "mode=sync", "replay.on_policy_probability=0.5"]
)
def test_responses_that_were_trained_on_before_are_no_test_of_updates(setting):
    rate = rate_of(setting)
    before = rate.wanted
    follow(rate, 0, {"off_policy/agreement": 0.9})
    assert rate.wanted == before


def test_the_rate_falls_until_the_policy_stays_near_the_one_that_generated():
    rate = rate_of()
    for step in range(90):
        moved = 0.1 * at(rate, step) / 1e-4
        follow(rate, step, {"movement": moved, "off_policy/kl": 80.0 * moved**2})  # .8 nats at the movement asked for
    assert 80.0 * (0.1 * at(rate, 90) / 1e-4) ** 2 == pytest.approx(0.2, rel=0.1)
    near = rate_of()
    for step in range(90):
        moved = 0.1 * at(near, step) / 1e-4
        follow(near, step, {"movement": moved, "off_policy/kl": 10.0 * moved**2})
    assert at(near, 90) == pytest.approx(1e-4, rel=0.1)


def test_a_policy_far_from_its_data_takes_smaller_steps_at_once_and_full_ones_when_it_is_back():
    rate = rate_of()
    for step in range(90):
        follow(rate, step, {"movement": 0.1 * at(rate, step) / 1e-4})
    usual = at(rate, 90)
    follow(rate, 90, {"off_policy/kl": 0.4})  # beyond what the mean may be, but single batches are
    assert at(rate, 91) == usual
    follow(rate, 91, {"off_policy/kl": 1.6})
    assert at(rate, 92) == pytest.approx(usual / 4)
    again = rate_of()
    again.load_state(rate.state())
    assert at(again, 92) == at(rate, 92)
    follow(rate, 92, {"movement": 0.025, "off_policy/kl": 0.1})  # as far as a quarter of the rate should go
    # The mean KL went from 0 over .05 and .244 to .226 (an eighth of the way each): sqrt(.2 / .226) ** .3 = .982.
    assert at(rate, 93) == pytest.approx(0.982 * usual, rel=1e-3)


def test_agreement_is_the_correlation_of_rewards_and_drift_within_prompts():
    # Prompt 0: rewards 1, 0 -> +-.5, drift .3, .1 -> +-.1. Prompt 1: rewards 0, 1 -> -+.5, drift 2.2, 2.0 -> +-.1.
    # Prompt 2 has one response that is known: it is compared with nothing.
    reward = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    drift = torch.tensor([[0.3, 0.1], [2.2, 2.0], [0.7, torch.nan]])
    known = torch.isfinite(drift)
    assert agreement(reward, drift, known) == pytest.approx(0.0, abs=1e-6)
    assert agreement(reward[:1], drift[:1], known[:1]) == pytest.approx(1.0)
    assert agreement(reward[1:2], drift[1:2], known[1:2]) == pytest.approx(-1.0)
    # Prompts 0 and 1 with twice the drift in prompt 0: (.5 x .2 x 2 - .5 x .1 x 2) / sqrt(4 x .25 x (2 x .04 + 2 x .01))
    wider = torch.tensor([[0.5, 0.1], [2.2, 2.0]])
    assert agreement(reward[:2], wider, known[:2]) == pytest.approx(0.1 / 0.1**0.5)
    assert agreement(torch.ones(2, 2), wider, known[:2]) is None


def test_the_rate_is_part_of_a_checkpoint():
    rate = rate_of()
    for step in range(5):
        follow(rate, step, {"movement": 0.01, "off_policy/agreement": 0.2})
    expected = {"rate": at(rate, 5), "found": at(rate, 5), "factor": 1.0, "agreement": rate.agreement, "kl": 0.0}
    expected |= {"caution": 1.0}
    assert rate.state() == expected != rate_of().state()
    assert rate.agreement > rate_of().agreement
    again = rate_of()
    again.load_state(rate.state())
    assert again == rate


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, MOST_ENTROPY), (torch.bfloat16, math.inf)])
def test_movement_is_the_mean_change_of_log_pi_in_units_of_the_root_of_the_entropy_up_to_ten_nats(dtype, most):
    """In bf16 of all of it."""
    model = tiny_llama().to(dtype)
    policy = PolicyModel(model)
    optimizer = MasterAdamW(model.parameters(), TrainConfig())
    step = TrainStep(policy, TrajectoryBalance(), optimizer, budget=Budget(max_tokens=60), temperature=1.0)
    batch = ragged_batch(3, 4)
    before = step.gradients(batch, beta=0.1).outputs
    optimizer.drop_gradients()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    after = step.gradients(batch, beta=0.1).outputs
    change = batch.sum_per_response(after.log_pi_N) - batch.sum_per_response(before.log_pi_N)
    entropy = batch.sum_per_response(before.entropy_N)
    assert entropy.max() > MOST_ENTROPY > entropy.min()
    want = change.abs().mean() / entropy.clamp(max=most).sqrt().mean()
    assert step.movement(batch, before) == pytest.approx(want.item(), rel=1e-5)


def test_a_bf16_policy_is_measured_four_steps_along_the_line_and_put_back():
    weight = torch.nn.Parameter(torch.linspace(-2.0, 2.0, 64).bfloat16())
    optimizer = MasterAdamW([weight], TrainConfig(weight_decay=0.1, max_grad_norm=None))
    (master,) = optimizer.masters
    for sign in (1.0, -1.0, -1.0):
        before = master.detach().clone()
        weight.grad = (sign * torch.linspace(0.1, 1.0, 64)).bfloat16()
        optimizer.accumulate()
        optimizer.step(0.1)
    moved = master.detach() - before
    with optimizer.extrapolated(4.0) as factor:
        assert factor == 4.0
        assert torch.allclose(weight.float(), before + 4.0 * moved, atol=0.02)  # to the rounding of bf16
    assert torch.equal(weight, master.bfloat16())


def test_an_fp32_policy_is_measured_where_it_is():
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = MasterAdamW([weight], TrainConfig())
    weight.grad = torch.ones(4)
    optimizer.step(0.1)
    after = weight.detach().clone()
    with optimizer.extrapolated(4.0) as factor:
        assert factor == 1.0
        assert torch.equal(weight, after)


def test_the_rounding_of_bf16_is_no_sign_of_agreement():
    rate = LearningRate(rate_of().config, exact_drift=False)
    follow(rate, 0, {"off_policy/agreement": -0.9})
    assert rate.agreement == rate_of().agreement


def test_after_a_collapse_a_given_rate_is_halved_and_so_is_the_movement_of_auto():
    given, auto = rate_of("train.learning_rate=3e-4"), rate_of("train.settle=0")
    wanted, before = auto.wanted, at(auto, 0)
    for factor in (0.5, 0.25):
        given.soften(factor)
        auto.soften(factor)
        assert at(given, 7) == pytest.approx(factor * 3e-4)
        assert auto.wanted == pytest.approx(factor * wanted)
        assert at(auto, 7) == pytest.approx(factor * before)
    again = rate_of("train.learning_rate=3e-4")
    again.load_state(given.state())
    assert at(again, 7) == at(given, 7)
    again.load_state({"rate": 1e-4, "agreement": 0.1})  # of an older version of tba
    assert at(again, 7) == 3e-4
