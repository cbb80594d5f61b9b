"""Sums in words: the answer, and nothing else."""


def correct(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """1 for the right number in words."""
    return [float(text.strip() == right) for text, right in zip(completions, answer)]
