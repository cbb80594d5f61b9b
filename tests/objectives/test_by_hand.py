"""Every objective but `tb` (test_trajectory_balance.py) against numbers worked out by hand, in fp64.

Token quantities are written as lists [prompts][responses][tokens]; gradients are compared token by token, responses laid
end to end. A ratio pi / pi_behaviour of w is written as behaviour = log_pi - log w.
"""

from dataclasses import dataclass, replace
from math import exp, log, log1p, nan, sqrt

import pytest
import torch
from builders import ragged_batch
from torch import Tensor
from variants import with_constants

from tba.objectives.grpo import GRPO, DrGRPO
from tba.objectives.objective import Objective
from tba.objectives.policy_gradient import RLOO, OnlineDPO, ProximalRLOO, Reinforce
from tba.objectives.ppo import PPO, VinePPO, generalised_advantages, step_advantages, token_rewards
from tba.objectives.registry import OBJECTIVES
from tba.objectives.subtrajectory_balance import SubTrajectoryBalance
from tba.objectives.trajectory_balance import Kimi, LearnedLogZ, TBAPrime, TrajectoryBalance
from tba.types import Batch, Forward, Totals

Tokens = list[list[list[float]]]
"""[prompts][responses][tokens]"""
Responses = list[list[float]]
"""[prompts][responses]"""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The loss and its gradients; None where the objective has no such input."""

    loss: float
    log_pi: list[float]
    values: list[float] | None = None
    log_z: list[float] | None = None


def flat(tokens: Tokens) -> Tensor:
    return torch.tensor([t for prompt in tokens for response in prompt for t in response], dtype=torch.float64)


def batch_of(
    reward: Responses,
    *,
    behaviour: Tokens,
    policy: Tokens | None = None,
    ref: Tokens | None = None,
    weight: Responses | None = None,
    mask: Tokens | None = None,
    step_values: Tokens | None = None,
    old_values: Tokens | None = None,
) -> Batch:
    """`policy` and `ref` are `behaviour` where they are not given, `weight` and `mask` are 1."""
    reward_PK = torch.tensor(reward, dtype=torch.float64)
    behaviour_N = flat(behaviour)
    lengths = torch.tensor([len(response) for prompt in behaviour for response in prompt])
    batch = Batch(
        prompt_ids=tuple(f"p{p}" for p in range(len(reward))),
        prompt_tokens=tuple(torch.tensor([1, 2]) for _ in reward),
        token_ids_N=torch.zeros(len(behaviour_N), dtype=torch.long),
        offsets=torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]),
        loss_mask_N=torch.ones(len(behaviour_N), dtype=torch.bool) if mask is None else flat(mask).bool(),
        log_ref_N=behaviour_N if ref is None else flat(ref),
        behaviour_N=behaviour_N,
        policy_N=behaviour_N if policy is None else flat(policy),
        rewards={"score": reward_PK},
        reward_PK=reward_PK,
        weight_PK=torch.ones_like(reward_PK) if weight is None else torch.tensor(weight, dtype=torch.float64),
        version_PK=torch.zeros(reward_PK.shape, dtype=torch.long),
        truncated_PK=torch.zeros(reward_PK.shape, dtype=torch.bool),
        rows_PK=torch.zeros(reward_PK.shape, dtype=torch.long),
        totals=Totals(prompts=0, responses=0, tokens=0),
        step_values_N=None if step_values is None else flat(step_values),
        old_values_N=None if old_values is None else flat(old_values),
    )
    totals = Totals(
        prompts=int((batch.weight_PK.sum(dim=1) > 0).sum()),
        responses=int(batch.weight_PK.sum()),
        tokens=int(batch.kept_N.sum()),
    )
    return replace(batch, totals=totals)


def answer(
    objective: Objective,
    batch: Batch,
    log_pi: Tokens,
    *,
    beta: float,
    values: Tokens | None = None,
    log_z: list[float] | None = None,
) -> Answer:
    """What the objective says, and its gradients with respect to everything the model said."""
    said = {"log_pi_N": flat(log_pi)}
    said |= {} if values is None else {"values_N": flat(values)}
    said |= {} if log_z is None else {"log_z_P": torch.tensor(log_z, dtype=torch.float64)}
    leaves = {name: tensor.requires_grad_() for name, tensor in said.items()}
    loss = objective(batch, Forward(**leaves), beta=beta)
    found = torch.autograd.grad(loss.value, list(leaves.values()), allow_unused=True)
    gradients = {name: None if g is None else g.tolist() for name, g in zip(leaves, found)}
    return Answer(
        loss=loss.value.item(),
        log_pi=gradients["log_pi_N"],
        values=gradients.get("values_N"),
        log_z=gradients.get("log_z_P"),
    )


def exactly(value: float | list[float]):
    return pytest.approx(value, rel=1e-12, abs=1e-14)


def with_ratios(log_pi: Tokens, ratios: Tokens) -> Tokens:
    """Behaviour log-probs that give these ratios."""
    return [
        [[pi - log(ratio) for pi, ratio in zip(*tokens)] for tokens in zip(*responses)]
        for responses in zip(log_pi, ratios)
    ]


# ------------------------------------------------------------------------------------------------ squared residuals
# One prompt, two responses of two tokens and one. log pi = [-3, -1], log ref = [-4, -3]: log-ratios +1 and +2, mean 1.5.
# Rewards 2 and 0 at beta 1/2: r / beta = 4 and 0. So log Z as each response tells it is -1 + 4 = 3 and -2 + 0 = -2.
PI = [[[-1.0, -2.0], [-1.0]]]
REF = [[[-2.0, -2.0], [-3.0]]]


def test_kimi_takes_the_mean_reward_for_log_z():
    # log Z = mean r / beta = 2: residuals 3 - 2 = 1 and -2 - 2 = -4
    # loss = (beta / 2) mean of 1, 16 = 8.5 / 4; by log pi: -beta residual / 2 = -1/4 (both tokens) and +1
    batch = batch_of([[2.0, 0.0]], behaviour=PI, ref=REF)
    got = answer(Kimi(), batch, PI, beta=0.5)
    assert got.loss == exactly(2.125)
    assert got.log_pi == exactly([-0.25, -0.25, 1.0])


def test_kimi_differs_from_tb_by_the_mean_log_ratio_and_nothing_else():
    # tb: log Z = mean of 3, -2 = 1/2 = kimi's 2 - the mean log-ratio 1.5; residuals +2.5 and -2.5, loss 6.25 / 4;
    # by log pi: -+ 5/8. Every token of kimi's gradient is higher by beta x 1.5 / 2 = 3/8.
    batch = batch_of([[2.0, 0.0]], behaviour=PI, ref=REF)
    tb, kimi = (answer(objective, batch, PI, beta=0.5) for objective in (TrajectoryBalance(), Kimi()))
    assert tb.loss == exactly(1.5625)
    assert tb.log_pi == exactly([-0.625, -0.625, 0.625])
    assert [k - t for k, t in zip(kimi.log_pi, tb.log_pi)] == exactly([0.375, 0.375, 0.375])


def test_kimi_and_tb_agree_where_the_mean_log_ratio_is_zero():
    # log ref = [-2, -2]: log-ratios -1 and +1, mean 0
    batch = batch_of([[2.0, 0.0]], behaviour=PI, ref=[[[-1.0, -1.0], [-2.0]]])
    tb, kimi = (answer(objective, batch, PI, beta=0.5) for objective in (TrajectoryBalance(), Kimi()))
    assert kimi.loss == exactly(tb.loss)
    assert kimi.log_pi == exactly(tb.log_pi)


def test_learned_log_z_is_pulled_to_the_mean_estimate():
    # log Z = 1: residuals 3 - 1 = 2 and -2 - 1 = -3; loss = (beta / 2) (4 + 9) / 2 = 13 / 8
    # by log pi: -beta residual / 2 = -1/2 and +3/4; by log Z: -beta (2 - 3) / 2 = +1/4, towards the mean 1/2
    batch = batch_of([[2.0, 0.0]], behaviour=PI, ref=REF)
    got = answer(LearnedLogZ(), batch, PI, beta=0.5, log_z=[1.0])
    assert got.loss == exactly(1.625)
    assert got.log_pi == exactly([-0.5, -0.5, 0.75])
    assert got.log_z == exactly([0.25])


def test_learned_log_z_at_the_mean_estimate_gives_the_gradient_of_tb():
    batch = batch_of([[2.0, 0.0]], behaviour=PI, ref=REF)
    got, tb = (
        answer(objective, batch, PI, beta=0.5, log_z=[0.5]) for objective in (LearnedLogZ(), TrajectoryBalance())
    )
    assert got.log_pi == exactly(tb.log_pi)
    assert got.log_z == exactly([0.0])


def test_learned_log_z_is_one_number_per_prompt():
    # The prompt above twice, log Z 1 and 0: half of its gradients, and for log Z = 0 residuals 3, -2, so
    # -beta (3 - 2) / 4 = -1/8 by log Z and -3/8, -3/8, +1/4 by log pi
    batch = batch_of([[2.0, 0.0]] * 2, behaviour=PI * 2, ref=REF * 2)
    got = answer(LearnedLogZ(), batch, PI * 2, beta=0.5, log_z=[1.0, 0.0])
    assert got.log_z == exactly([0.125, -0.125])
    assert got.log_pi == exactly([-0.25, -0.25, 0.375, -0.375, -0.375, 0.25])


# ------------------------------------------------------------------------------------------------ subtrajectories
# Two turns, a word of the environment between them: log-ratios 0 + 1 and +2. Reward 2 at beta 1/2: log F at the end 4.
TURNS_PI = [[[-1.0, -1.0, -9.0, -1.0]]]
TURNS_REF = [[[-1.0, -2.0, -0.1, -3.0]]]
TURNS_MASK = [[[1, 1, 0, 1]]]


def test_subtb_balances_every_stretch_of_turns():
    # Values 1 and 1/2, log F = 2 and 1: rho_01 = 2 + 1 - 1 = 2, rho_12 = 1 + 2 - 4 = -1, rho_02 = 2 + 3 - 4 = 1.
    # Weights 1/2, 1/2, 1/4 of 5/4: (2 + 1/2 + 1/4) / (5/4) = 2.2, times beta / 2.
    # By log pi beta x: first turn (1/2 x 2 + 1/4) / (5/4) = 1, second (-1/2 + 1/4) / (5/4) = -1/5. By the values beta x:
    # the first is in the stretches that begin with it, as its turn: 1; the second (-1/2 x 2 + 1/2 x -1) / (5/4) = -6/5.
    batch = batch_of([[2.0]], behaviour=TURNS_PI, ref=TURNS_REF, mask=TURNS_MASK)
    got = answer(SubTrajectoryBalance(decay=0.5), batch, TURNS_PI, beta=0.5, values=[[[1.0, 7.0, 7.0, 0.5]]])
    assert got.loss == exactly(0.55)
    assert got.log_pi == exactly([0.5, 0.5, 0.0, -0.1])
    assert got.values == exactly([0.5, 0.0, 0.0, -0.6])


def test_subtb_asks_nothing_where_every_turn_balances():
    # log F = 1, + 1 = 2, + 2 = 4 = r / beta
    batch = batch_of([[2.0]], behaviour=TURNS_PI, ref=TURNS_REF, mask=TURNS_MASK)
    got = answer(SubTrajectoryBalance(), batch, TURNS_PI, beta=0.5, values=[[[0.5, 7.0, 7.0, 1.0]]])
    assert got.loss == exactly(0.0)
    assert got.log_pi + got.values == exactly([0.0] * 8)


@pytest.mark.parametrize("decay", [0.5, 1.0])
def test_subtb_of_one_turn_is_trajectory_balance_with_a_learned_log_z(decay):
    # log Z = 1 is the value 1/2 before the first token. The state before it is the prompt, so that its responses have one
    # value, whose gradients add up to that of log Z: -beta x 2 / 2 and +beta x 3 / 2.
    batch = batch_of([[2.0, 0.0]], behaviour=PI, ref=REF)
    got = answer(SubTrajectoryBalance(decay=decay), batch, PI, beta=0.5, values=[[[0.5, 7.0], [0.5]]])
    want = answer(LearnedLogZ(), batch, PI, beta=0.5, log_z=[1.0])
    assert got.loss == exactly(want.loss)
    assert got.log_pi == exactly(want.log_pi)
    assert got.values == exactly([-0.5, 0.0, 0.75])
    assert sum(got.values) == exactly(want.log_z[0])


# ------------------------------------------------------------------------------------------------ TBA'
# Rewards 1, 0: centred +1/2, -1/2. log pi - log ref: 1 + 2 = 3 and -1: centred +2, -2. At beta 0.1 A = +0.3, -0.3.
# Ratios 2 and 10 (above 8), and 1/2. Normal length 4, two responses: token losses are divided by 8.
PRIME_REF = [[[-2.0, -4.0], [0.0]]]
PRIME_RATIOS = [[[2.0, 10.0], [0.5]]]


def test_tba_prime_is_the_tb_advantage_times_the_clamped_ratio():
    # loss = -(2 x 0.3 + 8 x 0.3 - 0.5 x 0.3) / 8 = -2.85 / 8
    # by log pi: -0.3 x 2 / 8; 0 above the clamp; +0.3 x 0.5 / 8. The KL part of A has no gradient of its own.
    batch = batch_of([[1.0, 0.0]], behaviour=with_ratios(PI, PRIME_RATIOS), ref=PRIME_REF)
    got = answer(TBAPrime(normal_length=4), batch, PI, beta=0.1)
    assert got.loss == exactly(-2.85 / 8)
    assert got.log_pi == exactly([-0.075, 0.0, 0.01875])


def test_tba_prime_gradient_vanishes_above_ratio_max_and_only_there():
    batch = batch_of([[1.0, 0.0]], behaviour=with_ratios(PI, PRIME_RATIOS), ref=PRIME_REF)
    # ratio_max 11 lets the 10 through: -0.3 x 10 / 8. ratio_max 1 stops the 2 as well, whatever A's sign.
    assert answer(
        with_constants(TBAPrime, {"normal_length": 4, "ratio_max": 11.0}), batch, PI, beta=0.1
    ).log_pi == exactly([-0.075, -0.375, 0.01875])
    assert answer(
        with_constants(TBAPrime, {"normal_length": 4, "ratio_max": 1.0}), batch, PI, beta=0.1
    ).log_pi == exactly([0.0, 0.0, 0.01875])


def test_tba_prime_bounds_what_one_token_adds_to_the_kl():
    # token log-ratios 30 -> 10 and 2, against -1: KL 12 and -1, centred +-6.5; A = 1/2 - 0.65 = -0.15 and +0.15
    batch = batch_of([[1.0, 0.0]], behaviour=PI, ref=[[[-31.0, -4.0], [0.0]]])
    got = answer(TBAPrime(normal_length=4), batch, PI, beta=0.1)
    assert got.log_pi == exactly([0.15 / 8, 0.15 / 8, -0.15 / 8])


# ------------------------------------------------------------------------------------------------ whole responses
# Rewards 4, 1, 1; the generating policy's log-ratios to the reference 1 + 1 = 2, -2, 0. At beta 1/2 R = 3, 2, 1.
# log pi = -3, -1, -2 is another policy's: the penalty is not taken from it.
PI3 = [[[-1.0, -2.0], [-1.0], [-2.0]]]
OLD3 = [[[-0.5, -0.5], [-3.0], [-1.0]]]
REF3 = [[[-1.5, -1.5], [-1.0], [-1.0]]]


def test_reinforce_subtracts_the_mean_return_of_the_prompt():
    # A = 1, 0, -1; loss = -(1 x -3 + -1 x -2) / 3 = 1/3
    batch = batch_of([[4.0, 1.0, 1.0]], behaviour=OLD3, ref=REF3)
    got = answer(Reinforce(), batch, PI3, beta=0.5)
    assert got.loss == exactly(1 / 3)
    assert got.log_pi == exactly([-1 / 3, -1 / 3, 0.0, 1 / 3])


def test_rloo_subtracts_the_mean_return_of_the_others():
    # means of the others 1.5, 2, 2.5: A = 1.5, 0, -1.5; loss = -(1.5 x -3 + -1.5 x -2) / 3 = 1/2
    batch = batch_of([[4.0, 1.0, 1.0]], behaviour=OLD3, ref=REF3)
    got = answer(RLOO(), batch, PI3, beta=0.5)
    assert got.loss == exactly(0.5)
    assert got.log_pi == exactly([-0.5, -0.5, 0.0, 0.5])


def test_rloo_leaves_the_own_response_out_of_its_baseline():
    # R = 6, 2, 1: the first's baseline is still 1.5, so its A grows by all of the 3; the others' are 3.5 and 4
    batch = batch_of([[7.0, 1.0, 1.0]], behaviour=OLD3, ref=REF3)
    assert answer(RLOO(), batch, PI3, beta=0.5).log_pi == exactly([-4.5 / 3, -4.5 / 3, 1.5 / 3, 3.0 / 3])


def test_rloo_learns_nothing_from_a_response_that_has_no_other():
    batch = batch_of([[4.0, 1.0, 1.0]], behaviour=OLD3, ref=REF3, weight=[[1.0, 0.0, 0.0]])
    assert answer(RLOO(), batch, PI3, beta=0.5).log_pi == exactly([0.0, 0.0, 0.0, 0.0])


@pytest.mark.parametrize(("samples", "beta"), [(2, 0.5), (4, 0.05), (7, 1.0)])
def test_on_fresh_data_the_gradient_of_tb_is_that_of_rloo_times_one_less_than_k_over_k(samples, beta):
    # Both are -A / (P K) per token: A = R - mean for tb and K / (K - 1) (R - mean) for rloo, with R = r - beta KL.
    batch = ragged_batch(P=3, K=samples, dtype=torch.float64)
    batch = replace(batch, behaviour_N=batch.policy_N)
    gradients = []
    for objective in (TrajectoryBalance(), RLOO()):
        log_pi_N = batch.policy_N.clone().requires_grad_()
        objective(batch, Forward(log_pi_N=log_pi_N), beta=beta).value.backward()
        gradients.append(log_pi_N.grad)
    assert gradients[1].abs().max() > 0.01
    torch.testing.assert_close(gradients[0], (samples - 1) / samples * gradients[1], rtol=1e-12, atol=1e-15)


# Rewards 1, 0 without a penalty: A = +1, -1. The first response's ratio is the product of its tokens'.
def test_proximal_rloo_clips_a_good_response_above_and_a_bad_one_below():
    # ratios 3 x 0.5 = 1.5 and 0.5: max(-1.5, -1.2) = -1.2 and max(0.5, 0.8) = 0.8, both flat
    batch = batch_of([[1.0, 0.0]], behaviour=with_ratios(PI, [[[3.0, 0.5], [0.5]]]))
    got = answer(ProximalRLOO(), batch, PI, beta=0.0)
    assert got.loss == exactly((-1.2 + 0.8) / 2)
    assert got.log_pi == exactly([0.0, 0.0, 0.0])


def test_proximal_rloo_does_not_clip_a_good_response_below_or_a_bad_one_above():
    # ratios 0.25 x 2 = 0.5 and 1.5: max(-0.5, -0.8) = -0.5 and max(1.5, 1.2) = 1.5; by log pi -w A / 2
    batch = batch_of([[1.0, 0.0]], behaviour=with_ratios(PI, [[[0.25, 2.0], [1.5]]]))
    got = answer(ProximalRLOO(), batch, PI, beta=0.0)
    assert got.loss == exactly((-0.5 + 1.5) / 2)
    assert got.log_pi == exactly([-0.25, -0.25, 0.75])


def test_proximal_rloo_has_the_advantage_and_on_fresh_data_the_gradient_of_rloo():
    # A = 1.5, 0, -1.5 as above, ratios 1: loss = -mean A = 0
    batch = batch_of([[4.0, 1.0, 1.0]], behaviour=PI3, policy=OLD3, ref=REF3)
    got = answer(ProximalRLOO(), batch, PI3, beta=0.5)
    assert got.loss == exactly(0.0)
    assert got.log_pi == exactly([-0.5, -0.5, 0.0, 0.5])


# ------------------------------------------------------------------------------------------------ GRPO and Dr. GRPO
# Rewards 2, 0, 1: mean 1, unbiased deviation 1. A = +1, -1, 0, over 1.0001 for GRPO. Ratios 1.5 and 0.5, 0.5 and 1.5, 1.
# Token losses over A's scale: -1.2 (clipped), -0.5; 0.8 (clipped), 1.5; 0.
GRPO_PI = [[[-1.0, -2.0], [-1.0, -3.0], [-2.0]]]
GRPO_RATIOS = [[[1.5, 0.5], [0.5, 1.5], [1.0]]]
SCALE = 1 / 1.0001


def test_grpo_clips_good_tokens_above_and_bad_ones_below_and_not_the_other_way():
    # means over tokens -0.85, 1.15, 0; their mean 0.1. By log pi: -w A / (2 tokens x 3 responses) where not clipped
    batch = batch_of([[2.0, 0.0, 1.0]], behaviour=with_ratios(GRPO_PI, GRPO_RATIOS))
    got = answer(GRPO(), batch, GRPO_PI, beta=0.0)
    assert got.loss == exactly(0.1 * SCALE)
    assert got.log_pi == exactly([0.0, -0.5 / 6 * SCALE, 0.0, 1.5 / 6 * SCALE, 0.0])


def test_grpo_may_clip_higher_above_than_below():
    # with clip_high 0.6 the 1.5 of the good response counts: mean (-1.5 - 0.5) / 2; the 0.5 of the bad one is still clipped
    batch = batch_of([[2.0, 0.0, 1.0]], behaviour=with_ratios(GRPO_PI, GRPO_RATIOS))
    got = answer(GRPO(clip_high=0.6), batch, GRPO_PI, beta=0.0)
    assert got.loss == exactly((-1.0 + 1.15) / 3 * SCALE)
    assert got.log_pi == exactly([-1.5 / 6 * SCALE, -0.5 / 6 * SCALE, 0.0, 1.5 / 6 * SCALE, 0.0])


def test_grpo_adds_k3_of_the_live_policy_to_every_token():
    # log ref - log pi = log 2 at the last token, 0 elsewhere: k3 = 2 - log 2 - 1, by log pi 1 - 2 = -1; / 3 responses
    batch = batch_of(
        [[2.0, 0.0, 1.0]],
        behaviour=with_ratios(GRPO_PI, GRPO_RATIOS),
        ref=[[[-1.0, -2.0], [-1.0, -3.0], [-2.0 + log(2)]]],
    )
    got = answer(GRPO(), batch, GRPO_PI, beta=0.6)
    assert got.loss == exactly(0.1 * SCALE + 0.6 * (1 - log(2)) / 3)
    assert got.log_pi == exactly([0.0, -0.5 / 6 * SCALE, 0.0, 1.5 / 6 * SCALE, -0.2])


def test_dr_grpo_divides_by_a_constant_length_and_not_by_the_deviation():
    # sums over tokens -1.7, 2.3, 0; / (3 responses x normal length 4)
    batch = batch_of([[2.0, 0.0, 1.0]], behaviour=with_ratios(GRPO_PI, GRPO_RATIOS))
    got = answer(DrGRPO(normal_length=4), batch, GRPO_PI, beta=0.0)
    assert got.loss == exactly(0.6 / 12)
    assert got.log_pi == exactly([0.0, -0.5 / 12, 0.0, 1.5 / 12, 0.0])


def test_grpo_pulls_equally_on_every_response_and_dr_grpo_on_every_token():
    # fresh responses of three tokens and one, rewards 2, 0: A = +-1, over the deviation sqrt 2 (+ 1e-4) for GRPO
    log_pi = [[[-1.0, -2.0, -3.0], [-1.0]]]
    batch = batch_of([[2.0, 0.0]], behaviour=log_pi)
    a = 1 / (sqrt(2) + 1e-4)
    assert answer(GRPO(), batch, log_pi, beta=0.0).log_pi == exactly([-a / 6, -a / 6, -a / 6, a / 2])
    assert answer(DrGRPO(normal_length=5), batch, log_pi, beta=0.0).log_pi == exactly([-0.1, -0.1, -0.1, 0.1])


def test_grpo_does_not_see_the_scale_of_rewards_and_dr_grpo_does():
    # rewards 200, 0 instead of 2, 0: GRPO's A is 1 / sqrt 2 but for the 1e-4, Dr. GRPO's is 100 times larger
    log_pi = [[[-1.0], [-1.0]]]
    small, large = (batch_of([[reward, 0.0]], behaviour=log_pi) for reward in (2.0, 200.0))
    grpo = [answer(GRPO(), batch, log_pi, beta=0.0).log_pi[0] for batch in (small, large)]
    assert grpo == exactly([-0.5 / (sqrt(2) + 1e-4), -50 / (100 * sqrt(2) + 1e-4)])
    dr_grpo = [answer(DrGRPO(normal_length=1), batch, log_pi, beta=0.0).log_pi[0] for batch in (small, large)]
    assert dr_grpo == exactly([-0.5, -50.0])


# ------------------------------------------------------------------------------------------------ PPO
# One response of three tokens: values 1, 2, 3, reward 2, beta 0.1, log pi_old - log ref = 1, -2, 0; gamma 0.9, lambda 0.5.
#   token rewards  -0.1, 0.2, 2
#   delta          -0.1 + 0.9 x 2 - 1 = 0.7;  0.2 + 0.9 x 3 - 2 = 0.9;  2 - 3 = -1
#   advantages     -1;  0.9 - 0.45 x 1 = 0.45;  0.7 + 0.45 x 0.45 = 0.9025 (last to first)
#   returns        A + V = 1.9025, 2.45, 2
#   whitened       mean A = 0.1175; deviations 0.785, 0.3325, -1.1175, over SD
# Ratios 1, 1.5, 1.5: the second is clipped (A > 0), the third is not (A < 0).
PPO_PI = [[[-1.0, -2.0, -3.0]]]
PPO_OLD = [[[-1.0, -1.0, -1.0]]]
PPO_REF = [[[-2.0, 1.0, -1.0]]]
VALUES = [[[1.0, 2.0, 3.0]]]
ADVANTAGES = [0.9025, 0.45, -1.0]
SD = sqrt((0.785**2 + 0.3325**2 + 1.1175**2) / 2 + 1e-8)
SURROGATE = (-0.785 - 1.2 * 0.3325 + 1.5 * 1.1175) / SD / 3

DISCOUNTED = with_constants(PPO, {"gamma": 0.9, "gae_lambda": 0.5})


def ppo_batch(old_values: Tokens | None = None) -> Batch:
    behaviour = with_ratios(PPO_PI, [[[1.0, 1.5, 1.5]]])
    return batch_of([[2.0]], behaviour=behaviour, policy=PPO_OLD, ref=PPO_REF, old_values=old_values)


def test_gae_discounts_by_gamma_and_lambda_over_three_tokens():
    batch = ppo_batch()
    reward_N = token_rewards(batch, beta=0.1)
    assert reward_N.tolist() == exactly([-0.1, 0.2, 2.0])
    advantage_N = generalised_advantages(batch, reward_N, flat(VALUES), gamma=0.9, gae_lambda=0.5)
    assert advantage_N.tolist() == exactly(ADVANTAGES)


def test_ppo_is_the_clipped_surrogate_of_whitened_advantages_plus_the_value_loss():
    # value loss = 0.1 / 2 x mean (V - return)^2 = 0.1 / 2 x mean A^2; by V: 0.1 (V - return) / 3 = -0.1 A / 3
    got = answer(DISCOUNTED, ppo_batch(), PPO_PI, beta=0.1, values=VALUES)
    squares = 0.9025**2 + 0.45**2 + 1.0
    assert got.loss == exactly(SURROGATE + 0.05 * squares / 3)
    assert got.log_pi == exactly([-0.785 / SD / 3, 0.0, 1.5 * 1.1175 / SD / 3])
    assert got.values == exactly([-0.1 * a / 3 for a in ADVANTAGES])


def test_ppo_value_clip_stops_a_value_that_left_the_old_one_towards_its_return():
    # Values were 1, 2, 3 when the batch was first seen, so advantages and returns are those above; now 1.5, 2.1, 4.
    #   1.5: clipped to 1.2, farther from 1.9025 than 1.5 is: 0.7025^2, flat
    #   2.1: within 0.2 of the old 2: 0.35^2
    #   4.0: clipped to 3.2, nearer to 2 than 4 is: 2^2 counts, and pulls back
    got = answer(DISCOUNTED, ppo_batch(old_values=VALUES), PPO_PI, beta=0.1, values=[[[1.5, 2.1, 4.0]]])
    assert got.loss == exactly(SURROGATE + 0.05 * (0.7025**2 + 0.35**2 + 4.0) / 3)
    assert got.values == exactly([0.0, 0.1 * -0.35 / 3, 0.1 * 2.0 / 3])
    assert got.log_pi == exactly([-0.785 / SD / 3, 0.0, 1.5 * 1.1175 / SD / 3])


def test_ppo_value_gives_nothing_past_the_end_of_a_response():
    # The response above, then one of a single token with value 5 and reward 1: advantage 1 - 5; the first is as before
    batch = batch_of(
        [[2.0, 1.0]],
        behaviour=[[*PPO_OLD[0], [-1.0]]],
        ref=[[*PPO_REF[0], [-1.0]]],
    )
    values_N = flat([[*VALUES[0], [5.0]]])
    advantage_N = generalised_advantages(batch, token_rewards(batch, beta=0.1), values_N, gamma=0.9, gae_lambda=0.5)
    assert advantage_N.tolist() == exactly([*ADVANTAGES, -4.0])


# ------------------------------------------------------------------------------------------------ VinePPO
# A response of two steps, tokens 0 and 1 (value of the prompt 0.25) and token 2 (value of the prefix 0.75), reward 1; and
# one of a single token, reward 0: A = 0.75 - 0.25 = 0.5 for tokens 0 and 1; 1 - 0.75 = 0.25 for token 2; 0 - 0.25.
#   whitened   mean 0.25; deviations 0.25, 0.25, 0, -0.5, over VINE_SD
# log ref - log pi = -1, -1, 3, 1: k3 = 1/e, 1/e, e^3 - 4 = 16.1 (counts as 10, without a pull), e - 2; by log pi
# 1 - 1/e, 1 - 1/e, 0, 1 - e. At beta 0.1 over two responses these weigh 0.05.
VINE_PI = [[[-1.0, -2.0, -3.0], [-2.0]]]
VINE_REF = [[[-2.0, -3.0, 0.0], [-1.0]]]
VINE_VALUES = [[[0.25, nan, 0.75], [0.25]]]
VINE_SD = sqrt((0.25**2 + 0.25**2 + 0.5**2) / 3 + 1e-8)
VINE_KL = 0.05 * (2 * exp(-1) + 10 + exp(1) - 2)
VINE_PULL = [0.05 * (1 - exp(-1)), 0.05 * (1 - exp(-1)), 0.0, 0.05 * (1 - exp(1))]


def vine_batch(ratios: Tokens) -> Batch:
    """The log-probs of the generating policy are not needed."""
    behaviour, unknown = with_ratios(VINE_PI, ratios), [[[nan, nan, nan], [nan]]]
    return batch_of([[1.0, 0.0]], behaviour=behaviour, policy=unknown, ref=VINE_REF, step_values=VINE_VALUES)


def test_vineppo_advantage_of_a_step_is_what_its_tokens_added_to_the_value():
    assert step_advantages(vine_batch([[[1.0, 1.0, 1.0], [1.0]]])).tolist() == exactly([0.5, 0.5, 0.25, -0.25])


def test_vineppo_is_the_clipped_surrogate_of_whitened_step_advantages_plus_k3():
    # ratios 1, 1.5, 0.5 and 0.5: -0.25; -1.2 x 0.25 (clipped); 0; 0.8 x 0.5 (clipped), over VINE_SD. Mean over four tokens.
    batch = vine_batch([[[1.0, 1.5, 0.5], [0.5]]])
    got = answer(VinePPO(), batch, VINE_PI, beta=0.1)
    assert got.loss == exactly((-0.25 - 0.3 + 0.4) / VINE_SD / 4 + VINE_KL)
    assert got.log_pi == exactly([VINE_PULL[0] - 0.25 / VINE_SD / 4, *VINE_PULL[1:]])


# ------------------------------------------------------------------------------------------------ online DPO
def test_online_dpo_prefers_the_best_response_to_the_worst_and_leaves_the_rest_alone():
    # log pi - log ref = 2 (best), -1 (worst) and 50; margin = 0.5 (2 + 1) = 1.5; by log pi -+ 0.5 sigmoid(-1.5)
    log_pi = [[[-1.0, -2.0], [-1.0], [-3.0]]]
    batch = batch_of([[1.0, 0.0, 0.5]], behaviour=log_pi, ref=[[[-2.0, -3.0], [0.0], [-53.0]]])
    got = answer(OnlineDPO(), batch, log_pi, beta=0.5)
    pull = 0.5 / (1 + exp(1.5))
    assert got.loss == exactly(log1p(exp(-1.5)))
    assert got.log_pi == exactly([-pull, -pull, pull, 0.0])


def test_online_dpo_gives_a_tie_no_gradient():
    # The pair above (as prompt 0) and a prompt of equal rewards: its loss is log 2 whatever its log-ratios, its pull none
    log_pi = [[[-1.0, -2.0], [-1.0]], [[-1.0], [-5.0]]]
    batch = batch_of([[1.0, 0.0], [1.0, 1.0]], behaviour=log_pi, ref=[[[-2.0, -3.0], [0.0]], [[-4.0], [-1.0]]])
    got = answer(OnlineDPO(), batch, log_pi, beta=0.5)
    pull = 0.5 / (1 + exp(1.5)) / 2
    assert got.loss == exactly((log1p(exp(-1.5)) + log(2)) / 2)
    assert got.log_pi == exactly([-pull, -pull, pull, 0.0, 0.0])


# ------------------------------------------------------------------------------------------------ what counts nowhere
SETTINGS = {"tba_prime": {"normal_length": 4}, "dr_grpo": {"normal_length": 4}}
EVERY = [pytest.param(kind(**SETTINGS.get(name, {})), id=name) for name, kind in OBJECTIVES.items()]
TWO = {
    "log_pi": [[[-1.0, -2.0, -1.5], [-1.0, -0.5]]],
    "behaviour": [[[-1.3, -1.0, -1.6], [-1.1, -1.5]]],
    "policy": [[[-1.2, -1.1, -1.6], [-1.1, -1.4]]],
    "ref": [[[-2.0, -1.0, -1.0], [-2.0, -0.2]]],
    "values": [[[0.3, 0.4, 0.9], [0.3, 0.1]]],
    "old_values": [[[0.2, 0.8, 0.6], [0.4, 0.1]]],
    "step_values": [[[0.3, nan, 0.7], [0.3, 0.2]]],
}
"""A prompt with two responses, rewards 1 and 0.4, and something for every objective."""


def answer_to(objective: Objective, tokens: dict[str, Tokens], reward: Responses, **rest) -> Answer:
    given = {name: value for name, value in tokens.items() if name not in ("log_pi", "values")}
    batch = batch_of(reward, **given, **rest)
    log_z = [0.7] * len(reward)
    return answer(objective, batch, tokens["log_pi"], beta=0.3, values=tokens["values"], log_z=log_z)


@pytest.mark.parametrize("objective", EVERY)
def test_a_response_without_weight_counts_nowhere(objective):
    # The two responses, a third of weight 0 beside them and a second prompt of weight 0 altogether. What was never known
    # of the dropped responses is NaN.
    extra = {"log_pi": -9.0, "behaviour": nan, "policy": nan, "ref": -0.1}
    extra |= {"values": 70.0, "old_values": -70.0, "step_values": 40.0}
    more = {name: [[*TWO[name][0], [x, x]], [[x], [x, x], [x]]] for name, x in extra.items()}
    want = answer_to(objective, TWO, [[1.0, 0.4]])
    got = answer_to(objective, more, [[1.0, 0.4, 99.0], [5.0, -99.0, 99.0]], weight=[[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    assert got.loss == exactly(want.loss)
    assert got.log_pi == exactly([*want.log_pi, *[0.0] * 6])
    assert got.values == (None if want.values is None else exactly([*want.values, *[0.0] * 6]))
    assert got.log_z == (None if want.log_z is None else exactly([*want.log_z, 0.0]))


@pytest.mark.parametrize("objective", EVERY)
def test_a_batch_without_any_weight_gives_zero(objective):
    got = answer_to(objective, TWO, [[1.0, 0.4]], weight=[[0.0, 0.0]])
    assert got.loss == 0.0
    assert got.log_pi == [0.0] * 5


# For subtb a word begins a turn; test_masked_tokens.py has it too.
@pytest.mark.parametrize("objective", [own for own in EVERY if own.id != "subtb"])
def test_tokens_that_the_policy_did_not_choose_count_nowhere(objective):
    # A tool's word in the middle of the first response and one at either end of the second, their log-probs unknown. The
    # word before the second response's first token begins its first step.
    word = {"log_pi": -9.0, "behaviour": nan, "policy": nan, "ref": -0.1, "values": 70.0, "old_values": -70.0}
    more = {
        name: [[[a, b, word[name], c], [word[name], d, e, word[name]]]]
        for name in word
        for (a, b, c), (d, e) in TWO[name]
    }
    more["step_values"] = [[[0.3, nan, nan, 0.7], [0.3, nan, 0.2, nan]]]
    want = answer_to(objective, TWO, [[1.0, 0.4]])
    got = answer_to(objective, more, [[1.0, 0.4]], mask=[[[1, 1, 0, 1], [0, 1, 1, 0]]])
    assert got.loss == exactly(want.loss)
    assert got.log_pi == exactly(_with_words(want.log_pi))
    assert got.values == (None if want.values is None else exactly(_with_words(want.values)))
    assert got.log_z == (None if want.log_z is None else exactly(want.log_z))


def _with_words(gradient: list[float]) -> list[float]:
    """Zeros at the three words."""
    a, b, c, d, e = gradient
    return [a, b, 0.0, c, 0.0, d, e, 0.0]
