"""`tba doctor`: what this machine has, which optional packages are missing, and what each of them is for."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from pathlib import Path

from tba.config import Config
from tba.runtime.mps import why_no_mps
from tba.runtime.threads import PINNED, threads_of, usable_cores

EXTRAS = {
    "wandb": "W&B logging (observe.sinks=[wandb])",
    "tensorboard": "TensorBoard logging (observe.sinks=[tensorboard])",
    "peft": "LoRA (model.lora)",
    "math_verify": "the grader of task.name=math",
    "vllm": "the engine of generate.engine=vllm",
    "pyarrow": "parquet files (tba replay RUN --export FILE.parquet)",
}
"""What each optional package is for, by the name it is imported by."""


def examine() -> list[tuple[str, str]]:
    """Findings about this machine with their names, in reading order."""
    findings = [("python", platform.python_version())]
    findings += [(name, importlib.metadata.version(name)) for name in ("torch", "transformers")]
    mps = _mps()  # first: to name the GPUs, this process uses them
    findings += [("cores", _cores()), ("memory", _memory()), ("disk here", _disk()), ("gpu", _gpus()), ("mps", mps)]
    findings += [(name, _extra(name, purpose)) for name, purpose in EXTRAS.items()]
    return findings


def _cores() -> str:
    bf16 = "with bf16 matrix units" if _has_amx() else "bf16 is slow here, use float32"
    threads, pinned = threads_of(Config()), os.environ.get(PINNED, "not set")
    return (
        f"{usable_cores()} usable ({bf16}); {PINNED}={pinned}; a trainer and a searcher get {threads.trainer} and "
        f"{threads.searcher} threads"
    )


def _has_amx() -> bool:
    info = Path("/proc/cpuinfo")
    return info.exists() and "amx_bf16" in info.read_text(errors="replace")


def _memory() -> str:
    if not hasattr(os, "sysconf"):
        return "unknown"
    page = os.sysconf("SC_PAGE_SIZE")
    return f"{page * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"


def _disk() -> str:
    return f"{shutil.disk_usage('.').free / 2**30:.1f} GiB free"


def _mps() -> str:
    reason = why_no_mps(Config())
    if reason is not None:
        return f"not used: {reason}"
    return (
        "runtime.mps=auto will start a private daemon, so that trainer and searcher on one GPU run side by side (1.24 times "
        "the work in a throw-away loop on an H200). A searcher's GPU fault may take the trainer down with it"
    )


def _gpus() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none: models run on the CPU"
    names = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return "; ".join(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in names)


def _extra(name: str, purpose: str) -> str:
    if importlib.util.find_spec(name) is None:
        return f"not installed; needed for {purpose}"
    return f"{importlib.metadata.version(name.replace('_', '-'))}: {purpose}"
