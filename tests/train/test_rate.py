"""The learning rate that follows the movement of the policy."""

import pytest
import torch
from builders import ragged_batch, tiny_llama

from tba.config import TrainConfig, load_config
from tba.launch.defaults import with_objective_defaults
from tba.models.policy import PolicyModel
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.train.collate import Budget
from tba.train.optimizer import LearningRate, MasterAdamW
from tba.train.step import TrainStep


def rate_of(*overrides: str) -> LearningRate:
    settings = ["train.max_steps=200", "train.first_learning_rate=1e-4", *overrides]
    return LearningRate(with_objective_defaults(load_config(None, settings)))


def test_a_given_schedule_is_used_as_it_is():
    rate = rate_of("train.learning_rate=3e-4")
    assert [rate.at(step) for step in (0, 100, 199)] == [3e-4] * 3
    assert not rate.measures(0)


def test_auto_begins_at_a_tenth_of_the_guess_and_falls_to_zero_over_the_second_half():
    rate = rate_of()
    # settle .5 of 200 steps: from step 100 on (200 - step) / 100
    assert [rate.at(step) for step in (0, 100, 150, 199)] == pytest.approx([1e-5, 1e-5, 5e-6, 1e-7])
    assert rate_of("train.settle=0").at(199) == pytest.approx(1e-5)


@pytest.mark.parametrize("wrong_by", [0.1, 1.0, 10.0])
def test_a_wrong_guess_is_mended_within_fifty_steps(wrong_by):
    """A policy whose movement is proportional to the rate: .07 at 1e-4."""
    rate = rate_of(f"train.first_learning_rate={wrong_by * 1e-4}")
    highest = 0.0
    for step in range(50):
        used = rate.at(step)
        highest = max(highest, used)
        rate.follow(step, 0.07 * used / 1e-4)
    assert rate.at(50) == pytest.approx(1e-4, rel=0.1)
    assert highest < 2e-4  # and no harm is done on the way


def test_where_nothing_moves_the_rate_stays_within_bounds():
    rate = rate_of()
    for step in range(90):
        rate.follow(step, 0.0)
    assert rate.rate == pytest.approx(30 * 1e-4)


def test_each_response_trained_four_times_halves_the_movement():
    assert rate_of().wanted == pytest.approx(0.07)
    assert rate_of("replay.max_trained_per_generated=4").wanted == pytest.approx(0.035)


def test_the_rate_is_part_of_a_checkpoint():
    rate = rate_of()
    for step in range(5):
        rate.follow(step, 0.01)
    assert rate.state() == {"rate": rate.at(5)} != rate_of().state()


def test_movement_is_the_mean_change_of_log_pi_in_units_of_the_root_of_the_entropy():
    model = tiny_llama()
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
    want = change.abs().mean() / batch.sum_per_response(before.entropy_N).sqrt().mean()
    assert step.movement(batch, before) == pytest.approx(want.item(), rel=1e-5)
