"""Every objective against `numpy_objectives.py`, which was written from the formulas alone by someone who had not seen
this code: loss and gradients agree to 1e-6 on ragged, masked, stale data. (Later additions were written there by the
author of the code: whitening and k3 of vineppo, the usual drift; subtb.)"""

from dataclasses import dataclass, replace

import numpy as np
import numpy_objectives
import pytest
import torch
from torch import Tensor
from variants import with_constants

from tba.objectives.registry import OBJECTIVES
from tba.trainer.batch import _weighted
from tba.types import Batch, Forward, Totals

P, K = 5, 4
CASES = [
    ("tb", {"trust_region": "none"}, 0.3),
    ("tb", {"trust_region": "response", "max_drift": 0.5}, 0.3),
    ("tb", {"trust_region": "response", "max_drift": 0.05, "usual_drift": 0.4}, 0.3),
    ("tb", {"trust_region": "token", "max_drift": 0.3}, 0.3),
    ("tb", {"trust_region": "taper"}, 0.3),
    ("tb_learned_z", {}, 0.3),
    ("kimi", {}, 0.3),
    ("subtb", {}, 0.3),
    ("subtb", {"decay": 0.4}, 0.05),
    ("subtb", {"decay": 1.0}, 1.0),
    ("tba_prime", {"normal_length": 11}, 0.05),
    ("tba_prime", {"normal_length": 11, "ratio_max": 1.5}, 0.05),
    ("reinforce", {}, 0.1),
    ("rloo", {}, 0.1),
    ("proximal_rloo", {}, 0.1),
    ("grpo", {}, 0.04),
    ("grpo", {"clip_high": 0.5}, 0.0),
    ("dr_grpo", {"normal_length": 11}, 0.0),
    ("dr_grpo", {"normal_length": 11}, 0.04),
    ("ppo", {"gamma": 0.9, "gae_lambda": 0.7}, 0.05),
    ("ppo", {"old_values": True}, 0.05),
    ("vineppo", {}, 0.05),
    ("online_dpo", {}, 0.1),
]


@dataclass
class Data:
    batch: Batch
    log_pi_N: Tensor
    values_N: Tensor
    log_z_P: Tensor


def random_data(seed: int, *, old_values: bool) -> Data:
    """Ragged responses; some tokens masked (their behaviour unknown), some responses and one prompt without weight."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(2, 8, (P * K,), generator=generator)
    N = int(lengths.sum())
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    log_pi_N = -normal(N).abs() - 0.1
    mask_N = torch.rand(N, generator=generator) > 0.15
    mask_N[offsets[:-1]] = True
    behaviour_N = log_pi_N + normal(N, scale=0.4)
    begins_N = (torch.rand(N, generator=generator) < 0.3) & mask_N
    begins_N[offsets[:-1]] = True
    weight_PK = (torch.rand(P, K, generator=generator) > 0.2).double()
    weight_PK[1], weight_PK[2] = 0.0, torch.tensor([1.0, 0.0, 0.0, 0.0])
    reward_PK = torch.randint(0, 3, (P, K), generator=generator).double()
    batch = Batch(
        prompt_ids=tuple(map(str, range(P))),
        prompt_tokens=tuple(torch.tensor([3]) for _ in range(P)),
        token_ids_N=torch.full((N,), 4),
        offsets=offsets,
        loss_mask_N=mask_N,
        log_ref_N=log_pi_N + normal(N, scale=0.5),
        behaviour_N=torch.where(mask_N, behaviour_N, torch.nan),
        policy_N=torch.where(mask_N, behaviour_N + normal(N, scale=0.1), torch.nan),
        rewards={},
        reward_PK=reward_PK,
        weight_PK=weight_PK,
        version_PK=torch.zeros(P, K, dtype=torch.long),
        truncated_PK=torch.zeros(P, K, dtype=torch.bool),
        rows_PK=torch.zeros(P, K, dtype=torch.long),
        totals=Totals(prompts=0, responses=0, tokens=0),
        step_values_N=torch.where(begins_N, torch.rand(N, generator=generator, dtype=torch.float64), torch.nan),
        old_values_N=normal(N, scale=0.5) if old_values else None,
    )
    return Data(_weighted(batch, weight_PK), log_pi_N, normal(N, scale=0.5), normal(P))


def as_numpy_prompts(data: Data) -> list:
    batch = data.batch

    def response(r: int):
        own = slice(int(batch.offsets[r]), int(batch.offsets[r + 1]))
        old = batch.old_values_N
        return numpy_objectives.Response(
            log_pi=data.log_pi_N[own].numpy(),
            log_ref=batch.log_ref_N[own].numpy(),
            behaviour=batch.behaviour_N[own].numpy(),
            policy=batch.policy_N[own].numpy(),
            mask=batch.loss_mask_N[own].numpy(),
            reward=float(batch.reward_PK.flatten()[r]),
            weight=float(batch.weight_PK.flatten()[r]),
            values=data.values_N[own].numpy(),
            old_values=None if old is None else old[own].numpy(),
            mc_values=batch.step_values_N[own].numpy(),
        )

    return [
        numpy_objectives.Prompt(responses=[response(p * K + k) for k in range(K)], log_z=float(data.log_z_P[p]))
        for p in range(P)
    ]


def ours(name: str, settings: dict, data: Data, beta: float):
    """Loss and its gradients, NaN-free."""
    leaves = [tensor.clone().requires_grad_() for tensor in (data.log_pi_N, data.values_N, data.log_z_P)]
    forward = Forward(log_pi_N=leaves[0], values_N=leaves[1], log_z_P=leaves[2])
    loss = with_constants(OBJECTIVES[name], settings)(data.batch, forward, beta=beta).value
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    return loss.item(), [None if gradient is None else gradient.numpy() for gradient in gradients]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "settings", "beta"), CASES, ids=lambda value: str(value))
def test_loss_and_gradient_agree_with_the_second_implementation(name, settings, beta, seed):
    settings = dict(settings)
    data = random_data(seed, old_values=settings.pop("old_values", False))
    answer = getattr(numpy_objectives, name)(as_numpy_prompts(data), beta=beta, **settings)
    data.batch = replace(data.batch, usual_drift=settings.pop("usual_drift", 0.0))
    loss, (d_log_pi, d_values, d_log_z) = ours(name, settings, data, beta)
    assert loss == pytest.approx(answer.loss, abs=1e-6, rel=1e-6)
    want = np.concatenate([tokens for own in answer.d_log_pi for tokens in own])
    np.testing.assert_allclose(d_log_pi, want, atol=1e-6)
    if answer.d_values is not None:
        np.testing.assert_allclose(d_values, np.concatenate([v for own in answer.d_values for v in own]), atol=1e-6)
    if answer.d_log_z is not None:
        np.testing.assert_allclose(d_log_z, answer.d_log_z, atol=1e-6)


def test_every_objective_is_compared():
    assert {name for name, _, _ in CASES} == set(OBJECTIVES)


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if OBJECTIVES[name].default_coupling != "batch"])
def test_losses_of_whole_prompts_add_up_to_the_loss_of_the_step(name):
    settings = {"normal_length": 11} if "normal_length" in OBJECTIVES[name].model_fields else {}
    data = random_data(0, old_values=False)
    whole, _ = ours(name, settings, data, 0.1)
    parts = 0.0
    for prompts in ([0, 3], [4, 1, 2]):
        part = data.batch.take(prompts)
        tokens = data.batch.tokens_of((torch.tensor(prompts)[:, None] * K + torch.arange(K)).flatten())
        own = replace(
            data,
            batch=part,
            log_pi_N=data.log_pi_N[tokens],
            values_N=data.values_N[tokens],
            log_z_P=data.log_z_P[torch.tensor(prompts)],
        )
        parts += ours(name, settings, own, 0.1)[0]
    assert parts == pytest.approx(whole, abs=1e-9)
