"""Weights for a vLLM engine in the searcher's process, through vLLM's own weight-transfer interface. Two ways, each a
backend that is registered with vLLM's factory:

    tba_in_process   the tensors that the searcher has fetched, as they are: nothing is left to carry. On a CPU too.
    tba_ipc          vLLM's own `ipc` for one GPU (`vllm_ipc`): it opens the memory that the trainer's process has published
                     in and loads from there. What the searcher has fetched, a copy that was compared with its checksum, is
                     loaded instead where the trainer has begun to write that memory again.

vLLM's own loading fuses the parts, makes layouts for kernels anew where there are any, and copies the values into the
tensors that are in use, so that compiled graphs stay valid.

    LLM(..., weight_transfer_config=WeightTransferConfig(backend=transfer.value))
    transfer.send(llm, weights)
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from vllm import LLM
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

from tba.types import SharedTensors, Weights

SHAPE, DTYPE = 1, 5
"""Places among the arguments of torch's rebuild_cuda_tensor."""


class Transfer(Enum):
    """How weights come into vLLM; the value is the backend's name."""

    in_process = "tba_in_process"
    ipc = "tba_ipc"

    @classmethod
    def chosen(cls, device: torch.device, *, beside_trainer: bool) -> Transfer:
        """The one for an engine on this device; `beside_trainer`: the trainer is another process on it."""
        return cls.ipc if beside_trainer and device.type == "cuda" and offers_ipc() else cls.in_process

    def send(self, llm: LLM, weights: Weights) -> None:
        """Have vLLM take the weights; they are in use afterwards."""
        if self is Transfer.in_process or weights.shared is None or not _send_shared(llm, weights.shared):
            _update(llm, {"tensors": weights.tensors})


def offers_ipc() -> bool:
    """Whether the installed vLLM has its ipc backend and can import it: that of 0.26 asks for Ray, which it does not use."""
    try:
        importlib.import_module("tba.generate.vllm_ipc")  # which registers it
    except ImportError:
        return False
    return True


def _update(llm: LLM, info: dict[str, Any]) -> None:
    llm.start_weight_update()
    llm.update_weights({"update_info": info})
    llm.finish_weight_update()


def _send_shared(llm: LLM, shared: SharedTensors) -> bool:
    """Have vLLM read the trainer's memory -> whether all of it was still what it was."""
    if not shared.is_there():
        return False
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    info = {
        "names": list(shared.handles),
        "shapes": [list(arguments[SHAPE]) for arguments in shared.handles.values()],
        "dtype_names": [str(arguments[DTYPE]).removeprefix("torch.") for arguments in shared.handles.values()],
        "ipc_handles": [{gpu: arguments} for arguments in shared.handles.values()],
    }
    _update(llm, info)
    torch.cuda.synchronize(device)  # what was read has been read when the number is looked at
    return shared.is_there()


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


def goes_in_place(model: nn.Module, device: torch.device) -> bool:
    """Whether new values go straight into the tensors in use."""
    return device.type == "cuda" and all(map(is_used_as_loaded, model.modules()))


class InProcessTransfer(WeightTransferEngine[InProcessInit, InProcessUpdate]):
    """vLLM's side of the transfer."""

    init_info_cls = InProcessInit
    update_info_cls = InProcessUpdate
    _in_place = False
    """Whether values go straight into the tensors in use: 24 ms instead of 124 for a 0.5B model on an H200."""

    def init_transfer_engine(self, init_info: InProcessInit) -> None:
        self._in_place = goes_in_place(self.model, self.device)

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


WeightTransferEngineFactory.register_engine(Transfer.in_process.value, InProcessTransfer)
