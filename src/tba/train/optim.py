"""AdamW over fp32 master weights, whatever the dtype the model computes in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tba.config import TrainConfig


class MasterAdamW:
    """AdamW whose weights and gradient sums are fp32.

    A bf16 model keeps an fp32 copy here: at learning rates of 1e-6 most updates would round away in bf16. An fp32 model
    is its own master.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], config: TrainConfig) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.masters = [_master_of(parameter) for parameter in self.parameters]
        self.max_grad_norm = config.max_grad_norm
        self.adam = torch.optim.AdamW(
            self.masters,
            lr=0.0,
            betas=config.adam_betas,
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def accumulate(self) -> None:
        """Add the model's gradients of one micro-batch to the fp32 sums; does nothing for an fp32 model."""
        for parameter, master in zip(self.parameters, self.masters):
            if master is parameter or parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

    def clip_gradients(self) -> Tensor:
        """Scale gradients down to max_grad_norm; returns the norm before. Non-finite norms leave gradients alone."""
        gradients = [master.grad for master in self.masters if master.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.max_grad_norm is not None and torch.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(self.masters, self.max_grad_norm, norm)
        return norm

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        for group in self.adam.param_groups:
            group["lr"] = learning_rate
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        for parameter, master in zip(self.parameters, self.masters):
            if master is not parameter:
                parameter.copy_(master)

    def state(self) -> dict[str, Any]:
        """Tensors and numbers of the optimizer, for a checkpoint."""
        return {"adam": self.adam.state_dict(), "masters": [master.detach() for master in self.masters]}


def _master_of(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype == torch.float32:
        return parameter
    return nn.Parameter(parameter.detach().float().clone())
