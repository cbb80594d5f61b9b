"""Second updates on earlier batches, against the same updates written out."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from builders import ragged_batch, tiny_llama
from resolved import resolved

from tba.config import Config, ConfigError, TrainConfig, dump_config, load_config
from tba.models.policy import PolicyModel
from tba.objectives.objective import Coupling, Needs, Objective, mean_over_responses, penalised_rewards
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.observe.run_folder import RunFolder
from tba.run.resume import resumed_config
from tba.trainer.batch import Budget
from tba.trainer.learning_rate import LearningRate
from tba.trainer.optimizer import MasterAdamW
from tba.trainer.reference import Beta
from tba.trainer.step import NonFiniteLoss, StepResult, TrainStep
from tba.trainer.updates import SpareTime, Updates
from tba.types import Batch, Forward, Loss, Totals


def make_step(**settings) -> TrainStep:
    policy = PolicyModel(tiny_llama())
    optimizer = MasterAdamW(policy.model.parameters(), TrainConfig(**settings))
    return TrainStep(policy, TrajectoryBalance(), optimizer, budget=Budget(max_tokens=200), temperature=1.0)


def config_of(*overrides: str) -> Config:
    return resolved(load_config(None, ["model.device=cpu", *overrides]))


def make_updates(folder, step: TrainStep, *overrides: str) -> Updates:
    config = config_of("train.learning_rate=1e-3", "objective.beta=0.1", *overrides)
    return Updates(config, step, LearningRate(config), Beta(config), folder)


def weights(step: TrainStep) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in step.policy.model.parameters()])


def own_batch(seed: int, *, version: int = 0) -> Batch:
    """A batch that the start model has generated, said to be of this version."""
    step, batch = make_step(), ragged_batch(seed=seed)
    log_pi_N = step.gradients(batch, beta=0.1).outputs.log_pi_N
    version_PK = torch.full_like(batch.version_PK, version)
    return replace(batch, policy_N=log_pi_N, behaviour_N=log_pi_N, version_PK=version_PK)


def test_a_batch_is_trained_a_second_time_after_so_many_steps(tmp_path):
    batches = [own_batch(seed) for seed in range(5)]
    expected, made = make_step(), make_step()
    for index in (0, 1, 0, 2, 1, 3, 2, 4):  # two steps later, before the next new batch
        expected(batches[index], beta=0.1, learning_rate=1e-3)
    updates = make_updates(tmp_path, made, "train.second_update_after=2")
    trained = []
    for step, batch in enumerate(batches):
        trained.append(updates.second(step=step, progress=0.0))
        updates.first(batch, step=step, progress=0.0)
    assert trained == [0, 0, 12, 12, 12]
    assert torch.equal(weights(made), weights(expected))


def test_a_second_update_is_left_out_where_the_policy_has_moved_two_nats_since(tmp_path):
    updates = make_updates(tmp_path, make_step(), "train.second_update_after=2")
    trained = []
    for step in range(6):
        updates.rate.stiffness = math.log(
            (0.9 if step < 4 else 1.1) / 1e-3
        )  # nats of an update at the given rate of 1e-3
        trained.append(updates.second(step=step, progress=0.0))
        updates.first(own_batch(step), step=step, progress=0.0)
    assert trained == [0, 0, 12, 12, 0, 0]


def make_auto(folder, step: TrainStep, *overrides: str) -> Updates:
    """With the defaults but for these."""
    config = config_of("train.max_steps=200", *overrides)
    return Updates(config, step, LearningRate(config), Beta(config), folder)


def moved_by(updates: Updates, rewards: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, list[float]]:
    """How far four steps on stale batches, and second updates, have moved the weights, and the rates they had."""
    start, rates = weights(updates.train_step), []
    for step in range(5):
        batch = own_batch(step)
        updates.second(step=step, progress=0.0)
        batch = replace(batch, reward_PK=rewards(batch.reward_PK), rewards={"score": rewards(batch.reward_PK)})
        rates.append(updates.first(batch, step=step, progress=0.0).metrics["learning_rate"])
    return weights(updates.train_step) - start, rates


@pytest.mark.parametrize("auto", [True, False])
@pytest.mark.parametrize(
    "rewards",
    [
        pytest.param(lambda reward_PK: 0.01 * reward_PK, id="x .01"),
        pytest.param(lambda reward_PK: 1e-6 * reward_PK, id="x 1e-6"),
        pytest.param(lambda reward_PK: 100.0 * reward_PK, id="x 100"),
        pytest.param(lambda reward_PK: 1000.0 + reward_PK, id="+ 1000"),
        pytest.param(lambda reward_PK: 2.0 * reward_PK - 1.0, id="-1 and 1"),
    ],
)
def test_updates_do_not_depend_on_the_scale_of_rewards(tmp_path, rewards, auto):
    """At the defaults, up to rounding: of 1000 + r that of the sixth decimal, divided by a beta of .01."""
    rate = [] if auto else ["train.learning_rate=1e-3", "train.second_update_after=3"]
    want, usual = moved_by(make_auto(tmp_path, make_step(adam_epsilon=1e-3), *rate), lambda reward_PK: reward_PK)
    got, rates = moved_by(make_auto(tmp_path, make_step(adam_epsilon=1e-3), *rate), rewards)
    assert rates == pytest.approx(usual, rel=0.01)
    assert (got - want).norm() < 0.01 * want.norm()


def test_at_a_beta_that_is_given_rewards_stay_as_they_are(tmp_path):
    want, _ = moved_by(make_auto(tmp_path, make_step(), "objective.beta=0.01"), lambda reward_PK: reward_PK)
    other = make_auto(tmp_path, make_step(), "objective.beta=0.01")
    got, _ = moved_by(other, lambda reward_PK: 0.01 * reward_PK)
    assert other.reward_unit == 1.0
    assert (got - want).norm() > 0.1 * want.norm()


def test_rewards_are_divided_by_the_unit_that_is_given(tmp_path):
    """(r / 4) / beta: with rewards of 4 and 0 the target is that of 1 and 0."""
    settings = ("objective.beta=0.01", "train.learning_rate=1e-3")
    want, _ = moved_by(make_auto(tmp_path, make_step(), *settings), lambda reward_PK: reward_PK)
    four = make_auto(tmp_path, make_step(), *settings, "objective.reward_unit=4")
    got, _ = moved_by(four, lambda reward_PK: 4.0 * reward_PK)
    assert four.reward_unit == 4.0
    assert torch.equal(got, want)


def test_the_unit_of_rewards_is_twice_their_largest_spread_so_far_and_part_of_a_checkpoint(tmp_path):
    updates, batch = make_auto(tmp_path, make_step()), own_batch(0)

    def see(*rewards: float) -> float:
        reward_PK = torch.tensor(rewards).repeat(3, 1)
        updates.first(replace(batch, reward_PK=reward_PK), step=3, progress=0.0)
        return updates.reward_unit

    assert see(3.0, 3.0, 3.0, 3.0) == 1.0  # nothing is known yet
    assert see(0.0, 0.1, 0.1, 0.0) == pytest.approx(0.1)
    assert see(0.0, 4.0, 4.0, 0.0) == pytest.approx(4.0)
    assert see(0.0, 0.1, 0.1, 0.0) == pytest.approx(4.0)  # a policy that has learned them is not pushed harder
    again = make_auto(tmp_path, make_step())
    again.load_state(updates.state())
    assert again.reward_unit == updates.reward_unit
    updates = again
    assert see(0.0, 0.1, 0.1, 0.0) == pytest.approx(4.0)
    assert see(0.0, 8.0, 8.0, 0.0) == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("overrides", "unit"),
    [
        ([], "spread"),
        (["objective.beta=0.01"], 1.0),
        (["objective.beta=0.01", "objective.reward_unit=spread"], "spread"),
        (["objective.reward_unit=2.5"], 2.5),
        (["objective.name=tb_learned_z"], 1.0),  # its log Z would have to follow the unit
        (["objective.name=grpo"], 1.0),
        (["objective.name=kimi"], 1.0),
    ],
)
def test_rewards_have_a_unit_of_their_own_where_beta_is_unset(overrides, unit):
    filled = config_of(*overrides)
    assert filled.objective.reward_unit == unit
    assert resolved(filled) == filled


def unseen_update_drift(updates: Updates, batch: Batch, result: StepResult) -> float:
    """Of the responses that the first update of a batch of one to three prompts leaves out: every fourth."""
    (num_prompts, size), step = batch.shape, updates.train_step
    left_out = [p * size + k for p in range(num_prompts) for k in range(3, size, 4)]
    return step.update_drift(batch, result.outputs, left_out)


def test_the_first_update_of_auto_moves_responses_that_it_leaves_out_by_as_many_nats_as_it_should(tmp_path):
    step, batch = make_step(), own_batch(0)
    updates = make_auto(tmp_path, step)
    result = updates.first(batch, step=0, progress=0.0)
    wanted = 0.18 * (0.1 * min(10.0, updates.rate.entropy)) ** 0.5
    assert unseen_update_drift(updates, batch, result) == pytest.approx(wanted, rel=0.25)
    assert updates.rate.squares == pytest.approx(result.metrics["learning_rate"] ** 2)
    # The next update's drift is known from it.
    assert updates.rate.drift(0.0) == pytest.approx(wanted, rel=0.25)
    assert "update_drift" not in result.metrics


def test_a_batch_without_weight_is_no_update_and_the_first_that_has_any_is_the_first(tmp_path):
    updates, batch = make_auto(tmp_path, make_step()), own_batch(0)
    before = weights(updates.train_step)
    empty = replace(batch, weight_PK=torch.zeros_like(batch.weight_PK), totals=Totals(prompts=0, responses=0, tokens=0))
    updates.first(empty, step=0, progress=0.0)
    assert torch.equal(weights(updates.train_step), before)
    assert (updates.rate.squares, len(updates.rate.squares_before)) == (0.0, 2)  # a version without an update
    result = updates.first(own_batch(1), step=1, progress=0.0)
    wanted = 0.18 * (0.1 * min(10.0, updates.rate.entropy)) ** 0.5
    assert unseen_update_drift(updates, own_batch(1), result) == pytest.approx(wanted, rel=0.25)


def test_nothing_moves_before_rewards_differ_and_the_first_batch_in_which_they_do_is_the_first(tmp_path):
    """The gradient of equal rewards is rounding noise, which a stretched update made a rate of .8 of."""
    updates, batch = make_auto(tmp_path, make_step()), own_batch(0)
    before = weights(updates.train_step)
    for step in range(6):
        equal = replace(batch, reward_PK=torch.ones_like(batch.reward_PK))
        assert updates.second(step=step, progress=0.0) == 0
        assert updates.first(equal, step=step, progress=0.0).metrics["learning_rate"] == 0.0
    assert torch.equal(weights(updates.train_step), before)
    result = updates.first(own_batch(1), step=6, progress=0.0)
    wanted = 0.18 * (0.1 * min(10.0, updates.rate.entropy)) ** 0.5
    assert unseen_update_drift(updates, own_batch(1), result) == pytest.approx(wanted, rel=0.25)


def test_updates_on_equal_rewards_do_not_raise_the_rate(tmp_path):
    """They hardly move the policy. A rate that made up for that reached 4 on one-token answers, then the policy was gone."""
    updates = make_auto(tmp_path, make_step(), "train.second_update_after=0")
    updates.first(own_batch(0), step=0, progress=0.0)
    equal = replace(own_batch(1), reward_PK=torch.ones_like(own_batch(1).reward_PK))
    first, batches = updates.first(equal, step=1, progress=0.0).metrics["learning_rate"], updates.rate.batches
    for step in range(2, 8):
        late = replace(equal, version_PK=torch.full_like(equal.version_PK, step - 1))
        assert updates.first(late, step=step, progress=0.0).metrics["learning_rate"] == first
    assert updates.rate.batches == batches, "nothing was learned of the rate"


class ReturnsAlone(Objective):
    """-mean R log pi: no response is compared with another."""

    default_coupling: ClassVar[Coupling] = "response"
    needs: ClassVar[Needs] = Needs(reference=True)
    default_beta: ClassVar[float] = 0.0

    def __call__(self, batch: Batch, forward: Forward, *, beta: float) -> Loss:
        value_PK = -penalised_rewards(batch, beta=beta) * batch.sum_per_response(forward.log_pi_N)
        return Loss(value=mean_over_responses(value_PK, batch), metrics={})


def test_an_objective_without_groups_learns_from_equal_rewards(tmp_path):
    config = config_of("objective.name=reinforce", "train.second_update_after=0")
    updates = Updates(config, make_step(), LearningRate(config), Beta(config), tmp_path)
    updates.train_step.objective = ReturnsAlone()
    equal = replace(own_batch(0), reward_PK=torch.ones_like(own_batch(0).reward_PK))
    assert updates.first(equal, step=0, progress=0.0).metrics["learning_rate"] > 1e-5


def test_a_gradient_of_nothing_is_not_stretched(tmp_path):
    config = config_of("objective.name=reinforce", "objective.beta=0")
    updates = Updates(config, make_step(), LearningRate(config), Beta(config), tmp_path)
    updates.train_step.objective = ReturnsAlone()
    nothing = replace(own_batch(0), reward_PK=torch.zeros_like(own_batch(0).reward_PK))
    assert updates.first(nothing, step=0, progress=0.0).metrics["learning_rate"] == 1e-6


def test_the_rate_of_auto_follows_the_drift_of_late_batches(tmp_path):
    """Its own update comes after: the drift that a batch shows is of the updates before it."""
    step = make_step()
    updates = make_auto(tmp_path, step, "train.second_update_after=0")
    used = updates.first(own_batch(0), step=0, progress=0.0).metrics["learning_rate"]
    first = updates.rate.stiffness
    late = own_batch(1)
    metrics = updates.first(late, step=1, progress=0.0).metrics
    assert metrics["off_policy/drift_lag"] == 1.0
    seen = math.log(metrics["off_policy/drift"] / used)
    assert updates.rate.stiffness == pytest.approx(0.4 * first + 0.6 * seen, rel=1e-6)  # weight 1 / (1 + 2 / 3)
    assert metrics["learning_rate"] == pytest.approx(min(2.0 * used, updates.rate.rate))
    assert metrics["off_policy/signal"] == updates.rate.signal
    assert "update_drift" not in metrics


def test_where_the_roles_take_turns_without_lag_the_update_drift_of_each_batch_is_measured(tmp_path):
    step = make_step()
    updates = make_auto(tmp_path, step, "mode=sync")
    batch = own_batch(0)
    result = updates.first(batch, step=0, progress=0.0)
    assert "update_drift" not in result.metrics
    assert updates.rate.batches == 1
    new, own = unseen_update_drift(updates, batch, result), step.update_drift(batch, result.outputs)
    # As near as the stretched update is to its aim.
    assert updates.rate.own_factor == pytest.approx(own / new, rel=0.25)
    assert math.exp(updates.rate.stiffness) == pytest.approx(new / result.metrics["learning_rate"], rel=0.25)
    lagged = make_auto(tmp_path, make_step(), "mode=fixed_lag", "replay.max_lag=1")
    lagged.first(own_batch(0), step=0, progress=0.0)
    lagged.first(own_batch(1), step=1, progress=0.0)
    assert lagged.rate.batches == 2  # of the first, which does not lag, and of the second by its drift


def test_without_second_updates_no_batch_is_kept(tmp_path):
    updates = make_updates(tmp_path, make_step(), "train.second_update_after=0")
    for step in range(3):
        assert updates.second(step=step, progress=0.0) == 0
        updates.first(ragged_batch(seed=step), step=step, progress=0.0)
    assert not updates.trained_once


def test_what_is_forgotten_is_not_trained_again(tmp_path):
    updates = make_updates(tmp_path, make_step(), "train.second_update_after=1")
    updates.first(ragged_batch(seed=0), step=0, progress=0.0)
    updates.forget()
    assert updates.second(step=1, progress=0.0) == 0


def test_a_second_update_that_is_not_finite_saves_its_batch(tmp_path):
    step = make_step()
    updates = make_updates(tmp_path, step, "train.second_update_after=1")
    updates.first(ragged_batch(seed=0), step=0, progress=0.0)
    with torch.no_grad():
        next(step.policy.model.parameters()).fill_(torch.nan)
    with pytest.raises(NonFiniteLoss, match="the second update before step 1 stopped before the optimizer moved"):
        updates.second(step=1, progress=0.0)
    assert (tmp_path / "failed-batch-step-1.safetensors").is_file()


def test_a_second_update_that_is_refused_leaves_a_step_unfinished_that_had_moved(tmp_path):
    """Where the roles take turns it comes in the middle of a step, whose weights must not be saved."""
    step = make_step()
    updates = make_updates(tmp_path, step, "train.second_update_after=1")
    updates.first(ragged_batch(seed=0), step=0, progress=0.0)
    (spoilt,) = updates.trained_once
    spoilt.reward_PK[0, 0] = torch.nan
    with pytest.raises(NonFiniteLoss):
        updates.second(step=1, progress=0.0)
    assert step.is_finite
    assert step.moved
    step.moved = False  # as after a whole step: before the next one nothing is lost
    updates.trained_once.append(spoilt)
    with pytest.raises(NonFiniteLoss):
        updates.second(step=1, progress=0.0)
    assert not step.moved


@pytest.mark.parametrize(("after", "kept"), [(3, [0, 1, 2]), (5, [0, 1, 2]), (2, [1, 2]), (0, [])])
def test_a_run_goes_on_with_the_batches_that_its_setting_asks_for(tmp_path, after, kept):
    batches = [ragged_batch(seed=seed) for seed in range(4)]
    saved = make_updates(tmp_path, make_step(), "train.second_update_after=3")
    for index in range(3):
        saved.first(batches[index], step=index, progress=0.0)
    resumed = make_updates(tmp_path, make_step(), f"train.second_update_after={after}")
    resumed.load_state(saved.state())
    assert [batch.token_ids_N.tolist() for batch in resumed.trained_once] == [
        batches[index].token_ids_N.tolist() for index in kept
    ]
    # Where the roles take turns the last step makes no second update: a run that goes on from there, for longer, has one too
    # many, and leaves it out.
    if after == 3:
        resumed.first(batches[3], step=3, progress=0.0)
        assert resumed.second(step=4, progress=0.0) == 12
        assert len(resumed.trained_once) == 2


@pytest.mark.parametrize(
    ("overrides", "after"),
    [
        ([], 3),
        (["objective.trust_region=none"], 0),
        (["objective.trust_region=taper"], 0),  # pushes up are not bounded
        (["objective.trust_region=token"], 3),
        (["objective.name=grpo"], 0),
        (["mode=sync"], 3),
        (["mode=fixed_lag", "replay.max_lag=2"], 3),
        (["model.dtype=bfloat16"], 0),
        (["train.learning_rate=1e-4"], 0),
        (["train.updates_per_batch=2"], 0),
        (["replay.max_replay_ratio=1"], 0),
        (["replay.max_replay_ratio=2"], 0),
        (["replay.on_policy_probability=0.5"], 0),
        (["replay.imports=[old.jsonl]"], 0),
        (["search.explore.reference_share=0.25"], 0),
        (["replay.max_lag=0"], 0),
        (["replay.max_lag=8"], 0),
        (["reference.reset_every=10"], 0),
        (["runtime.kind=ray"], 3),  # the settings of this test name a device
        (["objective.name=grpo", "train.second_update_after=5"], 5),
    ],
)
def test_second_updates_are_made_where_an_objective_bounds_stale_pushes_and_the_distance_can_be_seen(overrides, after):
    filled = config_of(*overrides)
    assert filled.train.second_update_after == after
    assert resolved(filled) == filled


def test_on_ray_nobody_here_knows_what_the_trainers_node_computes_in():
    assert resolved(load_config(None, ["runtime.kind=ray"])).train.second_update_after == 0
    known = resolved(load_config(None, ["runtime.kind=ray", "model.dtype=float32"]))
    assert known.train.second_update_after == 3


def test_a_batch_without_any_weight_is_not_trained_again(tmp_path):
    updates = make_updates(tmp_path, make_step(), "train.second_update_after=1")
    batch = ragged_batch(seed=0)
    empty = replace(batch, weight_PK=torch.zeros_like(batch.weight_PK), totals=Totals(prompts=0, responses=0, tokens=0))
    updates.first(empty, step=0, progress=0.0)
    assert updates.second(step=1, progress=0.0) == 0


def test_a_batch_cannot_be_trained_again_at_once_and_later():
    with pytest.raises(ConfigError, match=r"train.second_update_after=3 contradicts train.updates_per_batch=2"):
        load_config(None, ["train.second_update_after=3", "train.updates_per_batch=2"])


def test_a_run_that_resumes_has_the_second_updates_it_was_started_with(tmp_path):
    config = load_config(None, ["model.device=cpu", f"output={tmp_path}", "name=run"])
    folder = RunFolder(config.run_folder)
    folder.path.mkdir()
    started = resolved(config)
    folder.config.write_text(dump_config(started))
    assert started.train.second_update_after == 3
    assert resumed_config(config, folder) == started
    on_gpu = config.model_copy(update={"model": config.model.model_copy(update={"device": "cuda"})})
    assert resumed_config(on_gpu, folder).train.second_update_after == 3


def spare_time(*waited: float) -> SpareTime:
    """After waits before updates of two seconds each."""
    spare = SpareTime(step_seconds=2.0)
    for seconds in waited:
        spare.add(seconds)
    return spare


@pytest.mark.parametrize(
    ("waited", "enough"),
    [
        ([], False),  # nothing is known yet
        ([0.21], True),  # more than a tenth of an update
        ([0.19], False),
        ([0.21, *[0.0] * 7], True),
        ([0.21, *[0.0] * 8], False),  # the last eight came in time
        ([0.0] * 9, False),
    ],
)
def test_second_updates_are_made_while_one_of_the_last_eight_batches_was_late(waited, enough):
    assert spare_time(*waited).is_enough is enough
