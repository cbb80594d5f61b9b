"""Words of one family, paid by the word."""

NUM_PAID = 20
"""Words that count; those that are missing count as wrong."""


def belongs(completions: list[str], family: list[list[str]], **columns: object) -> list[float]:
    """Share of twenty words that are of the family."""
    return [sum(word in own for word in text.split()[:NUM_PAID]) / NUM_PAID for text, own in zip(completions, family)]
