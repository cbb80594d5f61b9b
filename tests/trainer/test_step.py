"""Gradients do not depend on how a step is cut into micro-batches or packed."""

import math
import warnings
from dataclasses import replace

import pytest
import torch
from builders import ragged_batch, tiny_llama
from transformers import LlamaForCausalLM

from tba.config import TrainConfig
from tba.models.load import checkpoint_layers
from tba.models.packing import pack
from tba.models.policy import PolicyModel, make_critic, make_log_z
from tba.objectives.registry import OBJECTIVES
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.trainer import step as train_step
from tba.trainer.batch import Budget
from tba.trainer.optimizer import MasterAdamW
from tba.trainer.step import NonFiniteLoss, TrainStep

P, K = 3, 4


def make_step(budget: Budget, *, model: LlamaForCausalLM | None = None, **settings) -> TrainStep:
    policy = PolicyModel(tiny_llama() if model is None else model)
    optimizer = MasterAdamW(policy.model.parameters(), TrainConfig(**settings))
    return TrainStep(policy, TrajectoryBalance(trust_region="none"), optimizer, budget=budget, temperature=0.7)


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


@pytest.mark.parametrize("max_responses", [1, K])
def test_gradients_are_the_same_bit_for_bit_however_many_workers_there_are(monkeypatch, max_responses):
    """In one pass over whole prompts, and in two over single responses."""
    monkeypatch.setattr(train_step, "LEAST_WORK", 0.0)
    found = []
    for workers in (1, 2, 5):
        policy = PolicyModel(tiny_llama())
        optimizer = MasterAdamW(policy.model.parameters(), TrainConfig())
        budget = Budget(max_tokens=10_000, max_responses=max_responses)
        objective = TrajectoryBalance(trust_region="none")
        step = TrainStep(policy, objective, optimizer, budget=budget, temperature=0.7, workers=workers)
        assert (step._workers is not None) == (workers > 1)
        result = step.gradients(ragged_batch(P, K), beta=0.1)
        numbers = [result.outputs.log_pi_N, torch.tensor(result.metrics["loss"])]
        numbers += [parameter.grad for parameter in policy.model.parameters()]
        found.append(torch.cat([number.flatten() for number in numbers]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_large_model_has_no_more_workers_than_its_gradients_leave_room_for(monkeypatch):
    monkeypatch.setattr(train_step, "LEAST_WORK", 0.0)
    policy = PolicyModel(tiny_llama())
    optimizer = MasterAdamW(policy.model.parameters(), TrainConfig())
    monkeypatch.setattr(train_step, "MOST_PENDING", 3 * 4 * policy.model.num_parameters())  # of fp32, three times

    step = TrainStep(policy, TrajectoryBalance(), optimizer, budget=Budget(max_tokens=99), temperature=1.0, workers=8)
    assert step._workers is not None
    assert step._workers.count == 3


def heads_step(name: str, budget: Budget) -> TrainStep:
    """A step of an objective with a head, whose weights are not the zeros they start as."""
    model, objective = tiny_llama(), OBJECTIVES[name]()
    critic = make_critic(model) if objective.has_critic else None
    log_z = make_log_z(model) if objective.has_log_z else None
    for head in (critic, log_z):
        if head is not None:
            torch.nn.init.normal_(head.head.weight, generator=torch.Generator().manual_seed(3))
    if log_z is not None:
        log_z.started = True
    policy = PolicyModel(model, critic=critic, log_z=log_z)
    heads = [parameter for head in policy.heads for parameter in head.parameters()]
    optimizer = MasterAdamW(model.parameters(), TrainConfig(), heads=heads, heads_rate=0.5)
    return TrainStep(policy, objective, optimizer, budget=budget, temperature=0.7)


@pytest.mark.parametrize("name", ["ppo", "subtb", "tb_learned_z"])
def test_gradients_of_critic_and_log_z_are_the_same_for_every_micro_batch_size(name):
    def all_gradients(responses: int, share: bool) -> torch.Tensor:
        budget = Budget(max_tokens=10_000, max_responses=responses, share_prompts=share)
        step = heads_step(name, budget)
        step.gradients(ragged_batch(P, K), beta=0.1)
        return torch.cat([master.grad.flatten() for master in step.optimizer.masters if master.grad is not None])

    want = all_gradients(P * K, True)
    for responses, share in ((1, True), (3, False), (K, True), (2 * K, False), (P * K, False)):
        got = all_gradients(responses, share)
        assert (got - want).abs().max() < 2e-5 * max(1.0, want.abs().max().item()), (responses, share)


def test_gradients_of_whitened_advantages_are_the_same_for_every_micro_batch_size():
    batch = ragged_batch(P, K)
    values_N = torch.full_like(batch.log_ref_N, math.nan)
    values_N[batch.offsets[:-1]] = torch.rand(P * K, generator=torch.Generator().manual_seed(4))
    batch = replace(batch, step_values_N=values_N)

    def all_gradients(responses: int) -> torch.Tensor:
        step = heads_step("vineppo", Budget(max_tokens=10_000, max_responses=responses))
        step.gradients(batch, beta=0.1)
        return torch.cat([master.grad.flatten() for master in step.optimizer.masters])

    want = all_gradients(P * K)
    for responses in (1, 3, K):
        assert (all_gradients(responses) - want).abs().max() < 2e-5 * max(1.0, want.abs().max().item()), responses


@pytest.mark.parametrize(
    "settings",
    [
        {"aggregate": "tokens"},
        {"ratio": "sequence", "max_ratio": 1.5},
        {"surrogate": "cispo", "clip_high": 1.1, "aggregate": "tokens"},
        {"surrogate": "vespo", "off_policy_mask": 0.01},
        {"top_entropy": 0.3},
        {"top_entropy": 0.3, "surrogate": "sapo", "aggregate": "tokens", "ratio": "sequence", "off_policy_mask": 0.01},
    ],
    ids=str,
)
def test_gradients_of_grpo_are_the_same_for_every_micro_batch_size_and_setting(settings):
    def all_gradients(responses: int, share: bool) -> torch.Tensor:
        step = make_step(Budget(max_tokens=10_000, max_responses=responses, share_prompts=share))
        step.objective = OBJECTIVES["grpo"](**settings)
        step.gradients(batch, beta=0.1)
        return torch.cat([parameter.grad.flatten() for parameter in step.policy.model.parameters()])

    batch = ragged_batch(P, K)
    want = all_gradients(P * K, True)
    assert want.abs().max() > 1e-3
    for responses, share in ((1, True), (3, False), (K, True), (2 * K, False), (P * K, False)):
        got = all_gradients(responses, share)
        assert (got - want).abs().max() < 1e-5 * max(1.0, want.abs().max().item()), (responses, share)


def test_values_are_of_the_state_before_each_token():
    model = tiny_llama()
    critic = make_critic(model)
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(3))
    tokens = torch.tensor([3, 4, 5, 6, 2])
    hidden = model.model(tokens[None]).last_hidden_state[0]
    want = critic(hidden[1:4])  # states [3 4], [3 4 5], [3 4 5 6] choose 5, 6, 2
    packed = pack([tokens[:2]], [[tokens[2:]]], device=tokens.device)
    got = PolicyModel(model, critic=critic).forward(packed, temperature=1.0).values_N
    assert (got - want).abs().max() < 1e-5


@pytest.mark.parametrize("responses", [2, P * K])
def test_log_z_starts_at_the_vargrad_estimate_of_a_batch_by_the_live_policy(responses):
    """Not by the policies that generated: at a restart they are several, and of imported responses they are unknown."""
    step, beta = heads_step("tb_learned_z", Budget(max_tokens=10_000, max_responses=responses)), 0.1
    batch = ragged_batch(P, K)
    batch = replace(batch, policy_N=torch.full_like(batch.policy_N, math.nan))
    batch.weight_PK[0, 1] = 0.0
    step.restart_log_z()
    result = step.gradients(batch, beta=beta)
    gap_PK = batch.sum_per_response(batch.log_ref_N - result.outputs.log_pi_N)
    estimates = (gap_PK + batch.reward_PK / beta)[batch.weight_PK > 0]
    assert len(estimates) == P * K - 1
    assert result.outputs.log_z_P.tolist() == pytest.approx([estimates.mean().item()] * P, rel=1e-5)


def test_a_restarted_log_z_starts_at_the_next_batch_and_adams_moments_with_it():
    step, first, second = heads_step("tb_learned_z", Budget(max_tokens=10_000)), ragged_batch(P, K), ragged_batch(P, K)
    second = replace(second, reward_PK=second.reward_PK + 9.0)  # at beta .1: log Z is 90 nats higher
    step.restart_log_z()
    started = step(first, beta=0.1, learning_rate=0.0).outputs.log_z_P[0].item()
    for _ in range(3):
        stayed = step(second, beta=0.1, learning_rate=0.0).outputs.log_z_P[0].item()
    assert abs(stayed - started) < 5.0, "it learns on from where it was: 1 nat a step at this rate"
    step.restart_log_z()
    again = step(second, beta=0.1, learning_rate=0.0).outputs.log_z_P
    assert again.tolist() == pytest.approx([started + 90.0] * P, rel=1e-4)
    counted = {int(step.optimizer.adam.state[p]["step"]) for p in step.policy.log_z.parameters()}
    assert counted == {1}
    assert {int(step.optimizer.adam.state[p]["step"]) for p in step.policy.model.parameters()} == {5}


def test_a_batch_without_any_weight_does_not_start_log_z():
    step, batch = heads_step("tb_learned_z", Budget(max_tokens=10_000)), ragged_batch(P, K)
    step.restart_log_z()
    nothing = replace(batch, weight_PK=torch.zeros(P, K), totals=replace(batch.totals, responses=0, tokens=0))
    step.gradients(nothing, beta=0.1)
    assert not step.policy.log_z.started


def test_a_batch_without_a_finite_loss_does_not_start_log_z():
    step, batch = heads_step("tb_learned_z", Budget(max_tokens=10_000)), ragged_batch(P, K)
    step.restart_log_z()
    with pytest.raises(NonFiniteLoss):
        step(replace(batch, reward_PK=torch.full((P, K), math.nan)), beta=0.1, learning_rate=1e-3)
    assert not step.policy.log_z.started
    assert math.isfinite(step(batch, beta=0.1, learning_rate=1e-3).metrics["loss"])


def test_heads_have_a_clip_and_a_learning_rate_of_their_own():
    policy, head = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    optimizer = MasterAdamW([policy], TrainConfig(max_grad_norm=1.0), heads=[head], heads_rate=0.5)
    policy.grad, head.grad = torch.tensor([0.5]), torch.tensor([1000.0])
    assert optimizer.clip_gradients().item() == pytest.approx(0.5)
    assert (policy.grad.item(), head.grad.item()) == pytest.approx((0.5, 1.0), rel=1e-4)
    optimizer.step(0.01)
    assert (policy.item(), head.item()) == pytest.approx((-0.01, -0.5), rel=1e-4)  # Adam's first step is the rate


def test_metrics_are_the_same_in_one_and_in_two_passes():
    _, one = gradients(Budget(max_tokens=10_000))
    _, parts = gradients(Budget(max_tokens=10_000, max_responses=K))
    _, two = gradients(Budget(max_tokens=10_000, max_responses=1))
    for other in (parts, two):
        for name in ("loss", "tb/loss", "tb/log_z", "tb/log_z_std", "tb/max_abs_residual"):
            assert other[name] == pytest.approx(one[name], rel=1e-5), name


@pytest.mark.parametrize("max_responses", [K, 1])
def test_a_prompt_without_weight_counts_in_no_metric_however_the_step_is_cut(max_responses):
    batch = ragged_batch(P, K)
    batch.weight_PK[0] = 0.0
    whole = make_step(Budget(max_tokens=10_000)).gradients(batch, beta=0.1).metrics
    cut = make_step(Budget(max_tokens=10_000, max_responses=max_responses)).gradients(batch, beta=0.1).metrics
    for name in ("loss", "tb/log_z", "tb/max_abs_residual"):
        assert cut[name] == pytest.approx(whole[name], rel=1e-5), name
    others = make_step(Budget(max_tokens=10_000)).gradients(batch.take([1, 2]), beta=0.1).metrics
    for name in ("tb/log_z", "tb/log_z_std"):
        assert whole[name] == pytest.approx(others[name], rel=1e-5), name


def test_a_mean_over_nothing_is_left_out():
    step = make_step(Budget(max_tokens=10_000))
    metrics = step.gradients(replace(ragged_batch(P, K), weight_PK=torch.zeros(P, K)), beta=0.1).metrics
    assert metrics == {"loss": 0.0, "tb/loss": 0.0, "tb/max_abs_residual": 0.0}


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
    assert all(master.grad is None for master in step.optimizer.masters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_move_that_is_refused_leaves_weights_and_moments_as_they_are(dtype, bad):
    """The loss is finite, and one number of the gradient is not."""
    step, batch = make_step(Budget(max_tokens=10_000), model=tiny_llama().to(dtype)), ragged_batch(P, K)

    def found() -> list[torch.Tensor]:
        moments = [value for state in step.optimizer.adam.state.values() for value in state.values()]
        return [tensor.detach().clone() for tensor in (*step.policy.model.parameters(), *moments)]

    step(batch, beta=0.1, learning_rate=0.01)
    assert step.moved
    step.moved, before = False, found()
    step.gradients(batch, beta=0.1)
    step.optimizer.masters[3].grad.view(-1)[5] = bad
    with pytest.raises(NonFiniteLoss, match="gradient norm is"):
        step.move(0.01, nats=0.5)
    assert not step.moved
    assert all(torch.equal(one, other) for one, other in zip(before, found(), strict=True))
    assert all(master.grad is None for master in step.optimizer.masters)
    step(batch, beta=0.1, learning_rate=0.01)
    assert not any(torch.equal(one, other) for one, other in zip(before[:1], found()[:1]))


def test_a_move_is_that_of_the_last_gradients_and_made_once():
    step, whole = make_step(Budget(max_tokens=10_000)), make_step(Budget(max_tokens=10_000))
    result = step.gradients(ragged_batch(P, K), beta=0.1)
    assert "learning_rate" not in result.metrics
    moved = step.move(0.01)
    metrics = whole(ragged_batch(P, K), beta=0.1, learning_rate=0.01).metrics
    assert metrics == {**result.metrics, **moved}
    assert (moved["learning_rate"], moved.keys()) == (0.01, {"grad_norm", "learning_rate"})
    assert all(map(torch.equal, step.policy.model.parameters(), whole.policy.model.parameters()))
    with pytest.raises(AssertionError, match="there are gradients"):
        step.move(0.01)


def test_after_a_loss_that_was_refused_there_is_nothing_to_move_by():
    step, batch = make_step(Budget(max_tokens=10_000)), ragged_batch(P, K)
    with pytest.raises(NonFiniteLoss):
        step.gradients(replace(batch, reward_PK=torch.full((P, K), math.nan)), beta=0.1)
    with pytest.raises(AssertionError, match="there are gradients"):
        step.move(0.01)


def test_a_batch_without_weight_moves_nothing():
    """Not even by the momentum of the steps before."""
    step, batch = make_step(Budget(max_tokens=10_000)), ragged_batch(P, K)
    step(batch, beta=0.1, learning_rate=0.01)
    before = [p.detach().clone() for p in step.policy.model.parameters()]
    nothing = replace(batch, weight_PK=torch.zeros(P, K), totals=replace(batch.totals, responses=0, tokens=0))
    step.moved = False
    step(nothing, beta=0.1, learning_rate=0.01)
    assert all(map(torch.equal, before, step.policy.model.parameters()))
    assert not step.moved


@pytest.mark.parametrize("rate", [1e-6, 1e-3, 0.3])
@pytest.mark.parametrize("nats", [0.02, 0.5])
def test_an_update_is_made_as_long_as_it_takes_to_move_log_pi_so_far(rate, nats):
    step, batch = make_step(Budget(max_tokens=10_000)), ragged_batch(P, K)
    before = step.gradients(batch, beta=0.1).outputs
    found = step.move(rate, nats=nats, measure=True)
    assert abs(math.log(found["update_drift"] / nats)) < train_step.NEAR
    assert found["own_movement"] == pytest.approx(step.update_drift(batch, before))
    assert found["update_drift"] == pytest.approx(
        found["own_movement"], rel=0.1
    )  # in proportion, before the last stretch
    # It is the update of that rate.
    plain = make_step(Budget(max_tokens=10_000))
    plain(batch, beta=0.1, learning_rate=found["learning_rate"])
    for one, other in zip(step.policy.model.parameters(), plain.policy.model.parameters()):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_update_drift_is_the_mean_change_of_log_pi_of_a_response_in_nats(dtype):
    step, batch = make_step(Budget(max_tokens=60), model=tiny_llama().to(dtype)), ragged_batch(P, K)
    before = step.gradients(batch, beta=0.1).outputs
    step.optimizer.drop_gradients()
    with torch.no_grad():
        for parameter in step.policy.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    after = step.gradients(batch, beta=0.1).outputs
    change_PK = batch.sum_per_response(after.log_pi_N) - batch.sum_per_response(before.log_pi_N)
    assert step.update_drift(batch, before) == pytest.approx(change_PK.abs().mean().item(), rel=1e-5)


def test_of_a_large_batch_the_update_drift_of_thirty_two_responses_is_measured():
    step, batch = make_step(Budget(max_tokens=200)), ragged_batch(16, 6)
    before = step.gradients(batch, beta=0.1).outputs
    step.move(0.01)
    after = step.gradients(batch, beta=0.1).outputs
    change_R = (batch.sum_per_response(after.log_pi_N) - batch.sum_per_response(before.log_pi_N)).flatten()
    assert step.update_drift(batch, before) == pytest.approx(change_R[::3].abs().mean().item(), rel=1e-5)  # 96 = 3 x 32


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


def test_recomputed_layers_have_the_same_gradients():
    want, _ = gradients(Budget(max_tokens=10_000))
    step = make_step(Budget(max_tokens=10_000))
    checkpoint_layers(step.policy.model)
    step.gradients(ragged_batch(P, K), beta=0.1)
    got = torch.cat([p.grad.flatten() for p in step.policy.model.parameters()])
    assert (got - want).abs().max() < 1e-6
    assert any(getattr(module, "gradient_checkpointing", False) for module in step.policy.model.modules())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("share_prompts", [True, False])
def test_the_host_waits_no_more_often_for_more_micro_batches(share_prompts):
    waits = [count_waits(max_responses, share_prompts=share_prompts) for max_responses in (P * K, K)]
    assert waits[0] == waits[1] > 0


def count_waits(max_responses: int, *, share_prompts: bool) -> int:
    budget = Budget(max_tokens=10_000, max_responses=max_responses, share_prompts=share_prompts)
    step = make_step(budget, model=tiny_llama(hidden_size=64).to("cuda", torch.bfloat16))
    step.gradients(ragged_batch(P, K), beta=0.1)  # kernels are compiled
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step.gradients(ragged_batch(P, K), beta=0.1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)
