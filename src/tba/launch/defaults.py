"""Settings that objective, mode, model and machine decide, filled in before a run starts; its config.yaml shows them.

Where the defaults that touch learning come from. "Bench" is the tuning part of benchmarks/own_problems.py (notes/);
what the paper uses instead stands in its config files.

    replay.on_policy_probability 1          bench: the paper's .95 with reuse 2 collapsed on three of four problems
    replay.max_trained_per_generated 1      bench: stable on all; 4 learns more from the same responses, in more steps
    train.second_update_after 3             bench: more from the same responses on four of four, in about the same time; at
                                            once instead, three of four gain nothing. Not in bf16: nothing gained on GSM8K.
                                            Left out where the trainer is the bottleneck: a new batch has more to give
    replay.max_uses, replay.lag             bench on a busy machine: drawn by age, some groups trained late, others never
    replay.deduplicate False                bench; a sure policy repeats itself, and policy gradients need multiplicities
    objective.beta .01 for tb               bench: .003, .03 and .01 -> .003 no better, .05 holds dense rewards back
    the same beyond 64 tokens: .64 / tokens GSM8K's validation problems: the KL grows with the length, the reward does not
    objective.max_kl_penalty .05            what GSM8K's distance costs by the line above; few of the bench go so far
    objective.reward_unit spread            so that beta and max_kl_penalty fit rewards of any scale; for rewards that are
                                            right or wrong it is about 1, with which the two were tuned. No study in
                                            notes/
    objective.off_policy response, .15      bench: the best of seven ways to bound stale pushes; by tokens instead of entropy
                                            it did not bind on long responses. At least 1.5 times the drift of one update:
                                            one factor, with no study in notes/
    train.learning_rate auto,               bench, one seed each: a fixed drift of .08 sqrt(entropy) costs word_sums and
        target_drift .18                    one_family, of .05 sort_digits. Against the rule before: quickstart and word_sums
                                            and the others level (notes/)
    at most 10 nats of entropy              one_family: .92 without a bound, .97 at 16, .985 at 10
    signal without a bound above             at most .15: sort_digits .831 instead of .843 ± .007, one_prompt .973 instead of
                                            .987 ± .001; .01 instead of .03 below: level on word_sums and one_family
    sqrt(200 / steps), .2 to 5              three_words of the story model: .40 after 180 s without it, .63 with it;
                                            quickstart (400 steps) stays above 86% from step 100 on instead of 76%
    search.num_searchers 2 on a CPU         three_words of the story model after 180 s: .54 with one, .89 with two
    train.settle .5                         bench with the rate before this one, and the embedded maths task, where
                                            evaluations stop swinging
    train.samples_per_prompt 8              docs/results.md: 4 and 8 cannot be told apart, 16 and 32 lose 2 and 4 points
    train.publish_every 1                   docs/results.md: 4 costs 2.5 points, 16 costs 9
    train.max_grad_norm 1                   the field's; gradients are in reward units, so it means the same at every beta
    train.adam_betas .9, .999               the field's; .99 within noise on the bench
    train.equal_reward_groups keep          the paper's; in trajectory balance they carry the pull to the reference
    train.truncated keep                    the paper's for GSM8K; a task's own rule scores cut-off responses
"""

from __future__ import annotations

from collections.abc import Callable

import psutil
import torch

from tba.config import Config, Schedule
from tba.launch.devices import placement_of, tokens_for
from tba.launch.slots import is_short_of_memory, keys_and_values_beside_trainer, with_slots
from tba.models.load import LoadedModel
from tba.objectives.registry import make_objective
from tba.runtime.placement import RolePlacement, sees_gpu
from tba.runtime.threads import usable_cores
from tba.tasks.registry import max_prompt_tokens

SECOND_UPDATE_AFTER = 3
"""Steps between the two updates on a batch."""

LEAST_SHARED, MEMORY_SHARE = 5_000_000, 8
"""Parameters of the smallest model that a second searcher on a CPU pays for (0.3M: it takes the trainer's time for second
updates, sort_digits .80 to .84 instead of .84 to .86), and the part of the machine's memory that it may take, one of so
many."""
LEAST_ROOM, STEPS_OF_ROOM = 100, 4
"""Responses of a prompt that replay has room for, at least (the paper's number), and in steps' worth of its visits."""


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
    config = with_searchers(config, loaded)
    placement, longest = placement_of(config), max_prompt_tokens(config, loaded.context)
    # Looking at all prompts takes seconds where they are made when they are asked for.
    if longest_prompt is not None and is_short_of_memory(config, loaded, placement, longest_prompt=longest):
        longest = longest_prompt()
    config = with_slots(config, loaded, placement, longest_prompt=longest)
    if not trains:
        return config
    train = config.train
    tokens = train.tokens_per_micro_batch
    if tokens is None:
        needed = keys_and_values_beside_trainer(config, loaded, placement, longest_prompt=longest)
        tokens = tokens_for(config, loaded, placement, keys_and_values=needed)
    return config.model_copy(update={"train": train.model_copy(update={"tokens_per_micro_batch": tokens})})


def with_searchers(config: Config, loaded: LoadedModel) -> Config:
    """The config with search.num_searchers filled in.

    On the CPU of one machine two searchers use what a waiting trainer leaves idle. A single one would need threads for that,
    and threads of one product stand still where one of them finds its core taken. Both hold the model and the reference.
    """
    search = config.search
    if search.num_searchers is not None or config.takes_turns or config.runtime.kind != "local":
        return config
    on_cpu = set(RolePlacement.of(config, auto="cuda:0" if sees_gpu() else "cpu").devices) == {"cpu"}
    searcher_bytes = 2 * loaded.num_parameters * torch.float32.itemsize
    pays = loaded.num_parameters >= LEAST_SHARED and searcher_bytes * MEMORY_SHARE <= psutil.virtual_memory().total
    count = 2 if on_cpu and pays and usable_cores() > 1 else 1
    return config.model_copy(
        update={"search": search.model_copy(update={"num_searchers": min(count, search.max_searchers or count)})}
    )


def with_objective_defaults(config: Config) -> Config:
    """What objective and mode decide where nothing else was asked for: beta, its settings, resets, how replay is sampled."""
    objective = make_objective(config)
    beta = config.objective.beta or Schedule(start=objective.beta_where_unset(config.generate.max_new_tokens))
    penalty = config.objective.max_kl_penalty
    if config.objective.beta is None and penalty is None:
        penalty = objective.default_max_kl_penalty
    unit = config.objective.reward_unit
    if unit is None:
        scales = objective.needs.target and not objective.extras.log_z and config.objective.beta is None
        unit = "spread" if scales else 1.0
    settings = {name: value for name, value in objective.model_dump(mode="json").items() if value is not None}
    reset_every, replay = config.reference.reset_every, config.replay
    if reset_every is None:
        without = config.model.lora is not None or (beta.kind == "constant" and beta.start == 0.0)
        reset_every = 0 if without else objective.default_reset_every
    deduplicate, m, reuse = replay.deduplicate, replay.on_policy_probability, replay.max_trained_per_generated
    max_uses, lag = replay.max_uses, replay.lag
    # By the bench of own problems (notes/); the paper's m, deduplication and annealed beta stand in its config files.
    if deduplicate is None:
        deduplicate = False  # a sure policy repeats itself: groups of distinct responses only would be short
    if m is None:
        m = 1.0
    second = config.train.second_update_after
    if second is None:
        second = SECOND_UPDATE_AFTER if _may_train_again(config) else 0
    if reuse is None:
        # A group that is to be drawn several times is trained as often: fewer would leave the trainer without its batches.
        reuse = float(config.train.updates_per_batch * (max_uses or 1))
    uses = reuse / config.train.updates_per_batch
    if max_uses is None and m == 1.0 and uses.is_integer() and not config.takes_turns and not replay.imports:
        # Drawn by age alone, some groups are trained twice and others never wherever one role stalls for a while.
        max_uses = int(uses)
    if lag is None:
        # Without a limit twelve searchers on two cores had 74% of their responses leave untrained (notes/). A slow
        # one does not hold up the others for long: the limit then leaves room for all that is in all slots (PacedVisits).
        # What a reset drops would be missing in the pace.
        drops = reset_every > 0 and replay.on_reference_reset == "drop"
        paced = max_uses is not None and not config.takes_turns
        lag = "pace" if paced and not drops and not replay.initial_responses else "keep"
    filled = config.model_copy(
        update={
            "objective": config.objective.model_copy(
                update={"beta": beta, "max_kl_penalty": penalty, "reward_unit": unit, **settings}
            ),
            "reference": config.reference.model_copy(update={"reset_every": reset_every}),
            "train": config.train.model_copy(update={"second_update_after": second}),
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


def _may_train_again(config: Config) -> bool:
    """Whether a second update on each batch is to be expected to pay. Settings of replay that are given say how often, or
    how late, a response may be trained, and a rate that is given was meant for one update a step."""
    replay, train, model = config.replay, config.train, config.model
    given = (replay.on_policy_probability, replay.max_trained_per_generated, replay.max_uses, replay.max_lag)
    if train.updates_per_batch > 1 or any(x is not None for x in (*given, train.learning_rate)):
        return False
    if replay.lag == "drop" or config.reference.reset_every or not make_objective(config).bounds_drift:
        return False
    if replay.imports or config.search.explore.reference_share:
        return False  # nobody knows how far the policy has drifted from what it did not generate
    # In bf16 the policy's distance from its data is lost in rounding: nothing tells the rate that it went too far.
    if model.dtype != "auto":
        return model.dtype == "float32"
    if config.runtime.kind == "ray" and model.device == "auto":
        return False  # by the node that the trainer will be on
    # Not by torch, which would touch the GPU before the run does.
    return RolePlacement.of(config, auto="cuda:0" if sees_gpu() else "cpu").trainer[0] == "cpu"


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
