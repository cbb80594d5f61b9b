"""The target of a step and what its batch shows, by hand."""

import math
from dataclasses import replace

import pytest
import torch
from builders import ragged_batch

from tba.config import ConfigError, load_config
from tba.objectives.registry import make_objective
from tba.objectives.trajectory_balance import log_z_estimates
from tba.trainer.batch import (
    Budget,
    batch_metrics,
    drift_metrics,
    drift_reward_correlation,
    entropy_of,
    reward_spread,
    shape_target,
    split_responses,
    split_whole_prompts,
    target_metrics,
)
from tba.types import Batch, Forward


def config(**objective):
    return load_config(None, [], objective={"beta": 0.1, **objective}, train={"max_steps": 10})


def test_without_schedules_nothing_changes():
    batch = ragged_batch()
    shaped, beta = shape_target(batch, config(), 3, 0.0, beta=0.1)
    assert shaped is batch
    assert beta == 0.1


def test_the_log_target_is_log_ref_plus_r_over_beta_all_over_tau():
    batch = ragged_batch()
    cooling = {"target_temperature": {"kind": "linear", "start": 2.0, "end": 1.0, "steps": 4}}
    shaped, beta = shape_target(batch, config(**cooling), 2, 0.5, beta=0.1)  # half-way: tau = 1.5
    log_pi = torch.zeros(batch.shape)
    found = log_z_estimates(log_pi, shaped.sum_per_response(shaped.log_ref_N), shaped.reward_PK, beta=beta)
    wanted = (batch.sum_per_response(batch.log_ref_N) + batch.reward_PK / 0.1) / 1.5
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(batch.log_ref_N, ragged_batch().log_ref_N)  # what is stored stays as it is


def test_a_weight_of_the_reference_is_a_beta_and_a_temperature():
    """(w log ref + r / b) / t with w = .75, b = .1 and t = 1.5: beta = .075, tau = 2."""
    batch = ragged_batch()
    shaped, beta = shape_target(batch, config(target_temperature=2.0), 0, 0.0, beta=0.075)
    log_pi = torch.zeros(batch.shape)
    found = log_z_estimates(log_pi, shaped.sum_per_response(shaped.log_ref_N), shaped.reward_PK, beta=beta)
    wanted = (0.75 * batch.sum_per_response(batch.log_ref_N) + batch.reward_PK / 0.1) / 1.5
    torch.testing.assert_close(found, wanted)


def test_a_target_is_plain_where_no_temperature_shapes_it():
    assert config().has_plain_target_at(0, 0.0)
    cooling = config(target_temperature={"kind": "linear", "start": 2.0, "end": 1.0, "steps": 4})
    assert [cooling.has_plain_target_at(step, 0.0) for step in (0, 3, 4)] == [False, False, True]


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


def at_target(batch, *, beta: float, share: float) -> torch.Tensor:
    """Log-probs of a policy that has gone this share of the way from the reference to the target, a constant aside."""
    lengths = batch.lengths
    per_token = (share * (batch.reward_PK + 7.0) / beta).flatten() / lengths
    return batch.log_ref_N + torch.repeat_interleave(per_token, lengths)


def test_the_share_of_the_way_to_the_target_is_0_at_the_reference_and_1_at_the_target():
    rewards = torch.tensor([[0.0, 1.0, 0.5, 0.5], [3.0, 3.0, 3.0, 3.0]])
    batch = ragged_batch(P=2, K=4)
    batch = replace(batch, reward_PK=rewards, weight_PK=torch.ones(2, 4))
    for share in (0.0, 0.3, 1.0):
        found = target_metrics(batch, at_target(batch, beta=0.1, share=share), beta=0.1)
        assert found["tb/target_reached"] == pytest.approx(share, abs=1e-4)
        # Of the first prompt only: sqrt((.25 + .25) / 4).
        assert found["tb/reward_spread"] == pytest.approx(0.125**0.5)


def test_a_response_without_weight_says_nothing_of_the_target():
    batch = ragged_batch(P=1, K=3)
    weights = torch.tensor([[1.0, 1.0, 0.0]])
    batch = replace(batch, reward_PK=torch.tensor([[1.0, 1.0, 5.0]]), weight_PK=weights)
    assert target_metrics(batch, batch.log_ref_N, beta=0.1) == {}


def test_rewards_that_differ_by_rounding_alone_say_nothing_of_the_target():
    batch = ragged_batch(P=1, K=4)
    rewards = torch.tensor([[0.1, 0.1, 0.1, 0.10000001]])
    batch = replace(batch, reward_PK=rewards, weight_PK=torch.ones(1, 4))
    assert target_metrics(batch, batch.log_ref_N + 1.0, beta=0.1) == {}


def of_lengths(prompt: int, *lengths: int) -> Batch:
    """Two responses to each prompt, all prompts of one length."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    prompts, shape = len(lengths) // 2, (len(lengths) // 2, 2)
    batch = ragged_batch(prompts, 2)
    return replace(
        batch, prompt_tokens=tuple(torch.arange(prompt) for _ in range(prompts)), offsets=ends,
        token_ids_N=torch.arange(int(ends[-1])), reward_PK=torch.zeros(shape),
    )  # fmt: skip


def test_micro_batches_are_as_few_as_the_budget_allows_and_of_about_the_same_size():
    batch = of_lengths(10, *[20] * 12)  # six prompts of 50 tokens: 200 hold four of them, and two are left over
    assert [len(part) for part in split_whole_prompts(batch, Budget(max_tokens=200), range(6))] == [3, 3]
    assert [len(part) for part in split_whole_prompts(batch, Budget(max_tokens=300), range(6))] == [6]
    assert split_whole_prompts(batch, Budget(max_tokens=49), range(6)) is None
    assert [len(part) for part in split_responses(batch, Budget(max_tokens=200), range(12))] == [6, 6]


def test_a_response_beyond_the_budget_runs_alone():
    batch = of_lengths(10, 500, 20, 20, 20)
    assert split_responses(batch, Budget(max_tokens=100), range(4)) == [[0], [1, 2, 3]]


def drifted(drift: list[float], *, versions: list[int], length: int = 4) -> tuple[Batch, torch.Tensor]:
    """One prompt with responses of so many tokens, and log_pi that has drifted by these nats since they were generated."""
    K = len(drift)
    batch = of_lengths(3, *[length] * K)
    numbers = {name: torch.full((length * K,), -1.0) for name in ("policy_N", "behaviour_N", "log_ref_N")}
    batch = replace(
        batch, **numbers, weight_PK=torch.ones(1, K), version_PK=torch.tensor([versions]),
        loss_mask_N=torch.ones(length * K, dtype=torch.bool), prompt_tokens=batch.prompt_tokens[:1],
        reward_PK=torch.tensor([[float(k % 2) for k in range(K)]]),
    )  # fmt: skip
    return batch, batch.policy_N + batch.per_token(torch.tensor([drift])) / length


def test_drift_is_that_of_late_responses():
    batch, log_pi_N = drifted([0.9, -0.1, 0.5, 7.0], versions=[10, 9, 7, 9])
    batch.weight_PK[0, 3] = 0.0
    found = drift_metrics(batch, log_pi_N, step=10, exact=True)
    assert found["off_policy/drift"] == pytest.approx(0.3)  # (.1 + .5) / 2: not of the first, which is of this version
    assert found["off_policy/drift_lag"] == pytest.approx(2.0)  # (1 + 3) / 2
    assert found["off_policy/kl"] == pytest.approx(-1.3 / 3)
    fresh, log_pi_N = drifted([0.9, -0.1], versions=[10, 10])
    assert "off_policy/drift" not in drift_metrics(fresh, log_pi_N, step=10, exact=True)


def test_a_response_whose_log_probs_are_unknown_has_no_drift():
    batch, log_pi_N = drifted([0.9, -0.1, 0.5, 7.0], versions=[9, 9, 7, 9])
    batch.policy_N[5] = math.nan  # of the second
    batch.behaviour_N[15] = math.nan  # of the last
    found = drift_metrics(batch, log_pi_N, step=10, exact=True)
    assert found["off_policy/drift"] == pytest.approx(0.7)  # (.9 + .5) / 2
    assert found["off_policy/drift_lag"] == pytest.approx(2.0)
    unknown = replace(batch, policy_N=torch.full_like(batch.policy_N, math.nan))
    assert drift_metrics(unknown, log_pi_N, step=10, exact=True) == {}


def test_the_rounding_of_bf16_is_taken_off_a_drift():
    """.016 nats x sqrt(4 tokens) = .032: of a drift of .04 sqrt(.04^2 - .032^2) = .024 is left, and of .02 three tenths."""
    for nats, left in ((0.04, 0.024), (0.02, 0.006)):
        batch, log_pi_N = drifted([nats, -nats], versions=[9, 9])
        found = drift_metrics(batch, log_pi_N, step=10, exact=False)
        assert found["off_policy/drift"] == pytest.approx(left, rel=1e-3)
        assert "off_policy/drift_reward_correlation" not in found
        assert drift_metrics(batch, log_pi_N, step=10, exact=True)["off_policy/drift"] == pytest.approx(nats, rel=1e-3)


def test_agreement_is_the_correlation_of_rewards_and_drift_within_prompts():
    # Prompt 0: rewards 1, 0 -> +-.5, drift .3, .1 -> +-.1. Prompt 1: rewards 0, 1 -> -+.5, drift 2.2, 2.0 -> +-.1.
    # Prompt 2 has one response that is known: it is compared with nothing.
    reward = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    drift = torch.tensor([[0.3, 0.1], [2.2, 2.0], [0.7, torch.nan]])
    known = torch.isfinite(drift)
    assert drift_reward_correlation(reward, drift, known) == pytest.approx(0.0, abs=1e-6)
    assert drift_reward_correlation(reward[:1], drift[:1], known[:1]) == pytest.approx(1.0)
    assert drift_reward_correlation(reward[1:2], drift[1:2], known[1:2]) == pytest.approx(-1.0)
    # Prompts 0 and 1 with twice the drift in prompt 0: (.5 x .2 x 2 - .5 x .1 x 2) / sqrt(4 x .25 x (2 x .04 + 2 x .01))
    wider = torch.tensor([[0.5, 0.1], [2.2, 2.0]])
    assert drift_reward_correlation(reward[:2], wider, known[:2]) == pytest.approx(0.1 / 0.1**0.5)
    assert drift_reward_correlation(torch.ones(2, 2), wider, known[:2]) is None


@pytest.mark.parametrize(("factor", "shift"), [(0.1, 0.0), (1e4, 0.0), (2.0, -1.0), (1.0, 1000.0)])
def test_agreement_does_not_depend_on_the_scale_of_rewards(factor, shift):
    # Drift .01, .03, -.02, .01 around its mean of .0075: .0025, .0225, -.0275, .0025; rewards 0, 1, 0, 1: -+.5.
    # .5 x (-.0025 + .0225 + .0275 + .0025) / sqrt(4 x .25 x (.0025^2 + .0225^2 + .0275^2 + .0025^2))
    batch, log_pi_N = drifted([0.01, 0.03, -0.02, 0.01], versions=[9, 9, 9, 9])
    scaled = replace(batch, reward_PK=factor * batch.reward_PK + shift)
    found = drift_metrics(scaled, log_pi_N, step=10, exact=True)
    assert found["off_policy/drift_reward_correlation"] == pytest.approx(0.025 / 1.275e-3**0.5, rel=1e-3)


def spread(*rewards: list[float], weights: list[list[float]] | None = None) -> float:
    reward_PK = torch.tensor(rewards)
    weight_PK = torch.ones_like(reward_PK) if weights is None else torch.tensor(weights)
    return reward_spread(replace(ragged_batch(*reward_PK.shape), reward_PK=reward_PK, weight_PK=weight_PK))


def test_the_spread_of_rewards_is_their_standard_deviation_within_the_prompts_where_they_differ():
    assert spread([0.0, 1.0, 1.0, 0.0]) == pytest.approx(0.5)
    assert spread([-1.0, 1.0]) == pytest.approx(1.0)
    assert spread([1000.0, 1001.0]) == pytest.approx(0.5)
    assert spread([0.0, 1.0], [7.0, 7.0]) == pytest.approx(0.5)  # not .35: nothing is learned from the second
    assert spread([0.0, 1.0], [0.0, 4.0]) == pytest.approx(2.125**0.5)  # (2 x .25 + 2 x 4) / 4
    assert spread([1.0, 1.0], [0.1, 0.10000001]) == 0.0  # rounding
    # Without weight: a response, whose prompt then has one reward alone; and one of three, 2 and 0 being left.
    assert spread([0.0, 1.0], weights=[[1.0, 0.0]]) == 0.0
    assert spread([0.0, 2.0, 9.0], weights=[[1.0, 1.0, 0.0]]) == pytest.approx(1.0)
    assert spread([math.nan, 1.0], [0.0, 1.0]) == pytest.approx(0.5)  # the step is refused for its loss


def test_the_entropy_of_a_batch_is_the_mean_of_its_responses_that_count():
    batch, _ = drifted([0.0] * 4, versions=[0] * 4)
    batch.weight_PK[0, 3] = 0.0
    batch.loss_mask_N[0] = False
    outputs = Forward(log_pi_N=batch.policy_N, entropy_N=torch.tensor([1.0] * 4 + [2.0] * 4 + [0.25] * 4 + [9.0] * 4))
    assert entropy_of(batch, outputs) == pytest.approx(4.0)  # (3 + 8 + 1) / 3
    assert math.isnan(entropy_of(replace(batch, weight_PK=torch.zeros(1, 4)), outputs))
