"""The defaults: `resolve` gives every setting that was left out its value when a run starts; its config.yaml shows them.

What is decided elsewhere, and why: model.device, model.dtype, runtime.threads and runtime.mps by each process for its own
machine, because a run has several, and its folder moves; search.reward_workers by the workers, who import the rewards.

Defaults that touch learning, and what they rest on. "Bench" is the tuning part of benchmarks/own_problems.py (notes/); what
the paper uses instead stands in its config files. Those of settings that have a plain default in config/:

    objective.trust_region response, .15      bench: the best of seven ways to bound stale pushes; by tokens instead of
    entropy
                                            it did not bind on long responses. At least 1.5 times the drift of one update:
                                            one factor, with no study in notes/
    train.learning_rate auto,               bench, one seed each: a fixed drift of .08 sqrt(entropy) costs word_sums and
        target_drift .18                    one_family, of .05 sort_digits. Against the rule before: quickstart and word_sums
                                            and the others level (notes/)
    at most 10 nats of entropy              one_family: .92 without a bound, .97 at 16, .985 at 10
    in n < 200 steps 200 / n times that     story model after 180 s: three_words .783 instead of .652, brief .945 instead of
                                            .814, rubric .858 instead of .910 (one seed each)
    first update by what it leaves out      three_words, reward of step 8 of 8: .55 instead of .50
    signal without a bound above            at most .15: sort_digits .831 instead of .843 ± .007, one_prompt .973 instead of
                                            .987 ± .001; .01 instead of .03 below: level on word_sums and one_family
    sqrt(200 / steps), .2 to 5              three_words of the story model: .40 after 180 s without it, .63 with it;
                                            quickstart (400 steps) stays above 86% from step 100 on instead of 76%
    the rate falls over the last half       bench with the rate before this one, and the embedded maths task, where
                                            evaluations stop swinging
    train.samples_per_prompt 8              docs/results.md: 4 and 8 do not differ, 16 and 32 lose 2 and 4 points
    train.publish_every 1                   docs/results.md: 4 costs 2.5 points, 16 costs 9
    train.max_grad_norm 1                   the field's; gradients are in reward units, so it means the same at every beta
    train.adam_betas .9, .999               the field's; .99 within noise on the bench
    groups of equal rewards are kept        the paper's; in trajectory balance they carry the pull to the reference
    train.truncated keep                    the paper's for GSM8K; a task's own rule scores cut-off responses
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tba.config import Config, Schedule
from tba.objectives.objective import Objective
from tba.objectives.registry import make_objective, reset_every_where_unset
from tba.run.memory import Machine, MemoryPlan, ModelShape
from tba.tasks.registry import max_prompt_tokens

FILLED = (
    *("objective.beta", "objective.max_kl_penalty", "objective.reward_unit", "reference.reset_every"),
    *("replay.on_policy_probability", "replay.max_replay_ratio", "replay.deduplicate", "replay.max_lag"),
    *("replay.capacity_per_prompt", "train.second_update_after", "train.tokens_per_micro_batch"),
    *("search.num_searchers", "generate.slots"),
)
"""The settings that `resolve` fills. A run that resumes keeps those it was started with, also on another machine."""
LEAST_SHARED, MEMORY_SHARE = 5_000_000, 8
"""Parameters of the smallest model that a second searcher on a CPU pays for (0.3M: it takes the trainer's time for second
updates, sort_digits .80 to .84 instead of .84 to .86), and the part of the machine's memory that it may take, one of so
many."""


def resolve(
    config: Config,
    model: ModelShape | None,
    machine: Machine,
    *,
    longest_prompt: Callable[[], int] | None = None,
    trains: bool = True,
) -> Config:
    """The config with a value for every setting of FILLED; what was given stays.

    Without a `model` those that follow from its size stay None (`--dry-run`, `tba compare`, which load none).
    `longest_prompt` finds the number of tokens of the run's longest prompt, and is asked only where memory is short; None =
    as long as the settings allow. Where nothing `trains`, nothing is planned for it.
    """
    objective, is_auto = make_objective(config), config.objective.beta is None
    c = config
    # Bench: more from the same responses on four of four, in about the same time; at once, three of four gain nothing.
    c = _filled(c, "train.second_update_after", 3 if _may_train_again(config, objective, machine) else 0)
    # Bench, .01 for tb: .003 no better, .03 and .05 hold dense rewards back. Beyond 64 tokens .64 / tokens (GSM8K's
    # validation problems): the KL grows with the length, the reward does not.
    c = _filled(c, "objective.beta", Schedule(start=objective.beta_where_unset(config.generate.max_new_tokens)))
    # .05 for tb: what GSM8K's distance costs by the line above; few of the bench go so far. None = no bound.
    c = _filled(c, "objective.max_kl_penalty", objective.default_max_kl_penalty if is_auto else None)
    # So that the two above fit rewards of any scale; right or wrong it is about 1, with which they were tuned. No study.
    scales = is_auto and objective.needs.target and not objective.has_log_z
    c = _filled(c, "objective.reward_unit", "spread" if scales else 1.0)
    own = {name: value for name, value in objective.model_dump(mode="json").items() if value is not None}
    c = c.model_copy(update={"objective": c.objective.model_copy(update=own)})  # so that config.yaml shows them
    c = _filled(c, "reference.reset_every", reset_every_where_unset(config, objective))  # the objective's paper
    # Bench: the paper's .95 with reuse 2 collapsed on three of four problems.
    c = _filled(c, "replay.on_policy_probability", 1.0)
    # Bench: stable on all; 4 learns more from the same responses, in more steps.
    c = _filled(c, "replay.max_replay_ratio", float(c.train.updates_per_batch))
    # Bench. A sure policy repeats itself: groups of distinct responses would be short; policy gradients need multiplicities.
    c = _filled(c, "replay.deduplicate", False)
    # The paper's 100, or four steps' worth: with one prompt, all that a step generates is of that prompt.
    c = _filled(
        c, "replay.capacity_per_prompt", max(100, 4 * c.train.prompts_per_step * c.samples_generated_per_prompt)
    )
    if model is not None:
        # Three words of the story model after 180 s: .54 with one searcher on a CPU, .89 with two.
        c = _filled(c, "search.num_searchers", _num_searchers(c, model, machine))
        c = _with_memory(c, model, machine, longest_prompt, trains=trains)
        # Twelve searchers on two cores without a limit: 74% of the responses left untrained. With less, KV slots and reward
        # workers would be left empty. Where a slow searcher holds up the others, they may go as far (PacedRollouts).
        judged = ((c.search.reward_workers or 1) - 1) * c.samples_generated_per_prompt
        held = c.search.count * ((c.generate.slots or 0) + judged)
        lag = 1 + c.spare_lag + math.ceil(held / c.train.responses_per_step)
        c = _filled(c, "replay.max_lag", lag if c.keeps_pace else None)
    c = _filled(c, "replay.max_lag", c.lag_steps if c.mode == "fixed_lag" else None)
    make_objective(c)  # what was filled in must fit too
    return c


def _filled(config: Config, key: str, value: Any) -> Config:
    """The config with a value for a setting that has none."""
    section, _, name = key.partition(".")
    before = getattr(config, section)
    if getattr(before, name) is not None:
        return config
    return config.model_copy(update={section: before.model_copy(update={name: value})})


def _may_train_again(config: Config, objective: Objective, machine: Machine) -> bool:
    """Whether a second update on each batch is to be expected to pay. Settings of replay that are given say how often, or
    how late, a response may be trained, and a rate that is given was meant for one update a step."""
    replay, train, model = config.replay, config.train, config.model
    max_lag = None if config.mode == "fixed_lag" else replay.max_lag
    given = (replay.on_policy_probability, replay.max_replay_ratio, max_lag, train.learning_rate)
    if train.updates_per_batch > 1 or any(value is not None for value in given):
        return False
    if config.reference.reset_every or not objective.bounds_drift:
        return False
    if replay.imports or config.search.explore.reference_share:
        return False  # the policy's drift from responses that it did not generate is unknown
    # In bf16 the policy's distance from its data is lost in rounding. The rate then cannot react to a step that was too
    # long. On GSM8K nothing was gained.
    if model.dtype != "auto":
        return model.dtype == "float32"
    if config.runtime.kind == "ray" and model.device == "auto":
        return False  # by the node that the trainer will be on
    return machine.placement(config).trainer[0] == "cpu"


def _num_searchers(config: Config, model: ModelShape, machine: Machine) -> int:
    """On the CPU of one machine two searchers use what a waiting trainer leaves idle. A single one would need threads for
    that, and threads of one product stand still where one of them finds its core taken. Both hold the model and the
    reference."""
    if config.is_synchronous or config.runtime.kind != "local" or set(machine.placement(config).devices) != {"cpu"}:
        return 1
    pays = model.num_parameters >= LEAST_SHARED and machine.cores > 1
    return 2 if pays and 2 * model.num_parameters * torch.float32.itemsize * MEMORY_SHARE <= machine.memory else 1


def _with_memory(
    config: Config, model: ModelShape, machine: Machine, longest_prompt: Callable[[], int] | None, *, trains: bool
) -> Config:
    """As many responses side by side, and tokens in a micro-batch, as the memory of the devices holds (memory.py)."""
    longest = max_prompt_tokens(config, model.context)
    # Looking at all prompts takes seconds where they are made when they are asked for.
    if longest_prompt is not None and MemoryPlan(config, model, machine, longest).is_short:
        longest = longest_prompt()
    plan = MemoryPlan(config, model, machine, longest)
    if config.generate.slots is None:
        plan = replace(plan, config=_filled(config, "generate.slots", plan.slots()))
    else:
        plan.check_slots(config.generate.slots)
    if not trains or config.train.tokens_per_micro_batch is not None:
        return plan.config
    return _filled(plan.config, "train.tokens_per_micro_batch", plan.tokens(plan.keys_and_values()))
