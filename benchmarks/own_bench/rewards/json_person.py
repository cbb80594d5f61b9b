"""A JSON object with three keys and their values."""

import json
import re


def _object(completion: list[dict[str, str]]) -> dict | None:
    """The first {...} of a reply as a dict; None where there is none or it does not parse."""
    found = re.search(r"\{[^{}]*\}", completion[0]["content"])
    try:
        value = json.loads(found.group()) if found else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def parses(completions: list[list[dict[str, str]]], **columns: object) -> list[float]:
    """1 where the whole reply is one JSON object, .5 where one is in it."""
    return [
        0.0 if _object(reply) is None else 1.0 if reply[0]["content"].strip().startswith("{") else 0.5
        for reply in completions
    ]


def keys(completions: list[list[dict[str, str]]], **columns: object) -> list[float]:
    wanted = {"name", "age", "city"}
    return [len(wanted & (_object(reply) or {}).keys()) / 3 for reply in completions]


def values(
    completions: list[list[dict[str, str]]], name: list[str], age: list[int], city: list[str], **columns: object
) -> list[float]:
    return [
        sum(str((_object(reply) or {}).get(key)) == str(value) for key, value in zip(("name", "age", "city"), row)) / 3
        for reply, *row in zip(completions, name, age, city)
    ]
