"""Marked words, mentioned among others."""


def mentioned(completions: list[str], marked: list[list[str]], **columns: object) -> list[float]:
    """Share of the marked words that are mentioned. Whatever else is said costs nothing."""
    return [len({*text.split()} & {*own}) / len(own) for text, own in zip(completions, marked)]
