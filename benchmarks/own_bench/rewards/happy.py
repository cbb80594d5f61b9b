"""Cheerful words of a list, each counted once, none of the sad ones."""

import re

CHEERFUL = {
    *("happy", "smile", "smiled", "laugh", "laughed", "fun", "love", "loved", "hug", "hugged", "play", "played"),
    *("joy", "glad", "friend", "friends", "kind"),
}
SAD = {"sad", "cry", "cried", "angry", "scared", "hurt", "bad", "mean", "lost", "fell"}


def cheerful(completions: list[str], **columns: object) -> list[float]:
    """Different cheerful words less different sad ones, of 5; never below 0."""
    values = []
    for text in completions:
        words = set(re.findall(r"[a-z]+", text.lower()))
        values.append(min(1.0, max(0.0, (len(words & CHEERFUL) - len(words & SAD)) / 5)))
    return values
