"""A chain of steps on one digit: only what follows the last `answer` counts."""


def correct(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """1 for the right digit after `answer`."""
    return [float(_given(text) == right) for text, right in zip(completions, answer)]


def _given(text: str) -> str:
    _, found, given = text.rpartition("answer")
    return given.strip() if found else ""
