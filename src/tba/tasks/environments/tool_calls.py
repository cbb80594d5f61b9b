"""Tool calls in the policy's text, in the syntax of its model family.

- Tagged JSON: Qwen 2.5, Qwen 3, SmolLM3, Hermes, and all chat templates without tools (Gemma 3).
- Tagged XML: Qwen 3.5 and Nemotron 3.
- Bare JSON: Llama 3.1 to 3.3.

Other families need a `response_template` in their tokenizer, with which transformers parses their calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class MalformedCall(ValueError):
    """The policy's text has a tool call that cannot be read. The message is for the policy."""


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call that the policy wrote: ToolCall(name="guess", arguments={"number": 7})"""

    name: str
    arguments: dict[str, Any]

    def as_message(self) -> dict[str, Any]:
        """The call as an entry of a message's `tool_calls`."""
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}


Syntax = Callable[[str, Sequence[Mapping[str, Any]]], tuple[str, list[ToolCall]]]
"""Takes a text and the schemas of tools, and returns the text without its calls, and the calls."""


def syntax_of(template: str) -> Syntax | None:
    """The syntax that a chat template with tools asks for; None for an unknown one."""
    if "<function=" in template and "<parameter=" in template:
        return tagged_xml
    if "<tool_call>" in template and "<arg_key>" not in template:  # <arg_key> is GLM's own syntax
        return tagged_json
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return bare_json
    return None


def make_call(value: Any, place: str = "tool call") -> ToolCall:
    """A call from `{"name", "arguments"}`; Llama calls them "parameters", and some policies write them as a JSON string."""
    value = value.get("function", value) if isinstance(value, dict) else value
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise MalformedCall(f'{place} needs a "name" that is a string and "arguments" that are a JSON object.')
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = _json(arguments, f"{place}: its arguments")
    if arguments is None:  # a tool without arguments
        arguments = {}
    if not isinstance(arguments, dict):
        raise MalformedCall(f'{place}: "arguments" must be a JSON object, not {json.dumps(arguments)[:100]}.')
    return ToolCall(name=value["name"], arguments=arguments)


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text, strict=False)  # policies write line breaks into strings
    except (ValueError, RecursionError) as error:  # a plain ValueError for a number of 5,000 digits
        raise MalformedCall(f"{place} is not valid JSON ({error}): {text.strip()[:100]}") from None


# A call that is not closed counts if it can be read: some policies stop before the closing tag.
TAGGED = re.compile(r"\s*<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def tagged_json(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, list[ToolCall]]:
    """`<tool_call>{"name": "guess", "arguments": {"number": 7}}</tool_call>`, any number of them."""
    found = TAGGED.findall(text)
    places = [f"tool call {number}" for number in range(1, len(found) + 1)]
    calls = [make_call(_json(body, place), place) for body, place in zip(found, places)]
    return TAGGED.sub("", text), calls


FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def tagged_xml(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, list[ToolCall]]:
    """`<tool_call><function=guess><parameter=number>7</parameter></function></tool_call>`, any number of them."""
    calls = []
    for number, body in enumerate(TAGGED.findall(text), start=1):
        function = FUNCTION.match(body)
        if function is None or body.count("<parameter=") != len(PARAMETER.findall(body)):
            raise MalformedCall(
                f"tool call {number} must be <function=NAME>, a <parameter=NAME>VALUE</parameter> for each argument and "
                f"</function>, not {body.strip()[:100]}"
            )
        types = _types_of(function[1], tools)
        arguments = {key: _typed(value, types.get(key)) for key, value in PARAMETER.findall(function[2])}
        calls.append(ToolCall(name=function[1], arguments=arguments))
    return TAGGED.sub("", text), calls


def _types_of(name: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    functions = [tool["function"] for tool in tools if tool["function"]["name"] == name]
    properties = functions[0]["parameters"].get("properties", {}) if functions else {}
    return {key: schema.get("type") for key, schema in properties.items()}


def _typed(value: str, type_name: Any) -> Any:
    """The syntax has no quotes: the tool's schema says whether 7 is a number or a text."""
    if type_name == "string":
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


BARE = re.compile(r'\s*(?:<\|python_tag\|>)?\s*(?=\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:)')
DECODER = json.JSONDecoder(strict=False)


def bare_json(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, list[ToolCall]]:
    """`{"name": "guess", "parameters": {"number": 7}}`, any number of them; other JSON stays text."""
    content, calls, place = "", list[ToolCall](), 0
    while start := BARE.search(text, place):
        try:
            value, end = DECODER.raw_decode(text, start.end())
        except (ValueError, RecursionError) as error:
            written = text[start.end() :].strip()[:100]
            raise MalformedCall(f"tool call {len(calls) + 1} is not valid JSON ({error}): {written}") from None
        is_call = "parameters" in value or "arguments" in value
        content += text[place : start.start() if is_call else end]
        calls += [make_call(value, f"tool call {len(calls) + 1}")] if is_call else []
        place = end
    return content + text[place:], calls


INSTRUCTIONS = """You can call tools. Each line is the JSON schema of one tool:
{tools}

To call a tool, write its name and its arguments as a JSON object between these tags:
<tool_call>
{{"name": "<tool>", "arguments": {{"<argument>": "<value>"}}}}
</tool_call>
You may write several calls one after another. Each result comes back between <tool_response> tags."""


def with_instructions(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The messages with the tools in the first one's text, for chat templates that know no tools (Gemma 3)."""
    # In the first message whatever its role: some of these templates refuse a system message.
    schemas = "\n".join(json.dumps(tool["function"]) for tool in tools)
    first, *others = messages
    parts = [first["content"], INSTRUCTIONS.format(tools=schemas)]
    ordered = parts if first["role"] == "system" else parts[::-1]
    return [{**first, "content": "\n\n".join(ordered)}, *map(dict, others)]


def as_user_message(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tool results and user messages as one user message: these templates want user and assistant in turns."""
    texts = [
        f"<tool_response>\n{message['content']}\n</tool_response>" if message["role"] == "tool" else message["content"]
        for message in messages
    ]
    return [{"role": "user", "content": "\n".join(texts)}]
