"""The devices of a run: whether they are there, what each role keeps in their memory, and what is left for its work."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tba.config import Config, ConfigError, PlacementConfig
from tba.models.load import LoadedModel, resolve_device
from tba.objectives.registry import make_objective
from tba.runtime.placement import RolePlacement

logger = logging.getLogger("tba")

ACTIVATION_BYTES = 2**30
"""Memory for the activations of one micro-batch on a CPU."""
KV_BYTES = {"cpu": 2**30, "cuda": 16 * 2**30}
"""Most memory for the keys and values of all slots of a searcher."""
SHARED_PART, OWN_PART = 0.35, 0.5
"""Most that the activations of one micro-batch, and the keys and values of all searchers there, take of a GPU's memory:
where trainer and searchers share it, and where a role has it alone."""
SLOTS_PART = 0.25
"""Part of a GPU's memory that published weights may take there: two slots, and the copy of each searcher."""
PROCESS_BYTES = 2 * 2**30
"""What CUDA, its libraries, workspaces and fragments take of a GPU for each process."""
MASTER_BYTES, GRADIENT_BYTES, MOMENT_BYTES = 4, 4, 8
"""For each weight that is trained, in fp32: its master where the model itself is not fp32, the sum of its gradients, and
AdamW's two moments."""

MOST_TOKENS = {"cpu": 4_096, "cuda": 32_768}
LEAST_TOKENS = 512
MICRO_BATCH_FLOP = 1e11
"""On a CPU a micro-batch has about so many floating-point operations, forward and backward: one second of a core. Workers on
several cores then find enough of them, and the logits of a small model are few enough to be kept."""
KEPT_PER_HIDDEN, KEPT_PER_INNER = 20, 6
"""Numbers kept per token and layer for the backward pass, for each hidden unit and each unit of the MLP."""


def placement_of(config: Config) -> RolePlacement:
    """The placement of a run on this machine."""
    return RolePlacement.of(config, auto="cuda:0" if resolve_device("auto").type == "cuda" else "cpu")


def check_devices(config: Config) -> None:
    """Refuse devices that are not there, by the name of the setting, before a model loads."""
    placement = config.runtime.placement or PlacementConfig()
    named = [("runtime.placement.trainer", device) for device in placement.trainer]
    named += [("runtime.placement.searchers", device) for device in placement.searchers]
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
    searchers = max(search.count, search.max_searchers or 0)
    if searchers < len(placement.searchers):
        logger.warning(
            "runtime.placement.searchers names %d devices for search.num_searchers=%d: the others stay idle.",
            len(placement.searchers),
            searchers,
        )


@dataclass(frozen=True, kw_only=True)
class TrainerMemory:
    """What lies on the trainer's first device while a step runs.

    TrainerMemory(device="cuda:0", total=140 * 2**30, kept={"weights": 15 * 2**30, ...}, most=48 * 2**30)
    """

    device: str
    total: int
    """Bytes of the device."""
    kept: Mapping[str, int]
    """Bytes by part that do not depend on the micro-batch, those of searchers on the same device included."""
    most: int
    """Bytes that activations take at most."""

    @property
    def activations(self) -> int:
        """Bytes for the activations of one micro-batch. Its gradients in the model's own dtype need no room of their own:
        they come as the activations go."""
        return min(self.most, self.total - sum(self.kept.values()))

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in self.kept.items() if size)
        return f"{parts}; {self.activations / 2**30:.1f} for activations, of {self.total / 2**30:.1f} GiB"


def trainer_memory(
    config: Config, loaded: LoadedModel, placement: RolePlacement, *, keys_and_values: int
) -> TrainerMemory:
    """What the trainer keeps on its first GPU, and the searchers beside it; on a CPU nothing is counted. `keys_and_values`
    are the bytes of all searchers there."""
    device = placement.trainer[0]
    if device == "cpu":
        return TrainerMemory(device=device, total=device_bytes(device), kept={}, most=ACTIVATION_BYTES)
    train, size = config.train, loaded.model.dtype.itemsize
    weights = loaded.num_parameters * size
    trained = 0 if config.model.lora is not None else loaded.num_parameters  # those of an adapter are few
    masters = MASTER_BYTES if size < MASTER_BYTES else 0
    moments = 0 if train.offload_optimizer else MOMENT_BYTES
    # Where the roles take turns, the one searcher is part of the trainer's process, on its device.
    ranks, searchers = len(placement.trainer), 1 if config.takes_turns else placement.num_searchers_on(device)
    resets = bool(config.reference.reset_every)
    # A searcher has its engine and the reference; evaluations want the start model where the reference is reset.
    copies = searchers * (3 if resets else 2) + (1 if resets and config.replay.on_reference_reset != "drop" else 0)
    if config.mode == "fixed_lag":  # an engine that evaluates, the weights in use, and those that wait for their turn
        copies += 1 + (1 + config.lag_steps if trained else 0)
    if config.takes_turns and not trained:
        copies -= 1  # the reference is the trainer's own model without its adapter
    has_critic = make_objective(config).extras.critic == "separate"  # whole on every rank, as all heads are
    published = 0 if config.takes_turns else published_on_gpu(placement, trained * size)
    kept = {
        "weights": weights // ranks,
        "masters": masters * trained // ranks,
        "gradients": GRADIENT_BYTES * trained // ranks,
        "moments": moments * trained // ranks,
        "critic": weights + (masters + GRADIENT_BYTES + moments) * trained if has_critic else 0,
        "engines and references": copies * weights,
        "published weights": published * (2 if resets else 1),  # references have slots of their own
        "keys and values": keys_and_values,
        "processes": (1 if config.takes_turns else 1 + searchers) * PROCESS_BYTES,
    }
    total = gpu_bytes(device)
    return TrainerMemory(device=device, total=total, kept=kept, most=int(part_of_gpu(placement, device) * total))


def tokens_for(config: Config, loaded: LoadedModel, placement: RolePlacement, *, keys_and_values: int) -> int:
    """Number of tokens of a micro-batch that the memory for activations holds, between LEAST_TOKENS, or one context, and
    MOST_TOKENS. What lies on a GPU is logged, with a warning where that is too much."""
    shape, kind = loaded.model.config.get_text_config(), placement.trainer[0].partition(":")[0]
    inner = getattr(shape, "intermediate_size", None) or 4 * shape.hidden_size
    kept = shape.num_hidden_layers * (KEPT_PER_HIDDEN * shape.hidden_size + KEPT_PER_INNER * inner)
    memory = trainer_memory(config, loaded, placement, keys_and_values=keys_and_values)
    least = min(LEAST_TOKENS, loaded.context)
    fit = memory.activations // (kept * loaded.model.dtype.itemsize)
    if kind != "cpu":
        logger.info("memory of %s: %s.", memory.device, memory)
    if kind != "cpu" and fit < least:
        logger.warning(
            "%s may run out of memory: %s. Less is needed with model.lora, with train.offload_optimizer=true, with "
            "searchers on a GPU of their own (runtime.placement), or with a trainer on several (train.ranks).",
            memory.device,
            memory,
        )
    if kind == "cpu":
        fit = min(fit, int(MICRO_BATCH_FLOP / (6 * loaded.num_parameters)))
    return max(least, min(MOST_TOKENS[kind], fit))


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


def published_on_gpu(placement: RolePlacement, published_bytes: int) -> int:
    """Bytes of a GPU that published weights of this size take: two slots, and a copy for each searcher. 0 = they lie in the
    host's memory: where not all roles share a GPU, and where they would take more of it than they may."""
    device = placement.slots_device
    if device == "cpu":
        return 0
    taken = published_bytes * (2 + placement.num_searchers_on(device))
    return taken if taken <= SLOTS_PART * gpu_bytes(device) else 0


def device_bytes(device: str) -> int:
    """All memory of a device."""
    if device != "cpu":
        return gpu_bytes(device)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else sys.maxsize
