"""The hidden gold rule, worked out by hand."""

import numpy as np
import pytest

from tba.tasks.tldr.posts import claims, gold_score, gold_scores, num_inversions, wins

POST = "so place harbour well day friday snack soup who aunt TL;DR:"  # three important facts, one trivial


@pytest.mark.parametrize(
    ("summary", "gold"),
    [
        ("who aunt place harbour day friday", 1.0),
        ("", 0.0),
        ("place harbour who aunt", 2 / 3 - 0.12),  # one pair in the wrong order
        ("day friday place harbour who aunt", 1 - 3 * 0.12),  # three pairs
        ("who aunt snack soup", 1 / 3 - 0.10),
        ("so who aunt well", 1 / 3 - 2 * 0.08),
        ("who aunt who aunt day friday", 2 / 3 - 0.15),
        ("place market", -0.30),
        ("place market place market", -0.60),  # a false claim counts each time
        ("snack pie", -0.30),  # so does a false trivial one
        ("who friday", -0.30),  # the value of another key
        ("who day friday", 1 / 3 - 0.08),  # a key by itself
        ("aunt day friday", 1 / 3 - 0.08),  # a value by itself
        ("banana day friday", 1 / 3 - 0.08),  # no word of this world
        # false, trivial, one filler, and 7 words where 6 would do
        ("who aunt place market so snack soup", 1 / 3 - 0.30 - 0.10 - 0.08 - 0.05),
        # a trivial fact stated twice: trivial once, repeated once, and 10 words
        ("who aunt place harbour day friday snack soup snack soup", 1 - 0.10 - 0.15 - 4 * 0.05),
    ],
)
def test_gold_by_hand(summary, gold):
    assert gold_score(POST, summary, finished=True) == pytest.approx(gold)
    assert gold_score(POST, summary, finished=False) == pytest.approx(gold - 0.30)


def test_recall_counts_the_important_facts_of_the_post():
    four = POST.replace("TL;DR:", "cost ten TL;DR:")
    assert gold_score(four, "who aunt place harbour day friday", finished=True) == 0.75


def test_equal_penalties_tie_whatever_their_order():
    # 1/3 + 1/3 - 0.12 - 0.08 in any order
    scores = [
        gold_score(POST, text, finished=True) for text in ("so place harbour who aunt", "place harbour who aunt so")
    ]
    assert scores[0] == scores[1]


def test_scores_of_many_are_those_of_each():
    summaries, finished = ["who aunt", "so", ""], [True, False, True]
    expected = [gold_score(POST, text, finished=end) for text, end in zip(summaries, finished)]
    np.testing.assert_array_equal(gold_scores([POST] * 3, summaries, finished), expected)


def test_claims_are_keys_with_values_and_the_rest_says_nothing():
    assert claims("so day friday noon") == ([("day", "friday")], 2)
    assert claims("day day friday day") == ([("day", "friday")], 2)


def test_inversions_are_pairs_of_which_the_larger_stands_first():
    assert [num_inversions(order) for order in ([], [3], [0, 1, 2], [2, 0, 1], [2, 1, 0])] == [0, 0, 0, 2, 3]


def test_a_tie_is_half_a_win():
    assert wins(np.array([1.0, 0.5, 0.2, 0.2]), np.array([0.5, 0.5, 0.5, 0.1])).mean() == (1 + 0.5 + 0 + 1) / 4
