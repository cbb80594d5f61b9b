"""Load a causal language model and its tokenizer from a folder, a hub name, or the package, and make it ready to train:
with a LoRA adapter, with compiled layers, or with layers recomputed in the backward pass.

LoRA goes through PEFT: a small adapter is trained and travels; the base model stays as it was loaded. The reference is the
base with the adapter off, so no second model is kept for it. Searchers merge an adapter into their engine's weights when it
arrives: decoding costs no more than without.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from tba.config import ConfigError, LoraConfig, ModelConfig
from tba.models.names import resolve_path
from tba.types import Weights

logger = logging.getLogger("tba.models")

ADAPTER = "default"
"""Name of the LoRA adapter, as PEFT calls it."""


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
    """Load a model with dropout off, in the compute dtype, on the device. A GPU that has a number becomes the current one:
    kernels and graphs go to that, wherever their tensors are."""
    disable_progress_bar()
    path, device = resolve_path(config.path), resolve_device(config.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    adapter = Path(path) if is_adapter(Path(path)) else None
    base = path if adapter is None else resolve_path(base_of(adapter))
    with _told(config.path, "cannot be loaded"):
        shape = AutoConfig.from_pretrained(base, **options)
    _check_generates(config.path, shape)
    _check_has_tokenizer(config.path, Path(path))
    with _told(config.path, "cannot be loaded with its tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
    with _told(config.path, "cannot be loaded with its weights"):
        model = AutoModelForCausalLM.from_pretrained(base, dtype=resolve_dtype(config.dtype, device), **options)
    if adapter is not None:
        model = with_adapter(model, adapter)
    return LoadedModel(model=model.to(device).eval(), tokenizer=tokenizer, context=context_length(model.config))


@contextmanager
def _told(path: str, what: str) -> Iterator[None]:
    """Errors of transformers in one line: files that are damaged fail wherever it first stumbles over them."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
        raise ValueError(
            f"model.path={path!r} {what}: {kind}{first_line(error).rstrip('. ')}. Give a folder with config.json, tokenizer "
            "and weights, all of them whole, or a hub name that can be reached (HF_HUB_OFFLINE=1 forbids downloads)."
        ) from error


def _check_generates(path: str, shape: Any) -> None:
    """Refuse a model that does not write text from left to right. transformers would load some of them all the same, with a
    head that was never trained."""
    built = ", ".join(getattr(shape, "architectures", None) or [shape.model_type])
    heads = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
    is_encoder = type(shape) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(shape, "is_decoder", False)
    for is_so, kind in (
        (getattr(shape, "is_encoder_decoder", False), "an encoder-decoder"),
        (is_encoder, "an encoder, which fills in gaps"),
        (built.endswith(heads), "a classifier"),
    ):
        if is_so:
            raise ValueError(
                f"model.path={path!r} is {kind} ({built}): what is trained here are decoder-only language models, such as "
                "Llama, Qwen, Gemma or GPT-2. Give one of these."
            )


def _check_has_tokenizer(path: str, folder: Path) -> None:
    """Refuse a folder without a tokenizer: of some kinds transformers makes an empty one, for which all text is empty."""
    names = (
        "tokenizer.json",
        "tokenizer.model",
        "spiece.model",
        "vocab.json",
        "vocab.txt",
        "*.tiktoken",
        "tekken.json",
    )
    own_code = ("tokenization_*.py",)
    if folder.is_dir() and not any(next(folder.glob(name), None) for name in (*names, *own_code)):
        raise ValueError(
            f"model.path={path!r}: the folder has no tokenizer ({', '.join(names[:5])}). Copy these files of the model that "
            "it was made from, or AutoTokenizer.from_pretrained(...).save_pretrained(folder)."
        )


def adapt(loaded: LoadedModel, config: ModelConfig, *, seed: int) -> None:
    """Put the adapter of model.lora into the model, if there is one to be trained; engines copy the weights before."""
    if config.lora is not None:
        if is_adapter(Path(config.path)):
            raise ConfigError(
                f"model.path={config.path} is a LoRA adapter itself, and model.lora would put another on top: write the "
                "whole model first, with `tba merge`."
            )
        add_lora(loaded.model, config.lora, base=str(resolve_path(config.path)), seed=seed)


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
        ADAPTER,
    )
    model.peft_config[ADAPTER].base_model_name_or_path = base


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
    """Weights with the adapter in them, base + scale x B A. The model's own adapter is left alone: it may be the one that
    trains."""
    if not name.endswith(".base_layer.weight"):
        return base
    layer = name.removesuffix(".base_layer.weight")
    module: Any = model.get_submodule(layer)
    a, b = (adapter[f"{layer}.lora_{part}.{ADAPTER}.weight"].to(base.device).float() for part in "AB")
    delta = module.scaling[ADAPTER] * (b @ a)
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
