"""Tool calls and tool schemas: what policies write, read in the syntax of each family."""

from typing import Literal

import pytest

from tba.tasks.environments.schemas import tool_schema, tools_of
from tba.tasks.environments.tool_calls import MalformedCall, bare_json, make_call, tagged_json, tagged_xml


def search(query: str, limit: int = 3, kind: Literal["web", "news"] = "web") -> list[str]:
    """Search for pages.

    Args:
        query: Words to look for.
        limit: Number of pages.
        kind: Where to look.
    """
    return [query] * limit


TOOLS = [tool_schema(search)]


def read(syntax, text):
    content, calls = syntax(text, TOOLS)
    return content, [(call.name, call.arguments) for call in calls]


def test_tagged_calls_leave_the_text_around_them():
    text = 'First.\n<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>\n<tool_call>{"name": "b"}</tool_call> Last.'
    assert read(tagged_json, text) == ("First. Last.", [("a", {"x": 1}), ("b", {})])


def test_a_tagged_call_without_its_last_tag_counts_if_it_can_be_read():
    assert read(tagged_json, '<tool_call>{"name": "a", "arguments": {}}') == ("", [("a", {})])
    with pytest.raises(MalformedCall, match="tool call 1 is not valid JSON"):
        tagged_json('<tool_call>{"name": "a", "argum')


def test_arguments_may_be_a_json_string_and_texts_may_have_line_breaks():
    assert read(tagged_json, '<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>') == (
        "",
        [("a", {"x": 1})],
    )
    assert read(tagged_json, '<tool_call>{"name": "a", "arguments": {"x": "1\n2"}}</tool_call>')[1] == [
        ("a", {"x": "1\n2"})
    ]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("[1]", 'needs a "name"'),
        ('{"arguments": {}}', 'needs a "name"'),
        ('{"name": 3}', 'needs a "name"'),
        ('{"name": "a", "arguments": [1]}', r'"arguments" must be a JSON object, not \[1\]'),
        ('{"name": "a", "arguments": "x"}', "its arguments is not valid JSON"),
        ('{"name": "a",}', "is not valid JSON .* at character"),
        ("[" * 100_000, "is nested too deeply"),
    ],
)
def test_a_malformed_call_says_what_is_wrong(body, why):
    with pytest.raises(MalformedCall, match=why):
        tagged_json(f"<tool_call>{body}</tool_call>")


def test_bare_calls_are_found_within_text_and_other_json_stays():
    text = 'I call {"name": "a", "parameters": {"x": {"y": "}"}}}; {"type": "function", "name": "b", "parameters": {}}'
    assert read(bare_json, text) == ("I call;", [("a", {"x": {"y": "}"}}), ("b", {})])
    assert read(bare_json, 'A record: {"name": "Ada", "age": 36}.') == ('A record: {"name": "Ada", "age": 36}.', [])
    with pytest.raises(MalformedCall, match="tool call 1 is not valid JSON"):
        bare_json('<|python_tag|>{"name": "a", "parameters": {')


def test_xml_arguments_have_the_types_of_the_tools_schema():
    text = (
        "Look.\n<tool_call>\n<function=search>\n<parameter=query>\n42\n</parameter>\n<parameter=limit>\n7\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    assert read(tagged_xml, text) == ("Look.", [("search", {"query": "42", "limit": 7})])
    unknown = (
        "<tool_call><function=other><parameter=x>[1]</parameter><parameter=y>word</parameter></function></tool_call>"
    )
    assert read(tagged_xml, unknown) == ("", [("other", {"x": [1], "y": "word"})])
    assert read(tagged_xml, "<tool_call>\n<function=look>\n</function>\n</tool_call>") == ("", [("look", {})])


@pytest.mark.parametrize("body", ["{}", "<function=search><parameter=query>cut</function>"])
def test_malformed_xml_is_an_error(body):
    with pytest.raises(MalformedCall, match="tool call 1 must be <function=NAME>"):
        tagged_xml(f"<tool_call>{body}</tool_call>")


def test_a_call_is_an_entry_of_a_message():
    call = make_call({"name": "a", "parameters": {"x": 1}})
    assert call.as_message() == {"type": "function", "function": {"name": "a", "arguments": {"x": 1}}}


def test_the_schema_of_a_tool_has_its_types_and_texts():
    function = tool_schema(search)["function"]
    assert (function["name"], function["description"]) == ("search", "Search for pages.")
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "Words to look for."},
            "limit": {"type": "integer", "description": "Number of pages."},
            "kind": {"type": "string", "enum": ["web", "news"], "description": "Where to look."},
        },
        "required": ["query"],
    }


class Room:
    size = 3

    @property
    def state(self):
        raise RuntimeError("no property is looked at")

    def reset(self, **columns): ...

    def get_reward(self) -> float: ...

    def close(self): ...

    def _hidden(self): ...

    async def move(self, steps: int) -> str:
        """Move.

        Args:
            steps: How far.
        """

    def look(self) -> str:
        """Look around."""


def test_every_public_method_of_an_environment_is_a_tool():
    tools = tools_of(Room)
    assert list(tools) == ["look", "move"]
    assert tools["move"]["function"]["parameters"]["required"] == ["steps"]
    assert list(tools_of(Room, without=("reset", "get_reward", "close", "move"))) == ["look"]


def without_docstring(x: int): ...


def without_hint(x):
    """Words.

    Args:
        x: A number.
    """


def without_description(x: int):
    """Words."""


def with_unknown_name(x: "Unknown"):  # noqa: F821
    """Words.

    Args:
        x: A number.
    """


def with_own_class(x: Room):
    """Words.

    Args:
        x: A room.
    """


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (without_docstring, "it has no docstring"),
        (without_hint, "Argument x is missing a type hint"),
        (without_description, "no description for the argument 'x'"),
        (with_unknown_name, "name 'Unknown' is not defined"),
        (with_own_class, "Room"),
    ],
)
def test_a_tool_without_a_schema_is_refused_with_an_example(function, why):
    with pytest.raises(ValueError, match=f"(?s)tool {function.__name__} has no schema: .*{why}.* for example"):
        tool_schema(function)
