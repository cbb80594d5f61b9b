"""AdamW whose moments lie in the host's memory, for models whose optimizer state does not fit on their GPU.

Of 7B parameters the two moments are 61 GB. They are needed once an optimizer step, each number by itself, so they travel to
the GPU and back in chunks while the chunk before is computed: two chunks of each are on the GPU at a time. The arithmetic is
torch's own fused kernel in fp32, and the numbers are those of `torch.optim.AdamW(fused=True)`; a step takes as long as the
moments take over the bus, in both directions at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

CHUNK = 2**26
"""Numbers of each moment that travel together: 256 MiB."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""The moments, as torch's optimizers name them."""


@dataclass(frozen=True, eq=False)
class Piece:
    """Numbers `first` to `last` of a parameter. Piece(parameter, 0, 4096)"""

    parameter: Tensor
    first: int
    last: int

    def of(self, whole: Tensor) -> Tensor:
        """The same numbers of a tensor of the parameter's shape."""
        return whole.reshape(-1)[self.first : self.last]


def chunks_of(parameters: Sequence[Tensor], size: int) -> Iterator[list[Piece]]:
    """All numbers of the parameters in chunks of `size`: large parameters are cut, small ones travel together."""
    chunk: list[Piece] = []
    room = size
    for parameter in parameters:
        first = 0
        while first < parameter.numel():
            last = min(parameter.numel(), first + room)
            chunk.append(Piece(parameter, first, last))
            room -= last - first
            first = last
            if room == 0:
                yield chunk
                chunk, room = [], size
    if chunk:
        yield chunk


class OffloadedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW(..., fused=True)` with exp_avg and exp_avg_sq on the host. Parameters are contiguous and all on one
    device; on a CPU nothing travels."""

    def __init__(self, groups: Any, *, chunk: int = CHUNK, **settings: Any) -> None:
        super().__init__(groups, fused=True, **settings)
        self._chunk = chunk
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        loose = [tuple(parameter.shape) for parameter in parameters if not parameter.is_contiguous()]
        if loose:
            raise ValueError(
                f"train.offload_optimizer=true needs contiguous parameters, one of shape {loose[0]} is not: leave it out."
            )
        device = parameters[0].device
        self._transfer = (
            HostTransfer(device, min(chunk, sum(map(torch.numel, parameters)))) if device.type == "cuda" else None
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move the parameters that have gradients."""
        assert closure is None, "gradients are computed before"
        for group in self.param_groups:
            moving = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in moving:
                if parameter not in self.state:
                    self.state[parameter] = self._new_state(parameter)
            chunks = list(chunks_of(moving, self._chunk))
            steps = {id(parameter): self.state[parameter]["step"].clone() for parameter in moving}
            for index, chunk in enumerate(chunks):
                if self._transfer is None:
                    self._move(group, chunk, self._moments(chunk), steps)
                    continue
                if index == 0:
                    self._transfer.fetch(0, self._moments(chunk))
                if index + 1 < len(chunks):
                    self._transfer.fetch(index + 1, self._moments(chunks[index + 1]))
                self._move(group, chunk, self._transfer.arrived(index), steps)
                self._transfer.store(index, self._moments(chunk))
            for parameter in moving:
                self.state[parameter]["step"].copy_(steps[id(parameter)])

    def settle(self) -> None:
        """Wait until what the last step computed lies on the host."""
        if self._transfer is not None:
            self._transfer.settle()

    def take(self, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
        """Go on from the state of a checkpoint."""
        self.state[parameter] = self._new_state(parameter)
        for name, value in self.state[parameter].items():
            value.copy_(state[name])

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return {"step": step, **{name: host_zeros(parameter) for name in MOMENTS}}

    def _moments(self, chunk: Sequence[Piece]) -> tuple[list[Tensor], list[Tensor]]:
        means, squares = ([piece.of(self.state[piece.parameter][name]) for piece in chunk] for name in MOMENTS)
        return means, squares

    def _move(
        self,
        group: dict[str, Any],
        chunk: Sequence[Piece],
        moments: tuple[list[Tensor], list[Tensor]],
        steps: dict[int, Tensor],
    ) -> None:
        """One chunk of AdamW. Pieces of a parameter have copies of its count of steps, which the kernel adds one to."""
        counts = [self.state[piece.parameter]["step"].clone() for piece in chunk]
        beta1, beta2 = group["betas"]
        adamw(
            [piece.of(piece.parameter) for piece in chunk],
            [piece.of(piece.parameter.grad) for piece in chunk if piece.parameter.grad is not None],
            *moments,
            [],
            counts,
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for piece, count in zip(chunk, counts):
            steps[id(piece.parameter)] = count


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
    """Two places on the GPU that chunks of moments take turns in, a stream that brings them and one that takes them back."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._places = [tuple(torch.empty(size, dtype=torch.float32, device=device) for _ in MOMENTS) for _ in range(2)]
        self._views: list[tuple[list[Tensor], list[Tensor]]] = [([], []), ([], [])]
        self._bringing, self._taking = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._here = [torch.cuda.Event(), torch.cuda.Event()]
        self._free = [torch.cuda.Event(), torch.cuda.Event()]

    def fetch(self, index: int, moments: tuple[list[Tensor], list[Tensor]]) -> None:
        """Begin to bring a chunk, once what was in its place before has been taken back."""
        place = index % 2
        with torch.cuda.stream(self._bringing):
            self._bringing.wait_event(self._free[place])
            # What a step before has taken back, maybe of this very chunk, must lie on the host.
            self._bringing.wait_stream(self._taking)
            self._views[place] = tuple(map(_filled, self._places[place], moments))  # type: ignore[assignment]
            self._here[place].record()

    def arrived(self, index: int) -> tuple[list[Tensor], list[Tensor]]:
        """The chunk on the GPU, for what is started from now on."""
        torch.cuda.current_stream().wait_event(self._here[index % 2])
        return self._views[index % 2]

    def store(self, index: int, moments: tuple[list[Tensor], list[Tensor]]) -> None:
        """Begin to take a chunk back, once what has been started computes no more."""
        place = index % 2
        self._taking.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._taking):
            for views, targets in zip(self._views[place], moments):
                for view, target in zip(views, targets):
                    target.copy_(view, non_blocking=True)
            self._free[place].record()

    def settle(self) -> None:
        self._taking.synchronize()


def _filled(place: Tensor, sources: Sequence[Tensor]) -> list[Tensor]:
    """The sources one after the other in a place."""
    views = list(place[: sum(map(torch.numel, sources))].split([source.numel() for source in sources]))
    for view, source in zip(views, sources):
        view.copy_(source, non_blocking=True)
    return views
