"""The devices of a run: whether they are there, and how much memory each role may take of its own."""

from __future__ import annotations

import logging
import os
import re
import sys

import torch

from tba.config import Config, ConfigError, PlacementConfig
from tba.models.load import resolve_device
from tba.runtime.placement import RolePlacement

logger = logging.getLogger("tba")

ACTIVATION_BYTES = 2**30
"""Memory for the activations of one micro-batch on a CPU."""
KV_BYTES = {"cpu": 2**30, "cuda": 16 * 2**30}
"""Most memory for the keys and values of all slots of a searcher."""
SHARED_PART, OWN_PART = 0.35, 0.5
"""Part of a GPU's memory for the activations of one micro-batch, and for the keys and values of all searchers there: where
trainer and searchers share it, weights and optimizer want the rest; a role that has it alone leaves that room too."""

SLOTS_PART = 0.25
"""Part of a GPU's memory that published weights may take there: two slots, and the copy of each searcher."""


def placement_of(config: Config) -> RolePlacement:
    """The placement of a run on this machine."""
    return RolePlacement.of(config, auto="cuda:0" if resolve_device("auto").type == "cuda" else "cpu")


def check_devices(config: Config) -> None:
    """Refuse devices that are not there, by the name of the setting, before a model loads."""
    placement = config.runtime.placement or PlacementConfig()
    named = [("runtime.placement.trainer", device) for device in placement.trainer]
    named += [("runtime.placement.searchers", device) for device in placement.searchers]
    named += [(f"search.kinds.{name}.device", kind.device or "cpu") for name, kind in config.search.kinds.items()]
    if not (placement.trainer and placement.searchers):  # otherwise nobody uses it
        named.append(("model.device", config.model.device))
    gpus = [(key, device) for key, device in named if re.fullmatch(r"cuda(:\d+)?", device)]
    count = torch.cuda.device_count() if gpus else 0
    for key, device in gpus:
        if int(device.partition(":")[2] or 0) >= count:
            there = ", ".join(["cpu", *(f"cuda:{index}" for index in range(count))])
            raise ConfigError(
                f"{key}={device} is not there: this machine has {there}"
                f"{'' if count else ' and no GPU that torch can use'}. Name one of them; `tba doctor` says what torch sees."
            )
    _warn_of_idle(config)


def _warn_of_idle(config: Config) -> None:
    """Say which of the named devices nobody uses."""
    placement, search = config.runtime.placement, config.search
    if placement is None:
        return
    searchers = max(search.num_searchers, search.max_searchers or 0)
    if searchers < len(placement.searchers):
        logger.warning(
            "runtime.placement.searchers names %d devices for search.num_searchers=%d: the others stay idle.",
            len(placement.searchers),
            searchers,
        )


def activation_bytes(placement: RolePlacement) -> int:
    """Memory for the activations of one micro-batch on the trainer's device."""
    device = placement.trainer[0]
    if device == "cpu":
        return ACTIVATION_BYTES
    return int(part_of_gpu(placement, device) * gpu_bytes(device))


def kv_bytes(placement: RolePlacement, device: str) -> int:
    """Memory for the keys and values of one searcher on this device."""
    if device == "cpu":
        return KV_BYTES["cpu"]
    searchers = max(1, placement.num_searchers_on(device))
    return min(KV_BYTES["cuda"], int(part_of_gpu(placement, device) * free_gpu_bytes(placement, device)) // searchers)


def part_of_gpu(placement: RolePlacement, device: str) -> float:
    """Part of a GPU's memory for what grows with the work: more where it is the trainer's alone, or the searchers'."""
    is_shared = device in placement.trainer and placement.num_searchers_on(device) > 0
    return SHARED_PART if is_shared else OWN_PART


def free_gpu_bytes(placement: RolePlacement, device: str) -> int:
    """Memory of a GPU that nothing uses, as far as can be asked without using some: of a GPU that is the searchers' alone it
    is all, for asking would leave this process's own half a gigabyte there for the whole run."""
    if device not in placement.trainer or not torch.cuda.is_available():
        return gpu_bytes(device)
    # What this process has freed and keeps for itself is free too: a second run in one process gets the slots of the first.
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def gpu_bytes(device: str) -> int:
    return torch.cuda.get_device_properties(device).total_memory


def slots_in_host_memory(placement: RolePlacement, published_bytes: int) -> bool:
    """Whether weight slots lie in the host's memory: where not all roles share a GPU, and where published weights would take
    more of it than they may, which is logged."""
    device = placement.slots_device
    if device == "cpu":
        return True
    taken = published_bytes * (2 + placement.num_searchers_on(device))
    if taken <= SLOTS_PART * device_bytes(device):
        return False
    logger.info(
        "published weights go through the host's memory: two slots and a copy for each searcher would take %.0f GiB of %s.",
        taken / 2**30,
        device,
    )
    return True


def device_bytes(device: str) -> int:
    """All memory of a device."""
    if device != "cpu":
        return gpu_bytes(device)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else sys.maxsize
