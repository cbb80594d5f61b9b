"""What every task is made from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from tba.config import TaskConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskInputs:
    """TaskInputs(config=TaskConfig(), tokenizer=tokenizer, max_prompt_tokens=200)"""

    config: TaskConfig
    tokenizer: PreTrainedTokenizerBase
    max_prompt_tokens: int
    functions: Sequence[Callable[..., Any]] | None = None
    """Rewards given as Python objects, in the order of task.rewards; for one's own problem."""
    device: str = "auto"
    """Of models that score: the policy's; auto = cuda where there is one, else cpu."""
