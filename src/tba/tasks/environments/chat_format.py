"""Conversations as token ids, where nothing that the policy generated is tokenised a second time.

    ids = prompt_ids(messages) + generated + next_turn_ids(results) + generated + ...

Ids between two turns come from a dummy conversation: the template writes [user, assistant, *results], and the text after
the assistant's end-of-turn token is what stands between the turns. Earlier turns stay as they were generated, also where a
template would rewrite them: Qwen 3 leaves out the thoughts of earlier turns, an episode keeps them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from tba.tasks.data.make_prompt import PromptRefused, encode, render_chat, tokens_of
from tba.tasks.environments.tool_calls import (
    MalformedCall,
    Syntax,
    ToolCall,
    as_user_message,
    make_call,
    syntax_of,
    tagged_json,
    with_instructions,
)

Message = Mapping[str, Any]

FIRST: Message = {"role": "user", "content": "dummy"}
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

    @property
    def said(self) -> str:
        """The turn's text without its thoughts: what a step environment gets."""
        _, mark, said = str(self.message.get("content") or "").rpartition("</think>")
        return said.strip() if mark else "" if "<think>" in said else said


@dataclass(frozen=True, kw_only=True)
class TurnEnd:
    """How a template ends a turn that is followed: TurnEnd(written='"}}\\n</tool_call><|im_end|>', token="<|im_end|>")"""

    written: str
    """Text from the dummy turn's last word to its end-of-turn token, which is part of it."""
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
        self._names = {tool["function"]["name"] for tool in self.tools}
        self._ends: dict[tuple[str, str], TurnEnd] = {}
        self._generation_prompt = self._render([FIRST])
        if self.tools:
            self.template["tools"] = self.tools
        self._instructs = bool(self.tools) and self._render([FIRST]) == self._generation_prompt
        # Of transformers 5.13 and newer; it does not know the calls of our own instructions.
        self._has_response_template = not self._instructs and getattr(tokenizer, "response_template", None) is not None
        self._syntax = self._find_syntax() if self.tools else None
        self._control_ids = _control_ids(tokenizer)

    def harmless(self, text: str) -> str:
        """A text from outside, in which control tokens are words: an environment must not end a turn or begin another."""
        return without_control_tokens(text, self.tokenizer)

    def prompt_ids(self, messages: Sequence[Message]) -> np.ndarray:
        """Ids of the prompt with the tools, up to the first token of the policy's turn."""
        text = self._render(with_instructions(messages, self.tools) if self._instructs else messages)
        return np.array(tokens_of(text, self.tokenizer, add_special_tokens=False), np.int32)

    def next_turn_ids(self, messages: Sequence[Message], *, ended: bool = True) -> np.ndarray:
        """Ids between a generated turn and the next one, for tool results or user messages. `ended` says that the turn has
        its end-of-turn token; the ids begin with it otherwise."""
        if self._instructs:
            messages = as_user_message(messages)
        role, name = str(messages[0]["role"]), str(messages[0].get("name"))
        # Some templates (gpt-oss) write the name of the called tool over its result. Policies make up names.
        kind = (role, name if name in self._names else "tool")
        if kind not in self._ends:
            self._ends[kind] = self._find_turn_end(*kind)
        end, text = self._ends[kind], self._after_dummy(*kind, messages)
        if not text.startswith(end.written):
            raise self._refused(f"ends an assistant's turn by {text[: len(end.written)]!r} and by {end.written!r}")
        # With the token, for tokenizers treat the start of a text in their own way.
        ids = _result_ids(end.token + text[len(end.written) :], self.tokenizer)
        return ids[1:] if ended else ids

    def reply(self, ids: np.ndarray) -> Reply:
        """The generated turn as a message with its tool calls."""
        shown = [token for token in ids.tolist() if token not in self._control_ids]
        text = self.tokenizer.decode(shown, clean_up_tokenization_spaces=False)
        try:
            fields, calls = self._by_template(ids) if self._has_response_template else self._by_syntax(text)
        except MalformedCall as error:
            message = {"role": "assistant", "content": text}
            return Reply(message=message, calls=(), error=str(error) if self.tools else None)
        called = {"tool_calls": [call.as_message() for call in calls]} if calls else {}
        return Reply(message={"role": "assistant", **fields, **called}, calls=tuple(calls), error=None)

    def _by_syntax(self, text: str) -> tuple[dict[str, Any], list[ToolCall]]:
        if self._syntax is None:
            return {"content": text}, []
        # A call within a thought is none: the policy only thinks about it.
        thought, mark, body = text.rpartition("</think>")
        if not mark and ("<think>" in text or self._generation_prompt.rstrip().endswith("<think>")):
            return {"content": text}, []
        content, calls = self._syntax(body, self.tools)
        return {"content": thought + mark + (content.rstrip() if calls else content)}, calls

    def _by_template(self, ids: np.ndarray) -> tuple[dict[str, Any], list[ToolCall]]:
        try:
            message = self.tokenizer.parse_response(
                ids.tolist(), prefix=self._generation_prompt, tools=self.tools or None
            )
        except Exception as error:  # its parsers raise what they like for a text that they cannot read
            raise MalformedCall(f"the tool call cannot be read: {error}") from None
        written = message.pop("tool_calls", None) or []
        calls = [make_call(call) for call in written] if self.tools else []
        # Fields that are empty are left out, and templates want a content.
        return {**message, "content": message.get("content") or ""}, calls

    def check_stops(self, stop_ids: Collection[int], *, role: str) -> None:
        """Refuse an engine that would not stop at the end of a turn, which messages of this role follow."""
        token = self._find_turn_end(role, "tool").token
        if self.tokenizer.convert_tokens_to_ids(token) not in stop_ids:
            raise ValueError(
                f"the chat template of {_name(self.tokenizer)} ends turns by {token}, and the model does not stop there: "
                "add its id to eos_token_id in generation_config.json."
            )

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
        """What the template writes after the last word of a dummy turn."""
        turns: list[dict[str, Any]] = [{"role": "assistant", "content": DUMMY}]
        if role == "tool":  # templates accept results of calls only
            call = ToolCall(name=name, arguments={"dummy": DUMMY}).as_message()
            # Some write calls and no content (Llama 3), or the content after the results (Gemma 4), or no calls (SmolLM3).
            turns = [{"role": "assistant", "content": content, "tool_calls": [call]} for content in ("", DUMMY)]
        for turn in turns:
            text = self._render([FIRST, turn, *messages], add_generation_prompt=bool(messages))
            _, mark, after = text.rpartition(DUMMY)
            if mark:
                return after
        raise self._refused("leaves out the assistant's turn")

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        try:
            return render_chat(messages, self.tokenizer, self.template, add_generation_prompt=add_generation_prompt)
        except PromptRefused as error:
            raise PromptRefused(f"a conversation {error}") from None

    def _find_syntax(self) -> Syntax | None:
        if self._instructs or self._has_response_template:
            return tagged_json
        syntax = syntax_of(self.tokenizer.get_chat_template(self.template.get("chat_template"), self.tools))
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

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        if tools:
            raise ValueError(f"{_name(tokenizer)} has no chat template, which tools need: use a chat model.")
        self.tokenizer = tokenizer

    def harmless(self, text: str) -> str:
        """See ChatFormat."""
        return without_control_tokens(text, self.tokenizer)

    def prompt_ids(self, messages: Sequence[Message]) -> np.ndarray:
        """Ids of the messages' texts, with the special tokens that the tokenizer puts first."""
        return np.array(encode(_texts(messages), self.tokenizer), np.int32)

    def next_turn_ids(self, messages: Sequence[Message], *, ended: bool = True) -> np.ndarray:
        """Ids of the observation alone, whether or not the turn has its EOS."""
        return _result_ids(_texts(messages), self.tokenizer)

    def reply(self, ids: np.ndarray) -> Reply:
        """The generated text; it has no calls."""
        text = self.tokenizer.decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return Reply(message={"role": "assistant", "content": text}, calls=(), error=None)


def _texts(messages: Sequence[Message]) -> str:
    return "\n".join(message["content"] for message in messages)


def _result_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    # A policy can write half a character in a call (\\ud83d), and a tool sends it back: no tokenizer takes it.
    text = text.encode("utf-8", "replace").decode("utf-8")
    return np.array(tokens_of(text, tokenizer, add_special_tokens=False), np.int32)


def without_control_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text with a blank in each control token, so that it is tokenised as words: `< |im_end|>`."""
    for token in _control_tokens(tokenizer):
        if len(token) > 1 and token in text:
            text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return sorted(added | set(tokenizer.all_special_tokens))


def _control_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that are no text. Tags of calls and thoughts are text, also where a tokenizer has them as special tokens."""
    tags = {"<tool_call>", "</tool_call>", "<think>", "</think>"}
    return frozenset(tokenizer.convert_tokens_to_ids([t for t in _control_tokens(tokenizer) if t not in tags]))


def _name(tokenizer: PreTrainedTokenizerBase) -> str:
    return f"tokenizer {tokenizer.name_or_path}" if tokenizer.name_or_path else "the tokenizer"
