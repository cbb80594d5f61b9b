"""The target of a step, by hand."""

from dataclasses import replace

import pytest
import torch
from builders import ragged_batch

from tba.config import ConfigError, load_config
from tba.objectives.registry import make_objective
from tba.objectives.trajectory_balance import log_z_estimates
from tba.train.batch import batch_metrics, shape_target


def config(**objective):
    return load_config(None, [], objective={"beta": 0.1, **objective}, train={"max_steps": 10})


def test_without_schedules_nothing_changes():
    batch = ragged_batch()
    shaped, beta = shape_target(batch, config(), 3)
    assert shaped is batch
    assert beta == 0.1


def test_the_log_target_is_w_log_ref_plus_r_over_beta_all_over_tau():
    batch = ragged_batch()
    objective = {
        "reference_weight": {"kind": "linear", "start": 1.0, "end": 0.5, "steps": 4},
        "target_temperature": {"kind": "linear", "start": 2.0, "end": 1.0, "steps": 4},
    }
    shaped, beta = shape_target(batch, config(**objective), 2)  # half-way: w = 0.75, tau = 1.5
    log_pi = torch.zeros(batch.shape)
    found = log_z_estimates(log_pi, shaped.sum_per_response(shaped.log_ref_N), shaped.reward_PK, beta=beta)
    wanted = (0.75 * batch.sum_per_response(batch.log_ref_N) + batch.reward_PK / 0.1) / 1.5
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(batch.log_ref_N, ragged_batch().log_ref_N)  # what is stored stays as it is


def test_an_objective_without_a_target_refuses_to_have_it_shaped():
    with pytest.raises(ConfigError, match=r"objective\.target_temperature cannot be used with rloo"):
        make_objective(config(name="rloo", target_temperature=2.0))
    with pytest.raises(ConfigError, match=r"objective\.target_temperature must stay above 0"):
        make_objective(config(target_temperature={"kind": "linear", "start": 2.0, "end": 0.0}))


def test_the_references_responses_need_an_objective_that_does_not_ask_for_the_policys_log_probs():
    share = {"explore": {"reference_share": 0.25}}
    for name in ("proximal_rloo", "ppo", "rloo"):
        with pytest.raises(ConfigError, match=rf"reference_share=0\.25 cannot be used with {name}"):
            make_objective(load_config(None, [], objective={"name": name, "beta": 0.1}, search=share))
    for name in ("tb", "online_dpo", "grpo", "vineppo"):  # the last two have k3 of the live policy in the loss
        make_objective(load_config(None, [], objective={"name": name, "beta": 0.1}, search=share))


def test_lag_is_that_of_the_policys_own_responses():
    batch = ragged_batch(P=1, K=4)
    policy_N = batch.policy_N.clone()
    policy_N[: int(batch.offsets[1])] = float("nan")  # the first response is the reference's
    batch = replace(batch, policy_N=policy_N, version_PK=torch.tensor([[0, 8, 9, 10]]))
    metrics = batch_metrics(batch, batch.log_ref_N, step=10)
    assert metrics["off_policy/lag_mean"] == pytest.approx(1.0)
    assert metrics["off_policy/lag_max"] == 2.0
