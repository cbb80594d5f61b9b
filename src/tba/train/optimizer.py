"""AdamW over fp32 master weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tba.config import TrainConfig
from tba.policy.sharding import local_part
from tba.train.offloaded_adam import OffloadedAdamW
from tba.train.ranks import ALONE, Ranks


class MasterAdamW:
    """AdamW whose weights and gradient sums are fp32.

    A bf16 model keeps an fp32 copy here: at learning rates of 1e-6 most updates would round away in bf16. An fp32 model
    is its own master. Of a model that is spread over ranks, each has the optimizer of its own part; heads are whole on every
    rank.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        config: TrainConfig,
        *,
        heads: Iterable[nn.Parameter] = (),
        heads_rate: float | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`heads` are trained beside the policy, clipped by a norm of their own, at `heads_rate` (None = the policy's)."""
        policy = [parameter for parameter in parameters if parameter.requires_grad]
        own = [parameter for parameter in heads if parameter.requires_grad]
        self.parameters = policy + own
        self._parts = [local_part(parameter) for parameter in self.parameters]
        """What of each parameter is on this rank, in the parameter's own memory."""
        self.masters = [_master_of(parameter, part) for parameter, part in zip(self.parameters, self._parts)]
        self._policy, self._heads = self.masters[: len(policy)], self.masters[len(policy) :]
        self._heads_rate = heads_rate
        self._ranks = ranks
        self.max_grad_norm = config.max_grad_norm
        groups = [{"params": group} for group in (self._policy, self._heads) if group]
        settings: dict[str, Any] = {"betas": config.adam_betas, "eps": config.adam_epsilon}
        settings |= {"lr": 0.0, "weight_decay": config.weight_decay}
        self.adam: torch.optim.AdamW
        if config.offload_optimizer:
            self.adam = OffloadedAdamW(groups, **settings)
        else:
            self.adam = torch.optim.AdamW(groups, fused=True, **settings)

    def accumulate(self) -> None:
        """Add the model's gradients of one micro-batch to the fp32 sums; an fp32 model adds them up itself."""
        first: list[tuple[nn.Parameter, Tensor]] = []
        further: list[tuple[nn.Parameter, Tensor]] = []
        for parameter, part, master in zip(self.parameters, self._parts, self.masters):
            if master is parameter or parameter.grad is None:
                continue
            gradient = local_part(parameter.grad)
            if part.dtype == torch.float32:
                master.grad = gradient
                continue
            (first if master.grad is None else further).append((master, gradient))
            parameter.grad = None
        _add(first, is_first=True)
        _add(further, is_first=False)

    def clip_gradients(self) -> Tensor:
        """Scale gradients down to max_grad_norm; returns the policy's norm before (the heads' if that is not finite).
        Non-finite norms leave gradients alone."""
        if self._ranks.size > 1:
            for head in self._heads:  # each rank has that of its own micro-batches, of a loss that counts `size` times
                head.grad = torch.zeros_like(head) if head.grad is None else head.grad
                self._ranks.sum_(head.grad).div_(self._ranks.size)
        norm = self._clip(self._policy, spread=self._ranks.size > 1)
        if not self._heads:
            return norm
        heads_norm = self._clip(self._heads, spread=False)
        return torch.where(torch.isfinite(heads_norm), norm.to(heads_norm.device), heads_norm)

    def _clip(self, masters: list[nn.Parameter], *, spread: bool) -> Tensor:
        """`spread`: each rank has other gradients, all of which make up one norm."""
        norm = torch.nn.utils.get_total_norm([master.grad for master in masters if master.grad is not None])
        if spread:
            norm = self._ranks.sum_(norm.square()).sqrt()
        gradients = [master.grad for master in masters if master.grad is not None]
        if self.max_grad_norm is not None and gradients:
            # Not clip_grads_with_norm_, which makes all gradients NaN where one is: to ask first is to wait for the device.
            factor = torch.clamp(self.max_grad_norm / (norm + 1e-6), max=1.0)
            torch._foreach_mul_(gradients, torch.where(torch.isfinite(norm), factor, 1.0))
        return norm

    def forget(self, parameters: Iterable[nn.Parameter]) -> None:
        """Start Adam's moments of these parameters anew, as after they were given other values."""
        self._settle()
        forgotten = {id(parameter) for parameter in parameters}
        for parameter, master in zip(self.parameters, self.masters):
            if id(parameter) in forgotten:
                self.adam.state.pop(master, None)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Move the weights and drop the gradients."""
        for index, group in enumerate(self.adam.param_groups):
            group["lr"] = learning_rate if index == 0 or self._heads_rate is None else self._heads_rate
        self.adam.step()
        self.drop_gradients()
        rounded = self._rounded()
        if rounded:
            torch._foreach_copy_([part for part, _ in rounded], [master for _, master in rounded])

    def _rounded(self) -> list[tuple[Tensor, nn.Parameter]]:
        """Parameters that are held in less than fp32, each with its master."""
        return [(part, master) for part, master in zip(self._parts, self.masters) if part.dtype != torch.float32]

    @torch.no_grad()
    def stretch(self, factor: float) -> None:
        """Make the last update of the policy `factor` times as long."""
        for part, master in zip(self._parts, self._policy):
            if master in self.adam.state:
                master.add_(self._last_update(master), alpha=factor - 1.0)
                if part.dtype != torch.float32:
                    part.copy_(master)
        self.adam.param_groups[0]["lr"] *= factor

    def _last_update(self, master: nn.Parameter) -> Tensor:
        """What the last step added to a policy weight."""
        group = self.adam.param_groups[0]
        self._settle()
        state = {name: value.to(master.device) for name, value in self.adam.state[master].items()}
        (beta1, beta2), steps = group["betas"], float(state["step"])
        mean = state["exp_avg"] / (1.0 - beta1**steps)
        spread = (state["exp_avg_sq"] / (1.0 - beta2**steps)).sqrt() + group["eps"]
        return -group["lr"] * (mean / spread + group["weight_decay"] * master)

    def drop_gradients(self) -> None:
        self.adam.zero_grad(set_to_none=True)
        for parameter in self.parameters:
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """{"master.0": weights, "adam.0.exp_avg": moments, "adam.0.step": count, ...}, for a checkpoint."""
        self._settle()
        found = {f"master.{index}": master.detach() for index, master in enumerate(self.masters)}
        for index, master in enumerate(self.masters):
            found |= {f"adam.{index}.{name}": value for name, value in self.adam.state.get(master, {}).items()}
        return found

    def _settle(self) -> None:
        """Wait until Adam's state is that after all steps so far."""
        if isinstance(self.adam, OffloadedAdamW):
            self.adam.settle()

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over master weights, which the model then holds too, and Adam's moments of those that have any."""
        for index, (part, master) in enumerate(zip(self._parts, self.masters)):
            master.copy_(state[f"master.{index}"])
            if part.dtype != torch.float32:
                part.copy_(master)
        self._settle()
        self.adam.state.clear()
        for index, master in enumerate(self.masters):
            start = f"adam.{index}."
            moments = {name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}
            if not moments:
                continue
            if isinstance(self.adam, OffloadedAdamW):
                self.adam.take(master, moments)
            else:
                self.adam.state[master] = {name: value.to(master.device) for name, value in moments.items()}


def _add(pairs: list[tuple[nn.Parameter, Tensor]], *, is_first: bool) -> None:
    """Add gradients in less than fp32 to those of their masters, which have none yet where they are the first."""
    if not pairs:
        return
    masters, gradients = zip(*pairs)
    if gradients[0].is_cuda and importlib.util.find_spec("triton") is not None:
        from tba.policy.kernels.gradients import accumulate, can_accumulate

        sums = None if is_first else [master.grad for master in masters]
        if can_accumulate(sums, gradients):
            for master, total in zip(masters, accumulate(sums, gradients)):
                master.grad = total
            return
    if is_first:
        for master, gradient in pairs:
            master.grad = gradient.float()
    else:
        torch._foreach_add_([master.grad for master in masters], list(gradients))


def _master_of(parameter: nn.Parameter, part: Tensor) -> nn.Parameter:
    """An fp32 parameter is its own master; of one that is spread over ranks, the part that is here, in its memory."""
    if part is parameter and parameter.dtype == torch.float32:
        return parameter
    return nn.Parameter(part if part.dtype == torch.float32 else part.detach().float().clone())
