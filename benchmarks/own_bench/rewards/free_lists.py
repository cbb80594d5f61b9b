"""So many things of each colour, paid by the thing."""

from collections import Counter


def counted(completions: list[str], wanted: list[dict[str, int]], **columns: object) -> list[float]:
    """1 less the share of pairs `colour thing` that are missing, too many, or not two words; at least 0."""
    return [_share(text, own) for text, own in zip(completions, wanted)]


def _share(text: str, wanted: dict[str, int]) -> float:
    pairs = [part.split() for part in text.split(",")]
    found = Counter(pair[0] if len(pair) == 2 else "" for pair in pairs)
    wrong = sum(abs(found[colour] - wanted.get(colour, 0)) for colour in {*found, *wanted})
    return max(0.0, 1.0 - wrong / max(found.total(), sum(wanted.values())))
