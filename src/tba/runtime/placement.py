"""Where the roles of a run are on this machine, and what follows from it: where weight slots lie, and which GPU is shared.

Everything here is about names of devices; nothing imports torch, so that the supervisor can ask too.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from tba.config import Config
from tba.runtime.board import MAX_SEARCHERS

VISIBLE = "CUDA_VISIBLE_DEVICES"


def sees_gpu(system: Path = Path("/")) -> bool:
    """Whether this machine has an NVIDIA GPU that this process may use. `system` is where its /dev is."""
    return any(system.glob("dev/nvidia[0-9]*")) and os.environ.get(VISIBLE, "0") not in ("", "-1")


@dataclass(frozen=True, kw_only=True)
class RolePlacement:
    """Devices by name, all of them real: RolePlacement(trainer=("cuda:0",), searchers=("cuda:1", "cuda:2"), ...)"""

    trainer: tuple[str, ...]
    """Those of the trainer, one per rank."""
    searchers: tuple[str, ...]
    """That of each searcher that the run means to have."""
    later: frozenset[str]
    """Those of any searcher that may join, these included."""
    sees_one: bool = False
    """Whether some searcher hides all GPUs but its own from itself (`see_only`)."""
    on_cluster: bool = False
    """Whether Ray places the roles: a device is then one of a role's own node, and nobody here knows who else uses it."""

    @classmethod
    def of(cls, config: Config, *, auto: str = "cuda:0") -> RolePlacement:
        """The placement of a run; `auto` is the device that model.device=auto stands for."""

        def real(device: str) -> str:
            return {"auto": auto, "cuda": "cuda:0"}.get(device, device)

        search, ranks = config.search, config.train.ranks
        trainer: tuple[str, ...] = (real(config.model.device),)
        if ranks > 1 and trainer == ("cuda:0",):  # each rank has one of its own
            trainer = tuple(f"cuda:{rank}" for rank in range(ranks))
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
        """Of the trainer's ranks, then of the searchers."""
        return self.trainer + self.searchers

    @property
    def slots_device(self) -> str:
        """Where weight slots lie."""
        return slots_device(self.trainer, self.later, sees_one=self.sees_one)

    def num_searchers_on(self, device: str) -> int:
        """Number of searchers that use this device, as far as is known."""
        return min(self.searchers.count(device), 1 if self.on_cluster else MAX_SEARCHERS)

    @property
    def shared_gpus(self) -> list[str]:
        """GPUs that several roles use."""
        counts = Counter((*dict.fromkeys(self.trainer), *self.searchers))
        return sorted(device for device, count in counts.items() if device != "cpu" and count > 1)


def slots_device(trainer: Sequence[str], searchers: Collection[str], *, sees_one: bool = False) -> str:
    """Where weight slots lie: on the GPU that all roles use, where CUDA IPC lets every process read them; otherwise, and
    where a process numbers GPUs in another way (`sees_one`), in host memory, `cpu`.

    They have the trainer's compute dtype on every device, and each engine casts what it loads to its own: a searcher in fp32
    on the CPU beside a trainer in bf16 computes with the weights that a searcher in bf16 has.
    """
    devices = {*trainer, *searchers}
    return devices.pop() if len(devices) == 1 and not sees_one else "cpu"


def must_hide(config: Config) -> bool:
    """Whether a searcher with this config must not see GPUs but its own: vLLM takes the first that it sees."""
    return config.generate.engine == "vllm" and config.model.device.partition(":")[2] not in ("", "0")


def see_only(device: str) -> str:
    """Hide all GPUs but one from this process, which must not have used any; returns the name of that one from now on."""
    index, visible = int(device.partition(":")[2]), os.environ.get(VISIBLE)
    os.environ[VISIBLE] = visible.split(",")[index].strip() if visible else str(index)
    return "cuda:0"
