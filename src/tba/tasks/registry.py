"""task.name -> task. A new task is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from tba.config import TaskConfig
from tba.tasks.base import Task
from tba.tasks.functions import OwnTask

TASKS: dict[str, Callable[..., Task]] = {"own": OwnTask}
"""Factories: (config, tokenizer, max_prompt_tokens=..., functions=...) -> task."""


def make_task(
    config: TaskConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int,
    functions: Sequence[Callable[..., Any]] | None = None,
) -> Task:
    if config.name not in TASKS:
        raise ValueError(f"task.name={config.name!r} is not known: it may be {', '.join(TASKS)}.")
    return TASKS[config.name](config, tokenizer, max_prompt_tokens=max_prompt_tokens, functions=functions)
