"""Words backwards, paid by the place."""


def places_right(completions: list[str], target: list[str], **columns: object) -> list[float]:
    """Share of places with the right word; places too many or too few are wrong ones."""
    return [_share(text.split(), right.split()) for text, right in zip(completions, target)]


def _share(words: list[str], right: list[str]) -> float:
    same = sum(word == wanted for word, wanted in zip(words, right))
    return same / max(len(words), len(right))
