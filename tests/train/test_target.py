"""The target of a step, by hand."""

import pytest
import torch
from builders import ragged_batch

from tba.config import ConfigError, load_config
from tba.objectives.make import make_objective
from tba.objectives.trajectory_balance import log_z_estimates
from tba.train.target import shape_target


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
