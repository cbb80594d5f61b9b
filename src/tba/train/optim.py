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

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        config: TrainConfig,
        *,
        heads: Iterable[nn.Parameter] = (),
        heads_rate: float | None = None,
    ) -> None:
        """`heads` are trained beside the policy, clipped by a norm of their own, at `heads_rate` (None = the policy's)."""
        policy = [parameter for parameter in parameters if parameter.requires_grad]
        own = [parameter for parameter in heads if parameter.requires_grad]
        self.parameters = policy + own
        self.masters = [_master_of(parameter) for parameter in self.parameters]
        self._policy, self._heads = self.masters[: len(policy)], self.masters[len(policy) :]
        self._heads_rate = heads_rate
        self.max_grad_norm = config.max_grad_norm
        self.adam = torch.optim.AdamW(
            [{"params": group} for group in (self._policy, self._heads) if group],
            lr=0.0,
            betas=config.adam_betas,
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def accumulate(self) -> None:
        """Add the model's gradients of one micro-batch to the fp32 sums; does nothing for an fp32 model."""
        sums, parts = [], []
        for parameter, master in zip(self.parameters, self.masters):
            if master is parameter or parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                sums.append(master.grad)
                parts.append(parameter.grad)
            parameter.grad = None
        if sums:
            torch._foreach_add_(sums, parts)

    def clip_gradients(self) -> Tensor:
        """Scale gradients down to max_grad_norm; returns the policy's norm before (the heads' if that is not finite).
        Non-finite norms leave gradients alone."""
        norm, heads_norm = self._clip(self._policy), self._clip(self._heads)
        return norm if torch.isfinite(heads_norm) else heads_norm

    def _clip(self, masters: list[nn.Parameter]) -> Tensor:
        norm = torch.nn.utils.get_total_norm([master.grad for master in masters if master.grad is not None])
        if self.max_grad_norm is not None and torch.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(masters, self.max_grad_norm, norm)
        return norm

    def forget(self, parameters: Iterable[nn.Parameter]) -> None:
        """Start Adam's moments of these parameters anew, as after they were given other values."""
        forgotten = {id(parameter) for parameter in parameters}
        for parameter, master in zip(self.parameters, self.masters):
            if id(parameter) in forgotten:
                self.adam.state.pop(master, None)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        for index, group in enumerate(self.adam.param_groups):
            group["lr"] = learning_rate if index == 0 or self._heads_rate is None else self._heads_rate
        self.adam.step()
        self.drop_gradients()
        pairs = [(p, master) for p, master in zip(self.parameters, self.masters) if master is not p]
        if pairs:
            torch._foreach_copy_([parameter for parameter, _ in pairs], [master for _, master in pairs])

    def drop_gradients(self) -> None:
        self.adam.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """Tensors and numbers of the optimizer, for a checkpoint."""
        return {"adam": self.adam.state_dict(), "masters": [master.detach() for master in self.masters]}


def _master_of(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype == torch.float32:
        return parameter
    return nn.Parameter(parameter.detach().float().clone())
