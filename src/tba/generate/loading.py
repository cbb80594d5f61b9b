"""New weights into a decoder's static tensors, in as few calls as possible."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tba.models.decoder import Decoder


class InPlaceLoad:
    """Copies named tensors into a decoder. On CUDA the hundreds of small copies and rearrangements become one graph once
    the tensors come from the same addresses as the time before, as they do from a searcher's private copy."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._addresses: tuple[int, ...] = ()
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def __call__(self, tensors: Mapping[str, Tensor]) -> None:
        addresses = tuple(tensor.data_ptr() for tensor in tensors.values())
        on_cuda = self._decoder.device.type == "cuda" and all(tensor.is_cuda for tensor in tensors.values())
        if not on_cuda or addresses != self._addresses:
            self._addresses, self._graph = addresses, None
            self._decoder.load(tensors)
            return
        if self._graph is None:
            self._graph = self._capture(tensors)
        self._graph.replay()

    def _capture(self, tensors: Mapping[str, Tensor]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            self._decoder.load(tensors)
        return graph
