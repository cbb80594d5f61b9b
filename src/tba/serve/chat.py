"""A conversation in OpenAI's form, and its tokens, where nothing that the policy generated in a session is tokenised again.

A request that begins with the messages of an earlier call of its session, with the answer as the server gave it, has that
call's tokens and behind them those of the new messages. Messages are the same where role, text and tool calls are: clients
send them back with other ids, with fields that are null, and with other white space around the text.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tba.tasks.environments.chat_format import ChatFormat
from tba.types import Finish

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Chat:
    """A conversation that waits for its next answer.

    Chat(kind="[[], {}]", form=ChatFormat(...), messages=[{"role": "user", "content": "2 + 2?"}])
    """

    kind: str
    """Tools and arguments of the template, as JSON."""
    form: ChatFormat
    messages: list[Message]
    """As chat templates take them."""

    def prompt_ids(self, calls: Sequence[Call], stop_ids: Collection[int]) -> list[int]:
        """The prompt, after earlier calls of its session."""
        earlier = [call for call in calls if call.chat is not None and not self.why_apart(call)]
        if earlier:
            call = max(reversed(earlier), key=lambda call: len(call.messages))
            new = [
                {**message, "content": self.form.harmless(message["content"])}
                for message in self.messages[len(call.messages) :]
            ]
            ended = len(call.token_ids) > 0 and int(call.token_ids[-1]) in stop_ids
            with suppress(ValueError):  # a template that does not only append: all is tokenised anew
                ids = self.form.next_turn_ids(new, ended=ended)
                return [int(token) for part in (call.prompt_ids, call.token_ids, ids) for token in part]
        return [int(token) for token in self.form.prompt_ids(self.messages)]

    def why_apart(self, call: Call) -> str:
        """Why the conversation does not go on from an earlier call; empty where it does."""
        if call.chat is None or call.chat.kind != self.kind:
            return "it has other tools, or other arguments of the chat template"
        for number, (own, earlier) in enumerate(zip(self.messages, call.messages)):
            if _essence(own) != _essence(earlier):
                return f"its message {number}, of the role {own['role']}, is not as it was"
        new = self.messages[len(call.messages) :]
        if not new:
            return "it has no message after the answer to that call"
        if any(message["role"] == "assistant" for message in new):
            return "it has a message of the assistant that the policy did not write"
        return ""

    def calls(self, token_ids: np.ndarray, name: str) -> Message:
        """What a response has for the message in OpenAI's form where it calls tools: the calls, and the text beside them."""
        reply = self.form.reply(token_ids) if self.form.tools else None
        if reply is None or not reply.calls:
            return {}
        calls = [
            {
                "id": f"call-{name}-{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for number, call in enumerate(reply.calls)
        ]
        return {**reply.message, "content": reply.message["content"] or None, "tool_calls": calls}


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One response to one prompt.

    Call(id="chatcmpl-7", prompt_ids=[5, 6], token_ids=[9, 2], policy_log_probs=[-.1, -.7],
         behaviour_log_probs=[-.1, -.7], version_spans=((0, 12),), finish="stop")
    """

    id: str
    prompt_ids: np.ndarray
    token_ids: np.ndarray
    policy_log_probs: np.ndarray
    behaviour_log_probs: np.ndarray
    version_spans: tuple[tuple[int, int], ...]
    finish: Finish
    chat: Chat | None = None
    """The conversation that it answers; None = its prompt came as text or tokens."""
    message: Message = field(default_factory=dict)
    """The response as chat templates take it."""

    @property
    def messages(self) -> list[Message]:
        """The conversation with the response."""
        return [*(self.chat.messages if self.chat else ()), self.message]


def template_messages(messages: Sequence[Message]) -> list[Message]:
    """Messages of a client as chat templates take them: arguments of calls are objects, results have their tool's name."""
    names: dict[str, str] = {}
    found = []
    for message in messages:
        own = {name: value for name, value in message.items() if value is not None}
        own["content"] = own.get("content") or ""
        if calls := own.pop("tool_calls", None):
            names |= {call["id"]: call["function"]["name"] for call in calls if "id" in call}
            own["tool_calls"] = [
                {"type": "function", "function": {**call["function"], "arguments": _object(call["function"])}}
                for call in calls
            ]
        if own["role"] == "tool" and (name := names.get(own.pop("tool_call_id", ""))) is not None:
            own["name"] = name
        found.append(own)
    return found


def _object(function: Message) -> Any:
    arguments = function.get("arguments") or {}
    with suppress(ValueError):  # a text that is no JSON stays as it is
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    return arguments


def _essence(message: Message) -> tuple[Any, ...]:
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message["role"], message["content"].strip(), calls
