"""objective.name -> objective. A new objective is one file, one line here and one test."""

from __future__ import annotations

from collections.abc import Callable

from tba.config import ObjectiveConfig
from tba.objectives.base import Objective
from tba.objectives.trajectory_balance import TrajectoryBalance

OBJECTIVES: dict[str, Callable[[ObjectiveConfig], Objective]] = {
    "tb": lambda config: TrajectoryBalance(residual_clip=config.residual_clip),
}


def make_objective(config: ObjectiveConfig) -> Objective:
    return OBJECTIVES[config.name](config)
