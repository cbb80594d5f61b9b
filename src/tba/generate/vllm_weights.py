"""Weights for a vLLM engine in the same process, through vLLM's own weight-transfer interface.

vLLM's backends carry weights between processes (`nccl` between GPUs, `ipc` on one), and neither works where there is no GPU.
A searcher has fetched the weights before its engine sees them, and its vLLM runs in its own process, so nothing is left to
carry: this backend, registered with vLLM's factory, takes the tensors as they are. vLLM's own loading fuses the parts, makes
layouts for kernels anew where there are any, and copies the values into the tensors that are in use, so that compiled
graphs stay valid.

    LLM(..., weight_transfer_config=WeightTransferConfig(backend=BACKEND))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND = "tba_in_process"
"""Name of the backend in WeightTransferConfig."""


@dataclass
class InProcessInit(WeightTransferInitInfo):
    """There is nobody to meet."""


@dataclass
class InProcessUpdate(WeightTransferUpdateInfo):
    """One round: InProcessUpdate(tensors={"model.norm.weight": tensor, ...})."""

    tensors: Mapping[str, Tensor]
    """By the names of the checkpoint; read during the update only."""


def is_used_as_loaded(layer: nn.Module) -> bool:
    """Whether kernels for GPUs use the layer's weights as they are loaded. Not so quantized layers, experts, and attention
    that multiplies matrices beforehand: models with such are made anew by vLLM, layer by layer."""
    method = getattr(layer, "quant_method", None)
    plain = method is None or type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    return plain and (type(layer) is Attention or not hasattr(layer, "process_weights_after_loading"))


class InProcessTransfer(WeightTransferEngine[InProcessInit, InProcessUpdate]):
    """vLLM's side of the transfer."""

    init_info_cls = InProcessInit
    update_info_cls = InProcessUpdate
    _in_place = False
    """Whether values go straight into the tensors in use: 18 ms instead of 104 for a 0.5B model on an H200."""

    def init_transfer_engine(self, init_info: InProcessInit) -> None:
        self._in_place = self.device.type == "cuda" and all(map(is_used_as_loaded, self.model.modules()))

    def start_weight_update(self) -> None:
        if not self._in_place:
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        # The base class always synchronizes the accelerator, which raises where there is none.
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def receive_weights(self, update_info: InProcessUpdate) -> None:
        self.model.load_weights(iter(update_info.tensors.items()))

    def finish_weight_update(self) -> None:
        if self._in_place:
            return
        finalize_layerwise_reload(self.model, self.model_config)
        # On a CPU matrices are packed per layer. vLLM reloads a tied matrix for the embedding alone (its reload module names
        # this limit), so the head would go on with the packed copy of the old one.
        if self.device.type == "cpu" and getattr(self.model_config.hf_text_config, "tie_word_embeddings", False):
            for layer in self.model.modules():
                if isinstance(layer, ParallelLMHead):
                    layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        pass

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """vLLM up to 0.26 wants this method; later ones have a class of its own for the trainer's side."""
        raise NotImplementedError("weights are handed over in this process: LLM.update_weights sends them.")


WeightTransferEngineFactory.register_engine(BACKEND, InProcessTransfer)
