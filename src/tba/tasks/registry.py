"""task.name -> task. A new task is one file, or a folder, and one line in TASKS.

The task makes its own evaluator (`Task.make_evaluator`). Data or models that `tba prepare` makes are a line in PREPARE, a
start model in the package is a line in models/load.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from tba.config import Config, TaskConfig
from tba.models.load import LoadedModel
from tba.models.weights import CANARY_TOKENS
from tba.tasks.arithmetic.prepare import prepare_arithmetic
from tba.tasks.arithmetic.task import ArithmeticTask
from tba.tasks.base import Task, TaskInputs
from tba.tasks.custom import CustomTask
from tba.tasks.gsm8k import GSM8KTask
from tba.tasks.math.task import MathTask
from tba.tasks.red_team.task import RedTeamTask
from tba.tasks.red_team.world import prepare_red_team
from tba.tasks.tldr.prepare import prepare_tldr
from tba.tasks.tldr.task import TLDRTask

TASKS: dict[str, Callable[[TaskInputs], Task]] = {
    "arithmetic": ArithmeticTask,
    "gsm8k": GSM8KTask,
    "custom": CustomTask,
    "math": MathTask,
    "tldr": TLDRTask,
    "red_team": RedTeamTask,
}

PREPARE: dict[str, Callable[[Path], dict[str, Any]]] = {
    "arithmetic": prepare_arithmetic,
    "tldr": prepare_tldr,
    "red_team": prepare_red_team,
}
"""What makes a task's data and start model, where it has one."""


def make_task_for(config: Config, loaded: LoadedModel) -> Task:
    """The task of a config for a loaded model."""
    limit = max_prompt_tokens(config, loaded.context)
    device = str(loaded.model.device)
    return make_task(config.task, loaded.tokenizer, max_prompt_tokens=limit, device=device)


def max_prompt_tokens(config: Config, context: int) -> int:
    """Longest prompt in tokens: what the model's context leaves beside the response, or the configured limit if smaller."""
    if context < CANARY_TOKENS:
        raise ValueError(
            f"the model's context of {context} tokens is too short: weights are checked by a sequence of {CANARY_TOKENS}. "
            "Raise max_position_embeddings in its config.json, or take another model."
        )
    room = context - config.generate.max_new_tokens
    if room < 1:
        raise ValueError(
            f"generate.max_new_tokens={config.generate.max_new_tokens} leaves no room for a prompt in the model's context "
            f"of {context} tokens: lower it."
        )
    return min(room, config.task.max_prompt_tokens or room)


def make_task(
    config: TaskConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int,
    device: str = "auto",
) -> Task:
    """The task of a config for any tokenizer; no model is looked at."""
    if config.name not in TASKS:
        raise ValueError(f"task.name={config.name!r} is not known: it may be {', '.join(TASKS)}.")
    inputs = TaskInputs(config=config, tokenizer=tokenizer, max_prompt_tokens=max_prompt_tokens, device=device)
    return TASKS[config.name](inputs)


def prepare_task(name: str, output: Path) -> dict[str, Any]:
    """Make a task's data and start model in a folder; says what was made."""
    if name not in PREPARE:
        raise ValueError(f"task {name!r} has nothing to prepare: it may be {', '.join(PREPARE)} or reward_model.")
    return PREPARE[name](output)
