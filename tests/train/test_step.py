"""Gradients do not depend on how a step is cut into micro-batches or packed."""

import math
from dataclasses import replace

import pytest
import torch
from builders import ragged_batch, tiny_llama

from tba.config import TrainConfig
from tba.models.policy import PolicyModel
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.train.collate import Budget
from tba.train.optim import MasterAdamW
from tba.train.step import NonFiniteLoss, TrainStep

P, K = 3, 4


def make_step(budget: Budget, **settings) -> TrainStep:
    policy = PolicyModel(tiny_llama())
    optimizer = MasterAdamW(policy.model.parameters(), TrainConfig(**settings))
    return TrainStep(policy, TrajectoryBalance(), optimizer, budget=budget, temperature=0.7)


def gradients(budget: Budget) -> tuple[torch.Tensor, dict]:
    step = make_step(budget)
    result = step.gradients(ragged_batch(P, K), beta=0.1)
    return torch.cat([p.grad.flatten() for p in step.policy.model.parameters()]), dict(result.metrics)


def plain_gradients() -> torch.Tensor:
    """The same loss the obvious way: one unpacked forward pass per response, autograd through everything."""
    model, batch, beta = tiny_llama(), ragged_batch(P, K), 0.1
    log_z = []
    for r in range(P * K):
        prompt, response = batch.prompt_tokens[r // K], batch.token_ids_N[batch.offsets[r] : batch.offsets[r + 1]]
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        log_pi = torch.log_softmax(logits / 0.7, -1).gather(1, response[:, None]).sum()
        log_ref = batch.log_ref_N[batch.offsets[r] : batch.offsets[r + 1]].sum()
        log_z.append(log_ref + batch.reward_PK.flatten()[r] / beta - log_pi)
    log_z = torch.stack(log_z).view(P, K)
    loss = (log_z - log_z.mean(1, keepdim=True).detach()).square().mean()
    (beta / 2 * loss).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("responses", [1, 3, K, K + 1, 2 * K, P * K])
def test_gradients_are_the_same_for_every_micro_batch_size(responses, share_prompts):
    want = plain_gradients()
    got, _ = gradients(Budget(max_tokens=10_000, max_responses=responses, share_prompts=share_prompts))
    assert (got - want).abs().max() < 1e-5 * max(1.0, want.abs().max().item())


def test_a_token_budget_smaller_than_any_response_still_trains_them_one_by_one():
    got, _ = gradients(Budget(max_tokens=1))
    want = plain_gradients()
    assert (got - want).abs().max() < 1e-5 * max(1.0, want.abs().max().item())


def test_metrics_are_the_same_in_one_and_in_two_passes():
    _, one = gradients(Budget(max_tokens=10_000))
    _, parts = gradients(Budget(max_tokens=10_000, max_responses=K))
    _, two = gradients(Budget(max_tokens=10_000, max_responses=1))
    for other in (parts, two):
        for name in ("loss", "tb/loss", "tb/log_z", "tb/log_z_std", "tb/max_abs_residual"):
            assert other[name] == pytest.approx(one[name], rel=1e-5), name


def test_dropped_responses_leave_no_gradient():
    step = make_step(Budget(max_tokens=10_000))
    batch = ragged_batch(P, K)
    step.gradients(replace(batch, weight_PK=torch.zeros(P, K)), beta=0.1)
    assert all(p.grad is None or not p.grad.any() for p in step.policy.model.parameters())


@pytest.mark.parametrize("max_responses", [P * K, 1])
def test_a_non_finite_loss_stops_before_the_optimizer_moves(max_responses):
    step = make_step(Budget(max_tokens=10_000, max_responses=max_responses))
    before = [p.detach().clone() for p in step.policy.model.parameters()]
    reward = ragged_batch(P, K).reward_PK.clone()
    reward[0, 0] = math.inf
    with pytest.raises(NonFiniteLoss, match="loss is"):
        step(replace(ragged_batch(P, K), reward_PK=reward), beta=0.1, learning_rate=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(before, step.policy.model.parameters()))


def test_gradients_are_clipped_to_the_threshold():
    step = make_step(Budget(max_tokens=10_000), max_grad_norm=0.01)
    step.gradients(ragged_batch(P, K), beta=0.1)
    before = step.optimizer.clip_gradients().item()
    after = torch.nn.utils.get_total_norm([p.grad for p in step.policy.model.parameters()]).item()
    assert before > 0.01
    assert after == pytest.approx(0.01, rel=1e-3)


def test_a_bf16_model_keeps_fp32_master_weights():
    """100 updates of 1e-6 would each round away in bf16; the master weights add them up."""
    parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = MasterAdamW([parameter], TrainConfig(max_grad_norm=None))
    for _ in range(100):
        parameter.grad = torch.ones(1, dtype=torch.bfloat16)
        optimizer.accumulate()
        optimizer.step(1e-6)
    assert optimizer.masters[0].item() == pytest.approx(1 - 1e-4, abs=5e-6)
    assert parameter.item() == 1.0
