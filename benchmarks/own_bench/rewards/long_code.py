"""A long word in code: all of it counts, spaces do not."""


def correct(completions: list[str], code: list[str], **columns: object) -> list[float]:
    """1 where every letter is followed by the right one."""
    return [float(text.split() == right.split()) for text, right in zip(completions, code)]
