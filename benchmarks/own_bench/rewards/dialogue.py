"""Direct speech."""

import re


def spoken(completions: list[str], **columns: object) -> list[float]:
    """Share of the sentences with a quotation mark, over the first 64 tokens; a text without a full stop has none."""
    values = []
    for text in completions:
        sentences = [part for part in re.split(r"(?<=[.!?])\s+", text.strip()) if part]
        values.append(sum('"' in sentence for sentence in sentences) / max(3, len(sentences)))
    return values
