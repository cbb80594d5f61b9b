"""The bound on off-policy pushes, worked out by hand."""

import math
from dataclasses import replace

import pytest
import torch
from builders import ragged_batch

from tba.objectives.trajectory_balance import TrajectoryBalance, gradient_share
from tba.types import Batch, Forward


def four_tokens(drift: list[list[float]]) -> tuple[Batch, torch.Tensor]:
    """One prompt whose responses have four tokens each, and log_pi that has drifted by so much at each token."""
    batch = ragged_batch(1, len(drift))
    N = 4 * len(drift)
    fields = {name: torch.zeros(N) for name in ("log_ref_N", "behaviour_N")}
    policy_N = torch.full((N,), -1.0)
    made = Batch(
        **{
            **vars(batch),
            **fields,
            "token_ids_N": torch.full((N,), 5),
            "loss_mask_N": torch.ones(N, dtype=torch.bool),
            "offsets": torch.arange(0, N + 1, 4),
            "policy_N": policy_N,
        }
    )
    return made, policy_N + torch.tensor(drift).flatten()


def shares(drift, push_up, *, rule="response", max_drift=0.1):
    batch, log_pi_N = four_tokens(drift)
    share_N = gradient_share(batch, log_pi_N, torch.tensor([push_up]), rule=rule, max_drift=max_drift)
    return share_N.view(-1, 4).tolist()


def test_a_response_is_masked_once_it_has_gone_far_enough_the_way_it_is_pushed():
    # four tokens of -1 nat each: the entropy is 4 nats, the limit .1 * sqrt(4) = .2 nats for the sum
    drift = [[0.06] * 4, [0.06] * 4, [-0.06] * 4, [-0.06] * 4, [0.04] * 4, [-0.04] * 4]
    push_up = [True, False, True, False, True, False]
    assert [own[0] for own in shares(drift, push_up)] == [0, 1, 1, 0, 1, 1]
    assert all(len(set(own)) == 1 for own in shares(drift, push_up))


def test_the_limit_follows_the_entropy_of_the_prompts_responses_and_not_their_tokens():
    """-log_pi of the two responses: 4 x .25 = 1 and 4 x 1 = 4 nats, mean 2.5; .1 * sqrt(2.5) = .158. With next to no entropy
    the rounding of an engine is left, .02 * sqrt(4) = .04."""
    batch, _ = four_tokens([[0.0] * 4, [0.0] * 4])
    for each, limit in (((-0.25, -1.0), 0.1 * 2.5**0.5), ((-1e-6, -1e-6), 0.04)):
        policy_N = torch.tensor([[each[0]] * 4, [each[1]] * 4]).flatten()
        made = Batch(**{**vars(batch), "policy_N": policy_N})
        for drift, kept in ((0.99 * limit, 1.0), (1.01 * limit, 0.0)):
            log_pi_N = policy_N + drift / 4
            share_N = gradient_share(made, log_pi_N, torch.tensor([[True, True]]), rule="response", max_drift=0.1)
            assert share_N.tolist() == [kept] * 8


def test_a_drift_that_all_responses_have_holds_none_back():
    """.1 x sqrt(4 nats) = .2, and one and a half times what an update usually does: that is more from .1333 nats on."""
    batch, _ = four_tokens([[0.0] * 4, [0.0] * 4])
    for usual, limit in ((0.0, 0.2), (0.1, 0.2), (0.13, 0.2), (0.4, 0.6)):
        made = replace(batch, usual_drift=usual)
        for drift, kept in ((0.99 * limit, 1.0), (1.01 * limit, 0.0)):
            log_pi_N = batch.policy_N + torch.tensor([drift, -drift]).repeat_interleave(4) / 4
            share_N = gradient_share(made, log_pi_N, torch.tensor([[True, False]]), rule="response", max_drift=0.1)
            assert share_N.tolist() == [kept] * 8
            # By tokens and by taper it says nothing.
            for rule in ("token", "taper"):
                pushed = {"push_up_PK": torch.tensor([[True, False]]), "rule": rule, "max_drift": 0.1}
                assert torch.equal(gradient_share(made, log_pi_N, **pushed), gradient_share(batch, log_pi_N, **pushed))


def test_a_response_with_unknown_log_probs_says_nothing_of_the_entropy():
    batch, log_pi_N = four_tokens([[0.06] * 4, [0.06] * 4])
    policy_N = batch.policy_N.clone()
    policy_N[4:] = torch.nan  # the first alone: 4 nats, a limit of .2; as 0 nats it would make the mean 2, and .14
    for drift, kept in ((0.048, 1.0), (0.052, 0.0)):
        made = Batch(**{**vars(batch), "policy_N": policy_N})
        log_pi_N = batch.policy_N + drift
        share_N = gradient_share(made, log_pi_N, torch.tensor([[True, True]]), rule="response", max_drift=0.1)
        assert share_N.view(2, 4)[:, 0].tolist() == [kept, 1.0]


def test_tokens_are_masked_one_by_one():
    drift = [[0.3, 0.1, -0.3, 0.0], [0.3, 0.1, -0.3, 0.0]]
    assert shares(drift, [True, False], rule="token", max_drift=0.2) == [[0, 1, 1, 1], [1, 1, 0, 1]]


def test_a_tapered_push_down_weighs_as_much_as_the_response_is_still_likely():
    drift = [[-0.25] * 4, [-0.25] * 4, [0.25] * 4]
    got = shares(drift, [True, False, False], rule="taper")
    assert [own[0] for own in got] == pytest.approx([1.0, math.exp(-1.0), 1.0])


def test_unknown_log_probs_hold_nothing_back():
    batch, log_pi_N = four_tokens([[9.0] * 4])
    unknown = Batch(**{**vars(batch), "policy_N": torch.full_like(batch.policy_N, torch.nan)})
    for rule in ("response", "token", "taper"):
        share_N = gradient_share(unknown, log_pi_N, torch.tensor([[True]]), rule=rule, max_drift=0.1)
        assert share_N.tolist() == [1.0] * 4


def test_a_masked_response_keeps_its_place_in_log_z_and_gets_no_gradient():
    """Rewards 1 and 0 at beta 1 and log_ref = 0: log_z = r - log_pi = [1 + 3, 0 + 3.6], mean 3.8. The first is pushed up by
    .2 and has gone up by 1 > .15 x sqrt(4) nats: it is left alone. The second is pushed down and has not gone down."""
    batch, log_pi_N = four_tokens([[0.25] * 4, [0.1] * 4])
    batch = Batch(**{**vars(batch), "reward_PK": torch.tensor([[1.0, 0.0]])})
    for rule, first in (("none", -0.1), ("response", 0.0)):
        leaf = log_pi_N.clone().requires_grad_()
        loss = TrajectoryBalance(trust_region=rule)(batch, Forward(log_pi_N=leaf), beta=1.0)
        (gradient_N,) = torch.autograd.grad(loss.value, leaf)
        # (beta / 2) mean residual^2: d / d log_pi = -residual / 2 for each token of a response
        assert gradient_N.view(2, 4)[0].tolist() == pytest.approx([first] * 4, abs=1e-6)
        assert gradient_N.view(2, 4)[1].tolist() == pytest.approx([0.1] * 4, abs=1e-6)
        assert loss.metrics["tb/loss"].item() == pytest.approx(0.04, abs=1e-6)


def test_fresh_data_has_the_gradient_of_exact_trajectory_balance():
    batch = ragged_batch(3, 4)
    gradients = []
    for rule in ("none", "response", "token", "taper"):
        leaf = batch.policy_N.clone().requires_grad_()
        loss = TrajectoryBalance(trust_region=rule)(batch, Forward(log_pi_N=leaf), beta=0.1)
        gradients.append(torch.autograd.grad(loss.value, leaf)[0])
    assert all(torch.equal(gradients[0], other) for other in gradients[1:])
