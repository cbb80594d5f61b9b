"""Reading the answer out of a worked solution."""

from __future__ import annotations

import re

MARKER = "####"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def final_number(text: str) -> str | None:
    """The number after the last `####`, commas removed; None where there is none.

    final_number("7*4=28\\n#### 1,028") == "1028"
    """
    _, marker, tail = text.rpartition(MARKER)
    found = NUMBER.match(tail.strip().removeprefix("$")) if marker else None
    return found.group().replace(",", "") if found else None


def same_number(given: str | None, wanted: str) -> bool:
    """Equal as numbers: "28.0" is "28"; None equals nothing."""
    return given is not None and float(given) == float(wanted.replace(",", ""))
