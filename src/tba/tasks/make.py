"""Make the task of a config for a loaded model; what the model's context decides is checked here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tba.config import Config
from tba.models.load import LoadedModel
from tba.models.weights import CANARY_TOKENS
from tba.tasks.base import Task
from tba.tasks.registry import make_task


def make_task_for(config: Config, loaded: LoadedModel, functions: Sequence[Callable[..., Any]] | None = None) -> Task:
    """`functions` are rewards given as Python objects, in the order of task.rewards."""
    limit = max_prompt_tokens(config, loaded.context)
    device = str(loaded.model.device)
    return make_task(config.task, loaded.tokenizer, max_prompt_tokens=limit, functions=functions, device=device)


def max_prompt_tokens(config: Config, context: int) -> int:
    """What the model's context leaves for the prompt, or the configured limit if that is smaller."""
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
