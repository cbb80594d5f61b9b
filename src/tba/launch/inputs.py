"""What a run is made from: the model, the task, and reward functions that came as Python objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tba.config import Config
from tba.models.load import LoadedModel, load_model
from tba.tasks.base import Task
from tba.tasks.registry import make_task_for

LEAST_ROOM, STEPS_OF_ROOM = 100, 4
"""Responses of a prompt that replay has room for, at least (the paper's number), and in steps' worth of its visits."""
RewardFunctions = Sequence[Callable[..., Any]] | None


@dataclass(frozen=True, kw_only=True, eq=False)
class RunInputs:
    """RunInputs(loaded=..., task=..., functions=None)"""

    loaded: LoadedModel
    task: Task
    functions: RewardFunctions


def load_inputs(config: Config, functions: RewardFunctions = None) -> RunInputs:
    """Load model and data: what can be wrong with them shows before a run folder exists."""
    loaded = load_model(config.model)
    task = make_task_for(config, loaded, functions)
    task.prompts(config.evaluate.split)  # or a split that the task lacks would only show when a searcher evaluates
    return RunInputs(loaded=loaded, task=task, functions=functions)


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
