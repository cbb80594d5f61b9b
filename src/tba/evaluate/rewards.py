"""Mean rewards of evaluated responses: what says how good a policy is where no reward of 1 means solved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tba.tasks.base import Outcome, RewardFailed, combined_reward


def reward_metrics(outcomes: Sequence[Outcome], weights: Mapping[str, float], *, name: str) -> dict[str, float]:
    """The mean combined reward under `name` and, where there are several rewards, the mean of each under `name/reward`.

    Responses whose reward failed are left out, as in training, and so is a reward where it is not applicable. A reward of
    weight 0 is measured here without being trained on.
    """
    scored = [outcome for outcome in outcomes if not isinstance(outcome, RewardFailed)]
    values = {name: [combined_reward(outcome, weights) for outcome in scored]}
    if len(weights) > 1:
        for component in weights:
            own = (outcome.get(component) for outcome in scored)
            values[f"{name}/{component}"] = [value for value in own if value is not None]
    return {metric: sum(found) / len(found) for metric, found in values.items() if found}
