"""The embedded posts and their summaries: a seeded generator of short texts with facts that matter and facts that do not.

    so place harbour well snack soup day friday ... who aunt ... TL;DR:

A fact is a key and one of its six values. A post states 3 to 5 important and 1 or 2 trivial ones among filler words, in any
order, always in 24 words; the last closes the post and asks for the summary. Its *canonical content* is its facts in key
order. A hash of that decides the split, so a held-out content cannot occur in training under any seed.

How good a summary really is says the hidden gold rule (`gold_score`). Evaluations see it, training never does. A claim is a
key followed by a value; a false one is not in the post, and counts each time. Every other word has no meaning: fillers, a
key or value by itself. Pairs in the wrong order are counted among the important facts that are true, each where it is first
stated.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from tba.tasks.task import Split

IMPORTANT = {
    "who": ("aunt", "brother", "cousin", "doctor", "landlord", "teacher"),
    "place": ("harbour", "market", "station", "castle", "garden", "library"),
    "day": ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday"),
    "hour": ("dawn", "morning", "noon", "dusk", "evening", "midnight"),
    "problem": ("leak", "fire", "theft", "noise", "delay", "quarrel"),
    "cause": ("storm", "rust", "mistake", "frost", "rumour", "mice"),
    "cost": ("ten", "twenty", "fifty", "hundred", "thousand", "million"),
    "plan": ("repair", "move", "wait", "refund", "apologise", "complain"),
}
"""Values by key of important facts. A summary should state these, in this order of keys."""
TRIVIAL = {
    "weather": ("sunny", "rainy", "windy", "foggy", "snowy", "cloudy"),
    "pet": ("cat", "dog", "parrot", "rabbit", "hamster", "tortoise"),
    "colour": ("red", "blue", "green", "yellow", "purple", "orange"),
    "snack": ("apple", "biscuit", "cheese", "toast", "soup", "pie"),
}
"""Values by key of trivial facts, which a summary should leave out."""
# The order of this dict is the order of keys: KEY_ORDER and canonical contents follow it.
VALUES = {**IMPORTANT, **TRIVIAL}
FILLERS = (
    "so", "well", "anyway", "honestly", "basically", "just", "really", "maybe", "actually", "then",
    "also", "quite", "somehow", "still", "perhaps", "okay", "right", "again", "here", "though",
)  # fmt: skip
SEPARATOR = "TL;DR:"
WORDS = (SEPARATOR, *VALUES, *(value for values in VALUES.values() for value in values), *FILLERS)
"""The vocabulary, for a tokenizer with a token for each word."""

POST_WORDS = 24
NUM_IMPORTANT = (3, 5)
NUM_TRIVIAL = (1, 2)
"""Fewest and most facts of a post."""

SPLITS_OF_HASH: tuple[Split, ...] = ("held_out", "validation", "train", "train", "train", "train", "train", "train")
"""The hash of a content, modulo 8, picks its split here."""
SEEDS: dict[Split, int] = {"train": 0, "validation": 20_250_318, "held_out": 20_250_319}
"""Seed of the posts of each split, which are the same in every run; the run's seed decides their order."""
HELD_OUT_POSTS = 2000
VALIDATION_POSTS = 1000
"""Sizes of the sets; evaluations take their first evaluate.num_prompts."""

Fact = tuple[str, str]
"""Key and value of a fact: ("day", "friday")."""


@dataclass(frozen=True, kw_only=True)
class Post:
    """Post(text="so place harbour well ... TL;DR:", facts=(("place", "harbour"), ("day", "friday"), ...))"""

    text: str
    facts: tuple[Fact, ...]
    """Facts of the post in the order of keys: the important ones, then the trivial."""

    @property
    def important(self) -> list[Fact]:
        return [fact for fact in self.facts if fact[0] in IMPORTANT]

    @property
    def trivial(self) -> list[Fact]:
        return [fact for fact in self.facts if fact[0] in TRIVIAL]

    @property
    def canonical(self) -> str:
        return "|".join(f"{key} {value}" for key, value in self.facts)

    @property
    def split(self) -> Split:
        digest = hashlib.blake2b(self.canonical.encode(), digest_size=8).digest()
        return SPLITS_OF_HASH[int.from_bytes(digest, "big") % len(SPLITS_OF_HASH)]


def draw_posts(split: Split, *, seed: int) -> Iterator[Post]:
    """Posts of one split without end."""
    rng = random.Random(seed)
    while True:
        keys = rng.sample(list(IMPORTANT), rng.randint(*NUM_IMPORTANT))
        keys += rng.sample(list(TRIVIAL), rng.randint(*NUM_TRIVIAL))
        # In key order, not in the drawn one: the canonical content must not depend on the draw.
        facts = [(key, rng.choice(VALUES[key])) for key in VALUES if key in keys]
        parts = [f"{key} {value}" for key, value in facts]
        # A fact is two words and the separator one, so every post has POST_WORDS words.
        parts += [rng.choice(FILLERS) for _ in range(POST_WORDS - 1 - 2 * len(facts))]
        rng.shuffle(parts)
        post = Post(text=" ".join([*parts, SEPARATOR]), facts=tuple(facts))
        if post.split == split:
            yield post


@cache
def first_posts(split: Split, num_posts: int) -> tuple[Post, ...]:
    """The first posts of a split's own stream, all of different contents."""
    found: dict[str, Post] = {}
    for post in draw_posts(split, seed=SEEDS[split]):
        if len(found) == num_posts:
            break
        found.setdefault(post.canonical, post)
    return tuple(found.values())


MAX_SUMMARY_TOKENS = 14
"""Longest summary in tokens, its EOS included: generate.max_new_tokens of this task."""
NEGLECTED_KEYS = tuple(IMPORTANT)[5:]
"""Important keys that a sloppy writer mostly leaves out."""


@dataclass(frozen=True, kw_only=True)
class Flaws:
    """Probabilities of what goes wrong with a summary, which comes by chance, item by item."""

    drop: float
    drop_neglected: float
    """Probability that an important fact of NEGLECTED_KEYS is left out; `drop` is that of the others."""
    hallucinate: float
    """Probability that a stated fact has another value than in the post."""
    swap: float
    """Probability that two important facts that follow each other change places."""
    trivial: float
    """Probability that a trivial fact is stated, somewhere."""
    filler: float
    """Probability that a filler word stands before a stated fact."""


REFERENCE = Flaws(drop=0.15, drop_neglected=0.15, hallucinate=0.06, swap=0.08, trivial=0.10, filler=0.10)


def reference_summary(post: Post) -> str:
    """Summary that a policy is compared with, always the same for a post."""
    # Seeded by the text: a str seed does not depend on PYTHONHASHSEED.
    return draw_summary(post, REFERENCE, random.Random(post.text))


def draw_summary(post: Post, flaws: Flaws, rng: random.Random) -> str:
    """Summary with flaws, drawn again while it is empty or too long to end by itself."""
    words: list[str] = []
    while not 0 < len(words) < MAX_SUMMARY_TOKENS:
        # Order of the flaws: dropped and wrong facts first, then swaps, then trivial facts, then fillers.
        stated: list[Fact] = []
        for key, value in post.important:
            if rng.random() < (flaws.drop_neglected if key in NEGLECTED_KEYS else flaws.drop):
                continue
            if rng.random() < flaws.hallucinate:
                value = rng.choice([other for other in VALUES[key] if other != value])
            stated.append((key, value))
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
    return " ".join(words)


KEY_ORDER = {key: index for index, key in enumerate(VALUES)}
ALL_VALUES = frozenset(value for values in VALUES.values() for value in values)
DECIMALS = 9
"""Decimals of a gold score: equal penalties that were added up in another order must tie."""


def gold_score(post: str, summary: str, *, finished: bool) -> float:
    """The recall of the important facts less the penalties of a summary: at most 1. `finished`: it ended with an EOS."""
    # The post is read by the same grammar as a summary; its fillers and separator claim nothing.
    facts = set(claims(post)[0])
    num_important = sum(key in IMPORTANT for key, _ in facts)
    stated, num_meaningless = claims(summary)
    true = [claim for claim in stated if claim in facts]
    distinct = list(dict.fromkeys(true))
    # Places in key order: a pair of them is in the wrong order where the larger comes first.
    important = [KEY_ORDER[key] for key, _ in distinct if key in IMPORTANT]
    penalty = (
        0.30 * (len(stated) - len(true))  # false claims
        + 0.10 * (len(distinct) - len(important))  # trivial facts
        + 0.08 * num_meaningless
        + 0.15 * (len(true) - len(distinct))  # repeated facts
        + 0.12 * num_inversions(important)
        + 0.05 * max(0, len(summary.split()) - 2 * num_important)  # extra words
        + 0.30 * (not finished)
    )
    return round(len(important) / max(1, num_important) - penalty, DECIMALS)


def gold_scores(posts: Sequence[str], summaries: Sequence[str], finished: Sequence[bool]) -> np.ndarray:
    """Gold scores of summaries, float64 [N]."""
    return np.array([gold_score(post, summary, finished=end) for post, summary, end in zip(posts, summaries, finished)])


def wins(scores: np.ndarray, reference_scores: np.ndarray) -> np.ndarray:
    """Wins, float64 [N]: 1 for a summary that scores above its reference, 1/2 for a tie, else 0."""
    return (scores > reference_scores) + 0.5 * (scores == reference_scores)


def claims(text: str) -> tuple[list[Fact], int]:
    """Claims of a text, in order, and the number of its words that claim nothing.

    claims("so day friday noon") == ([("day", "friday")], 2)
    """
    words, found, num_other = text.split(), list[Fact](), 0
    position = 0
    while position < len(words):
        pair = words[position : position + 2]
        # The value may be of another key (`day noon`): that is a claim too, and false.
        if len(pair) == 2 and pair[0] in VALUES and pair[1] in ALL_VALUES:
            found.append((pair[0], pair[1]))
            position += 2
        else:
            num_other += 1
            position += 1
    return found, num_other


def num_inversions(order: Sequence[int]) -> int:
    """Number of pairs of which the larger stands first: num_inversions([2, 0, 1]) == 2."""
    return sum(first > second for index, first in enumerate(order) for second in order[index + 1 :])
