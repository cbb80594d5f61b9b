"""Load a causal language model and its tokenizer from a folder, a hub name, or the package, and make it ready to train:
with an adapter, with compiled layers, or with layers recomputed in the backward pass."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from tba.config import ConfigError, ModelConfig
from tba.models.lora import add_lora, base_of, is_adapter, with_adapter

logger = logging.getLogger("tba.models")

SHIPPED = {
    "tba:arithmetic": "tasks/arithmetic/start_model",
    "tba:tldr": "tasks/tldr/start_model",
    "tba:red_team": "tasks/red_team/start_model",
}
"""Models inside the package, by the name used for model.path."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedModel:
    """A model ready to train or to generate, with what belongs to it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    context: int
    """Longest sequence in tokens, prompt and response together."""

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def on_gpu(self) -> bool:
        return self.model.device.type == "cuda"


def resolve_path(path: str) -> str:
    """The folder or hub name behind model.path."""
    if path in SHIPPED:
        return str(files("tba").joinpath(SHIPPED[path]))
    if path.startswith("tba:"):
        raise ValueError(f"model.path={path!r} is not shipped with the package: it has {', '.join(SHIPPED)}.")
    if _looks_like_folder(path) and not Path(path).is_dir():
        raise ValueError(f"model.path={path!r}: there is no such folder. Give a folder with config.json or a hub name.")
    return path


def check_named(key: str, path: str | None) -> None:
    """Refuse a folder that is not there as soon as it is named; hub names are known when they are loaded."""
    if path is not None and _looks_like_folder(path) and not Path(path).expanduser().is_dir():
        raise ValueError(f"{key}={path!r}: there is no such folder. Give one with config.json, or a hub name.")


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its kind where it has none."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def resolve_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]


def load_model(config: ModelConfig) -> LoadedModel:
    """Load with dropout off, in the compute dtype, on the device."""
    disable_progress_bar()
    path, device = resolve_path(config.path), resolve_device(config.device)
    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    adapter = Path(path) if is_adapter(Path(path)) else None
    base = path if adapter is None else resolve_path(base_of(adapter))
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=resolve_dtype(config.dtype, device), **options)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model.path={config.path!r} cannot be loaded: {first_line(error)} Give a folder with config.json and weights, "
            "or a hub name that can be reached (HF_HUB_OFFLINE=1 forbids downloads)."
        ) from error
    if adapter is not None:
        model = with_adapter(model, adapter)
    return LoadedModel(model=model.to(device).eval(), tokenizer=tokenizer, context=context_length(model.config))


def adapt(loaded: LoadedModel, config: ModelConfig, *, seed: int) -> None:
    """Put the adapter of model.lora into the model, if there is one to be trained; engines copy the weights before."""
    if config.lora is not None:
        if is_adapter(Path(config.path)):
            raise ConfigError(
                f"model.path={config.path} is a LoRA adapter itself, and model.lora would put another on top: write the "
                "whole model first, with `tba merge`."
            )
        add_lora(loaded.model, config.lora, base=str(resolve_path(config.path)), seed=seed)


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Keep each layer's input only, and compute the layer again in the backward pass."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    # transformers asks the layer whether it trains. Dropout modules stay off; some layers drop by a rate of their own.
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", None) is not None:
            module.training = True
            for name in ("dropout", "attention_dropout", "activation_dropout", "hidden_dropout"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)


def compile_layers(model: PreTrainedModel) -> bool:
    """Compile the layers in place, for any number of tokens; False, with a warning and nothing changed, where that fails."""
    if next(model.parameters()).device.type != "cuda":
        logger.warning("train.compile has no effect without CUDA.")
        return False
    layers = getattr(model.base_model, "layers", None)
    if layers is None:
        logger.warning("train.compile: %s has no `layers` to compile; training goes on without.", type(model).__name__)
        return False
    for layer in layers:
        layer.compile(dynamic=True)
    return True


def context_length(model_config: Any) -> int:
    for name in ("max_position_embeddings", "n_positions", "n_ctx"):
        if getattr(model_config, name, None):
            return int(getattr(model_config, name))
    raise ValueError(f"model type {model_config.model_type!r} does not state its context (max_position_embeddings).")


def _looks_like_folder(path: str) -> bool:
    return path.startswith((".", "/", "~")) or path.count("/") > 1
