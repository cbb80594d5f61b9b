"""Slots of searchers: how many responses each writes at a time, by the memory that its device has for keys and values."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace

import torch

from tba.config import Config, ConfigError
from tba.generate.decoder.families import FAMILIES
from tba.generate.decoder.fused_pass import why_never_fused
from tba.generate.native.paged_cache import PAGE
from tba.generate.native.prompt_queue import READ_AHEAD
from tba.generate.native.slot_cache import KEY_MULTIPLE
from tba.launch.devices import device_bytes, kv_bytes
from tba.models.load import LoadedModel, resolve_dtype
from tba.models.text_part import kv_bytes_per_token
from tba.runtime.placement import RolePlacement

logger = logging.getLogger("tba")

MOST_SLOTS = {"cpu": 128, "cuda": 256}


@dataclass(frozen=True, kw_only=True)
class SlotBudget:
    """How many slots a searcher gets, and what that costs.

    SlotBudget(slots=31, positions=8448, prompts=3, prompt_tokens=8192, bytes_per_token=57_344, memory=16 * 2**30)
    """

    slots: int
    positions: int
    """Number of tokens of a slot, as the cache rounds it: those of the longest prompt with the longest response; in pages
    (`keeps_pages`) of half the longest response, for prompts are shared, and where that is too little responses wait."""
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
        """Bytes of all keys and values."""
        return (self.slots * self.positions + self.prompts * self.prompt_tokens) * self.bytes_per_token

    def __str__(self) -> str:
        return (
            f"{self.slots} slots of {self.positions} tokens with {self.bytes_per_token:,} bytes of keys and values each, "
            f"and {self.prompts} prompts of {self.prompt_tokens} tokens at most: "
            f"{self.used / 2**30:.3g} GiB of {self.memory / 2**30:.3g}"
        )


def with_slots(config: Config, loaded: LoadedModel, placement: RolePlacement, *, longest_prompt: int) -> Config:
    """The config with generate.slots filled in: of several devices the one with the least memory for it decides. The
    budget of each is logged."""
    generate, devices = config.generate, dict.fromkeys(placement.searchers)
    if generate.slots is None:
        budgets = {name: slots_for(config, loaded, placement, name, longest_prompt=longest_prompt) for name in devices}
        for device, budget in budgets.items():
            logger.info("generate.slots on %s: %s.", device, budget)
        slots = min(budget.slots for budget in budgets.values())
        return config.model_copy(update={"generate": generate.model_copy(update={"slots": slots})})
    for device in devices if generate.engine == "native" else ():
        check_slots(config, loaded, device, slots=generate.slots, longest_prompt=longest_prompt)
    return config


def is_short_of_memory(config: Config, loaded: LoadedModel, placement: RolePlacement, *, longest_prompt: int) -> bool:
    """Whether a searcher could not have all slots that were asked for, or MOST_SLOTS, with prompts of this length."""
    for device in dict.fromkeys(placement.searchers):
        slots = config.generate.slots or MOST_SLOTS[device.partition(":")[0]]
        memory = kv_bytes(placement, device)
        budget = slot_budget(config, loaded, device, slots=slots, memory=memory, longest_prompt=longest_prompt)
        if budget.used > memory:
            return True
    return False


def keys_and_values_beside_trainer(
    config: Config, loaded: LoadedModel, placement: RolePlacement, *, longest_prompt: int
) -> int:
    """Most bytes of keys and values on the trainer's first device, with the slots that searchers have there."""
    device, generate = placement.trainer[0], config.generate
    memory = kv_bytes(placement, device)
    if generate.engine == "native" and generate.slots is not None:
        budget = slot_budget(config, loaded, device, slots=generate.slots, memory=memory, longest_prompt=longest_prompt)
        # In pages a slot is planned with half the longest response, but all may become that long.
        memory = min(memory, 2 * budget.used)
    return placement.num_searchers_on(device) * memory


def slots_for(
    config: Config, loaded: LoadedModel, placement: RolePlacement, device: str, *, longest_prompt: int
) -> SlotBudget:
    """As many responses as a searcher on this device has memory for, at most MOST_SLOTS: each with the longest prompt and
    the longest response, or half of that in pages, in the dtype that the cache has there."""
    memory, most = kv_bytes(placement, device), MOST_SLOTS[device.partition(":")[0]]
    budgets = [
        slot_budget(config, loaded, device, slots=slots, memory=memory, longest_prompt=longest_prompt)
        for slots in range(1, most + 1)
    ]
    fitting = [budget for budget in budgets if budget.used <= memory]
    if not fitting:
        logger.warning(
            "one response on %s needs %s. It is tried with one; shorter prompts (task.max_prompt_tokens) or responses "
            "(generate.max_new_tokens) need less.",
            device,
            budgets[0],
        )
    return fitting[-1] if fitting else budgets[0]


def slot_budget(
    config: Config, loaded: LoadedModel, device: str, *, slots: int, memory: int, longest_prompt: int
) -> SlotBudget:
    """What so many slots of a searcher on this device cost."""
    kind = device.partition(":")[0]
    dtype = torch.float32 if kind == "cpu" else resolve_dtype(config.model.dtype, torch.device(kind))
    prompt, samples = min(longest_prompt, loaded.context), config.samples_generated_per_prompt
    waiting = max(1, min(READ_AHEAD[kind], slots // samples))
    if keeps_pages(config, loaded, device):
        positions, multiple = config.generate.max_new_tokens / 2 + PAGE, PAGE
        waiting += -(-slots // samples)
    else:
        positions, multiple = min(loaded.context, prompt + config.generate.max_new_tokens), KEY_MULTIPLE
    return SlotBudget(
        slots=slots,
        positions=math.ceil(positions / multiple) * multiple,
        prompts=waiting,
        prompt_tokens=prompt,
        bytes_per_token=kv_bytes_per_token(loaded.model.config, dtype),
        memory=memory,
    )


def keeps_pages(config: Config, loaded: LoadedModel, device: str) -> bool:
    """Whether a searcher on this device keeps keys and values in pages: the native engine with its fused kernels does."""
    text = loaded.model.config.get_text_config()
    if device.partition(":")[0] != "cuda" or config.generate.engine != "native" or text.model_type not in FAMILIES:
        return False
    make_spec, _ = FAMILIES[text.model_type]
    return why_never_fused(make_spec(text, tied=False)) is None


def check_slots(config: Config, loaded: LoadedModel, device: str, *, slots: int, longest_prompt: int) -> None:
    """Refuse a number of slots, given by the user, whose keys and values the device could never hold."""
    memory = device_bytes(device)
    budget = slot_budget(config, loaded, device, slots=slots, memory=memory, longest_prompt=longest_prompt)
    if keeps_pages(config, loaded, device):  # a response has a page at least; where there are no more, others wait
        budget = replace(budget, positions=PAGE, prompts=1)
    if budget.used > memory:
        most = max(1, slots * memory // budget.used)
        raise ConfigError(
            f"generate.slots={slots} does not fit on {device}: {budget}, which is all "
            f"that it has. Give at most {most}, or leave it out to have as many as there is memory for."
        )
