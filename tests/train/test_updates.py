"""Second updates on earlier batches, against the same updates written out."""

from dataclasses import replace

import pytest
import torch
from builders import ragged_batch, tiny_llama

from tba.config import Config, ConfigError, TrainConfig, dump_config, load_config
from tba.launch.defaults import with_objective_defaults
from tba.launch.resume import resumed_config, with_stored_defaults
from tba.models.policy import PolicyModel
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.observe.files import RunFolder
from tba.train.batch import Budget
from tba.train.optimizer import LearningRate, MasterAdamW
from tba.train.reference import Beta
from tba.train.step import NonFiniteLoss, TrainStep
from tba.train.updates import Updates
from tba.types import Totals


def make_step() -> TrainStep:
    policy = PolicyModel(tiny_llama())
    optimizer = MasterAdamW(policy.model.parameters(), TrainConfig())
    return TrainStep(policy, TrajectoryBalance(), optimizer, budget=Budget(max_tokens=200), temperature=1.0)


def config_of(*overrides: str) -> Config:
    return with_objective_defaults(load_config(None, ["model.device=cpu", *overrides]))


def make_updates(folder, step: TrainStep, *overrides: str) -> Updates:
    config = config_of("train.learning_rate=1e-3", "objective.beta=0.1", *overrides)
    return Updates(config, step, LearningRate(config), Beta(config), folder)


def weights(step: TrainStep) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in step.policy.model.parameters()])


def test_a_batch_is_trained_a_second_time_after_so_many_steps(tmp_path):
    batches = [ragged_batch(seed=seed) for seed in range(5)]
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
        (["objective.off_policy=exact"], 0),
        (["objective.off_policy=taper"], 0),  # pushes up are not bounded
        (["objective.off_policy=token"], 3),
        (["objective.name=grpo"], 0),
        (["mode=sync"], 3),
        (["mode=fixed_lag", "lag_steps=2"], 3),
        (["model.dtype=bfloat16"], 0),
        (["train.learning_rate=1e-4"], 0),
        (["train.updates_per_batch=2"], 0),
        (["replay.max_trained_per_generated=1"], 0),
        (["replay.max_trained_per_generated=2"], 0),
        (["replay.on_policy_probability=0.5"], 0),
        (["replay.imports=[old.jsonl]"], 0),
        (["search.explore.reference_share=0.25"], 0),
        (["replay.lag=pace", "replay.max_lag=0"], 0),
        (["replay.lag=drop"], 0),
        (["reference.reset_every=10"], 0),
        (["runtime.kind=ray"], 3),  # the settings of this test name a device
        (["objective.name=grpo", "train.second_update_after=5"], 5),
    ],
)
def test_second_updates_are_made_where_an_objective_bounds_stale_pushes_and_the_distance_can_be_seen(overrides, after):
    filled = config_of(*overrides)
    assert filled.train.second_update_after == after
    assert with_objective_defaults(filled) == filled


def test_on_ray_nobody_here_knows_what_the_trainers_node_computes_in():
    assert with_objective_defaults(load_config(None, ["runtime.kind=ray"])).train.second_update_after == 0
    known = with_objective_defaults(load_config(None, ["runtime.kind=ray", "model.dtype=float32"]))
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
    config = load_config(None, ["model.device=cpu", f"output={tmp_path}", "name=run", "train.first_learning_rate=1e-4"])
    folder = RunFolder(config.run_folder)
    folder.path.mkdir()
    started = with_objective_defaults(config)
    folder.config.write_text(dump_config(started))
    resumed = with_objective_defaults(with_stored_defaults(config))
    assert resumed.train.second_update_after == 3
    assert resumed_config(resumed, folder) == started
    # A version that did not know them has stored none.
    lines = [line for line in dump_config(started).splitlines() if "second_update_after" not in line]
    folder.config.write_text("\n".join(lines))
    resumed = with_objective_defaults(with_stored_defaults(config))
    assert resumed.train.second_update_after == 0
    assert resumed_config(resumed, folder).train.second_update_after == 0
