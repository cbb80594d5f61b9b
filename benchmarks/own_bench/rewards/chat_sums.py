"""Small sums: the last number said is the answer."""

import re

Chat = list[list[dict[str, str]]]


def correct(completions: Chat, answer: list[str], **columns: object) -> list[float]:
    """1 where the last number is the sum, whatever is said around it."""
    return [float(_last_number(reply[0]["content"]) == right) for reply, right in zip(completions, answer)]


def _last_number(text: str) -> str | None:
    numbers = re.findall(r"\d+", text)
    return numbers[-1] if numbers else None
