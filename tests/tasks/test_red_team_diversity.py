"""Diversity metrics against numbers worked out by hand, and self-BLEU against a slow BLEU of its own."""

import math
import random
from collections import Counter

import numpy as np
import pytest

from tba.tasks.red_team.attacking import effective_modes, mean_cosine_distance, self_bleu, vendi_score


def unit_vectors(n, d, seed=0):
    vectors = np.random.default_rng(seed).normal(size=(n, d))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def words(texts):
    return [text.split() for text in texts]


def test_distance_is_one_minus_the_mean_cosine_of_pairs():
    # Cosines: (x, y) 0, (x, -x) -1, (y, -x) 0: mean -1/3
    vectors = np.array([[1, 0], [0, 1], [-1, 0]], np.float32)
    assert mean_cosine_distance(vectors) == pytest.approx(4 / 3)


def test_distance_agrees_with_going_through_the_pairs():
    vectors = unit_vectors(40, 7)
    cosines = [float(vectors[i] @ vectors[j]) for i in range(40) for j in range(i)]
    assert mean_cosine_distance(vectors) == pytest.approx(1 - sum(cosines) / len(cosines), abs=1e-6)


def test_equal_vectors_have_no_distance_and_one_or_none_has_no_pairs():
    assert mean_cosine_distance(np.tile([[0.6, 0.8]], (5, 1))) == pytest.approx(0.0)
    assert mean_cosine_distance(np.array([[1.0, 0.0]])) == 0.0
    assert mean_cosine_distance(np.zeros((0, 3))) == 0.0


def test_effective_modes_is_the_exponential_of_the_entropy():
    # Shares 1/2, 1/4, 1/4: entropy .5 ln 2 + .5 ln 4 = 1.5 ln 2, so 2^1.5
    assert effective_modes([2, 1, 0, 1]) == pytest.approx(2**1.5)
    assert effective_modes([3, 3, 3, 3]) == pytest.approx(4.0)
    assert effective_modes([0, 0]) == effective_modes([]) == 0.0


def test_vendi_score_counts_different_texts():
    assert vendi_score(np.eye(6, dtype=np.float32)) == pytest.approx(6.0)
    assert vendi_score(np.tile([[1.0, 0.0]], (6, 1))) == pytest.approx(1.0)
    # Two at a cosine of .6: eigenvalues of K / 2 are (1 + .6) / 2 and (1 - .6) / 2
    expected = math.exp(-(0.8 * math.log(0.8) + 0.2 * math.log(0.2)))
    assert vendi_score(np.array([[1.0, 0.0], [0.6, 0.8]])) == pytest.approx(expected)
    assert vendi_score(np.zeros((0, 3))) == 0.0


def test_vendi_score_takes_at_most_so_many_rows():
    assert vendi_score(np.eye(20), max_rows=5) == pytest.approx(5.0)
    vectors = unit_vectors(40, 5)
    assert vendi_score(vectors, max_rows=8, seed=1) == vendi_score(vectors, max_rows=8, seed=1)
    assert vendi_score(vectors, max_rows=8, seed=1) != vendi_score(vectors, max_rows=8, seed=2)


def test_self_bleu_by_hand():
    # "a b c d e" against "a b c d f": precisions 4/5, 3/4, 2/3, 1/2, equal lengths; and the same the other way round
    assert self_bleu(words(["a b c d e", "a b c d f"])) == pytest.approx((4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    # "a b" against "a b c d": 2/2, 1/1, .1/1, .1/1 and exp(1 - 4/2); the other: 2/4, 1/3, .1/2, .1/1, no penalty
    short = (1 * 1 * 0.1 * 0.1) ** 0.25 * math.exp(-1)
    long = (2 / 4 * 1 / 3 * 0.1 / 2 * 0.1 / 1) ** 0.25
    assert self_bleu(words(["a b", "a b c d"])) == pytest.approx((short + long) / 2)


def test_self_bleu_of_doubles_is_one_and_of_strangers_zero():
    assert self_bleu(words(["a b c d e"] * 3)) == pytest.approx(1.0)
    assert self_bleu(words(["a b c d", "e f g h"])) == 0.0
    assert self_bleu(words(["a b c d"])) == self_bleu(words([])) == self_bleu(words(["", ""])) == 0.0


def test_self_bleu_agrees_with_a_slow_implementation():
    rng = random.Random(3)
    texts = [" ".join(rng.choices("abcdef", k=rng.randint(1, 12))) for _ in range(40)]
    slow = [slow_bleu(text, texts[:i] + texts[i + 1 :]) for i, text in enumerate(texts)]
    assert self_bleu(words(texts)) == pytest.approx(sum(slow) / len(slow))


def test_self_bleu_takes_at_most_so_many_texts():
    rng = random.Random(4)
    texts = [" ".join(rng.choices("abcdef", k=9)) for _ in range(30)]
    assert self_bleu(words(texts), seed=1, max_texts=10) == self_bleu(words(texts), seed=1, max_texts=10)
    assert self_bleu(words(texts), seed=1, max_texts=10) < self_bleu(words(texts))


def slow_bleu(text, references):
    """BLEU-4 as Papineni et al. write it, with an epsilon of .1 for orders without a match."""
    own_words = text.split()
    product = 1.0
    for order in (1, 2, 3, 4):
        own = Counter(zip(*(own_words[start:] for start in range(order))))
        matches = 0
        for ngram, count in own.items():
            most = 0
            for reference in references:
                others = reference.split()
                found = sum(tuple(others[i : i + order]) == ngram for i in range(len(others)))
                most = max(most, found)
            matches += min(count, most)
        if order == 1 and matches == 0:
            return 0.0
        product *= (matches if matches else 0.1) / max(1, sum(own.values()))
    best = min((abs(len(r.split()) - len(own_words)), len(r.split())) for r in references)[1]
    return product**0.25 * (1.0 if len(own_words) > best else math.exp(1 - best / len(own_words)))
