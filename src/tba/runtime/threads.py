"""How many threads each process of a run computes with: the cores of its machine, shared out among them.

A product of matrices uses every thread that its process has, and a process that has one leaves the other cores of a laptop
idle. But the threads of a product wait for each other: where one of them finds its core taken, all of them stand still. A
synchronous run with two threads on two cores takes 20 s instead of the 24 with one, and 126 beside one other busy process
(one thread: 24; notes/). So one core is left for what else the machine does, and on two cores each process computes its
products with one thread. None is left where a process would have one thread instead of two: a trainer and a searcher with
two each on four cores make 1.0 to 1.8 times as many steps as with one, and .76 to .94 times as many beside one other busy
process.

A trainer on a CPU has workers besides: threads that compute whole micro-batches, each alone (runtime/workers.py). Workers do
not wait for each other. So there is one for each core, also where searchers compute on these cores with one thread each.

Nothing here imports torch, so that the supervisor can ask too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tba.config import Config
from tba.runtime.placement import RolePlacement, sees_gpu

PINNED = "OMP_NUM_THREADS"
"""Where it is set, it is the most that a process has: whoever set it may have meant one process, and a run has several. A
role finds there the number that it was started with."""
LEFT = 1
"""Number of cores that no process of a run counts on, unless it would cost processes their second thread."""
MOST_THREADS = 16
"""Of a process by default: small models gain little by more, and what was measured had four cores."""
SYSTEM = Path("/")
"""Where /proc, /sys and /dev are."""


@dataclass(frozen=True, kw_only=True)
class RoleThreads:
    """Numbers of threads: RoleThreads(trainer=4, searcher=1)"""

    trainer: int
    """That of the trainer's process, and of each of its ranks."""
    searcher: int


def threads_of(config: Config, *, num_searchers: int = 0) -> RoleThreads:
    """The threads of a run's processes: runtime.threads, or what their machine has for each. Searchers share the cores with
    the trainer equally, and what does not go round is the trainer's, who all of them wait for. `num_searchers` are there at
    least, where a run has been given more than it was started with."""
    if config.runtime.threads is not None:
        return RoleThreads(trainer=config.runtime.threads, searcher=config.runtime.threads)
    if _is_elsewhere(config):
        return RoleThreads(trainer=1, searcher=1)
    found = _on_this_machine(config, num_searchers)
    return RoleThreads(trainer=_bounded(found.trainer), searcher=_bounded(found.searcher))


def workers_of(config: Config) -> int:
    """Number of the trainer's threads that compute whole micro-batches, each with a single thread (runtime/workers.py).

    They do not wait for each other, so they may be as many as there are cores, also where other processes compute on these:
    a trainer and its searcher on two cores take two and one. Searchers with several threads each keep theirs to themselves.
    """
    threads = threads_of(config)
    if config.runtime.threads is not None or _is_elsewhere(config) or config.train.ranks > 1:
        return threads.trainer
    placement = RolePlacement.of(config, auto="cuda:0" if sees_gpu(SYSTEM) else "cpu")
    if placement.trainer[0] != "cpu":
        return 1
    is_alone = config.takes_turns or threads.searcher == 1
    return _bounded(usable_cores()) if is_alone else threads.trainer


def threads_alone(config: Config) -> int:
    """The threads of a process that has the machine to itself, as in an evaluation."""
    if config.runtime.threads is not None:
        return config.runtime.threads
    return 1 if sees_gpu(SYSTEM) and config.model.device != "cpu" else _bounded(usable_cores() - LEFT)


def _is_elsewhere(config: Config) -> bool:
    """Whether the roles run on nodes that nobody here knows."""
    return config.runtime.kind == "ray" and not config.takes_turns


def _on_this_machine(config: Config, num_searchers: int) -> RoleThreads:
    placement = RolePlacement.of(config, auto="cuda:0" if sees_gpu(SYSTEM) else "cpu")
    rank_devices = (placement.trainer * config.train.ranks)[: config.train.ranks]
    more = max(0, num_searchers - len(placement.searchers))
    searchers = () if config.takes_turns else placement.searchers + placement.searchers[-1:] * more
    devices = (*rank_devices, *searchers)
    on_cpu, ranks = devices.count("cpu"), rank_devices.count("cpu")
    if not on_cpu:
        return RoleThreads(trainer=1, searcher=1)
    cores = usable_cores() - (len(devices) - on_cpu)  # a process that feeds a GPU takes one
    if on_cpu == 1 or cores != 2 * on_cpu:  # two each, for several processes, are worth the last core
        cores -= LEFT
    each = max(1, cores // on_cpu)
    return RoleThreads(trainer=(cores - each * (on_cpu - ranks)) // ranks if ranks else 1, searcher=each)


def _bounded(threads: int) -> int:
    """At least one, and no more than OMP_NUM_THREADS, of which the first number counts where it is a list of levels."""
    first = os.environ.get(PINNED, "").split(",")[0].strip()
    most = int(first) if first.isdecimal() and int(first) > 0 else MOST_THREADS
    return max(1, min(threads, most))


def usable_cores() -> int:
    """Cores that this process may use: not those that it is pinned away from, nor more than its container's quota, and a
    core that runs two threads is one, for both would wait for the same arithmetic units."""
    if hasattr(os, "sched_getaffinity"):
        cores = len({_siblings(thread) for thread in os.sched_getaffinity(0)})
    else:
        cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    return max(1, min([cores, *_quotas()]))


def _siblings(thread: int) -> str:
    """The hardware threads of the core that this one belongs to."""
    try:
        return (SYSTEM / f"sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(thread)


def _quotas() -> Iterator[int]:
    """Cores that the control groups of this process leave it, where they limit it, in both versions of the interface."""
    for line in _read("proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        root, names = SYSTEM / "sys/fs/cgroup", ["cpu.max"]
        if "cpu" in controllers.split(","):
            root, names = root / "cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        elif controllers:
            continue
        parts = Path(path.lstrip("/")).parts
        for depth in range(len(parts) + 1):  # a group is limited by those above it, too
            numbers = " ".join(_read(str(root.joinpath(*parts[:depth], name))) for name in names).split()
            if len(numbers) == 2 and all(number.isdecimal() for number in numbers):  # otherwise `max` or -1
                yield max(1, int(numbers[0]) // int(numbers[1]))


def _read(path: str) -> str:
    try:
        return (SYSTEM / path).read_text()
    except OSError:
        return ""
