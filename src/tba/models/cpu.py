"""A process that computes on a CPU: its threads, and PyTorch's settings for the core that it runs on."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

CPU_INFO = Path("/proc/cpuinfo")


def use_cpu(threads: int | None = None) -> None:
    """Compute with so many threads, None = as many as before, and without oneDNN where it only costs time."""
    if threads is not None:
        torch.set_num_threads(threads)
    if not gains_by_onednn(platform.machine(), CPU_INFO.read_text() if CPU_INFO.exists() else ""):
        torch.backends.mkldnn.set_flags(False)


def gains_by_onednn(machine: str, cpu_info: str) -> bool:
    """Whether oneDNN makes products faster: not on an ARM core without bf16. There it prepares every product of small
    matrices for 60 us, which then takes 5 (16 x 32 by 32 x 48 on a Neoverse N1: 66 us, without it 9), and large ones gain
    8% by it at most. It also switches itself off at the first product in bf16, and a process then rounds differently."""
    return machine != "aarch64" or "bf16" in cpu_info
