"""Objectives leave their numbers on the device: reading one stops the host until the device has caught up."""

from typing import Any

import pytest
import torch
from builders import ragged_batch
from torch.utils._python_dispatch import TorchDispatchMode

from tba.objectives.registry import OBJECTIVES
from tba.types import Forward

P, K = 3, 4
READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::repeat_interleave.Tensor"}
STOPPING = {"ppo", "vineppo", "subtb"}
"""PPO is computed once a step, between two passes; VinePPO finds its steps on the device, SubTB its turns."""


class Reads(TorchDispatchMode):
    """Counts what would wait for a device: numbers read, and results whose size depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function._schema.name) + (f".{function._overloadname}" if "repeat" in str(function) else "")
        by_mask = name == "aten::index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        known_size = (kwargs or {}).get("output_size") is not None
        if (name in READS and not known_size) or by_mask:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


def test_reads_are_noticed():
    numbers = torch.arange(3.0)
    with Reads() as reads:
        float(numbers.sum())
        numbers[numbers > 1.0]
        torch.repeat_interleave(numbers, torch.tensor([1, 2, 0]))
        torch.repeat_interleave(numbers, torch.tensor([1, 2, 0]), output_size=3)
    assert reads.found == ["aten::_local_scalar_dense", "aten::index", "aten::repeat_interleave.Tensor"]


@pytest.mark.parametrize("name", sorted(set(OBJECTIVES) - STOPPING))
def test_an_objective_reads_nothing(name):
    settings = {"normal_length": 8} if "normal_length" in OBJECTIVES[name].model_fields else {}
    assert_nothing_is_read(name, settings)


@pytest.mark.parametrize("surrogate", ["clip", "cispo", "sapo", "vespo"])
def test_grpo_reads_nothing_with_any_surrogate_and_both_masks(surrogate):
    assert_nothing_is_read("grpo", {"surrogate": surrogate, "off_policy_mask": 0.1, "top_entropy": 0.2})


def assert_nothing_is_read(name: str, settings: dict[str, Any]) -> None:
    batch = ragged_batch(P, K)
    objective = OBJECTIVES[name].model_validate(settings)
    forward = Forward(
        log_pi_N=batch.behaviour_N.clone().requires_grad_(),
        entropy_N=batch.behaviour_N.abs(),
        log_z_P=torch.zeros(P, requires_grad=True),
    )
    with Reads() as reads:
        loss = objective(batch, forward, beta=0.1)
        loss.value.backward()
    assert reads.found == []
