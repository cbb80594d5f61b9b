"""A row of letters turned round."""


def correct(completions: list[str], turned: list[str], **columns: object) -> list[float]:
    """1 for the whole row and nothing else."""
    return [float(text.strip() == right) for text, right in zip(completions, turned)]
