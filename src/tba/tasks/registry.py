"""task.name -> task. A new task is one file, or a folder, and one line here; where accuracy does not say how good it is,
also an evaluator in evaluate/; a start model in the package is a line in models/load.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from tba.config import TaskConfig
from tba.tasks.arithmetic.prepare import prepare_arithmetic
from tba.tasks.arithmetic.task import ArithmeticTask
from tba.tasks.base import Task
from tba.tasks.custom.task import CustomTask
from tba.tasks.inputs import TaskInputs
from tba.tasks.maths.gsm8k import GSM8KTask
from tba.tasks.maths.math import MathTask
from tba.tasks.red_team.prepare import prepare_red_team
from tba.tasks.red_team.task import RedTeamTask
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


def make_task(
    config: TaskConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int,
    functions: Sequence[Callable[..., Any]] | None = None,
    device: str = "auto",
) -> Task:
    if config.name not in TASKS:
        raise ValueError(f"task.name={config.name!r} is not known: it may be {', '.join(TASKS)}.")
    inputs = TaskInputs(
        config=config, tokenizer=tokenizer, max_prompt_tokens=max_prompt_tokens, functions=functions, device=device
    )
    return TASKS[config.name](inputs)


def prepare_task(name: str, output: Path) -> dict[str, Any]:
    """Make a task's data and start model in a folder; says what was made."""
    if name not in PREPARE:
        raise ValueError(f"task {name!r} has nothing to prepare: it may be {', '.join(PREPARE)} or reward_model.")
    return PREPARE[name](output)
