"""Settings that objective, mode, model and machine decide, filled in before a run starts; its config.yaml shows them.

Where the defaults that touch learning come from. "Bench" is the tuning part of benchmarks/own_problems.py (docs/log.md);
what the paper uses instead stands in its config files.

    replay.on_policy_probability 1          bench: the paper's .95 with reuse 2 collapsed on three of four problems
    replay.max_trained_per_generated 1      bench: stable on all; 4 learns more from the same responses, in more steps
    replay.max_uses, replay.lag             bench on a busy machine: drawn by age, some groups trained late, others never
    replay.deduplicate False                bench; a sure policy repeats itself, and policy gradients need multiplicities
    objective.beta .01 for tb               bench: .003, .03 and .01 -> .003 no better, .05 holds dense rewards back
    objective.off_policy response, .1       bench: the best of seven ways to bound stale pushes
    train.learning_rate auto, movement .1   bench: one setting as good as the best constant movement of each problem; within
                                            .2 nats of its data no run of one_prompt was called collapsing any more
    train.settle .5                         bench, and the embedded maths task, where evaluations stop swinging
    train.samples_per_prompt 8              docs/results.md: 4 and 8 cannot be told apart, 16 and 32 lose 2 and 4 points
    train.publish_every 1                   docs/results.md: 4 costs 2.5 points, 16 costs 9
    train.max_grad_norm 1                   the field's; gradients are in reward units, so it means the same at every beta
    train.adam_betas .9, .999               the field's; .99 within noise on the bench
    train.equal_reward_groups keep          the paper's; in trajectory balance they carry the pull to the reference
    train.truncated keep                    the paper's for GSM8K; a task's own rule scores cut-off responses
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tba.config import Config, ConfigError, Schedule
from tba.generate.native.kv_cache import KEY_MULTIPLE
from tba.generate.native.page_pool import PAGE
from tba.generate.native.prefill import READ_AHEAD
from tba.launch.devices import device_bytes, kv_bytes, placement_of, tokens_for
from tba.models.families import FAMILIES
from tba.models.fused_pass import why_never_fused
from tba.models.load import LoadedModel, resolve_dtype
from tba.objectives.registry import make_objective
from tba.runtime.placement import RolePlacement
from tba.tasks.registry import max_prompt_tokens

logger = logging.getLogger("tba")

ANCHOR_PARAMETERS, ANCHOR_RATE = 0.314e6, 2e-4
"""The shipped model's size and a rate that it learns at."""
EXPONENT = 0.6
"""Between what works for the shipped model and what works at 0.5B (1e-6 to 4e-6 with fp32 master weights)."""

LORA_FACTOR = 10.0
"""An adapter's matrices start at zero and are few: they want a larger rate than the weights they stand for."""

MOST_SLOTS = {"cpu": 128, "cuda": 256}

LEAST_ROOM, STEPS_OF_ROOM = 100, 4
"""Responses of a prompt that replay has room for, at least (the paper's number), and in steps' worth of its visits."""


def learning_rate_for(num_parameters: int, *, lora: bool = False) -> float:
    """2e-4 at 0.31M parameters, 2.4e-6 at 0.5B, 4.9e-7 at 7B; ten times that for an adapter; two digits."""
    rate = ANCHOR_RATE * (num_parameters / ANCHOR_PARAMETERS) ** -EXPONENT
    return float(f"{(LORA_FACTOR if lora else 1.0) * rate:.1e}")


def with_defaults(
    config: Config,
    loaded: LoadedModel,
    *,
    longest_prompt: Callable[[], int] | None = None,
    trains: bool = True,
) -> Config:
    """The config with every None that means `by the model and machine` replaced. `longest_prompt` finds the number of
    tokens of the run's longest one, and is asked only where memory is short; None = as long as the settings allow. Where
    nothing `trains`, nothing is planned for it."""
    config = with_objective_defaults(config)  # changes nothing where it was done before
    placement, longest = placement_of(config), max_prompt_tokens(config, loaded.context)
    # Looking at all prompts takes seconds where they are made when they are asked for.
    if longest_prompt is not None and is_short_of_memory(config, loaded, placement, longest_prompt=longest):
        longest = longest_prompt()
    config = with_slots(config, loaded, placement, longest_prompt=longest)
    if not trains:
        return config
    train = config.train
    first_rate = learning_rate_for(loaded.num_parameters, lora=config.model.lora is not None)
    tokens = train.tokens_per_micro_batch
    if tokens is None:
        needed = keys_and_values_beside_trainer(config, loaded, placement, longest_prompt=longest)
        tokens = tokens_for(config, loaded, placement, keys_and_values=needed)
    filled = {"first_learning_rate": train.first_learning_rate or first_rate, "tokens_per_micro_batch": tokens}
    return config.model_copy(update={"train": train.model_copy(update=filled)})


def keys_and_values_beside_trainer(
    config: Config, loaded: LoadedModel, placement: RolePlacement, *, longest_prompt: int
) -> int:
    """Most bytes of keys and values on the trainer's first device, with the slots that searchers have there."""
    device = placement.trainer[0]
    there = [index for index, name in enumerate(placement.searchers) if name == device]
    needed = 0
    for own in map(config.for_searcher, there[: placement.num_searchers_on(device)]):
        memory, slots = kv_bytes(placement, device), own.generate.slots
        if own.generate.engine == "native" and slots is not None:
            budget = slot_budget(own, loaded, device, slots=slots, memory=memory, longest_prompt=longest_prompt)
            # In pages a slot is planned with half the longest response, but all may become that long.
            memory = min(memory, 2 * budget.used)
        needed += memory
    return needed


def is_short_of_memory(config: Config, loaded: LoadedModel, placement: RolePlacement, *, longest_prompt: int) -> bool:
    """Whether a searcher could not have all slots that were asked for, or MOST_SLOTS, with prompts of this length."""
    for index, device in enumerate(placement.searchers):
        slots = config.for_searcher(index).generate.slots or MOST_SLOTS[device.partition(":")[0]]
        memory = kv_bytes(placement, device)
        budget = slot_budget(config, loaded, device, slots=slots, memory=memory, longest_prompt=longest_prompt)
        if budget.used > memory:
            return True
    return False


def with_slots(config: Config, loaded: LoadedModel, placement: RolePlacement, *, longest_prompt: int) -> Config:
    """The config with generate.slots and those of all kinds filled in, each by the devices that it is for. Where one number
    is for several, the device with the least memory for it decides. What was chosen is logged."""
    generate, search, planned = config.generate, config.search, placement.searchers
    by_kind: dict[str | None, int] = {}
    budgets: dict[str, SlotBudget] = {}
    for index, device in enumerate(planned if generate.slots is None else ()):
        if device not in budgets:
            budgets[device] = slots_for(config, loaded, placement, device, longest_prompt=longest_prompt)
            logger.info("generate.slots on %s: %s.", device, budgets[device])
        kind, slots = search.kind_at(index), budgets[device].slots
        by_kind[kind] = min(slots, by_kind.get(kind, slots))
    for index, device in enumerate(planned):
        own = config.for_searcher(index).generate
        if own.slots is not None and own.engine == "native":
            check_slots(config, loaded, device, slots=own.slots, longest_prompt=longest_prompt)
    kinds = {
        name: kind.model_copy(update={"slots": kind.slots or generate.slots or by_kind[name]})
        for name, kind in search.kinds.items()
    }
    slots = generate.slots or min(by_kind.values())
    return config.model_copy(
        update={
            "generate": generate.model_copy(update={"slots": slots}),
            "search": search.model_copy(update={"kinds": kinds}),
        }
    )


def with_objective_defaults(config: Config) -> Config:
    """What objective and mode decide where nothing else was asked for: beta, its settings, resets, how replay is sampled."""
    objective = make_objective(config)
    beta = config.objective.beta or Schedule(start=objective.default_beta)
    settings = {name: value for name, value in objective.model_dump(mode="json").items() if value is not None}
    reset_every, replay = config.reference.reset_every, config.replay
    if reset_every is None:
        without = config.model.lora is not None or (beta.kind == "constant" and beta.start == 0.0)
        reset_every = 0 if without else objective.default_reset_every
    deduplicate, m, reuse = replay.deduplicate, replay.on_policy_probability, replay.max_trained_per_generated
    max_uses, lag = replay.max_uses, replay.lag
    # By the bench of own problems (docs/log.md); the paper's m, deduplication and annealed beta stand in its config files.
    if deduplicate is None:
        deduplicate = False  # a sure policy repeats itself: groups of distinct responses only would be short
    if m is None:
        m = 1.0
    if reuse is None:
        # A group that is to be drawn several times is trained as often: fewer would leave the trainer without its batches.
        reuse = float(config.train.updates_per_batch * (max_uses or 1))
    uses = reuse / config.train.updates_per_batch
    if max_uses is None and m == 1.0 and uses.is_integer() and not config.takes_turns and not replay.imports:
        # Drawn by age alone, some groups are trained twice and others never wherever one role stalls for a while.
        max_uses = int(uses)
    if lag is None:
        # Without a limit twelve searchers on two cores had 74% of their responses leave untrained (docs/results.md). A slow
        # one does not hold up the others for long: the limit then leaves room for all that is in all slots (PacedVisits).
        # What a reset drops would be missing in the pace.
        drops = reset_every > 0 and replay.on_reference_reset == "drop"
        paced = max_uses is not None and not config.takes_turns
        lag = "pace" if paced and not drops and not replay.initial_responses else "keep"
    filled = config.model_copy(
        update={
            "objective": config.objective.model_copy(update={"beta": beta, **settings}),
            "reference": config.reference.model_copy(update={"reset_every": reset_every}),
            "replay": replay.model_copy(
                update={
                    "deduplicate": deduplicate,
                    "on_policy_probability": m,
                    "max_trained_per_generated": reuse,
                    "max_uses": max_uses,
                    "lag": lag,
                }
            ),
        }
    )
    make_objective(filled)  # what was filled in must fit too
    return filled


def with_room(config: Config, *, num_prompts: int) -> Config:
    """The config with replay.capacity_per_prompt filled in: where there are fewer prompts than a step takes, what a step
    generates for one of them must fit."""
    visits = -(-config.train.prompts_per_step // num_prompts)
    needed, room = visits * config.samples_generated_per_prompt, config.replay.capacity_per_prompt
    if room is not None and room < needed:
        raise ValueError(
            f"replay.capacity_per_prompt={room} cannot hold a step: with {num_prompts} prompts one is visited {visits} "
            f"times for the {config.train.prompts_per_step} of a step, {needed} responses. Raise it, or "
            "train.samples_per_prompt."
        )
    room = max(LEAST_ROOM, STEPS_OF_ROOM * needed) if room is None else room
    return config.model_copy(update={"replay": config.replay.model_copy(update={"capacity_per_prompt": room})})


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
    shape, kind = loaded.model.config.get_text_config(), device.partition(":")[0]
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    head_dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
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
        bytes_per_token=2 * shape.num_hidden_layers * heads * head_dim * dtype.itemsize,
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
            f"generate.slots={slots} (or that of a kind in search.kinds) does not fit on {device}: {budget}, which is all "
            f"that it has. Give at most {most}, or leave it out to have as many as there is memory for."
        )
