"""A written sum: only what follows the last `answer` counts."""


def correct(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """1 for the right number after `answer`, its digits apart or not."""
    return [float(_given(text) == right) for text, right in zip(completions, answer)]


def _given(text: str) -> str:
    _, found, given = text.rpartition("answer")
    return "".join(given.split()) if found else ""
