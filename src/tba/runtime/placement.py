"""Where the roles of a run are on this machine, and what follows from it: where shared weights lie, which GPU is
shared, and how many threads each process computes with. Nothing here imports torch, so that the supervisor can ask too.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tba.config import Config
from tba.runtime.counters import MAX_SEARCHERS

logger = logging.getLogger("tba.runtime")

VISIBLE = "CUDA_VISIBLE_DEVICES"


def sees_gpu(system: Path = Path("/")) -> bool:
    """Whether this machine has an NVIDIA GPU that this process may use. `system` is where its /dev is."""
    return any(system.glob("dev/nvidia[0-9]*")) and os.environ.get(VISIBLE, "0") not in ("", "-1")


@dataclass(frozen=True, kw_only=True)
class RolePlacement:
    """Devices by name, all of them real: RolePlacement(trainer=("cuda:0",), searchers=("cuda:1", "cuda:2"), ...)"""

    trainer: tuple[str, ...]
    searchers: tuple[str, ...]
    later: frozenset[str]
    """Devices of all searchers that may join, those of the start included."""
    sees_one: bool = False
    """Whether some searcher hides all GPUs but its own from itself (`see_only`)."""
    on_cluster: bool = False
    """Whether Ray places the roles: a device is then one of a role's own node, and its other users are not known here."""

    @classmethod
    def of(cls, config: Config, *, auto: str = "cuda:0") -> RolePlacement:
        """The placement of a run; `auto` is the device that model.device=auto stands for."""

        def real(device: str) -> str:
            return {"auto": auto, "cuda": "cuda:0"}.get(device, device)

        search, ranks = config.search, config.train.ranks
        trainer: tuple[str, ...] = (real(config.model.device),)
        if ranks > 1 and trainer == ("cuda:0",):  # each rank has one of its own
            trainer = tuple(f"cuda:{rank}" for rank in range(ranks))
        # Weight buffers are placed once, before later searchers are known, so the devices of all that may join count.
        anywhere = [real(config.searcher_device(index)) for index in range(MAX_SEARCHERS)]
        return cls(
            trainer=trainer,
            searchers=tuple(anywhere[: search.count]),
            later=frozenset(anywhere),
            sees_one=any(must_hide(own) for own in map(config.for_searcher, range(MAX_SEARCHERS))),
            on_cluster=config.runtime.kind == "ray",
        )

    @property
    def devices(self) -> tuple[str, ...]:
        return self.trainer + self.searchers

    @property
    def shared_weights_device(self) -> str:
        """Where shared weights lie: on the GPU that all roles use, where CUDA IPC lets every process read them;
        otherwise, and where a process numbers GPUs in another way (`sees_one`), in host memory, `cpu`.

        They have the trainer's compute dtype, and each engine casts what it loads to its own.
        """
        devices = {*self.trainer, *self.later}
        return devices.pop() if len(devices) == 1 and not self.sees_one else "cpu"

    def num_searchers_on(self, device: str) -> int:
        """Number of searchers that use this device, as far as is known."""
        return min(self.searchers.count(device), 1 if self.on_cluster else MAX_SEARCHERS)

    @property
    def shared_gpus(self) -> list[str]:
        counts = Counter((*dict.fromkeys(self.trainer), *self.searchers))
        return sorted(device for device, count in counts.items() if device != "cpu" and count > 1)


def must_hide(config: Config) -> bool:
    """Whether a searcher with this config must not see GPUs but its own: vLLM takes the first that it sees."""
    return config.generate.engine == "vllm" and config.model.device.partition(":")[2] not in ("", "0")


def see_only(device: str) -> str:
    """Hide all GPUs but one from this process, which must not have used any; returns the name of that one from now on."""
    index, visible = int(device.partition(":")[2]), os.environ.get(VISIBLE)
    os.environ[VISIBLE] = visible.split(",")[index].strip() if visible else str(index)
    return "cuda:0"


# --- threads ---------------------------------------------------------------------------------------------------------
#
# The threads of a product of matrices wait for each other: where one of them finds its core taken, all of them stand still.
# A synchronous run with two threads on two cores takes 20 s instead of the 24 with one, and 126 beside one other busy
# process (one thread: 24; notes/). So one core is left for what else the machine does. None is left where a process would
# have one thread instead of two: a trainer and a searcher with two each on four cores make 1.0 to 1.8 times as many steps as
# with one, and .76 to .94 times as many beside one other busy process.
#
# A trainer on a CPU has workers besides: threads that compute whole micro-batches, each alone (runtime/workers.py).

PINNED = "OMP_NUM_THREADS"
"""The most threads of a process where the user has set it. A role finds the number that it was started with there."""
LEFT = 1
"""Number of cores that no process of a run counts on, unless it would cost processes their second thread."""
MOST_THREADS = 16
"""Of a process by default: small models gain little by more, and what was measured had four cores."""
SYSTEM = Path("/")


@dataclass(frozen=True, kw_only=True)
class RoleThreads:
    trainer: int
    """Number of threads of the trainer's process, and of each of its ranks."""
    searcher: int


def threads_of(config: Config, *, num_searchers: int = 0) -> RoleThreads:
    """runtime.threads, or what their machine has for each. Searchers share the cores with the trainer equally, and what
    does not go round is the trainer's. `num_searchers` are there at least, where more were asked for later."""
    if config.runtime.threads is not None:
        return RoleThreads(trainer=config.runtime.threads, searcher=config.runtime.threads)
    if _is_elsewhere(config):
        # The cores of the nodes are not known here, and Ray reserves a CPU for each thread (cluster/roles.py).
        return RoleThreads(trainer=1, searcher=1)
    placement = _placement(config)
    rank_devices = (placement.trainer * config.train.ranks)[: config.train.ranks]
    more = max(0, num_searchers - len(placement.searchers))
    searchers = () if config.is_synchronous else placement.searchers + placement.searchers[-1:] * more
    devices = (*rank_devices, *searchers)
    on_cpu, ranks = devices.count("cpu"), rank_devices.count("cpu")
    if not on_cpu:
        return RoleThreads(trainer=1, searcher=1)
    cores = usable_cores() - (len(devices) - on_cpu)  # a process that feeds a GPU takes one
    if on_cpu == 1 or cores != 2 * on_cpu:  # two each, for several processes, are worth the last core
        cores -= LEFT
    each = max(1, cores // on_cpu)
    for_trainer = (cores - each * (on_cpu - ranks)) // ranks if ranks else 1
    return RoleThreads(trainer=_bounded(for_trainer), searcher=_bounded(each))


def _placement(config: Config) -> RolePlacement:
    return RolePlacement.of(config, auto="cuda:0" if sees_gpu(SYSTEM) else "cpu")


def workers_of(config: Config) -> int:
    """Number of the trainer's threads that compute whole micro-batches, each with a single thread (runtime/workers.py).
    They do not wait for each other, so there is one for each core, also where searchers compute on these with one
    thread each."""
    threads = threads_of(config)
    if config.runtime.threads is not None or _is_elsewhere(config) or config.train.ranks > 1:
        return threads.trainer
    if _placement(config).trainer[0] != "cpu":
        return 1
    is_alone = config.is_synchronous or threads.searcher == 1
    return _bounded(usable_cores()) if is_alone else threads.trainer


def threads_alone(config: Config) -> int:
    """The threads of a process that has the machine to itself, as in an evaluation."""
    if config.runtime.threads is not None:
        return config.runtime.threads
    return 1 if sees_gpu(SYSTEM) and config.model.device != "cpu" else _bounded(usable_cores() - LEFT)


def _is_elsewhere(config: Config) -> bool:
    """Whether the roles run on nodes that this process does not know."""
    return config.runtime.kind == "ray" and not config.is_synchronous


def _bounded(threads: int) -> int:
    """At least one, and no more than OMP_NUM_THREADS, of which the first number counts where it is a list of levels."""
    first = os.environ.get(PINNED, "").split(",")[0].strip()
    most = int(first) if first.isdecimal() and int(first) > 0 else MOST_THREADS
    return max(1, min(threads, most))


def usable_cores() -> int:
    """Cores that this process may use, by its affinity and its container's quota. Two hardware threads of a core are
    one, for both would wait for the same arithmetic units."""
    if hasattr(os, "sched_getaffinity"):
        siblings = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
        cores = len({_read(siblings.format(thread)) or str(thread) for thread in os.sched_getaffinity(0)})
    else:
        cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    return max(1, min([cores, *_quotas()]))


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


# --- MPS -------------------------------------------------------------------------------------------------------------
#
# With a private CUDA MPS daemon, roles that share a GPU run their kernels side by side instead of in turns. It must be there
# before the first process touches the GPU. The processes then share one context on the GPU: a fault in a searcher's kernel
# may take the trainer down with it; the last checkpoint stays.

CONTROL = "nvidia-cuda-mps-control"
TIMEOUT_SECONDS = 20.0
WATCH = 'while kill -0 "$1" 2>/dev/null; do sleep 1; done; echo quit | "$2"; rm -rf "$3"'
"""Arguments: process, control program, folder."""
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
PRIORITY, BELOW_NORMAL = "CUDA_MPS_CLIENT_PRIORITY", "1"


def why_no_mps(config: Config) -> str | None:
    """Reason against a daemon for this run; None = there is none. Looks at the machine without touching the GPU."""
    if config.runtime.mps == "off":
        return "runtime.mps=off"
    if config.is_synchronous:
        return f"in {config.mode} mode one process uses the GPU"
    placement = RolePlacement.of(config)  # what speaks for auto being cuda here is looked at next
    if set(placement.devices) == {"cpu"} or not sees_gpu():
        return "there is no NVIDIA GPU to share"
    if not placement.shared_gpus:
        return "every role has a GPU of its own"
    if PIPES in os.environ:
        return f"{PIPES} is set: that daemon is used"
    torch = sys.modules.get("torch")  # who has not imported it cannot have touched the GPU
    if torch is not None and torch.cuda.is_initialized():
        return "this process uses the GPU already, and a daemon must be there before"
    if shutil.which(CONTROL) is None:
        return f"{CONTROL} is not on the PATH"
    return None


def start_mps(config: Config) -> bool:
    """Start a daemon that lives as long as this process, for it and its children. Returns False, with a log line, where
    it is not wanted or not allowed; `runtime.mps=on` then raises."""
    reason = why_no_mps(config)
    if reason is None:
        folder = tempfile.mkdtemp(prefix="tba-mps-")
        os.environ[PIPES] = os.environ[LOGS] = folder
        try:
            subprocess.run([CONTROL, "-d"], capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True)
        except subprocess.CalledProcessError as error:
            reason = f"{CONTROL} -d failed: {(error.stderr or error.stdout).strip()[:300]}"
        except (subprocess.TimeoutExpired, OSError) as error:
            reason = f"{CONTROL} -d failed: {error}"
        else:
            # A process beside the daemon ends it after this one: it cannot end while its clients live. It has a session of
            # its own, or Ctrl-C would end it before the roles, which are the clients.
            subprocess.Popen(
                ["sh", "-c", WATCH, "tba-mps-watch", str(os.getpid()), CONTROL, folder],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            return True
        del os.environ[PIPES], os.environ[LOGS]
        shutil.rmtree(folder, ignore_errors=True)
    if config.runtime.mps == "on":
        raise RuntimeError(f"runtime.mps=on, but {reason}.")
    logger.info("no MPS daemon: %s.", reason)
    return False


def lower_mps_priority(config: Config) -> None:
    """Before the trainer touches the GPU: where searchers share it through a daemon, their kernels go first. A decode
    step is hundreds of small kernels that would each wait for the trainer's large ones (notes/gpu.md)."""
    if PIPES in os.environ and not config.is_synchronous and RolePlacement.of(config).shared_gpus:
        os.environ.setdefault(PRIORITY, BELOW_NORMAL)
