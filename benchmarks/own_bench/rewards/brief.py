"""Short sentences."""

import re


def short(completions: list[str], **columns: object) -> list[float]:
    """Share of at least 6 sentences that have 2 to 5 words."""
    values = []
    for text in completions:
        sentences = [part for part in re.split(r"[.!?]+\s*", text.strip()) if part.strip()]
        fine = sum(2 <= len(sentence.split()) <= 5 for sentence in sentences)
        values.append(fine / max(6, len(sentences)))
    return values
