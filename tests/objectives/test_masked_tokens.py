"""Tokens that the policy did not choose: an environment's words, with whatever log-probs they have."""

import math
from dataclasses import replace

import pytest
import torch
from test_against_numpy import Data, random_data
from torch import Tensor

from tba.objectives.registry import OBJECTIVES
from tba.types import Forward

# Log-probs of a masked token: as episodes store it (0), unknown (imports), impossible, and nearly so.
FILLS = [0.0, math.nan, -math.inf, -1e4]


def answer(name: str, data: Data, *, stored: float, now: float) -> tuple[Tensor, dict[str, float], list[Tensor]]:
    """The loss, its metrics, and its gradients by all outputs at masked tokens. `stored` is what the batch has of these
    tokens, `now` what the model says."""
    batch, masked_N = data.batch, ~data.batch.loss_mask_N
    fields = ("log_ref_N", "behaviour_N", "policy_N")
    batch = replace(batch, **{key: getattr(batch, key).masked_fill(masked_N, stored) for key in fields})
    outputs = [data.log_pi_N.masked_fill(masked_N, now), data.values_N.masked_fill(masked_N, now)]
    leaves = [output.requires_grad_() for output in outputs]
    forward = Forward(log_pi_N=leaves[0], values_N=leaves[1], log_z_P=data.log_z_P, entropy_N=data.log_pi_N.abs())
    settings = {"normal_length": 8} if "normal_length" in OBJECTIVES[name].model_fields else {}
    loss = OBJECTIVES[name](**settings)(batch, forward, beta=0.1)
    gradients = torch.autograd.grad(loss.value, leaves, allow_unused=True)
    return (
        loss.value.detach(),
        {key: float(value) for key, value in loss.metrics.items()},
        [gradient[masked_N] for gradient in gradients if gradient is not None],
    )


@pytest.mark.parametrize("name", OBJECTIVES)
def test_masked_tokens_have_no_gradient_and_move_no_number(name):
    data = random_data(0, old_values=True)
    assert (~data.batch.loss_mask_N).any()
    loss, metrics, _ = answer(name, data, stored=0.0, now=-1.0)
    assert all(map(math.isfinite, metrics.values()))
    for stored in FILLS:
        for now in (0.0, -1.0, -1e4):
            same, own, gradients = answer(name, data, stored=stored, now=now)
            assert torch.equal(same, loss), (stored, now)
            assert own == metrics, (stored, now)
            assert gradients
            assert all((gradient == 0.0).all() for gradient in gradients), (stored, now)
