"""The memory plan of a run: the sizes of the model and the machine, and the parts of a device's memory. `MemoryPlan` has as
many slots for the keys and values of searchers, and tokens for the activations of the trainer, as fit (resolve.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import psutil
import torch

from tba.config import Config, ConfigError
from tba.engine.decoder.families import FAMILIES
from tba.engine.decoder.fused_pass import why_never_fused
from tba.engine.native.paged_cache import PAGE
from tba.engine.native.prefill import READ_AHEAD
from tba.engine.native.slot_cache import KEY_MULTIPLE
from tba.models.load import LoadedModel, resolve_dtype
from tba.runtime.placement import RolePlacement, sees_gpu, usable_cores

logger = logging.getLogger("tba")

MOST_SLOTS = {"cpu": 128, "cuda": 256}
KV_BYTES = {"cpu": 2**30, "cuda": 16 * 2**30}
"""Most memory for the keys and values of all slots of a searcher."""
ACTIVATION_BYTES = 2**30
"""Memory for the activations of one micro-batch on a CPU."""
SHARED_PART, OWN_PART = 0.35, 0.5
"""Most that the activations of one micro-batch, and the keys and values of all searchers there, take of a GPU's memory:
where trainer and searchers share it, and where a role has it alone."""
SLOTS_PART = 0.25
"""Part of a GPU's memory that published weights may take there: two buffers, and the copy of each searcher."""
PROCESS_BYTES = 2 * 2**30
"""Bytes of a GPU that CUDA, its libraries, workspaces and fragments take for each process."""
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


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a model."""

    num_parameters: int
    num_layers: int
    hidden_size: int
    inner_size: int
    """Units of the MLP."""
    key_size: int
    """Numbers in the keys of a token in one layer: heads of keys x size of a head. Its values have as many."""
    weight_bytes: int
    """Bytes of a weight as the trainer computes with it."""
    context: int
    """Longest sequence in tokens."""
    has_fused_kernels: bool = False
    """Whether the native engine decodes it with fused kernels on a GPU, where it keeps keys and values in pages."""

    @classmethod
    def of(cls, loaded: LoadedModel) -> ModelShape:
        shape = loaded.model.config.get_text_config()
        heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
        head_size = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
        is_known = shape.model_type in FAMILIES
        return cls(
            num_parameters=loaded.num_parameters,
            num_layers=shape.num_hidden_layers,
            hidden_size=shape.hidden_size,
            inner_size=getattr(shape, "intermediate_size", None) or 4 * shape.hidden_size,
            key_size=heads * head_size,
            weight_bytes=loaded.model.dtype.itemsize,
            context=loaded.context,
            has_fused_kernels=is_known and why_never_fused(FAMILIES[shape.model_type][0](shape, tied=False)) is None,
        )


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine of this process. Machine(auto="cuda:0", cores=16, memory=128 * 2**30, gpus={"cuda:0": 140 * 2**30})"""

    auto: str
    """Device that model.device=auto stands for."""
    cores: int
    memory: int
    """Bytes of the machine's own memory."""
    gpus: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each GPU that the run uses; empty = they were not asked."""
    free: Mapping[str, int] = field(default_factory=dict)
    """Bytes that nothing uses of the trainer's GPUs."""

    @classmethod
    def seen(cls) -> Machine:
        """Without its GPUs' memory: nothing touches them, and torch need not be able to use them."""
        auto = "cuda:0" if sees_gpu() else "cpu"
        return cls(auto=auto, cores=usable_cores(), memory=psutil.virtual_memory().total)

    @classmethod
    def found(cls, config: Config) -> Machine:
        """With the memory of the GPUs that a run uses. Of a GPU that is the searchers' alone all memory counts as free: to
        ask would leave half a gigabyte of this process there for the whole run."""
        placement = placement_of(config)
        gpus = {name: gpu_bytes(name) for name in placement.devices if name != "cpu"}
        free = {name: free_bytes(name) for name in gpus if name in placement.trainer}
        auto = "cuda:0" if torch.cuda.is_available() else "cpu"
        return replace(cls.seen(), auto=auto, gpus=gpus, free=free)

    def placement(self, config: Config) -> RolePlacement:
        return RolePlacement.of(config, auto=self.auto)

    def bytes_of(self, device: str) -> int:
        return self.memory if device == "cpu" else self.gpus[device]


def placement_of(config: Config) -> RolePlacement:
    """The placement of a run on the machine of this process."""
    return RolePlacement.of(config, auto="cuda:0" if torch.cuda.is_available() else "cpu")


def gpu_bytes(device: str) -> int:
    return torch.cuda.get_device_properties(device).total_memory


def free_bytes(device: str) -> int:
    """Bytes of a GPU that nothing uses. What this process has freed and keeps for itself is free too: a second run in one
    process gets the slots of the first."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def published_on_gpu(placement: RolePlacement, published_bytes: int, *, gpu: int) -> int:
    """Bytes of a GPU, which has `gpu`, that published weights of this size take: two buffers, and a copy for each searcher.
    0 = they lie in the host's memory: where not all roles share a GPU, and where they would take more than they may."""
    device = placement.shared_weights_device
    taken = published_bytes * (2 + placement.num_searchers_on(device))
    return taken if device != "cpu" and taken <= SLOTS_PART * gpu else 0


@dataclass(frozen=True, kw_only=True)
class SlotBudget:
    """How many slots a searcher gets, and what that costs. SlotBudget(slots=31, positions=8448, prompts=3,
    prompt_tokens=8192, bytes_per_token=57_344, memory=16 * 2**30)"""

    slots: int
    positions: int
    """Number of tokens of a slot, as the cache rounds it: those of the longest prompt with the longest response; in pages
    of half the longest response, for prompts are shared, and where that is too little responses wait."""
    prompts: int
    """Number of prompts beside them, at most: those that are prefilled and wait for slots; in pages also those at work."""
    prompt_tokens: int
    """Number of tokens of the longest prompt, or of the longest that is allowed."""
    bytes_per_token: int
    """Size of one token's keys and values in all layers."""
    memory: int
    """Bytes for the keys and values of one searcher."""

    @property
    def used(self) -> int:
        return (self.slots * self.positions + self.prompts * self.prompt_tokens) * self.bytes_per_token

    def __str__(self) -> str:
        return (
            f"{self.slots} slots of {self.positions} tokens with {self.bytes_per_token:,} bytes of keys and values each, "
            f"and {self.prompts} prompts of {self.prompt_tokens} tokens at most: "
            f"{self.used / 2**30:.3g} GiB of {self.memory / 2**30:.3g}"
        )


@dataclass(frozen=True)
class MemoryPlan:
    """What fits on the devices of a run: MemoryPlan(config, model, machine, longest_prompt=512)"""

    config: Config
    model: ModelShape
    machine: Machine
    longest_prompt: int = 1
    """Number of tokens of the longest prompt, or of the longest that is allowed."""

    @cached_property
    def placement(self) -> RolePlacement:
        return self.machine.placement(self.config)

    def part_of_gpu(self, device: str) -> float:
        """Part of a GPU's memory for what grows with the work: more where it is the trainer's alone, or the searchers'."""
        is_shared = device in self.placement.trainer and self.placement.num_searchers_on(device) > 0
        return SHARED_PART if is_shared else OWN_PART

    def kv_bytes(self, device: str) -> int:
        """Memory for the keys and values of one searcher on this device."""
        if device == "cpu":
            return KV_BYTES["cpu"]
        free = self.machine.free.get(device, self.machine.gpus[device])
        return min(
            KV_BYTES["cuda"], int(self.part_of_gpu(device) * free) // max(1, self.placement.num_searchers_on(device))
        )

    def keeps_pages(self, device: str) -> bool:
        """Whether a searcher there keeps keys and values in pages: the native engine with its fused kernels does."""
        return device != "cpu" and self.config.generate.engine == "native" and self.model.has_fused_kernels

    def budget(self, device: str, slots: int, *, memory: int | None = None) -> SlotBudget:
        """Bytes that so many slots of a searcher on this device take."""
        config, model, kind = self.config, self.model, device.partition(":")[0]
        samples, response = config.samples_generated_per_prompt, config.generate.max_new_tokens
        dtype = torch.float32 if kind == "cpu" else resolve_dtype(config.model.dtype, torch.device(kind))
        prompt = min(self.longest_prompt, model.context)
        waiting = max(1, min(READ_AHEAD[kind], slots // samples))
        if self.keeps_pages(device):
            positions, multiple = response / 2 + PAGE, PAGE
            waiting += -(-slots // samples)
        else:
            positions, multiple = min(model.context, prompt + response), KEY_MULTIPLE
        return SlotBudget(
            slots=slots,
            positions=math.ceil(positions / multiple) * multiple,
            prompts=waiting,
            prompt_tokens=prompt,
            bytes_per_token=2 * model.num_layers * model.key_size * dtype.itemsize,
            memory=self.kv_bytes(device) if memory is None else memory,
        )

    @property
    def is_short(self) -> bool:
        """Whether a searcher could not have all slots that were asked for, or MOST_SLOTS."""
        given = self.config.generate.slots
        budgets = (
            self.budget(device, given or MOST_SLOTS[device.partition(":")[0]]) for device in self.placement.searchers
        )
        return any(budget.used > budget.memory for budget in budgets)

    def slots(self) -> int:
        """As many responses as a searcher has memory for, at most MOST_SLOTS. Of several devices the one with the least
        memory decides. Each budget is logged."""
        found = []
        for device in dict.fromkeys(self.placement.searchers):
            budgets = [self.budget(device, slots) for slots in range(1, MOST_SLOTS[device.partition(":")[0]] + 1)]
            fitting = [budget for budget in budgets if budget.used <= budget.memory]
            if not fitting:
                logger.warning(
                    "one response on %s needs %s. It is tried with one; shorter prompts (task.max_prompt_tokens) or "
                    "responses (generate.max_new_tokens) need less.",
                    *(device, budgets[0]),
                )
            found.append(fitting[-1] if fitting else budgets[0])
            logger.info("generate.slots on %s: %s.", device, found[-1])
        return min(budget.slots for budget in found)

    def check_slots(self, slots: int) -> None:
        """Refuse a number of slots, given by the user, whose keys and values a device could never hold."""
        for device in dict.fromkeys(self.placement.searchers if self.config.generate.engine == "native" else ()):
            budget = self.budget(device, slots, memory=self.machine.bytes_of(device))
            if self.keeps_pages(device):  # a response has a page at least; where there are no more, others wait
                budget = replace(budget, positions=PAGE, prompts=1)
            if budget.used > budget.memory:
                most = max(1, slots * budget.memory // budget.used)
                raise ConfigError(
                    f"generate.slots={slots} does not fit on {device}: {budget}, which is all "
                    f"that it has. Give at most {most}, or leave it out to have as many as there is memory for."
                )

    def keys_and_values(self) -> int:
        """Most bytes of keys and values on the trainer's first device, with the slots that searchers have there."""
        generate, device = self.config.generate, self.placement.trainer[0]
        memory = self.kv_bytes(device)
        if generate.engine == "native" and generate.slots is not None:
            # In pages a slot is planned with half the longest response, but all may become that long.
            memory = min(memory, 2 * self.budget(device, generate.slots).used)
        return self.placement.num_searchers_on(device) * memory

    def kept(self, keys_and_values: int) -> dict[str, int]:
        """Bytes by part that the trainer and the searchers beside it keep on its first GPU, whatever the micro-batch; on a
        CPU nothing is counted. `keys_and_values` are the bytes of all searchers there."""
        config, model, placement = self.config, self.model, self.placement
        device = placement.trainer[0]
        if device == "cpu":
            return {}
        size, by_turns = model.weight_bytes, config.is_synchronous
        weights = model.num_parameters * size
        trained = 0 if config.model.lora is not None else model.num_parameters  # those of an adapter are few
        masters = MASTER_BYTES if size < MASTER_BYTES else 0
        moments = 0 if config.train.offload_optimizer else MOMENT_BYTES
        # Where the roles take turns, the one searcher is part of the trainer's process, on its device.
        ranks, searchers = len(placement.trainer), 1 if by_turns else placement.num_searchers_on(device)
        resets = bool(config.reference.reset_every)
        # A searcher has its engine and the reference; evaluations want the start model where the reference is reset.
        copies = searchers * (3 if resets else 2) + (resets and config.replay.on_reference_reset != "drop")
        if (
            config.mode == "fixed_lag"
        ):  # an engine that evaluates, the weights in use, and those that wait for their turn
            copies += 1 + (1 + config.lag_steps if trained else 0)
        if by_turns and not trained:
            copies -= 1  # the reference is the trainer's own model without its adapter
        published = 0 if by_turns else published_on_gpu(placement, trained * size, gpu=self.machine.bytes_of(device))
        return {
            "weights": weights // ranks,
            "masters": masters * trained // ranks,
            "gradients": GRADIENT_BYTES * trained // ranks,
            "moments": moments * trained // ranks,
            "engines and references": copies * weights,
            "published weights": published * (2 if resets else 1),  # references have buffers of their own
            "keys and values": keys_and_values,
            "processes": (1 if by_turns else 1 + searchers) * PROCESS_BYTES,
        }

    def activations(self, kept: Mapping[str, int]) -> int:
        """Bytes for the activations of one micro-batch. Its gradients need no room of their own: they come as these go."""
        device = self.placement.trainer[0]
        total = self.machine.bytes_of(device)
        most = ACTIVATION_BYTES if device == "cpu" else int(self.part_of_gpu(device) * total)
        return min(most, total - sum(kept.values()))

    def tokens(self, keys_and_values: int) -> int:
        """Number of tokens of a micro-batch that the memory for activations holds, between LEAST_TOKENS, or one context, and
        MOST_TOKENS. What lies on a GPU is logged, with a warning where that is too much."""
        model, device, parts = self.model, self.placement.trainer[0], self.kept(keys_and_values)
        kind, least, activations = device.partition(":")[0], min(LEAST_TOKENS, model.context), self.activations(parts)
        per_token = model.num_layers * (KEPT_PER_HIDDEN * model.hidden_size + KEPT_PER_INNER * model.inner_size)
        fit = activations // (per_token * model.weight_bytes)
        if kind == "cpu":
            # 6 operations a weight and token: 2 forward and 4 backward.
            fit = min(fit, int(MICRO_BATCH_FLOP / (6 * model.num_parameters)))
        else:
            memory = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in parts.items() if size)
            total = self.machine.bytes_of(device) / 2**30
            memory += f"; {activations / 2**30:.1f} for activations, of {total:.1f} GiB"
            logger.info("memory of %s: %s.", device, memory)
            if fit < least:
                logger.warning(
                    "%s may run out of memory: %s. Less is needed with model.lora, with train.offload_optimizer=true, with "
                    "searchers on a GPU of their own (search.devices), or with a trainer on several (train.ranks).",
                    *(device, memory),
                )
        return max(least, min(MOST_TOKENS[kind], fit))
