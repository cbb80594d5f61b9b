"""Cheerful words of a list, each counted once, none of the sad ones."""

import re

CHEERFUL = set(
    "happy smile smiled laugh laughed fun love loved hug hugged play played joy glad friend friends kind".split()
)
SAD = set("sad cry cried angry scared hurt bad mean lost fell".split())


def cheerful(completions, **columns):
    """Different cheerful words less different sad ones, of 5; never below 0."""
    values = []
    for text in completions:
        words = set(re.findall(r"[a-z]+", text.lower()))
        values.append(min(1.0, max(0.0, (len(words & CHEERFUL) - len(words & SAD)) / 5)))
    return values
