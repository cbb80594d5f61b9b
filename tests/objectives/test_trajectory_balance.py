"""The objective against numbers worked out by hand and against finite differences."""

from dataclasses import replace

import pytest
import torch
from builders import ragged_batch
from torch import tensor

from tba.objectives.trajectory_balance import TrajectoryBalance, trajectory_balance_loss
from tba.types import Forward


def test_loss_is_the_variance_of_log_z_within_a_prompt():
    # log_z = ref + reward / beta - pi = [-2 + 4 + 1, -2 + 0 + 3] = [3, 1]; mean 2, residuals +1 and -1
    loss = trajectory_balance_loss(tensor([[-1.0, -3.0]]), tensor([[-2.0, -2.0]]), tensor([[2.0, 0.0]]), beta=0.5)
    assert loss.item() == pytest.approx(1.0)


def test_loss_is_a_mean_over_prompts_and_responses():
    # prompt 0 as above: squared residuals 1, 1. prompt 1: log_z = [0 + 2 - 0, 0 + 0 - 0] = [2, 0]: 1, 1. Then with
    # beta = 1 on prompt 1's rewards [2, 0] nothing else changes: the mean of four ones is 1.
    log_pi, log_ref = tensor([[-1.0, -3.0], [0.0, 0.0]]), tensor([[-2.0, -2.0], [0.0, 0.0]])
    assert trajectory_balance_loss(log_pi, log_ref, tensor([[2.0, 0.0], [1.0, 0.0]]), beta=0.5).item() == pytest.approx(
        1.0
    )


def test_a_response_without_weight_counts_neither_in_the_mean_nor_in_the_loss():
    # without the third response this is the first test: residuals +1, -1
    loss = trajectory_balance_loss(
        tensor([[-1.0, -3.0, -50.0]]),
        tensor([[-2.0, -2.0, -1.0]]),
        tensor([[2.0, 0.0, 9.0]]),
        beta=0.5,
        weight_PK=tensor([[1.0, 1.0, 0.0]]),
    )
    assert loss.item() == pytest.approx(1.0)


def test_gradient_identity_holds_by_finite_differences():
    """grad L = -(2 / (P K beta)) sum_ij A_ij grad log_pi_ij with A = (r - mean r) - beta (KL - mean KL)."""
    generator = torch.Generator().manual_seed(0)
    P, K, beta = 3, 4, 0.3
    log_pi = -torch.rand(P, K, generator=generator, dtype=torch.float64) * 20
    log_ref = -torch.rand(P, K, generator=generator, dtype=torch.float64) * 20
    reward = torch.rand(P, K, generator=generator, dtype=torch.float64)
    kl = log_pi - log_ref
    advantage = (reward - reward.mean(1, keepdim=True)) - beta * (kl - kl.mean(1, keepdim=True))
    identity = -2 / (P * K * beta) * advantage

    step = 1e-5
    for i in range(P):
        for j in range(K):
            moved = torch.zeros_like(log_pi)
            moved[i, j] = step
            plus = trajectory_balance_loss(log_pi + moved, log_ref, reward, beta=beta)
            minus = trajectory_balance_loss(log_pi - moved, log_ref, reward, beta=beta)
            assert ((plus - minus) / (2 * step)).item() == pytest.approx(identity[i, j].item(), abs=1e-7)


def test_back_propagated_value_is_half_beta_times_the_papers_loss():
    batch = ragged_batch()
    log_pi_N = -torch.rand(len(batch.token_ids_N), generator=torch.Generator().manual_seed(1))
    loss = TrajectoryBalance()(batch, Forward(log_pi_N=log_pi_N), beta=0.2)
    paper = trajectory_balance_loss(
        batch.sum_per_response(log_pi_N), batch.sum_per_response(batch.log_ref_N), batch.reward_PK, beta=0.2
    )
    assert loss.metrics["tb/loss"] == pytest.approx(paper.item(), rel=1e-6)
    assert loss.value.item() == pytest.approx(0.1 * paper.item(), rel=1e-6)


def test_equal_rewards_still_pull_to_the_reference():
    # rewards all 0; log_pi - log_ref = [+1, -1]: the gradient lowers the first and raises the second
    log_pi = tensor([[-1.0, -3.0]], requires_grad=True)
    trajectory_balance_loss(log_pi, tensor([[-2.0, -2.0]]), tensor([[0.0, 0.0]]), beta=0.5).backward()
    assert log_pi.grad[0, 0] > 0 > log_pi.grad[0, 1]


def test_tokens_outside_the_loss_mask_do_not_count():
    batch = ragged_batch(P=1, K=2)
    log_pi_N = -torch.ones(len(batch.token_ids_N))
    mask = batch.loss_mask_N.clone()
    mask[0] = False
    masked = replace(batch, loss_mask_N=mask)
    assert masked.sum_per_response(log_pi_N)[0, 0].item() == batch.sum_per_response(log_pi_N)[0, 0].item() + 1
