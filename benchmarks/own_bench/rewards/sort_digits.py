"""Digits in ascending order, and nothing else."""


def correct(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """1 for all digits in their order."""
    return [float(text.strip() == right) for text, right in zip(completions, answer)]
