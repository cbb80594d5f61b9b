"""JSON schemas of tools, from the type hints and docstrings of Python functions.

An environment follows TRL's contract: every public method is a tool, except those that the trainer itself calls.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection
from typing import Any

from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

NOT_TOOLS = ("reset", "get_reward", "close")
"""Public methods that the trainer calls, and the policy never does."""


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Schema of one tool, as chat templates take it; `self` is left out."""
    try:
        return get_json_schema(function)
    # NameError: a type hint whose name is unknown; JSONDecodeError: `(choices: ...)` that is no JSON list.
    except (DocstringParsingException, TypeHintParsingException, NameError, json.JSONDecodeError) as error:
        name = getattr(function, "__qualname__", repr(function))
        why = " ".join(str(part) for part in error.args)
        raise ValueError(
            f"tool {name} has no schema: {why}. A tool needs a docstring that says what it does, and for each argument a "
            "type hint (str, int, float, bool, list, dict, Literal) and under `Args:` a line like `number: The guess.`"
        ) from None


def tools_of(environment_class: type, *, without: Collection[str] = NOT_TOOLS) -> dict[str, dict[str, Any]]:
    """Schemas of an environment's tools by their names, in alphabetical order."""
    # On the class: a look at an instance's members would evaluate its properties.
    methods = inspect.getmembers(environment_class, inspect.isfunction)
    return {name: tool_schema(method) for name, method in methods if not name.startswith("_") and name not in without}
