"""Share of the words that the story names."""

import re


def named(completions: list[str], words: list[list[str]], **columns: object) -> list[float]:
    """["cat", "hat", "park"] in "The cat had a hat." -> 2 / 3"""
    return [
        sum(bool(re.search(rf"\b{word.lower()}\b", text.lower())) for word in wanted) / len(wanted)
        for text, wanted in zip(completions, words)
    ]
