"""The embedded posts, their splits, and the summaries with flaws."""

import random
from itertools import islice

import pytest

from recipes.start_models import make_word_tokenizer
from recipes.tldr import SLOPPY
from tba.tasks.tldr.posts import (
    FILLERS,
    HELD_OUT_POSTS,
    IMPORTANT,
    MAX_SUMMARY_TOKENS,
    REFERENCE,
    SEPARATOR,
    TRIVIAL,
    VALIDATION_POSTS,
    VALUES,
    WORDS,
    Flaws,
    Post,
    claims,
    draw_posts,
    draw_summary,
    first_posts,
    gold_score,
    gold_scores,
    reference_summary,
    wins,
)

FAULTLESS = Flaws(drop=0, drop_neglected=0, hallucinate=0, swap=0, trivial=0, filler=0)
POST = Post(
    text="so place harbour well cost ten snack soup who aunt TL;DR:",
    facts=(("who", "aunt"), ("place", "harbour"), ("cost", "ten"), ("snack", "soup")),
)


def test_the_world_has_twelve_keys_of_six_values_and_twenty_fillers_all_different():
    assert (len(IMPORTANT), len(TRIVIAL), len(FILLERS)) == (8, 4, 20)
    assert all(len(values) == 6 for values in VALUES.values())
    assert len(set(WORDS)) == len(WORDS) == 12 + 72 + 20 + 1


def test_a_post_is_24_words_with_its_facts_among_fillers_and_the_separator_last():
    for post in islice(draw_posts("train", seed=5), 200):
        words = post.text.split(" ")
        assert len(words) == 24
        assert words[-1] == SEPARATOR
        assert 3 <= len(post.important) <= 5
        assert 1 <= len(post.trivial) <= 2
        stated, num_other = claims(post.text)
        assert sorted(stated) == sorted(post.facts)
        assert num_other == 24 - 2 * len(post.facts)  # fillers and the separator
        assert [key for key, _ in post.facts] == [key for key in VALUES if key in dict(post.facts)]


def test_a_post_is_one_token_per_word_and_comes_back_from_its_tokens():
    tokenizer = make_word_tokenizer(WORDS)
    post = next(draw_posts("train", seed=0))
    token_ids = tokenizer(post.text)["input_ids"]
    assert len(token_ids) == 25
    assert token_ids[0] == tokenizer.bos_token_id
    assert tokenizer.unk_token_id not in token_ids
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == post.text


def test_no_content_is_in_two_splits_under_any_seed():
    contents = {
        split: {post.canonical for seed in (0, 1, 2) for post in islice(draw_posts(split, seed=seed), 600)}
        for split in ("train", "validation", "held_out")
    }
    assert not contents["train"] & contents["held_out"]
    assert not contents["train"] & contents["validation"]
    assert not contents["validation"] & contents["held_out"]


def test_the_split_depends_on_the_facts_and_not_on_the_words_around_them():
    post = next(draw_posts("held_out", seed=0))
    other = Post(text="well " + post.text, facts=post.facts)
    assert other.split == "held_out"


def test_the_sets_to_report_and_tune_on_are_fixed_and_without_repeats():
    for split, size in (("held_out", HELD_OUT_POSTS), ("validation", VALIDATION_POSTS)):
        posts = first_posts(split, size)
        assert len({post.canonical for post in posts}) == len(posts) == size
        assert posts[:10] == first_posts(split, 10)


def test_a_summary_without_flaws_states_the_important_facts_in_the_order_of_keys():
    assert draw_summary(POST, FAULTLESS, random.Random(0)) == "who aunt place harbour cost ten"


@pytest.mark.parametrize(
    ("flaw", "summary"),
    [
        ({"drop": 1}, "cost ten"),
        ({"drop_neglected": 1}, "who aunt place harbour"),
        ({"swap": 1}, "place harbour cost ten who aunt"),  # the first moves on with every exchange
    ],
)
def test_each_flaw_does_what_it_says(flaw, summary):
    assert draw_summary(POST, Flaws(**(vars(FAULTLESS) | flaw)), random.Random(0)) == summary


def test_hallucinations_trivial_facts_and_fillers_are_added_where_they_should():
    wrong = draw_summary(POST, Flaws(**(vars(FAULTLESS) | {"hallucinate": 1})), random.Random(0))
    assert [key for key, _ in claims(wrong)[0]] == ["who", "place", "cost"]
    assert not set(claims(wrong)[0]) & set(POST.facts)
    more = draw_summary(POST, Flaws(**(vars(FAULTLESS) | {"trivial": 1, "filler": 1})), random.Random(0))
    assert set(claims(more)[0]) == set(POST.facts)
    assert all(word in FILLERS for word in more.split()[::3])


def test_references_are_always_the_same_and_sloppy_summaries_fit_the_limit():
    posts = first_posts("validation", 300)
    rng = random.Random(0)
    for post in posts:
        assert reference_summary(post) == reference_summary(post)
        assert 0 < len(draw_summary(post, SLOPPY, rng).split()) < MAX_SUMMARY_TOKENS
    assert SLOPPY.drop > REFERENCE.drop


def test_perfect_summaries_beat_nine_references_in_ten():
    # A reference is perfect with probability E[(.85 * .94 * .9)^n * .92^(n - 1)] * E[.9^trivial] = .188, and then ties:
    # 1 - .188 / 2 = .906, with a standard error of .006 for 1000 posts.
    posts = first_posts("validation", 1000)
    texts, finished = [post.text for post in posts], [True] * len(posts)
    perfect = gold_scores(texts, [draw_summary(post, FAULTLESS, random.Random(0)) for post in posts], finished)
    references = gold_scores(texts, [reference_summary(post) for post in posts], finished)
    assert (perfect == 1.0).all()
    assert wins(perfect, references).mean() == pytest.approx(0.906, abs=0.018)
    assert gold_score(posts[0].text, reference_summary(posts[0]), finished=True) == references[0]
