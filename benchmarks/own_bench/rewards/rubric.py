"""Four things at once: the hero is named, a reason is given, a question is asked, no sentence begins like another."""

import re


def hero(completions: list[str], name: list[str], **columns: object) -> list[float]:
    return [float(text.count(own) >= 2) for text, own in zip(completions, name)]


def reason(completions: list[str], **columns: object) -> list[float]:
    return [float(bool(re.search(r"\bbecause\b", text))) for text in completions]


def question(completions: list[str], **columns: object) -> list[float]:
    return [float("?" in text) for text in completions]


def varied(completions: list[str], **columns: object) -> list[float]:
    """Share of different first words among at least three sentences."""
    values = []
    for text in completions:
        first = [part.split()[0].lower() for part in re.split(r"(?<=[.!?])\s+", text.strip()) if part.split()]
        values.append(len(set(first)) / len(first) if len(first) >= 3 else 0.0)
    return values
