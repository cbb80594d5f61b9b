"""Load a causal language model and its tokenizer from a folder, a hub name, or the package, and make it ready to train:
with a LoRA adapter, with compiled layers, or with layers recomputed in the backward pass.

LoRA goes through PEFT: a small adapter is trained and travels. The reference is the base with the adapter off, so no second
model is kept for it. Searchers merge an adapter into their engine's weights when it arrives.
"""

from __future__ import annotations

import json
import logging
import platform
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from tba.config import ConfigError, LoraConfig, ModelConfig
from tba.models.paths import LFS_POINTER, resolve_path
from tba.models.text_part import (
    CONTEXT_NAMES,
    is_tied,
    modules_beside_text,
    name_of,
    stated_context,
    text_parameters,
    trunk_of,
)
from tba.models.weights import check_fits
from tba.types import Weights

logger = logging.getLogger("tba.models")

ADAPTER, ADAPTER_FILES = "default", ("adapter_model.safetensors", "adapter_model.bin")
"""Name of the LoRA adapter, as PEFT calls it, and files of which it has one."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
"""Files of which a tokenizer has one; some families have others."""
UNPACKED = ("mxfp4", "fp8", "compressed-tensors")  # ways of quantizing that transformers undoes when it loads
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
"""Dtypes of weights that are what they stand for, as safetensors calls them."""
CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedModel:
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    context: int  # longest sequence in tokens, prompt and response together

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


def first_line(error: BaseException) -> str:
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
    with friendly_errors(config.path, "cannot be loaded"):
        check_has_config(Path(base))
        shape = AutoConfig.from_pretrained(base, **options)
    # By the config alone, before tokenizer and weights: what cannot work is refused in a second.
    check_generates(config.path, shape)
    with_tokenizer = path if adapter is None or _has_tokenizer(adapter) else base  # PEFT saves an adapter without one
    _check_small_files(config.path, Path(base), Path(with_tokenizer))
    with friendly_errors(config.path, "cannot be loaded with its tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(with_tokenizer, **options)
    with friendly_errors(config.path, "cannot be loaded with its weights"):
        if getattr(shape, "quantization_config", None) is None:
            _check_plain(Path(base))
        model = load_weights(AutoModelForCausalLM, base, dtype=resolve_dtype(config.dtype, device), **options)
        if adapter is not None:
            model = with_adapter(model, adapter)
        _check_vocabulary(model, tokenizer)
        # eval: dropout off, in training too, or trainer and engine would compute different policies.
        model = model.to(device).eval()
        _check_finite(model)
    # Only the part of the model that text goes through is trained and published.
    text = text_parameters(model)
    for name, parameter in model.named_parameters():
        if name not in text:
            parameter.requires_grad_(False)
    return LoadedModel(model=model, tokenizer=tokenizer, context=context_length(model.config))


def load_weights(auto_class: Any, path: str, *, may_be_missing: frozenset[str] = frozenset(), **options: Any) -> Any:
    """A model of which every tensor comes from its files. transformers gives those that are missing, or have another shape,
    random numbers, different ones in every process."""
    reports = logging.getLogger("transformers.modeling_utils")

    def is_other(record: logging.LogRecord) -> bool:
        return not any(word in record.getMessage() for word in ("MISSING", "MISMATCH"))  # its tables: said here instead

    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    reports.addFilter(is_other)
    try:
        model, found = auto_class.from_pretrained(path, **options)
    finally:
        reports.removeFilter(is_other)
    if missing := sorted(found["missing_keys"] - may_be_missing):
        raise ValueError(f"its files have no {some_of(missing)}, which {type(model).__name__} needs")
    for name, stored, expected in sorted(found["mismatched_keys"]):
        size = getattr(model.config, "vocab_size", None)
        vocabulary = f" (vocab_size={size})" if size in expected and size not in stored else ""
        raise ValueError(
            f"{name} has the shape {list(stored)} in its files, and {list(expected)} by config.json{vocabulary}"
        )
    return model


def load_published(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Copy published tensors over a model's parameters; nothing is copied when a name or a shape is wrong. Buffers (the
    correction bias of DeepSeek's router) and parts that see images are not published: nothing moves them."""
    known = model.state_dict()
    shapes = {name: tuple(known[name].shape) for name in text_parameters(model)}
    check_fits(tensors, shapes, ignored=known)
    model.load_state_dict(dict(tensors), strict=False)


def some_of(names: Sequence[str], most: int = 3) -> str:
    """`a, b, c and 7 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _check_finite(model: PreTrainedModel) -> None:
    """Refuse weights with NaN or infinity: no token can be chosen, and every loss would be NaN."""
    own = [(name, p.detach()) for name, p in model.named_parameters() if p.is_floating_point() and p.element_size() > 1]
    # A sum is NaN or infinite if one number is: no mask of the size of a tensor is made.
    finite = torch.stack([p.sum(dtype=torch.float32) for _, p in own]).isfinite().tolist()  # one wait for the GPU
    if broken := [name for (name, _), is_finite in zip(own, finite) if not is_finite]:
        raise ValueError(f"{len(broken)} of its {len(own)} tensors hold NaN or infinite numbers ({some_of(broken)})")


def _check_plain(folder: Path) -> None:
    """Refuse weights of 8 bits and complex ones: transformers makes floats of them, without scales or imaginary parts."""
    for file in sorted(folder.glob("*.safetensors")):
        try:  # the header says how long the file must be: a download that broke off is known by its name
            opened = safe_open(file, "pt")
        except SafetensorError as error:
            size = file.stat().st_size
            raise ValueError(
                f"{file.name} ({size} bytes) is damaged or cut off ({error}): download or copy it again"
            ) from None
        with opened as tensors:
            weights = [name for name in tensors.keys() if name.endswith(".weight")]  # noqa: SIM118
            kinds = {name: tensors.get_slice(name).get_dtype() for name in weights}
            if others := [name for name, kind in kinds.items() if kind not in PLAIN_DTYPES]:
                raise ValueError(
                    f"{some_of(others)} of {file.name} are {kinds[others[0]]} and none of {', '.join(PLAIN_DTYPES)}, and "
                    "config.json has no quantization_config that says what they stand for"
                )


def _check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer with tokens beyond the embedding, which fail where one first occurs. A special token that nothing
    here writes may lie beyond: Gemma 3's for images does."""
    rows = model.get_input_embeddings().weight.shape[0]
    needed = 1 + max(tokenizer.get_vocab().values(), default=0)  # ids may have gaps
    if needed <= rows:
        return
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    written = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token}
    idle = {token for token in special - written if token not in str(tokenizer.chat_template)}
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if beyond := [f"{token!r} (id {id})" for token, id in vocabulary if id >= rows and token not in idle]:
        raise ValueError(
            f"its tokenizer has tokens that its embedding of {rows} rows has none for: {some_of(beyond)}. Use the tokenizer "
            f"that the model was trained with, or model.resize_token_embeddings({needed}) and save both"
        )


@contextmanager
def friendly_errors(path: str, what: str) -> Iterator[None]:
    """Errors of transformers in one line: files that are damaged fail wherever it first stumbles over them."""
    try:
        yield
    except Exception as error:  # transformers, its hub client, tokenizers, safetensors and pickle each have kinds
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "CUDA" in str(error):
            raise  # the machine's trouble, and not the model's
        if "custom code" in first_line(error):
            raise ValueError(
                f"model.path={path!r} {what} without running Python code that comes with it. If you trust that code: "
                "model.trust_remote_code=true, or --trust-remote-code for tba replay, runs it."
            ) from error
        kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
        lines = [" ".join(line.split()) for line in str(error).strip().splitlines()[:2]]  # a headline may come first
        message = "; ".join(lines).rstrip(". ") or type(error).__name__
        raise ValueError(
            f"model.path={path!r} {what}: {kind}{message}. Give a folder with config.json, tokenizer "
            "and weights, all of them whole, or a hub name that can be reached (HF_HUB_OFFLINE=1 forbids downloads)."
        ) from error


def check_has_config(folder: Path) -> None:
    """Refuse a folder that is no model, and name one in there that is, such as a run's checkpoint, or a snapshot in a folder
    of the hub's cache. Refuse a clone without git-lfs too, which has pointers in the place of large files."""
    if folder.is_dir() and not (folder / "config.json").is_file():
        inside = sorted(found.parent for place in ("*", "*/*") for found in folder.glob(f"{place}/config.json"))
        raise ValueError("the folder has no config.json" + (f", and {inside[0]} has one" if inside else ""))
    for file in sorted(path for path in folder.glob("*") if path.is_file()):
        with file.open("rb") as opened:
            if opened.read(len(LFS_POINTER)) == LFS_POINTER:
                raise ValueError(
                    f"{file.name} is a pointer of git-lfs: `git lfs pull` in the folder gets the file itself"
                )


def check_generates(path: str, shape: Any) -> None:
    """Refuse a model that does not write text from left to right: transformers loads some with a head of random numbers."""
    built = ", ".join(getattr(shape, "architectures", None) or [shape.model_type])
    heads = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
    is_encoder = type(shape) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(shape, "is_decoder", False)
    for is_so, kind in (
        (getattr(shape, "is_encoder_decoder", False), "an encoder-decoder"),
        (is_encoder, "an encoder, which fills in gaps"),
        (built.endswith(heads), "a classifier"),
        (type(shape) not in MODEL_FOR_CAUSAL_LM_MAPPING and not hasattr(shape, "auto_map"), "no language model"),
    ):
        if is_so:
            raise ValueError(
                f"model.path={path!r} is {kind} ({built}): what is trained here are decoder-only language models, such as "
                "Llama, Qwen, Gemma or GPT-2. Give one of these."
            )
    quantization = getattr(shape, "quantization_config", None)
    method = quantization.get("quant_method", "bitsandbytes") if isinstance(quantization, Mapping) else None
    if method is not None and method not in UNPACKED:
        raise ValueError(
            f"model.path={path!r} is quantized ({method}), and weights are trained in float32 or bfloat16: give the model "
            "that it was made from. model.lora={} needs less memory."
        )
    for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
        size = getattr(shape, name, None)
        if isinstance(size, int) and size < 1:
            raise ValueError(f"model.path={path!r}: its config.json has {name}={size}, and at least 1 is needed.")


def _has_tokenizer(folder: Path) -> bool:
    names = (*TOKENIZER_FILES, "*.tiktoken", "tekken.json", "tokenization_*.py")
    return any(next(folder.glob(name), None) for name in names)


def _check_small_files(path: str, folder: Path, tokenizer: Path) -> None:
    """Refuse a generation_config.json that transformers would leave out in silence, with the stop tokens in it, and a folder
    without a tokenizer: of some kinds transformers makes an empty one, for which all text is empty."""
    file = folder / "generation_config.json"
    try:
        if file.is_file() and not isinstance(json.loads(file.read_text(encoding="utf-8")), dict):
            raise ValueError("it holds no object")
    except ValueError as error:
        raise ValueError(
            f"model.path={path!r}: {file} cannot be read ({error}), and it may name the tokens that end a response. Copy it "
            "again, or delete it."
        ) from None
    if tokenizer.is_dir() and not _has_tokenizer(tokenizer):
        raise ValueError(
            f"model.path={path!r}: the folder has no tokenizer ({', '.join(TOKENIZER_FILES)}). Copy these files of the "
            "model that it was made from, or AutoTokenizer.from_pretrained(...).save_pretrained(folder)."
        )


def adapt(loaded: LoadedModel, config: ModelConfig, *, seed: int) -> Any:
    """Put the adapter of model.lora into the model, if there is one to be trained; engines copy the weights before. Returns
    the model as PEFT's users know it, a PeftModel where there is an adapter."""
    if config.lora is None:
        return loaded.model
    if is_adapter(Path(config.path)):
        raise ConfigError(
            f"model.path={config.path} is a LoRA adapter itself, and model.lora would put another on top: write the "
            "whole model first, with `tba merge`."
        )
    return add_lora(loaded.model, config.lora, base=str(resolve_path(config.path)), seed=seed)


def add_lora(model: PreTrainedModel, config: LoraConfig, *, base: str, seed: int) -> Any:
    """Put a fresh adapter into the model, in place: from here on only the adapter trains. It changes nothing at first.
    Returns PEFT's PeftModel around the same model."""
    peft = _peft()
    # PEFT draws A from the global generator: the same seed gives the same adapter.
    torch.manual_seed(seed)
    unreached = _linear_layers_without_adapter(model)
    adapter = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha if config.alpha is not None else 2 * config.rank,
        target_modules=config.targets if isinstance(config.targets, str) else list(config.targets),
        exclude_modules=[*modules_beside_text(model), *(unreached if config.targets == "all-linear" else ())] or None,
        # Engines compute without dropout: with it the trainer's log-probs would be another policy's.
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    tied = is_tied(model)
    try:
        # What trains is the model inside: in the dtype of the model, without the cast to fp32 that PEFT makes by default.
        outside = peft.get_peft_model(model, adapter, adapter_name=ADAPTER, autocast_adapter_dtype=False)
    except (ValueError, re.error) as error:  # PEFT's errors about targets; a text of targets is a pattern
        raise ConfigError(
            f"model.lora.targets={config.targets!r} does not fit {type(model).__name__}: {first_line(error).rstrip('. ')}. "
            f"Give names of {'some' if config.targets == 'all-linear' else 'its'} linear layers, such as in_proj or q_proj."
        ) from error
    for name in unreached:
        if has_adapter(model.get_submodule(name)):
            raise ConfigError(
                f"model.lora.targets={config.targets!r} names {name}, which cannot have an adapter: it is a router, or the "
                "model computes with its weights without calling it. Take it out of the targets (all-linear leaves it out)."
            )
    # An adapter on one end of tied embeddings would change one use of a matrix that is published once.
    for module in (model.get_output_embeddings(), model.get_input_embeddings()) if tied else ():
        if has_adapter(module):
            raise ConfigError(
                f"model.lora.targets={config.targets!r} names {name_of(model, module)}, whose weights are tied: embedding "
                "and head of this model are one matrix, and an adapter would change only one of them. Take it out of the "
                "targets (all-linear leaves it out)."
            )
    model._hf_peft_config_loaded = True  # or transformers would save, and switch off, no adapter
    model.peft_config[ADAPTER].base_model_name_or_path = base
    return outside


def _linear_layers_without_adapter(model: PreTrainedModel) -> list[str]:
    """Names of linear layers that PEFT cannot adapt: routers, which return several tensors (Llama 4, Phi-3.5-MoE), and
    those of a state-space mixer whose kernels take the weights as they are."""
    found = []
    for name, module in model.named_modules():
        is_router = isinstance(module, nn.Linear) and "Router" in type(module).__name__
        ends_mixer = name.endswith((".dt_proj", ".out_proj"))
        if is_router or (ends_mixer and hasattr(model.get_submodule(name.rpartition(".")[0]), "A_log")):
            found.append(name)
    return found


def has_adapter(module: Any) -> bool:
    return ADAPTER in getattr(module, "lora_alpha", ())


def has_lora(model: nn.Module) -> bool:
    return bool(getattr(model, "peft_config", None))


@torch.no_grad()
def merged(model: PreTrainedModel, weights: Weights) -> Weights:
    """A published adapter as weights of the whole model, under the names it had without an adapter. The model's own adapter
    is left alone: it may be the one that trains."""
    # A module that wraps several parameters (experts) is wrapped once for each: `experts.base_layer.base_layer.down_proj`.
    tensors = {
        name.replace(".base_layer", ""): parameter.detach()
        for name, parameter in model.named_parameters()
        if ".lora_" not in name
    }
    for name, found in model.named_modules():
        if not has_adapter(found):
            continue
        module: Any = found
        target = f"{name.replace('.base_layer', '')}.{getattr(module, 'parameter_name', 'weight')}"
        whole = tensors[target]
        is_embedding = ADAPTER in getattr(module, "lora_embedding_A", ())
        pattern = f"{name}.lora_embedding_{{}}.{ADAPTER}" if is_embedding else f"{name}.lora_{{}}.{ADAPTER}.weight"
        a, b = (weights.tensors[pattern.format(part)].to(whole.device).float() for part in "AB")
        experts = getattr(module, "num_experts", 1)
        if experts > 1:
            # PEFT lays the ranks of all experts in one matrix: A as [expert, rank], B as [rank, expert].
            a_ERI, b_ORE = a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts))
            delta = torch.einsum("ore,eri->eoi", b_ORE, a_ERI)
            is_turned = not module._did_swap_in_out_features
        else:
            delta = b @ a
            is_turned = is_embedding or module.fan_in_fan_out
        delta = module.scaling[ADAPTER] * (delta.transpose(-2, -1) if is_turned else delta)
        # Added in fp32 and rounded once, as the sum: a delta rounded by itself would lose more.
        tensors[target] = (whole.float() + delta).to(whole.dtype)
    return Weights(version=weights.version, tensors=tensors)


@contextmanager
def adapter_off(model: PreTrainedModel) -> Iterator[None]:
    """The base model while the context lasts, where there is an adapter: nothing else may compute with it meanwhile."""
    lora = has_lora(model)
    if lora:
        model.disable_adapters()
    try:
        yield
    finally:
        if lora:
            model.enable_adapters()


def is_adapter(path: Path) -> bool:
    return (path / "adapter_config.json").is_file()


def base_of(path: Path) -> str:
    """The model that an adapter folder was trained on."""
    file = path / "adapter_config.json"
    try:
        base = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file} cannot be read as the config of an adapter ({error}): copy it again.") from None
    if not base:
        raise ConfigError(f"{file} does not name its base model (base_model_name_or_path).")
    return str(base)


def with_adapter(model: PreTrainedModel, path: Path) -> PreTrainedModel:
    """The base model with a saved adapter merged into its weights: a plain model."""
    if not any((path / name).is_file() for name in ADAPTER_FILES):
        # PEFT would take the folder for a name of the hub.
        raise ValueError(f"the adapter has no weights ({' or '.join(ADAPTER_FILES)})")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")  # PEFT would make up random ones
        try:
            merged = _peft().PeftModel.from_pretrained(model, str(path)).merge_and_unload()
        except UserWarning as warning:
            raise ValueError(f"{path}: {first_line(warning)}") from None
    return merged.requires_grad_(True)  # PEFT has frozen all but the adapter, which is no more


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ConfigError("model.lora needs PEFT: pip install 'tba-rl[lora]'.") from None
    return peft


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Keep each layer's input only, and compute the layer again in the backward pass."""
    # Non-reentrant: the reentrant kind wants inputs with gradients, which a frozen embedding does not give.
    model.gradient_checkpointing_enable({"use_reentrant": False})
    # transformers asks the layer whether it trains. Dropout modules stay off; some layers drop by a rate of their own.
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", None) is not None:
            module.training = True
            for name in ("dropout", "attention_dropout", "activation_dropout", "hidden_dropout"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)


def compile_layers(model: PreTrainedModel) -> None:
    """Compile the layers in place, for any number of tokens; with a warning nothing changes where that fails."""
    layers = getattr(trunk_of(model), "layers", None)
    if next(model.parameters()).device.type != "cuda":
        logger.warning("train.compile has no effect without CUDA.")
    elif layers is None:
        logger.warning("train.compile: %s has no `layers` to compile; training goes on without.", type(model).__name__)
    else:
        for layer in layers:
            layer.compile(dynamic=True)


def context_length(model_config: Any) -> int:
    length = stated_context(model_config)
    if length is None:
        raise ValueError(
            f"model type {model_config.model_type!r} does not state its context: its config has none of "
            f"{', '.join(CONTEXT_NAMES)}. Write max_position_embeddings, the longest sequence in tokens, into config.json."
        )
    return length


# --- how a process computes on a CPU ---------------------------------------------------------------------------------


def use_cpu(threads: int | None = None) -> None:
    """Compute with so many threads, None = as many as before, and without oneDNN where it only costs time."""
    if threads is not None:
        torch.set_num_threads(threads)
    if not gains_by_onednn(platform.machine(), CPU_INFO.read_text() if CPU_INFO.exists() else ""):
        # A setting of the whole process, not of one model.
        torch.backends.mkldnn.set_flags(False)


def gains_by_onednn(machine: str, cpu_info: str) -> bool:
    """Whether oneDNN makes products faster: not on an ARM core without bf16. There it prepares every product of small
    matrices for 60 us, which then takes 5 (16 x 32 by 32 x 48 on a Neoverse N1: 66 us, without it 9), and large ones gain
    8% by it at most. It also switches itself off at the first product in bf16, and a process then rounds differently."""
    return machine != "aarch64" or "bf16" in cpu_info
