"""Making the embedded edition, and the models that ship."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from recipes.start_models import Shape, Training, make_model, make_word_tokenizer, one_deterministic_thread
from recipes.tldr import (
    SHAPE,
    Preparing,
    gold_agreement,
    judged,
    make_pairs,
    prepare_tldr,
    sample_summaries,
    win_rate_of,
)
from tba.models.paths import resolve_path
from tba.tasks.tldr.posts import WORDS, first_posts, gold_scores, reference_summary, wins
from tba.tasks.tldr.reward_model import RewardTraining, load_scorer, read_pairs
from tba.tasks.tldr.summarising import reward_model_path

START_MODEL = Path(resolve_path("tba:tldr"))
pytestmark = pytest.mark.slow

TINY = Preparing(
    shape=Shape(hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, context=64),
    supervised=Training(steps=40, batch_size=16, learning_rate=1e-2, warmup_steps=5),
    reward=RewardTraining(epochs=1, batch_size=8, device="cpu"),
    num_train=20,
    num_validation=6,
    num_held_out=4,
    num_pairs=24,
    num_pairs_held_out=8,
)
FILES = (
    "train.jsonl", "validation.jsonl", "held_out.jsonl", "pairs.jsonl", "pairs_held_out.jsonl",
    "model/model.safetensors", "model/config.json", "model/tokenizer.json",
    "reward_model/model.safetensors", "reward_model/config.json", "reward_model/reward_head.safetensors",
    "reward_model/reward.json", "reward_model/tokenizer.json",
)  # fmt: skip


@pytest.fixture(scope="module")
def shipped():
    model = AutoModelForCausalLM.from_pretrained(START_MODEL, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(START_MODEL)


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_preparing_twice_gives_the_same_bytes_and_leaves_randomness_as_it_was(tmp_path):
    for seed, folder in enumerate(("a", "b")):
        torch.manual_seed(seed)  # the caller's randomness must not matter
        before = torch.get_rng_state()
        made = prepare_tldr(tmp_path / folder, preparing=TINY)
        assert torch.equal(torch.get_rng_state(), before)
    for file in FILES:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file

    # What was told is what the files give.
    pairs = read_pairs(tmp_path / "b" / "pairs_held_out.jsonl")
    assert len(pairs) == 8
    assert gold_agreement(pairs, made["reward_model"])["reward_model"] == made["reward_model_agrees_with_gold"]
    held_out = rows_of(tmp_path / "b" / "held_out.jsonl")
    assert held_out == [{"prompt": p.text, "reference": reference_summary(p)} for p in first_posts("held_out", 4)]
    assert [len(rows_of(tmp_path / "b" / f"{split}.jsonl")) for split in ("train", "validation")] == [20, 6]


def test_a_judge_prefers_gold_and_likes_length_a_little():
    post = "so place harbour day friday snack soup who aunt TL;DR:"
    # gold 1/3 and 2/3, words 2 and 4: P(first preferred) = sigmoid((-1/3 - 0.04) / 0.08) = 0.0093
    one, two = ("who aunt", True), ("who aunt place harbour", True)
    # gold 1/3 and 1/3 - 0.08, words 2 and 3: P(first preferred) = sigmoid((0.08 - 0.02) / 0.08) = 0.679
    filled = ("so who aunt", True)
    rng = random.Random(0)
    shares = [np.mean([judged(post, one, other, rng).chosen == one[0] for _ in range(2000)]) for other in (two, filled)]
    assert shares == pytest.approx([0.0093, 0.679], abs=0.03)


def test_samples_are_given_by_seed_and_place(shipped):
    posts = [post.text for post in first_posts("validation", 6)]
    a, b, other = (sample_summaries(*shipped, posts, samples_per_post=2, seed=seed) for seed in (0, 0, 1))
    assert a == b != other
    assert [len(own) for own in a] == [2] * 6


def test_the_shipped_models_are_small_and_complete(shipped):
    model, tokenizer = shipped
    for folder in (START_MODEL, reward_model_path()):
        assert sum(file.stat().st_size for file in folder.iterdir()) < 1_500_000
    fresh = make_model(make_word_tokenizer(WORDS), SHAPE, seed=0)
    assert {name: p.shape for name, p in model.named_parameters()} == {n: p.shape for n, p in fresh.named_parameters()}
    assert tokenizer.get_vocab() == make_word_tokenizer(WORDS).get_vocab()
    assert GenerationConfig.from_pretrained(START_MODEL).eos_token_id == tokenizer.eos_token_id


def test_the_shipped_start_model_wins_about_a_quarter(shipped):
    with one_deterministic_thread():
        start = win_rate_of(*shipped, first_posts("validation", 300))
    # 27.8% on 2000 posts; two standard errors of 300 posts are 5 points.
    assert 0.22 <= start <= 0.35


def test_the_shipped_reward_model_orders_fresh_pairs_as_gold_does(shipped):
    with one_deterministic_thread():
        pairs = make_pairs(*shipped, "validation", 300, seed=77)
        agreement = gold_agreement(pairs, str(reward_model_path()))
    assert agreement["reward_model"] > 0.74
    assert agreement["labels"] > agreement["reward_model"]
    assert agreement["correlation"] > 0.5


def test_the_shipped_reward_model_is_standardised_and_its_favourite_of_four_is_better_than_a_sample(shipped):
    posts = first_posts("validation", 200)
    texts, finished = [post.text for post in posts], [True] * 200
    samples = [own[0][0] for own in sample_summaries(*shipped, texts, samples_per_post=1, seed=1)]
    scorer = load_scorer(str(reward_model_path()), device="cpu")
    scores = scorer.score(texts, samples, finished)
    assert scores.mean() == pytest.approx(0.0, abs=0.25)
    assert scores.std() == pytest.approx(1.0, abs=0.2)
    # The best of a post's samples by the reward model is better by gold than any one.
    several = sample_summaries(*shipped, texts, samples_per_post=4, seed=2)
    of_four = [sample for own in several for sample in own]
    given = scorer.score(np.repeat(texts, 4).tolist(), *zip(*of_four))
    best = [own[place][0] for own, place in zip(several, given.reshape(-1, 4).argmax(axis=1))]
    references = gold_scores(texts, [reference_summary(post) for post in posts], finished)
    assert wins(gold_scores(texts, best, finished), references).mean() > 0.35
