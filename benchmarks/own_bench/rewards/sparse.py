"""An order as a record of five fields."""


def correct(completions: list[str], record: list[str], **columns: object) -> list[float]:
    """1 for all five fields right and nothing else."""
    return [float(text.strip() == right) for text, right in zip(completions, record)]
