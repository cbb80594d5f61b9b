"""Summaries of embedded posts: the perfect one, the reference that win rates compare with, the sloppy ones to learn from.

The last two are perfect summaries with flaws (`Flaws`), which come by chance, item by item.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tba.tasks.tldr.world import FILLERS, IMPORTANT, VALUES, Fact, Post

MAX_SUMMARY_TOKENS = 14
"""A summary with its EOS: generate.max_new_tokens of this task."""
NEGLECTED_KEYS = tuple(IMPORTANT)[5:]
"""Important keys that a sloppy writer mostly leaves out."""


@dataclass(frozen=True, kw_only=True)
class Flaws:
    """Probabilities of what goes wrong with a summary."""

    drop: float
    """An important fact is left out."""
    drop_neglected: float
    """The same for facts of NEGLECTED_KEYS."""
    hallucinate: float
    """A stated fact has another value than in the post."""
    swap: float
    """Two important facts that follow each other change places."""
    trivial: float
    """A trivial fact is stated, somewhere."""
    filler: float
    """A filler word stands before a stated fact."""


REFERENCE = Flaws(drop=0.15, drop_neglected=0.15, hallucinate=0.06, swap=0.08, trivial=0.10, filler=0.10)
SLOPPY = Flaws(drop=0.20, drop_neglected=0.50, hallucinate=0.03, swap=0.10, trivial=0.45, filler=0.10)


def perfect_summary(post: Post) -> str:
    """The important facts in the order of their keys."""
    return " ".join(f"{key} {value}" for key, value in post.important)


def reference_summary(post: Post) -> str:
    """Always the same for a post."""
    return draw_summary(post, REFERENCE, random.Random(post.text))


def sloppy_summary(post: Post, rng: random.Random) -> str:
    return draw_summary(post, SLOPPY, rng)


def draw_summary(post: Post, flaws: Flaws, rng: random.Random) -> str:
    """Drawn again while it is empty, or too long to end by itself."""
    while True:
        words = _draw_words(post, flaws, rng)
        if 0 < len(words) < MAX_SUMMARY_TOKENS:
            return " ".join(words)


def _draw_words(post: Post, flaws: Flaws, rng: random.Random) -> list[str]:
    stated = [_maybe_wrong(fact, flaws, rng) for fact in post.important if not _is_dropped(fact, flaws, rng)]
    for first in range(len(stated) - 1):
        if rng.random() < flaws.swap:
            stated[first], stated[first + 1] = stated[first + 1], stated[first]
    for fact in post.trivial:
        if rng.random() < flaws.trivial:
            stated.insert(rng.randint(0, len(stated)), fact)
    words = []
    for fact in stated:
        words += [rng.choice(FILLERS)] if rng.random() < flaws.filler else []
        words += fact
    return words


def _is_dropped(fact: Fact, flaws: Flaws, rng: random.Random) -> bool:
    return rng.random() < (flaws.drop_neglected if fact[0] in NEGLECTED_KEYS else flaws.drop)


def _maybe_wrong(fact: Fact, flaws: Flaws, rng: random.Random) -> Fact:
    key, value = fact
    if rng.random() >= flaws.hallucinate:
        return fact
    return key, rng.choice([other for other in VALUES[key] if other != value])
