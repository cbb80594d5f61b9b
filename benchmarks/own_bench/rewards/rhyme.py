"""Neighbouring sentences whose last message end alike."""

import re
from itertools import pairwise


def rhymed(completions: list[str], **columns: object) -> list[float]:
    """Share of neighbouring pairs, of at least 3, whose last message differ and share their last two letters."""
    values = []
    for text in completions:
        ends = [found[-1].lower() for part in re.split(r"[.!?]+", text) if (found := re.findall(r"[A-Za-z]+", part))]
        pairs = list(pairwise(ends))
        values.append(sum(a != b and a[-2:] == b[-2:] for a, b in pairs) / max(3, len(pairs)))
    return values
