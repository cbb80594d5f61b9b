"""A LoRA adapter kept beside a decoder's matrices instead of being merged into them.

Merging rounds base + scale x B A to the engine's dtype. In half precision a change below half a unit in the last place of a
weight is lost, and the first optimizer steps are hardly more than that: the engine would go on sampling the base while the
trainer's policy has moved. Beside the matrix nothing is lost, and a new version is copied in no time; a decode step has two
small products more for each matrix. In fp32 nothing is lost by merging either, and decoding costs nothing.

The stacked matrices of a decoder (query, key and value; gate and up) have one adapter, too: the A of all of them stacked,
and a B with blocks.

Axes: R ranks of all sources of one matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tba.generate.decoder.spec import DecoderWeights, DenseMlp, Layer, Linear, LowRank, Placement, UnsupportedModel
from tba.models.load import ADAPTER
from tba.models.weights import check_fits


class DecoderAdapter:
    """The static tensors of an adapter in a decoder, and which of its named tensors fills which part."""

    def __init__(self, weights: DecoderWeights, model: PreTrainedModel) -> None:
        """`model` has the adapter: its shapes and scales count, its values do not. It changes nothing until it is loaded."""
        self.placements: dict[str, Placement] = {}
        modules = dict(_adapted_modules(model))
        places = {_storage(linear.weight): linear for layer in weights.layers for linear in _linears(layer)}
        sources: dict[int, list[tuple[str, Placement]]] = {}
        for name in modules:
            placement = weights.placements.get(f"{name}.weight")
            if placement is None or _storage(placement.target) not in places:
                raise UnsupportedModel(f"its adapter changes {name}, which is no matrix of a layer")
            sources.setdefault(_storage(placement.target), []).append((name, placement))
        for storage, found in sources.items():
            places[storage].low_rank = self._place(places[storage], found, modules)

    def _place(self, linear: Linear, sources: list[tuple[str, Placement]], modules: Mapping[str, Any]) -> LowRank:
        num_rows, num_columns = linear.weight.shape
        ranks = [modules[name].r[ADAPTER] for name, _ in sources]
        low_rank = LowRank(
            down=linear.weight.new_zeros(sum(ranks), num_columns), up=linear.weight.new_zeros(num_rows, sum(ranks))
        )
        start = 0
        for (name, base), rank in zip(sources, ranks):
            module, part = modules[name], slice(start, start + rank)
            first = base.target.storage_offset() // num_columns
            rows = slice(first, first + base.target.shape[0])
            self.placements[_part_name(name, "A")] = Placement(
                target=low_rank.down[part],
                shape=tuple(module.lora_A[ADAPTER].weight.shape),
                arrange=lambda given: given,
            )
            self.placements[_part_name(name, "B")] = Placement(
                target=low_rank.up[rows, part],
                shape=tuple(module.lora_B[ADAPTER].weight.shape),
                arrange=_arranged_like(base, module),
            )
            start += rank
        return low_rank

    def is_of(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether these tensors are an adapter's."""
        return any(name in self.placements for name in tensors)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy a published adapter in place; nothing is copied when a name or shape is wrong."""
        check_fits(tensors, {name: place.shape for name, place in self.placements.items()})
        for name, placement in self.placements.items():
            placement.target.copy_(placement.arrange(tensors[name]))


def _arranged_like(base: Placement, module: Any) -> Callable[[Tensor], Tensor]:
    """From B [out, r] to the rows of the decoder's matrix, with the scale: what orders the rows of the weight orders B's."""
    scale, turned = module.scaling[ADAPTER], module.fan_in_fan_out
    return lambda given: base.arrange(given.float().t() if turned else given.float()) * scale


def _adapted_modules(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if ADAPTER in getattr(module, "lora_A", ()) or ADAPTER in getattr(module, "lora_embedding_A", ()):
            yield name, module


def _linears(layer: Layer) -> tuple[Linear, ...]:
    inner = (layer.mlp.up, layer.mlp.down) if isinstance(layer.mlp, DenseMlp) else (layer.mlp.router,)
    return (layer.qkv, layer.output, *inner)


def _storage(tensor: Tensor) -> int:
    """What a tensor and its views have in common."""
    return tensor.untyped_storage().data_ptr()


def _part_name(module: str, part: str) -> str:
    return f"{module}.lora_{part}.{ADAPTER}.weight"
