"""Programmatic dependent launch: a kernel of a decode step is set up while the one before it still runs.

A decode step is a chain of some 170 short kernels, and setting one up takes about as long as the work of a small one. Hopper
can start the programs of the next kernel as soon as all programs of this one have begun, as far as there is room. Each of our
kernels says so at its very beginning and then waits until the kernel before it has finished and its results can be seen:
before that wait it may touch nothing that a kernel computes, only weights.

Every program must wait, also one that has nothing to do: a kernel whose programs end early would be taken for the end of
all that came before it.
"""

from __future__ import annotations

import os
from functools import cache

import torch
import triton
import triton.language as tl


@cache
def can_overlap(device: torch.device) -> bool:
    """Whether kernels on this device may be launched before the one before them has ended: Hopper and later can."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return device.type == "cuda" and not interpreted and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def begin(OVERLAPS: tl.constexpr):
    """Let the next kernel be set up, and wait for the results of the one before."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
