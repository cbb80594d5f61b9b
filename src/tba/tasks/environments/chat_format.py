"""Conversations as token ids, where nothing that the policy generated is tokenised a second time.

    ids = prompt_ids(messages) + generated + next_turn_ids(results) + generated + ...

Ids between two turns come from a dummy conversation: the template writes [user, assistant, *results], and the text after
the assistant's end-of-turn token is what stands between the turns. Earlier turns stay as they were generated, also where a
template would rewrite them: Qwen 3 leaves out the thoughts of earlier turns, an episode keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os.path import commonprefix
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from tba.tasks.data.make_prompt import PromptRefused, encode, render_chat, tokens_of
from tba.tasks.environments.tool_calls import (
    MalformedCall,
    ToolCall,
    as_user_message,
    make_call,
    syntax_of,
    tagged_json,
    with_instructions,
)

Message = Mapping[str, Any]

DUMMY = "DummyTurnOfTheAssistant"
PROBE = "DummyResultOfTheTool"


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A turn of the policy, read: Reply(message={"role": "assistant", "content": "7?"}, calls=(), error=None)"""

    message: dict[str, Any]
    """The turn as a chat message; thoughts stay in its content, calls are in `tool_calls`."""
    calls: tuple[ToolCall, ...]
    """Tool calls of the turn, in order; none of them where one cannot be read."""
    error: str | None
    """What is wrong with a call, for the policy to read."""


@dataclass(frozen=True, kw_only=True)
class TurnEnd:
    """How a template ends the dummy turn: TurnEnd(written='"}}\\n</tool_call><|im_end|>', token="<|im_end|>")"""

    written: str
    """Text from the dummy's last word up to the end-of-turn token, which is part of it."""
    token: str
    """End-of-turn token; it may be another than the tokenizer's EOS (`<|eot_id|>`, `<end_of_turn>`)."""


class ChatFormat:
    """The token ids of conversations with a chat model."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[Mapping[str, Any]] = (),
        template: Mapping[str, Any] | None = None,
    ) -> None:
        """`tools` are schemas (schemas.py); `template` is what the chat template gets besides (chat_template_kwargs)."""
        if tokenizer.chat_template is None:
            raise ValueError(f"{_name(tokenizer)} has no chat template: use PlainFormat, or a chat model.")
        self.tokenizer, self.tools, self.template = tokenizer, list(tools), dict(template or {})
        self._ends: dict[tuple[str, str], TurnEnd] = {}
        self._template_has_tools = bool(tools) and self._writes_tools()
        self._parse = self._find_syntax()
        self._hidden = _control_ids(tokenizer)

    def prompt_ids(self, messages: Sequence[Message]) -> np.ndarray:
        """Ids of the prompt with the tools, up to the first token of the policy's turn."""
        if self.tools and not self._template_has_tools:
            messages = with_instructions(messages, self.tools)
        text = self._render(messages)
        return np.array(tokens_of(text, self.tokenizer, add_special_tokens=False), np.int32)

    def next_turn_ids(self, messages: Sequence[Message], *, ended: bool = True) -> np.ndarray:
        """Ids between a generated turn and the next one, for tool results or user messages; `ended` says that the turn
        has its end-of-turn token, else the ids begin with it."""
        if self.tools and not self._template_has_tools:
            messages = as_user_message(messages)
        # Some templates (gpt-oss) write the name of the assistant's call over its result.
        kind = (messages[0]["role"], messages[0].get("name", "tool"))
        end, text = self._turn_end(*kind), self._after_dummy(*kind, messages)
        if not text.startswith(end.written):
            raise self._refused(
                f"writes {end.written!r} after the assistant's last turn, but {text[: len(end.written)]!r} when messages of "
                f"role {kind[0]} follow"
            )
        # The token comes first, not only for turns without it: a tokenizer treats the start of a text in its own way.
        ids = tokens_of(end.token + text[len(end.written) :], self.tokenizer, add_special_tokens=False)
        return np.array(ids[1:] if ended else ids, np.int32)

    def reply(self, ids: np.ndarray) -> Reply:
        """The generated turn as a message with its tool calls."""
        text = self.tokenizer.decode(
            [token for token in ids.tolist() if token not in self._hidden], clean_up_tokenization_spaces=False
        )
        plain = {"role": "assistant", "content": text}
        try:
            message, calls = self._read(ids, text)
        except MalformedCall as error:
            return Reply(message=plain, calls=(), error=str(error))
        if calls:
            message["tool_calls"] = [call.as_message() for call in calls]
        return Reply(message=message, calls=tuple(calls), error=None)

    def _read(self, ids: np.ndarray, text: str) -> tuple[dict[str, Any], list[ToolCall]]:
        if self._response_template:
            return self._read_by_template(ids)
        thoughts, body = self._split_thoughts(text)
        content, calls = self._parse(body, self.tools) if self._parse else (body, [])
        return {"role": "assistant", "content": thoughts + (content.strip() if calls else content)}, calls

    def _read_by_template(self, ids: np.ndarray) -> tuple[dict[str, Any], list[ToolCall]]:
        try:
            message = self.tokenizer.parse_response(
                ids.tolist(), prefix=self._generation_prompt, tools=self.tools or None
            )
        except (ValueError, TypeError) as error:  # its parsers raise both for what they cannot read
            raise MalformedCall(f"the tool call cannot be read: {error}") from None
        calls = [make_call(call.get("function", call)) for call in message.pop("tool_calls", None) or []]
        # Fields that are empty are left out, and templates want a content.
        return {"role": "assistant", **message, "content": message.get("content") or ""}, calls

    def _split_thoughts(self, text: str) -> tuple[str, str]:
        """A call in a thought is none: the policy only thinks about it."""
        thoughts, mark, body = text.rpartition("</think>")
        opened = "<think>" in text or self._generation_prompt.rstrip().endswith("<think>")
        return (text, "") if opened and not mark else (thoughts + mark, body)

    def _turn_end(self, role: str, name: str) -> TurnEnd:
        if (role, name) not in self._ends:
            self._ends[role, name] = self._find_turn_end(role, name)
        return self._ends[role, name]

    def _find_turn_end(self, role: str, name: str) -> TurnEnd:
        followed = self._after_dummy(role, name, [{"role": role, "name": name, "content": PROBE}])
        if PROBE not in followed:
            raise self._refused(f"leaves out messages of role {role}")
        # What it writes in both cases: some templates (Phi 3) put an EOS at the end of the conversation as well.
        after = commonprefix([self._after_dummy(role, name, []), followed])  # noqa: RUF071 (of texts, not of paths)
        token = max(_control_tokens(self.tokenizer), key=after.rfind)
        if token not in after:
            raise self._refused(f"ends an assistant's turn in another way when messages of role {role} follow")
        return TurnEnd(written=after[: after.rfind(token) + len(token)], token=token)

    def _after_dummy(self, role: str, name: str, messages: Sequence[Message]) -> str:
        """What the template writes after the last word of the dummy turn."""
        turn: dict[str, Any] = {"role": "assistant", "content": DUMMY}
        if role == "tool":  # templates accept results of calls only
            turn["tool_calls"] = [ToolCall(name=name, arguments={"dummy": DUMMY}).as_message()]
        conversation = [{"role": "user", "content": "dummy"}, turn, *messages]
        _, mark, after = self._render(conversation, add_generation_prompt=bool(messages)).rpartition(DUMMY)
        if not mark:
            raise self._refused("leaves out the assistant's turn")
        return after

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        tools = self.tools if self._template_has_tools else None
        given = {**self.template, "tools": tools}
        try:
            return render_chat(messages, self.tokenizer, given, add_generation_prompt=add_generation_prompt)
        except PromptRefused as error:
            raise PromptRefused(f"a conversation {error}") from None

    @cached_property
    def _generation_prompt(self) -> str:
        return self._render([{"role": "user", "content": "dummy"}])

    @property
    def _response_template(self) -> Any:
        return getattr(self.tokenizer, "response_template", None)

    def _writes_tools(self) -> bool:
        self._template_has_tools = False
        without = self._render([{"role": "user", "content": "dummy"}])
        self._template_has_tools = True
        return self._render([{"role": "user", "content": "dummy"}]) != without

    def _find_syntax(self) -> Any:
        if not self.tools or self._response_template:
            return None
        if not self._template_has_tools:
            return tagged_json
        syntax = syntax_of(self.tokenizer.get_chat_template(tools=self.tools))
        if syntax is None:
            raise ValueError(
                f"the chat template of {_name(self.tokenizer)} has tools, in a syntax that tba cannot read. Give the "
                "tokenizer a response_template (see transformers' response parsing), or use another model."
            )
        return syntax

    def _refused(self, what: str) -> ValueError:
        return ValueError(
            f"the chat template of {_name(self.tokenizer)} {what}, so the tokens between two turns are unknown. Give the "
            "tokenizer a chat_template that only appends when messages are added, or use a model with one."
        )


class PlainFormat:
    """The token ids of episodes with a model that has no chat template: an observation's text follows the action's."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[Mapping[str, Any]] = (),
        template: Mapping[str, Any] | None = None,
    ) -> None:
        if tools or template:
            given = "tools" if tools else "chat_template_kwargs"
            raise ValueError(f"{_name(tokenizer)} has no chat template, which {given} need: use a chat model.")
        self.tokenizer = tokenizer

    def prompt_ids(self, messages: Sequence[Message]) -> np.ndarray:
        """Ids of the messages' texts, with the special tokens that the tokenizer puts first."""
        return np.array(encode(_texts(messages), self.tokenizer), np.int32)

    def next_turn_ids(self, messages: Sequence[Message], *, ended: bool = True) -> np.ndarray:
        """Ids of the observation alone, after a turn that ended with EOS or without."""
        return np.array(tokens_of(_texts(messages), self.tokenizer, add_special_tokens=False), np.int32)

    def reply(self, ids: np.ndarray) -> Reply:
        """The generated text; it has no calls."""
        text = self.tokenizer.decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return Reply(message={"role": "assistant", "content": text}, calls=(), error=None)


def _texts(messages: Sequence[Message]) -> str:
    return "\n".join(message["content"] for message in messages)


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return sorted(added | set(tokenizer.all_special_tokens))


def _control_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that are no text. Tags of calls and thoughts are text, also where a tokenizer has them as special tokens."""
    tags = {"<tool_call>", "</tool_call>", "<think>", "</think>"}
    return frozenset(tokenizer.convert_tokens_to_ids([t for t in _control_tokens(tokenizer) if t not in tags]))


def _name(tokenizer: PreTrainedTokenizerBase) -> str:
    return f"tokenizer {tokenizer.name_or_path}" if tokenizer.name_or_path else "the tokenizer"
