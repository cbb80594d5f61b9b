"""From a config to its objective. A new objective is one file, one line in OBJECTIVES and one test."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from tba.config import Config, ConfigError, Schedule
from tba.config.reading import RENAMED
from tba.objectives.grpo import GRPO, DrGRPO
from tba.objectives.objective import Objective
from tba.objectives.policy_gradient import RLOO, OnlineDPO, ProximalRLOO, Reinforce
from tba.objectives.ppo import PPO, VinePPO
from tba.objectives.subtrajectory_balance import SubTrajectoryBalance
from tba.objectives.trajectory_balance import Kimi, LearnedLogZ, TBAPrime, TrajectoryBalance

OBJECTIVES: dict[str, type[Objective]] = {
    "tb": TrajectoryBalance,
    "tb_learned_z": LearnedLogZ,
    "subtb": SubTrajectoryBalance,
    "tba_prime": TBAPrime,
    "kimi": Kimi,
    "reinforce": Reinforce,
    "rloo": RLOO,
    "proximal_rloo": ProximalRLOO,
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "ppo": PPO,
    "vineppo": VinePPO,
    "online_dpo": OnlineDPO,
}


def make_objective(config: Config) -> Objective:
    """The objective of objective.name with its settings, checked against the rest of the config."""
    name = config.objective.name
    if name not in OBJECTIVES:
        close = difflib.get_close_matches(name, list(OBJECTIVES), n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(OBJECTIVES)}."
        raise ConfigError(f"objective.name={name} is unknown: {hint}")
    kind = OBJECTIVES[name]
    try:
        objective = kind.make(config)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(config, kind, problem) for problem in error.errors())) from None
    # All contradictions at once, so that a config is corrected in one go.
    if problems := list(refusals(config, objective)):
        raise ConfigError("\n".join(problems))
    return objective


def reset_every_where_unset(config: Config, objective: Objective) -> int:
    """Value of reference.reset_every where it is not set: the objective's, and 0 where there is no reference to reset."""
    # With an adapter the reference is the base model without it, and stays.
    beta = config.objective.beta
    has_none = config.model.lora is not None or (beta is not None and beta.ends == (0.0, 0.0))
    return 0 if has_none else objective.default_reset_every


LARGEST_BETA = 100.0  # largest beta that is taken to be meant: a reward of 100 would move a log-probability by 1


def refusals(config: Config, objective: Objective) -> Iterator[str]:
    name, replay, train, generate = config.objective.name, config.replay, config.train, config.generate
    needs, explore, temperature = objective.needs, config.search.explore, config.objective.target_temperature
    default_beta, reset_every = objective.beta_where_unset(generate.max_new_tokens), config.reference.reset_every
    if reset_every is None:
        reset_every = reset_every_where_unset(config, objective)
    first, last = (config.objective.beta or Schedule(start=default_beta)).ends
    if needs.positive_beta and min(first, last) <= 0:
        yield f"objective.beta must stay above 0 for {name}, got start={first}, end={last}: " + (
            "set objective.beta.end."
            if first > 0
            else f"it divides the reward. Use {default_beta:g} or leave it unset; for no pull to a reference, use "
            "an objective such as objective.name=rloo objective.beta=0."
        )
    if max(first, last) > LARGEST_BETA:
        yield (
            f"objective.beta={max(first, last):g} is above {LARGEST_BETA:g}: the policy would be held at the reference and "
            f"learn nothing. Rewards between 0 and 1 want .001 to .1; {name} uses {default_beta:g} where it is unset."
        )
    if not needs.positive_beta and min(first, last) < 0:
        yield f"objective.beta must not be negative, got start={first}, end={last}."
    if needs.group and train.samples_per_prompt < 2:
        yield (
            f"train.samples_per_prompt must be at least 2 for {name}, got {train.samples_per_prompt}: with one sample a "
            "response has nothing to be compared with and nothing is learned."
        )
    if (needs.behaviour or needs.own_samples) and replay.imports:
        yield (
            f"replay.imports cannot be used with {name}: it needs responses whose sampling probabilities are known, and "
            "imported text has none. Use tb, kimi or online_dpo."
        )
    if needs.multiplicities and replay.deduplicate:
        yield (
            f"replay.deduplicate=true biases {name}: its estimate needs every response as often as it was sampled. Leave "
            "replay.deduplicate unset."
        )
    truncates = generate.top_p < 1 or generate.top_k > 0 or generate.min_new_tokens > 0
    if needs.own_samples and (explore.probability > 0 or truncates):
        yield (
            f"{name} takes every response for a sample of the policy itself, so search.explore, generate.top_p, "
            "generate.top_k and generate.min_new_tokens must be off: use proximal_rloo, whose ratio accounts for it, or tb."
        )
    if (needs.own_samples or (needs.policy and max(first, last) > 0)) and explore.reference_share > 0:
        yield (
            f"search.explore.reference_share={explore.reference_share:g} cannot be used with {name}: it needs the "
            "log-probs of the policy itself. Use tb, or set it to 0."
        )
    if needs.all_responses and train.truncated == "drop":
        yield (
            f"train.truncated=drop biases {name}: a value is the mean over all continuations, and responses that happen to "
            "end are better than it on average. Set train.truncated=keep or penalise."
        )
    if temperature is not None and not needs.target:
        yield (
            f"objective.target_temperature cannot be used with {name}, whose target is not shaped: use tb or tb_learned_z."
        )
    if temperature is not None and min(temperature.ends) <= 0:
        start, end = temperature.ends
        yield f"objective.target_temperature must stay above 0, got start={start}, end={end}."
    if reset_every > 0 and max(first, last) <= 0:
        yield (
            f"reference.reset_every={reset_every} has no effect: with objective.beta=0 {name} has no reference. Set "
            "objective.beta, or reference.reset_every=0."
        )
    if reset_every % train.updates_per_batch != 0:
        yield (
            f"reference.reset_every={reset_every} falls between the train.updates_per_batch={train.updates_per_batch} "
            "updates of a batch: make it a multiple."
        )


def _explain(config: Config, kind: type[Objective], problem: Mapping[str, Any]) -> str:
    name = str(problem["loc"][0]) if problem["loc"] else ""
    if problem["type"] == "extra_forbidden":
        if (key := f"objective.{name}") in RENAMED:
            return f"unknown key {key}: it is called {RENAMED[key]} now."
        known = list(kind.model_fields)
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        takes = f"{config.objective.name} takes {', '.join(['beta', *known])}."
        hint = f"did you mean objective.{close[0]}?" if close else takes
        return f"unknown key objective.{name} for objective.name={config.objective.name}: {hint}"
    return f"objective.{name}: {problem['msg']}, got {problem['input']!r}."
