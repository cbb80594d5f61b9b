"""Twelve brackets of two kinds that match."""

LENGTH = 12
PAIRS = {")": "(", "]": "["}


def correct(completions: list[str], **columns: object) -> list[float]:
    """1 for twelve brackets, each closed by its own kind in the right order."""
    return [float(_is_right(text.strip())) for text in completions]


def distinct(completions: list[str], **columns: object) -> list[float]:
    """1 for a right answer that did not come before in this call: its mean is the share of different right answers."""
    seen: set[str] = set()
    values = []
    for text in (completion.strip() for completion in completions):
        values.append(float(_is_right(text) and text not in seen))
        seen.add(text)
    return values


def _is_right(text: str) -> bool:
    open_brackets: list[str] = []
    for character in text:
        if character in PAIRS:
            if not open_brackets or open_brackets.pop() != PAIRS[character]:
                return False
        elif character in PAIRS.values():
            open_brackets.append(character)
        else:
            return False
    return len(text) == LENGTH and not open_brackets
