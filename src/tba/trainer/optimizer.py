"""AdamW over fp32 master weights, and one whose moments lie in the host's memory, for models whose optimizer state does not
fit on their GPU.

Of 7B parameters the two moments are 61 GB. They travel to the GPU and back in pieces while the piece before is
computed. The arithmetic is torch's own fused kernel in fp32: the numbers are those of `torch.optim.AdamW(fused=True)`.
A step takes as long as the moments take over the bus, in both directions at once.
"""

from __future__ import annotations

import importlib.util
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from tba.config import TrainConfig
from tba.models.policy import ALONE, Ranks, local_part

CHUNK = 2**26  # numbers of each moment that travel together: 256 MiB
MOMENTS = ("exp_avg", "exp_avg_sq")  # the moments, as torch's optimizers name them


class MasterAdamW:
    """AdamW whose weights and gradient sums are fp32. A bf16 model keeps an fp32 copy here: at learning rates of 1e-6 most
    updates would round away in bf16. An fp32 model is its own master. Of a model that is spread over ranks, each has the
    optimizer of its own part; heads are whole on every rank."""

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
        """Part of each parameter that is on this rank, in the parameter's own memory."""
        self.masters: list[nn.Parameter] = []
        for parameter, part in zip(self.parameters, self._parts):
            # An fp32 parameter is its own master; of one that is spread over ranks, the part that is here, in its memory.
            own_memory = part if part.dtype == torch.float32 else part.detach().float().clone()
            self.masters.append(parameter if own_memory is parameter else nn.Parameter(own_memory))
        self._policy, self._heads = self.masters[: len(policy)], self.masters[len(policy) :]
        self._heads_rate, self._ranks, self.max_grad_norm = heads_rate, ranks, config.max_grad_norm
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
                # The rows of a sharded fp32 parameter: autograd has added this micro-batch to them already.
                master.grad = gradient
                continue
            (first if master.grad is None else further).append((master, gradient))
            # Or autograd would add the next micro-batch to it, in bf16, and this one would count twice.
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
        gradients = [master.grad for master in masters if master.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if spread:
            norm = self._ranks.sum_(norm.square()).sqrt()
        if self.max_grad_norm is not None and gradients:
            # Not clip_grads_with_norm_, which makes all gradients NaN where one is: to ask first is to wait for the device.
            factor = torch.clamp(self.max_grad_norm / (norm + 1e-6), max=1.0)
            torch._foreach_mul_(gradients, torch.where(torch.isfinite(norm), factor, 1.0))
        return norm

    def forget(self, parameters: Iterable[nn.Parameter]) -> None:
        # A transfer on its way would write into what is dropped here.
        self._synchronize()
        forgotten = {id(parameter) for parameter in parameters}
        for parameter, master in zip(self.parameters, self.masters):
            if id(parameter) in forgotten:
                self.adam.state.pop(master, None)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        # The policy is the first group, heads are the second.
        for index, group in enumerate(self.adam.param_groups):
            group["lr"] = learning_rate if index == 0 or self._heads_rate is None else self._heads_rate
        self.adam.step()
        self.drop_gradients()
        self._round()

    def _round(self) -> None:
        """Give parameters that are held in less than fp32 what their masters have."""
        rounded = [(part, master) for part, master in zip(self._parts, self.masters) if part.dtype != torch.float32]
        if rounded:
            torch._foreach_copy_([part for part, _ in rounded], [master for _, master in rounded])

    @torch.no_grad()
    def stretch(self, factor: float) -> None:
        """Make the last update of the policy `factor` times as long."""
        self._synchronize()
        group = self.adam.param_groups[0]
        for master in self._policy:
            if master not in self.adam.state:
                continue
            state = {name: value.to(master.device) for name, value in self.adam.state[master].items()}
            (beta1, beta2), steps = group["betas"], float(state["step"])
            # AdamW's formula, from the moments after the step. Weight decay is that of the weight now: a difference of
            # second order.
            mean = state["exp_avg"] / (1.0 - beta1**steps)
            spread = (state["exp_avg_sq"] / (1.0 - beta2**steps)).sqrt() + group["eps"]
            last_update = -group["lr"] * (mean / spread + group["weight_decay"] * master)
            master.add_(last_update, alpha=factor - 1.0)
        self._round()
        group["lr"] *= factor  # a further stretch is of the update as long as it is now

    def drop_gradients(self) -> None:
        self.adam.zero_grad(set_to_none=True)
        for parameter in self.parameters:
            # zero_grad drops those of the masters, and a bf16 model has gradients of its own.
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """{"master.0": weights, "adam.0.exp_avg": moments, "adam.0.step": count, ...}, for a checkpoint."""
        self._synchronize()
        found = {f"master.{index}": master.detach() for index, master in enumerate(self.masters)}
        for index, master in enumerate(self.masters):
            found |= {f"adam.{index}.{name}": value for name, value in self.adam.state.get(master, {}).items()}
        return found

    def _synchronize(self) -> None:
        """Wait until Adam's state is that after all steps so far."""
        if isinstance(self.adam, OffloadedAdamW):
            self.adam.synchronize()

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over master weights, which the model then holds too, and Adam's moments of those that have any."""
        for index, master in enumerate(self.masters):
            master.copy_(state[f"master.{index}"])
        self._round()
        self._synchronize()
        # After the transfers of the last step, which write into the moments that are dropped here.
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
        from tba.models.kernels import accumulate, can_accumulate

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


class OffloadedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW(..., fused=True)` with its moments on the host. Parameters are contiguous and on one device."""

    def __init__(self, groups: Any, *, chunk: int = CHUNK, **settings: Any) -> None:
        super().__init__(groups, fused=True, **settings)
        self._chunk = chunk
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        loose = [tuple(parameter.shape) for parameter in parameters if not parameter.is_contiguous()]
        if loose:
            raise ValueError(
                f"train.offload_optimizer=true needs contiguous parameters, one of shape {loose[0]} is not: leave it out."
            )
        device, largest = parameters[0].device, max(parameter.numel() for parameter in parameters)
        self._bus = HostTransfer(device, min(chunk, largest)) if device.type == "cuda" else None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "gradients are computed before"
        for group in self.param_groups:
            moving = [parameter for parameter in group["params"] if parameter.grad is not None]
            pieces: list[tuple[Tensor, ...]] = []
            for parameter in moving:
                if parameter not in self.state:
                    self.state[parameter] = self._new_state(parameter)
                state = self.state[parameter]
                whole = (parameter, parameter.grad, *(state[name] for name in MOMENTS))
                # Views, since all are contiguous: the kernel writes into the parameter and its moments themselves.
                parts = zip(*(tensor.detach().reshape(-1).split(self._chunk) for tensor in whole))
                pieces += [(*part, state["step"]) for part in parts if part[0].numel()]
            moments = [piece[2:4] for piece in pieces]
            beta1, beta2 = group["betas"]
            here = moments if self._bus is None else self._bus.brought(moments)
            # Moments first: only when asked for more after the last piece does the bus take that one back.
            for (mean, square), (weights, gradient, _, _, count) in zip(here, pieces):
                adamw(
                    # The kernel adds one to the count, and a parameter may have several pieces.
                    [weights], [gradient], [mean], [square], [], [count.clone()], fused=True, amsgrad=False, maximize=False,
                    beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
                )  # fmt: skip
            for parameter in moving:
                self.state[parameter]["step"] += 1

    def synchronize(self) -> None:
        if self._bus is not None:
            self._bus.taking.synchronize()

    def take(self, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
        self.state[parameter] = self._new_state(parameter)
        for name, value in self.state[parameter].items():
            value.copy_(state[name])

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return {"step": step, **{name: host_zeros(parameter) for name in MOMENTS}}


def host_zeros(parameter: Tensor) -> Tensor:
    """Zeros of a parameter's shape in the host's memory, which the GPU can read and write by itself where it has one."""
    zeros = torch.zeros(parameter.shape, dtype=torch.float32)
    if parameter.is_cuda and zeros.numel():
        # Not pin_memory, whose allocator rounds every tensor up to a power of two.
        address = zeros.data_ptr()
        failed = int(torch.cuda.cudart().cudaHostRegister(address, zeros.numel() * zeros.element_size(), 0))
        if failed:
            raise RuntimeError(
                f"the host's memory for AdamW's moments cannot be registered with CUDA (error {failed}): leave "
                "train.offload_optimizer out, or allow the process to lock more memory (ulimit -l)."
            )
        weakref.finalize(zeros.untyped_storage(), torch.cuda.cudart().cudaHostUnregister, address)
    return zeros


class HostTransfer:
    """Two places on the GPU that pieces of moments take turns in, a stream that brings them and one that takes them back."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._places = [[torch.empty(size, dtype=torch.float32, device=device) for _ in MOMENTS] for _ in range(2)]
        self._bringing, self.taking = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._here = [torch.cuda.Event(), torch.cuda.Event()]
        self._free = [torch.cuda.Event(), torch.cuda.Event()]

    def brought(self, moments: Sequence[Sequence[Tensor]]) -> Iterator[list[Tensor]]:
        """Each piece's moments on the GPU, for what is started before the next are asked for; they are taken back then."""
        coming = self._bring(0, moments[0]) if moments else []
        for index, own in enumerate(moments):
            here, place = coming, index % 2
            if index + 1 < len(moments):
                # Before this piece is handed out, so that the next travels while the caller computes.
                coming = self._bring(index + 1, moments[index + 1])
            torch.cuda.current_stream().wait_event(self._here[place])
            yield here
            # The caller has queued its kernel by now: the way back begins when that is done.
            self.taking.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.taking):
                for target, view in zip(own, here):
                    target.copy_(view, non_blocking=True)
                self._free[place].record()

    def _bring(self, index: int, moments: Sequence[Tensor]) -> list[Tensor]:
        """Begin to bring a piece, once what was in its place before has been taken back."""
        place = index % 2
        views = [whole[: moment.numel()] for whole, moment in zip(self._places[place], moments)]
        with torch.cuda.stream(self._bringing):
            # An event that was never recorded holds nothing up: the first two pieces find their places free.
            self._bringing.wait_event(self._free[place])
            # What a step before has taken back, maybe of this very piece, must lie on the host.
            self._bringing.wait_stream(self.taking)
            for view, moment in zip(views, moments):
                view.copy_(moment, non_blocking=True)
            self._here[place].record()
        return views
