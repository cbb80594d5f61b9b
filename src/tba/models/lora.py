"""LoRA through PEFT: a small adapter is trained and travels; the base model stays as it was loaded.

The reference is the base with the adapter off, so no second model is kept for it. Searchers merge an adapter into their
engine's weights when it arrives: decoding costs no more than without.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tba.config import ConfigError, LoraConfig
from tba.types import Weights

NAME = "default"
"""Name of the adapter, as PEFT calls it."""


def add_lora(model: PreTrainedModel, config: LoraConfig, *, base: str, seed: int) -> None:
    """Put a fresh adapter into the model, in place: from here on only the adapter trains. It changes nothing at first."""
    peft = _peft()
    torch.manual_seed(seed)
    model.add_adapter(
        peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha if config.alpha is not None else 2 * config.rank,
            target_modules=config.targets if isinstance(config.targets, str) else list(config.targets),
            lora_dropout=0.0,
            task_type="CAUSAL_LM",
        ),
        NAME,
    )
    model.peft_config[NAME].base_model_name_or_path = base


def has_lora(model: nn.Module) -> bool:
    return bool(getattr(model, "peft_config", None))


def merged(model: PreTrainedModel, weights: Weights) -> Weights:
    """A published adapter as weights of the whole model, under the names it had without an adapter."""
    tensors = {
        name.replace(".base_layer.", "."): _with_delta(model, name, parameter.detach(), weights.tensors)
        for name, parameter in model.named_parameters()
        if ".lora_" not in name
    }
    return Weights(version=weights.version, tensors=tensors)


@torch.no_grad()
def _with_delta(model: PreTrainedModel, name: str, base: Tensor, adapter: Mapping[str, Tensor]) -> Tensor:
    """base + scale x B A. The model's own adapter is left alone: it may be the one that trains."""
    if not name.endswith(".base_layer.weight"):
        return base
    layer = name.removesuffix(".base_layer.weight")
    module: Any = model.get_submodule(layer)
    a, b = (adapter[f"{layer}.lora_{part}.{NAME}.weight"].to(base.device).float() for part in "AB")
    delta = module.scaling[NAME] * (b @ a)
    return (base.float() + (delta.t() if module.fan_in_fan_out else delta)).to(base.dtype)


@contextmanager
def adapter_off(model: PreTrainedModel) -> Iterator[None]:
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


def is_adapter(path: Path) -> bool:
    return (path / "adapter_config.json").is_file()


def base_of(path: Path) -> str:
    """The model that an adapter folder was trained on."""
    base = json.loads((path / "adapter_config.json").read_text()).get("base_model_name_or_path")
    if not base:
        raise ConfigError(f"{path}/adapter_config.json does not name its base model (base_model_name_or_path).")
    return str(base)


def with_adapter(model: PreTrainedModel, path: Path) -> PreTrainedModel:
    """The base model with a saved adapter merged into its weights: a plain model."""
    return _peft().PeftModel.from_pretrained(model, str(path)).merge_and_unload()


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ConfigError("model.lora needs PEFT: pip install 'tba-rl[lora]'.") from None
    return peft
