"""Asynchrony and references as settings: fixed lag, several updates per batch, reference resets, Monte-Carlo values."""

import json

import numpy as np
import pytest
import torch
from problem import make_config, scores_of
from transformers import AutoModelForCausalLM

from tba.config import load_config
from tba.observe.run_folder import RunFolder
from tba.run import train

pytestmark = pytest.mark.slow


def steps_of(config) -> list[dict]:
    records = [json.loads(line) for line in RunFolder(config.run_folder).metrics.read_text().splitlines()]
    return [record for record in records if "loss" in record]


def test_a_fixed_lag_is_kept_exactly_once_there_are_enough_versions(folder):
    config = make_config(folder, "mode=fixed_lag", "replay.max_lag=3", "name=lag", "train.max_steps=7")
    summary = train(config)
    for record in steps_of(config):
        trained = record["step"] - 1
        assert record["off_policy/lag_mean"] == record["off_policy/lag_max"] == min(trained, 3)
    assert summary["lag"]["max"] == 3
    assert scores_of(config) == summary["final"], "evaluated with current, not with old weights"


def test_stale_responses_are_those_of_the_old_weights(folder):
    """off_policy/kl compares with the policy that generated: 0 at lag 0 (sync), not 0 once the weights have moved."""
    stale = make_config(folder, "mode=fixed_lag", "replay.max_lag=4", "name=stale")
    fresh = make_config(folder, "mode=sync", "name=fresh")
    for config in (stale, fresh):
        train(config)
    assert all(abs(record["off_policy/kl"]) < 1e-4 for record in steps_of(fresh))
    assert [abs(record["off_policy/kl"]) > 1e-3 for record in steps_of(stale)] == [False, *[True] * 5]


def test_where_the_roles_take_turns_second_updates_come_before_the_next_responses_are_generated(folder):
    config = make_config(folder, "mode=sync", "name=again", "train.second_update_after=2")
    train(config)
    records = steps_of(config)
    assert [record["buffer/trained_again"] / 16 for record in records] == [0, 1, 2, 3, 4, 4]  # the last one is the end
    assert all(abs(record["off_policy/kl"]) < 1e-4 for record in records)


def test_several_updates_train_on_one_batch(folder):
    config = make_config(folder, "mode=sync", "name=updates", "objective.name=ppo", "train.updates_per_batch=3")
    summary = train(config)
    records = steps_of(config)
    assert [record["off_policy/lag_mean"] for record in records] == [0, 1, 2, 0, 1, 2]
    assert (summary["responses_generated"], summary["responses_trained"]) == (32, 96)
    rewards = [record["batch/reward"] for record in records]
    assert rewards[0] == rewards[1] == rewards[2] != rewards[3]


def test_dropping_old_responses_waits_for_full_batches(folder):
    config = make_config(folder, "name=drop", "replay.max_lag=0", "replay.on_policy_probability=0.5")
    summary = train(config)
    records = steps_of(config)
    assert summary["steps"] == len(records) == config.train.max_steps
    assert summary["empty_steps"] == 0
    assert all(record["off_policy/lag_max"] == 0 for record in records)
    assert all(record["off_policy/dropped"] == 0 for record in records)
    assert records[-1]["buffer/expired"] > 0


def test_a_step_without_any_weight_moves_nothing_and_is_counted(folder):
    """Every response is cut off: with truncated=drop nothing is left."""
    settings = ["mode=sync", "name=empty", "train.truncated=drop"]
    settings += ["generate.max_new_tokens=2", "generate.min_new_tokens=2"]
    config = make_config(folder, *settings, reward="always_one")
    summary = train(config)
    assert summary["empty_steps"] == summary["steps"] == config.train.max_steps
    assert summary["responses_trained"] == 0
    start = AutoModelForCausalLM.from_pretrained(config.model.path)
    end = AutoModelForCausalLM.from_pretrained(RunFolder(config.run_folder).newest_checkpoint())
    assert all(torch.equal(a, b) for a, b in zip(start.parameters(), end.parameters()))


def test_half_of_each_synchronous_batch_may_come_from_replay(folder):
    """The synchronous GFlowNet baseline: with m = 0.5 old responses train beside those of this step."""
    config = make_config(
        folder,
        "mode=sync",
        "name=half",
        "objective.name=tb_learned_z",
        "replay.on_policy_probability=0.5",
        "train.max_steps=12",
    )
    train(config)
    lags = [record["off_policy/lag_mean"] for record in steps_of(config)]
    assert lags[0] == 0
    assert max(lags) > 0


def test_a_reset_makes_the_current_policy_the_reference(folder):
    config = make_config(folder, "mode=sync", "name=reset", "reference.reset_every=2")
    train(config)
    records = steps_of(config)
    assert [record["reference_version"] for record in records] == [0, 2, 2, 4, 4, 4]
    # Steps 1, 3 and 5 train on fresh responses of versions 0, 2 and 4, each of which is the reference at that time.
    assert [abs(record["kl"]) < 1e-4 for record in records] == [True, False, True, False, True, False]


def test_a_learned_log_z_begins_again_at_a_reset(folder):
    config = make_config(
        folder,
        "mode=sync",
        "name=reset-log-z",
        "reference.reset_every=2",
        "objective.name=tb_learned_z",
    )
    train(config)
    records = steps_of(config)
    # Steps 1, 3 and 5 train on fresh responses of the reference itself: log ref = log pi, and the VarGrad estimate of log Z
    # is the mean reward / beta. One step at a rate of .5 takes the next one .5 to 1 nats away from where it was.
    gaps = [record["tb/log_z"] - record["batch/reward"] / record["beta"] for record in records]
    assert [abs(gap) < 1e-3 for gap in gaps] == [True, False, True, False, True, False]


@pytest.mark.parametrize("rule", ["drop", "recompute"])
def test_asynchronous_resets_never_train_on_an_earlier_reference(folder, rule):
    config = make_config(
        folder,
        f"name=reset-{rule}",
        "reference.reset_every=3",
        "train.max_steps=9",
        "replay.on_policy_probability=0.5",  # so that responses stay in the buffer after they were trained on
        f"replay.on_reference_reset={rule}",
    )
    summary = train(config)
    last = steps_of(config)[-1]
    assert summary["steps"] == 9
    assert last["reference_version"] == 6
    if rule == "drop":
        assert last["buffer/dropped"] > 0
    else:
        assert last["buffer/dropped"] == last["buffer/refused"] == 0


def test_monte_carlo_values_reach_the_trainer(tmp_path):
    settings = ["mode=sync", "objective.name=vineppo", "train.max_steps=1"]
    settings += ["train.responses_per_step=8", "train.samples_per_prompt=4", "task.num_train_prompts=20"]
    settings += ["evaluate.num_prompts=2", "observe.progress=false", f"output={tmp_path}", "name=vine"]
    config = load_config(None, settings)
    train(config)
    (record,) = steps_of(config)
    assert np.isfinite(record["loss"])
    assert record["objective/ratio_mean"] == pytest.approx(1.0, abs=1e-4)


def test_where_every_response_and_continuation_is_cut_off_vineppo_learns_nothing(folder):
    """Two tokens, none of them the end, and a penalty for all: no step is better than another, and every advantage is 0."""
    config = make_config(
        folder,
        "mode=sync",
        "name=vine-cut-off",
        "objective.name=vineppo",
        "objective.beta=0",
        "generate.max_new_tokens=2",
        "generate.min_new_tokens=2",
        "train.truncated=penalise",
        "train.max_steps=2",
    )
    train(config)
    for record in steps_of(config):
        assert (record["batch/reward"], record["completions/clipped_ratio"]) == (-1.0, 1.0)
        assert record["loss"] == record["grad_norm"] == 0.0
