"""How many threads each process of a run computes with: the cores of its machine, shared out among them.

A product of matrices uses every thread that its process has, and a process that has one leaves the other cores of a laptop
idle. Processes that together have more threads than there are cores slow each other down by far more than they gain.
Nothing here imports torch, so that the supervisor can ask too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from tba.config import Config
from tba.runtime.placement import VISIBLE, RolePlacement

PINNED = "OMP_NUM_THREADS"
"""Where it is set, it is what every process has: the user, torchrun or Ray has shared out the cores. A role finds there the
number that it was started with."""
QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""What a container may use of the machine, in microseconds of how many: `200000 100000` are two cores."""


@dataclass(frozen=True, kw_only=True)
class RoleThreads:
    """Numbers of threads: RoleThreads(trainer=4, searcher=1)"""

    trainer: int
    """That of the trainer's process, and of each of its ranks."""
    searcher: int


def threads_of(config: Config) -> RoleThreads:
    """The threads of a run's processes: runtime.threads, or OMP_NUM_THREADS, or what their machine has for each. Searchers
    share the cores with the trainer equally, and what does not go round is the trainer's, who all of them wait for."""
    runtime = config.runtime
    given = runtime.threads or _pinned()
    if given is not None:
        return RoleThreads(trainer=given, searcher=given)
    if runtime.kind == "ray" and not config.takes_turns:  # on nodes that nobody here knows
        return RoleThreads(trainer=max(1, int(runtime.trainer_cpus)), searcher=max(1, int(runtime.searcher_cpus)))
    placement = RolePlacement.of(config, auto="cuda:0" if _sees_gpu() else "cpu")
    rank_devices = (placement.trainer * config.train.ranks)[: config.train.ranks]
    devices = (*rank_devices, *(() if config.takes_turns else placement.searchers))
    on_cpu, ranks = devices.count("cpu"), rank_devices.count("cpu")
    if not on_cpu:
        return RoleThreads(trainer=1, searcher=1)
    cores = usable_cores() - (len(devices) - on_cpu)  # a process that feeds a GPU takes one
    each = max(1, cores // on_cpu)
    rest = max(1, (cores - each * (on_cpu - ranks)) // ranks) if ranks else 1
    return RoleThreads(trainer=rest, searcher=each)


def threads_alone(config: Config) -> int:
    """The threads of a process that has the machine to itself, as in an evaluation."""
    return (
        config.runtime.threads or _pinned() or (1 if _sees_gpu() and config.model.device != "cpu" else usable_cores())
    )


def usable_cores() -> int:
    """Cores that this process may use: not those that it is pinned away from, nor more than its container's quota, and a
    core that runs two threads is one, for both would wait for the same arithmetic units."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed, _quota() or allowed))


def _quota() -> int | None:
    try:
        most, of = QUOTA.read_text().split()
    except (OSError, ValueError):
        return None
    return None if most == "max" else max(1, int(most) // int(of))


def _pinned() -> int | None:
    """OMP_NUM_THREADS, whose first number counts where it is a list of levels; None = it says nothing."""
    first = os.environ.get(PINNED, "").split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


def _sees_gpu() -> bool:
    return Path("/dev/nvidia0").exists() and os.environ.get(VISIBLE, "0") not in ("", "-1")
