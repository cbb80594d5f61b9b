"""Each change of the training step, to be switched on alone: `with only("kept logits"): ...`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

import tba.models.flash_attention
import tba.models.packing
import tba.models.policy
import tba.train.batch
import tba.train.step
import tba.types
from tba.train.step import NonFiniteLoss, TrainStep


def _pageable(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.to(device, non_blocking=device.type != "cpu")


def _reads_first(self: Any, batch: Any, *, beta: float, learning_rate: float, measure_movement: bool = False) -> Any:
    """The step that reads the loss, then the norm, before the optimizer is told to move."""
    result = self.gradients(batch, beta=beta)
    norm = self.optimizer.clip_gradients()
    if not torch.isfinite(norm):
        raise NonFiniteLoss(f"gradient norm is {norm.item()}")
    metrics = {**result.metrics, "grad_norm": norm.item(), "learning_rate": learning_rate}
    self.optimizer.step(learning_rate)
    return replace(result, metrics=metrics)


_in_turn = TrainStep._own_micro_batches


def _all_first(self: Any, batch: Any, dealt: Any) -> Any:
    return list(_in_turn(self, batch, dealt))


def _patches(name: str) -> list[Any]:
    """What takes a change back."""
    if name == "kept logits":
        return [patch.object(tba.models.policy, "KEPT_LOGITS_SHARE", 0.0)]
    if name == "even micro-batches":
        return [patch.object(tba.train.batch, "EVEN_SHARES", ())]
    if name == "read at the end":
        return [patch.object(TrainStep, "__call__", _reads_first)]
    if name == "packed in turn, pinned":
        modules = (tba.types, tba.models.packing, tba.models.flash_attention, tba.train.batch)
        return [
            patch.object(TrainStep, "_own_micro_batches", _all_first),
            *(patch.object(module, "on_device", _pageable) for module in modules),
        ]
    if name == "gathered keys":
        return [patch.object(tba.models.flash_attention, "MOST_GATHERED", 1)]
    if name == "gradients at once":
        return [patch("tba.kernels.gradients.can_accumulate", lambda sums, gradients: False)]
    raise ValueError(name)


CHANGES = (
    "gathered keys",
    "kept logits",
    "even micro-batches",
    "read at the end",
    "packed in turn, pinned",
    "gradients at once",
)


@contextmanager
def only(*on: str) -> Iterator[None]:
    """These changes, and none of the others."""
    with ExitStack() as stack:
        for name in CHANGES:
            if name not in on:
                for one in _patches(name):
                    stack.enter_context(one)
        yield


VARIANTS = {**{name: (name,) for name in CHANGES}, "all": CHANGES, "all but kept logits": CHANGES[:1] + CHANGES[2:]}
assert "kept logits" not in VARIANTS["all but kept logits"]
