"""Mean rewards of evaluated responses: what says how good a policy is where no reward of 1 means solved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tba.observe.metrics import mean_metrics
from tba.tasks.base import Outcome, RewardFailed
from tba.types import combined_reward

Components = Mapping[str, float | None]


def reward_metrics(
    outcomes: Sequence[Sequence[Outcome]], weights: Mapping[str, float], *, name: str
) -> dict[str, float]:
    """The mean combined reward under `name` and, where there are several rewards, the mean of each under `name/reward`, with
    standard errors over prompts; `outcomes` are of each prompt's samples.

    Responses whose reward failed are left out, as in training, and so is a reward where it is not applicable. A reward of
    weight 0 is measured here without being trained on.
    """
    scored = [[outcome for outcome in own if not isinstance(outcome, RewardFailed)] for own in outcomes]
    values = {name: _prompt_means(scored, lambda components: combined_reward(components, weights))}
    if len(weights) > 1:
        for component in weights:
            values[f"{name}/{component}"] = _prompt_means(scored, _picker(component))
    return mean_metrics({metric: found for metric, found in values.items() if found})


def _picker(component: str) -> Callable[[Components], float | None]:
    return lambda components: components.get(component)


def _prompt_means(scored: Sequence[Sequence[Components]], value: Callable[[Components], float | None]) -> list[float]:
    """The mean over each prompt's samples; a prompt without a value is left out."""
    by_prompt = [[found for found in map(value, own) if found is not None] for own in scored]
    return [sum(own) / len(own) for own in by_prompt if own]
