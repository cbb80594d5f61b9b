"""`tba doctor`: what this machine has, which optional packages are missing, and what each of them is for.

`tba doctor MODEL`: how a model would run here, by its config alone, before any weights are fetched or loaded. Whether the
native engine knows it is read from the tensors that its config makes, on PyTorch's device without memory. No config says
whether its sequences can be packed, and prompts padded: that is tried on a tiny random model with its config.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import logging
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tba.config import Config
from tba.engine.decoder.build import native_spec
from tba.engine.decoder.fused_pass import why_never_fused
from tba.engine.decoder.spec import UnsupportedModel
from tba.engine.transformers_engine import cache_abilities
from tba.models.load import check_generates, check_has_config, friendly_errors
from tba.models.paths import resolve_path
from tba.models.policy import PolicyModel
from tba.models.text_part import stated_context, switch_length
from tba.runtime.placement import PINNED, threads_of, usable_cores, why_no_mps

EXTRAS = {
    "wandb": "W&B logging (observe.sinks=[wandb])",
    "tensorboard": "TensorBoard logging (observe.sinks=[tensorboard])",
    "peft": "LoRA (model.lora)",
    "math_verify": "the grader of task.name=math",
    "vllm": "the engine of generate.engine=vllm",
    "uvicorn": "a served engine (tba serve)",
    "pyarrow": "parquet files (tba replay RUN --export FILE.parquet)",
}
"""Purpose of each optional package, by the name it is imported by."""
TINY = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_attention_heads", "n_head"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("hidden_size", "n_embd"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_hidden_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    "head_dim": 16,
    "vocab_size": 256,
    "num_experts_per_tok": 2,
    "sliding_window": 12,
}
"""Sizes of the tiny model, by the names that configs have for them."""
GIB = 2**30


def examine() -> list[tuple[str, str]]:
    """Findings about this machine with their names, in reading order."""
    findings = [("python", platform.python_version())]
    findings += [(name, importlib.metadata.version(name)) for name in ("torch", "transformers")]
    reason = why_no_mps(Config())  # first: to name the GPUs, this process uses them
    mps = f"not used: {reason}"
    if reason is None:
        mps = (
            "runtime.mps=auto will start a private daemon, so that trainer and searcher on one GPU run side by side (1.24 "
            "times the work in a throw-away loop on an H200). A searcher's GPU fault may take the trainer down with it"
        )
    info, threads = Path("/proc/cpuinfo"), threads_of(Config())
    has_amx = info.exists() and "amx_bf16" in info.read_text(errors="replace")
    cores = (
        f"{usable_cores()} usable ({'with bf16 matrix units' if has_amx else 'bf16 is slow here, use float32'}); {PINNED}="
        f"{os.environ.get(PINNED, 'not set')}; a trainer and a searcher get {threads.trainer} and {threads.searcher} threads"
    )
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    names = "; ".join(f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB" for gpu in gpus)
    findings += [("cores", cores), ("memory", f"{psutil.virtual_memory().total / GIB:.1f} GiB")]
    findings += [("disk here", f"{shutil.disk_usage('.').free / GIB:.1f} GiB free")]
    findings += [("gpu", names or "none: models run on the CPU"), ("mps", mps)]
    for name, purpose in EXTRAS.items():
        if importlib.util.find_spec(name) is None:
            findings.append((name, f"not installed; needed for {purpose}"))
        else:
            findings.append((name, f"{importlib.metadata.version(name.replace('_', '-'))}: {purpose}"))
    return findings


def examine_model(path: str, *, trust_remote_code: bool = False) -> list[tuple[str, str]]:
    """Findings about a model with their names, in reading order."""
    found = resolve_path(path)
    with friendly_errors(path, "cannot be read"):
        check_has_config(Path(found))
        config = AutoConfig.from_pretrained(found, trust_remote_code=trust_remote_code)
    check_generates(path, config)
    with _quiet() as heard:
        # Tensors of the meta device have shapes and no memory: a model of any size is built at once.
        with torch.device("meta"), friendly_errors(path, "cannot be built"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        try:
            spec, refusal = native_spec(model), ""
        except UnsupportedModel as reason:
            spec, refusal = None, str(reason)
        training, padding = _tried(config, heard)
    count = sum(parameter.numel() for parameter in model.parameters())
    length, switch = stated_context(config), switch_length(config)
    findings = [("model", f"{path}: {config.model_type}, {count / 1e9:.3g}B parameters")]
    if spec is None:
        findings += [("engine", f"over transformers' own forward pass, slower: {refusal}"), ("batches", padding)]
        searcher = "weights and the model's own cache, whose size is not known before it is loaded"
    else:
        native = "native" if switch is None else f"native up to {switch:,} tokens, beyond over transformers"
        not_fused = why_never_fused(spec)
        fused = "with fused kernels and CUDA graphs"
        if not_fused is not None:
            fused = f"without fused kernels and CUDA graphs: {not_fused}"
        findings.append(("engine", f"{native}; on a GPU {fused}"))
        # Keys and values, of 2 bytes a number.
        per_token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 2
        example = f"{256 * 1024 * per_token / GIB:.3g} GiB for 256 responses of 1,024"
        searcher = f"weights and {per_token / 2**10:.3g} KiB of keys and values a token in bf16: {example}"
    context = "not stated" if length is None or length < 1 else f"{length:,} tokens"
    # bf16: weights and gradients, and in fp32 master weights, gradient sums and two averages. fp32 is its own master.
    trainer = f"{20 * count / GIB:.3g} GiB in bf16, {16 * count / GIB:.3g} in float32, and activations; LoRA far less"
    return [
        *findings,
        ("training", training),
        ("context", context if switch is None else f"{context}; rotary angles change beyond {switch:,}"),
        ("weights", f"{2 * count / GIB:.3g} GiB in bf16, {4 * count / GIB:.3g} in float32"),
        ("trainer", trainer),
        ("searcher", searcher),
    ]


def _tried(config: Any, heard: BufferingHandler) -> tuple[str, str]:
    """How a model of this config trains, and how its prompts are batched where the engine is not native."""
    try:
        torch.manual_seed(0)
        tiny = AutoModelForCausalLM.from_config(tiny_config(config), dtype=torch.float32).eval()
        padding = "prompts of all lengths together" if cache_abilities(tiny).pads else "prompts of one length together"
        heard.flush()
        packed = PolicyModel(tiny).packed
    except Exception as error:  # a tiny model of an unknown family fails in its own ways: then nothing is known
        unknown = f"not known before it is loaded: no small copy could be tried ({type(error).__name__})"
        return unknown, unknown
    messages = [record.getMessage() for record in heard.buffer]
    reason = next((message for message in messages if "one sequence at a time" in message), "")
    if packed:
        return "packed sequences, prompts shared by their responses", padding
    return f"one sequence at a time, slower: {reason.partition('(')[2].rpartition(')')[0] or 'see the log'}", padding


def tiny_config(config: Any) -> Any:
    """The config with small sizes, of which everything else is the model's."""
    tiny = copy.deepcopy(config)
    text, own = tiny.get_text_config(), config.get_text_config()
    for name, size in TINY.items():
        if isinstance(getattr(own, name, None), int):
            with suppress(AttributeError):  # some are computed from others
                setattr(text, name, min(size, getattr(own, name)))
    if getattr(own, "num_key_value_heads", None) is not None:
        grouped = own.num_key_value_heads < own.num_attention_heads
        text.num_key_value_heads = min(own.num_key_value_heads, 2 if grouped else 4)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(text, name, None) is not None:
            setattr(text, name, 1)
    for name, value in vars(text).items():  # settings of each layer
        if isinstance(value, list) and len(value) == own.num_hidden_layers:
            setattr(text, name, value[: text.num_hidden_layers])
    rope = getattr(text, "rope_parameters", None) or {}
    half = int(TINY["head_dim"] * rope.get("partial_rotary_factor", 1.0)) // 2
    for name in ("short_factor", "long_factor"):
        if isinstance(rope.get(name), list):
            rope[name] = rope[name][:half]
    return tiny


@contextmanager
def _quiet() -> Iterator[BufferingHandler]:
    """Warnings of the package are kept instead of shown."""
    logger, handler = logging.getLogger("tba"), BufferingHandler(10_000)
    logger.addHandler(handler)
    propagates, logger.propagate = logger.propagate, False
    try:
        yield handler
    finally:
        logger.propagate = propagates
        logger.removeHandler(handler)
