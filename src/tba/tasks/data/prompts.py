"""Prompts as tokens: plain text or chat messages, one BOS, within the context."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy as np
from transformers import PreTrainedTokenizerBase

from tba.config import TaskConfig
from tba.tasks.data.rows import BadRow
from tba.types import Prompt


class LazyPrompts(Sequence[Prompt], ABC):
    """Prompts that are made when they are asked for."""

    @abstractmethod
    def at(self, place: int) -> Prompt:
        """The prompt at a place from 0 on."""

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        places = range(len(self))[index]
        return self.at(places) if isinstance(places, int) else [self.at(place) for place in places]


def make_prompt(
    *,
    id: str,
    text: str | list[dict[str, str]],
    columns: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    place: str = "",
    template: Mapping[str, Any] | None = None,
) -> Prompt:
    """Tokenise a prompt; one that does not fit is refused, never cut. `place` is where it was read, `template` is what the
    chat template gets besides the messages."""
    name = f"{place}: prompt {id!r}" if place else f"prompt {id!r}"
    try:
        token_ids = encode(text, tokenizer, template)
    except PromptRefused as error:
        raise BadRow("refused prompt", f"{name} {error}") from None
    if not token_ids:
        raise BadRow("empty prompt", f"{name} is empty: it gives no tokens.")
    if len(token_ids) > max_tokens:
        raise BadRow(
            "over-long prompt",
            f"{name} has {len(token_ids)} tokens, beyond the {max_tokens} that the model's context leaves beside "
            "generate.max_new_tokens (or task.max_prompt_tokens): shorten it, or lower generate.max_new_tokens.",
        )
    return Prompt(id=id, token_ids=np.array(token_ids, np.int32), text=text, columns=columns)


class PromptRefused(ValueError):
    """The chat template or the tokenizer fails on a prompt."""


def encode(
    text: str | list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids with at most one BOS; chat messages through the tokenizer's template, ready for the answer."""
    if isinstance(text, str):
        starts_with_bos = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        return _tokens(text, tokenizer, add_special_tokens=not starts_with_bos)
    if tokenizer.chat_template is None:
        raise ValueError(
            "the data has chat messages but the tokenizer has no chat template: give plain text prompts, or a model with "
            "a template."
        )
    try:
        words = tokenizer.apply_chat_template(text, tokenize=False, add_generation_prompt=True, **(template or {}))
    except Exception as error:  # a template is a program: it may raise what it likes
        roles = ", ".join(message["role"] for message in text)
        raise PromptRefused(
            f"with the roles {roles} is refused by the tokenizer's chat template: {type(error).__name__}: {error}. Change "
            "the messages, or the template (chat_template of the tokenizer)."
        ) from None
    return _tokens(words, tokenizer, add_special_tokens=False)


def _tokens(text: str, tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool) -> list[int]:
    try:
        return tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
    except Exception as error:  # tokenizers raises nothing more specific
        raise PromptRefused(f"is refused by the tokenizer: {error}. Change the text, or the tokenizer.") from None


def uses_chat(config: TaskConfig, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether prompts are chat messages: what task.chat means for this tokenizer."""
    has_template = tokenizer.chat_template is not None
    if config.chat is True and not has_template:
        raise ValueError("task.chat=true, but the tokenizer has no chat template: use task.chat=false or a chat model.")
    return has_template if config.chat == "auto" else config.chat
