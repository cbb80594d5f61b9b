"""The hidden gold rule of the embedded edition: how good a summary really is. Evaluations see it, training never does.

    gold = recall of the important facts
           - 0.30 for each false claim        - 0.10 for each trivial fact       - 0.08 for each word without meaning
           - 0.15 for each repeated fact      - 0.12 for each pair in the wrong order
           - 0.05 for each word beyond those of the perfect summary              - 0.30 if it did not end by itself

A claim is a key followed by a value, right or wrong; a false one is not in the post, and counts each time. Every other word
has no meaning: fillers, a key or value by itself. Pairs in the wrong order are counted among the important facts that are
true, each where it is first stated.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tba.tasks.tldr.world import IMPORTANT, VALUES, Fact

FALSE_CLAIM = 0.30
TRIVIAL_FACT = 0.10
MEANINGLESS_WORD = 0.08
REPEATED_FACT = 0.15
WRONG_ORDER = 0.12
EXTRA_WORD = 0.05
NO_END = 0.30

KEY_ORDER = {key: index for index, key in enumerate(VALUES)}
ALL_VALUES = frozenset(value for values in VALUES.values() for value in values)
DECIMALS = 9
"""Equal penalties that were added up in another order must tie."""


def gold_score(post: str, summary: str, *, finished: bool) -> float:
    """The gold score of a summary: at most 1, that of the perfect one. `finished`: it ended by itself, with an EOS."""
    facts = set(claims(post)[0])
    num_important = sum(key in IMPORTANT for key, _ in facts)
    stated, num_meaningless = claims(summary)
    true = [claim for claim in stated if claim in facts]
    distinct = list(dict.fromkeys(true))
    important = [KEY_ORDER[key] for key, _ in distinct if key in IMPORTANT]
    penalty = (
        FALSE_CLAIM * (len(stated) - len(true))
        + TRIVIAL_FACT * (len(distinct) - len(important))
        + MEANINGLESS_WORD * num_meaningless
        + REPEATED_FACT * (len(true) - len(distinct))
        + WRONG_ORDER * num_inversions(important)
        + EXTRA_WORD * max(0, len(summary.split()) - 2 * num_important)
        + NO_END * (not finished)
    )
    return round(len(important) / max(1, num_important) - penalty, DECIMALS)


def gold_scores(posts: Sequence[str], summaries: Sequence[str], finished: Sequence[bool]) -> np.ndarray:
    """float64 [N]."""
    return np.array([gold_score(post, summary, finished=end) for post, summary, end in zip(posts, summaries, finished)])


def wins(scores: np.ndarray, reference_scores: np.ndarray) -> np.ndarray:
    """float64 [N]: 1 for a summary that scores above its reference, 1/2 for a tie, else 0."""
    return (scores > reference_scores) + 0.5 * (scores == reference_scores)


def win_rate(scores: np.ndarray, reference_scores: np.ndarray) -> float:
    """Share of summaries that score above their reference; a tie is half a win."""
    return float(np.mean(wins(scores, reference_scores)))


def claims(text: str) -> tuple[list[Fact], int]:
    """What a text claims, in order, and how many of its words claim nothing.

    claims("so day friday noon") == ([("day", "friday")], 2)
    """
    words, found, num_other = text.split(), list[Fact](), 0
    position = 0
    while position < len(words):
        pair = words[position : position + 2]
        if len(pair) == 2 and pair[0] in VALUES and pair[1] in ALL_VALUES:
            found.append((pair[0], pair[1]))
            position += 2
        else:
            num_other += 1
            position += 1
    return found, num_other


def num_inversions(order: Sequence[int]) -> int:
    """Pairs of which the larger stands first: num_inversions([2, 0, 1]) == 2."""
    return sum(first > second for index, first in enumerate(order) for second in order[index + 1 :])
