"""LoRA adapters for a vLLM engine, unmerged: beside the base model's weights, through vLLM's own adapter interface.

vLLM (0.26 and 0.32) takes adapters from folders only, so each version is written to one in memory (/dev/shm) and given to
`LLMEngine.add_lora`. All versions have one id and are loaded in place of each other (`load_inplace`): requests hold the id,
so running ones go on with the new adapter, as an update in flight asks. With an id per version they would keep the old one,
and vLLM would compute all versions that are still in use.

The base's weights never change. They come through a loader of our own, registered with vLLM's factory, because vLLM wraps
layers for adapters once they are loaded, and its weight-transfer backends know no layers that are wrapped.

    folder = AdapterFolder(LoraConfig(rank=32), model, dtype, device)
    with base_weights(model):
        llm = LLM(..., load_format=LOAD_FORMAT, **folder.options)
    with folder.written(tensors) as adapter:
        llm.llm_engine.add_lora(adapter)
    llm.llm_engine.add_request("0", prompt, parameters, lora_request=folder.request)
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.config.lora import MaxLoRARanks
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from tba.config import ConfigError, LoraConfig
from tba.models.load import ADAPTER

LOAD_FORMAT = "tba_in_process"
"""Name of the loader that reads the weights given to `base_weights`."""
MEMORY = Path("/dev/shm")
NAME, ADAPTER_ID = "policy", 1
"""What the adapter is to vLLM, which counts from 1."""
GPU_DTYPES = (torch.float16, torch.bfloat16)
"""Those of vLLM's kernels that apply adapters on a GPU."""

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
