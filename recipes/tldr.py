"""Make the embedded edition's data, start model and reward model:

    python -m recipes tldr --output prepared

writes train.jsonl, validation.jsonl, held_out.jsonl (`prompt`, `reference`), pairs.jsonl, pairs_held_out.jsonl (`prompt`,
`chosen`, `rejected`), model/ and reward_model/ under prepared/. The two models ship as
`src/tba/tasks/tldr/start_model/` and `reward_model/`.

**The start model is flawed on purpose**: it learns from sloppy summaries. **So is the reward model**: it sees some thousand
pairs of the start model's samples, with labels by noisy judges who like length a little, and knows nothing of flaws that the
start model does not have. A policy that follows it too far gets worse by the gold rule.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from recipes.start_models import (
    Shape,
    Training,
    make_word_tokenizer,
    one_deterministic_thread,
    sample_texts,
    save_rounded,
    train_start_model,
    write_rows,
)
from tba.config import TaskConfig
from tba.tasks.task import Split
from tba.tasks.tldr.posts import (
    HELD_OUT_POSTS,
    MAX_SUMMARY_TOKENS,
    SEEDS,
    VALIDATION_POSTS,
    WORDS,
    Flaws,
    Post,
    draw_posts,
    draw_summary,
    first_posts,
    gold_score,
    gold_scores,
    reference_summary,
    wins,
)
from tba.tasks.tldr.reward_model import Pair, RewardTraining, load_scorer, train_reward_model
from tba.types import Sampling

SHAPE = Shape(hidden_size=128, num_key_value_heads=4, context=64)
SUPERVISED = Training(steps=800, batch_size=64)
REWARD = RewardTraining(device="cpu")
SUPERVISED_SEED, PAIRS_SEED, PAIRS_HELD_OUT_SEED = 1, 2, 3
"""Posts of streams that RL does not train on: what the models have seen should not be easier than the rest."""
SAMPLING = Sampling(max_new_tokens=MAX_SUMMARY_TOKENS)
LIKING_FOR_LENGTH = 0.02
"""What a judge of pairs adds to the gold score for each word."""
JUDGES_NOISE = 0.08
"""Scale of gold differences that judges often get wrong."""
SLOTS = 128
SLOPPY = Flaws(drop=0.20, drop_neglected=0.50, hallucinate=0.03, swap=0.10, trivial=0.45, filler=0.10)
"""Flaws of the summaries that the start model learns from."""


Sample = tuple[str, bool]
"""A summary, and whether it ended by itself, with an EOS."""


@dataclass(frozen=True, kw_only=True)
class Preparing:
    """Sizes and trainings; the defaults make the shipped models."""

    shape: Shape = SHAPE
    supervised: Training = SUPERVISED
    reward: RewardTraining = REWARD
    num_train: int = TaskConfig().num_train_prompts
    num_validation: int = VALIDATION_POSTS
    num_held_out: int = HELD_OUT_POSTS
    num_pairs: int = 5000
    num_pairs_held_out: int = 1000


SHIPPED = Preparing()


def prepare_tldr(output: Path, *, preparing: Preparing = SHIPPED) -> dict[str, Any]:
    """Write data and models; returns what was made and how good it is. The same machine makes the same bytes."""
    disable_progress_bar()
    splits = {
        "train": tuple(islice(draw_posts("train", seed=SEEDS["train"]), preparing.num_train)),
        "validation": first_posts("validation", preparing.num_validation),
        "held_out": first_posts("held_out", preparing.num_held_out),
    }
    for name, posts in splits.items():
        write_rows(
            output / f"{name}.jsonl", [{"prompt": post.text, "reference": reference_summary(post)} for post in posts]
        )
    tokenizer = make_word_tokenizer(WORDS)
    with one_deterministic_thread():
        model: PreTrainedModel = train_start_model(sloppy_pairs, tokenizer, preparing.shape, preparing.supervised)
        model = save_rounded(model, tokenizer, output / "model")
        pairs = make_pairs(model, tokenizer, "train", preparing.num_pairs, seed=PAIRS_SEED)
        measured = make_pairs(model, tokenizer, "validation", preparing.num_pairs_held_out, seed=PAIRS_HELD_OUT_SEED)
        for name, own in (("pairs", pairs), ("pairs_held_out", measured)):
            rows = [{"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected} for pair in own]
            write_rows(output / f"{name}.jsonl", rows)
        reward = train_reward_model(
            str(output / "model"),
            output / "pairs.jsonl",
            output / "reward_model",
            preparing.reward,
            held_out=output / "pairs_held_out.jsonl",
        )
        start = win_rate_of(model, tokenizer, splits["validation"])
        agreement = gold_agreement(measured, str(output / "reward_model"))
    return {
        "model": str(output / "model"),
        "reward_model": reward["model"],
        "parameters": model.num_parameters(),
        "win_rate": start,
        "labels_agree_with_gold": agreement["labels"],
        "reward_model_agrees_with_labels": reward["accuracy"],
        "reward_model_agrees_with_gold": agreement["reward_model"],
        "correlation_with_gold": agreement["correlation"],
    }


def sloppy_pairs(rng: random.Random) -> Iterator[tuple[str, str]]:
    return ((post.text, draw_summary(post, SLOPPY, rng)) for post in draw_posts("train", seed=SUPERVISED_SEED))


def make_pairs(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, split: Split, num_pairs: int, *, seed: int
) -> list[Pair]:
    """Two different samples of each post, ended by themselves, in the order that a judge prefers."""
    posts, rng, pairs = draw_posts(split, seed=seed), random.Random(seed), list[Pair]()
    while len(pairs) < num_pairs:
        texts = [post.text for post in islice(posts, num_pairs)]
        samples = sample_summaries(model, tokenizer, texts, samples_per_post=2, seed=seed + len(pairs))
        pairs += [judged(text, a, b, rng) for text, (a, b) in zip(texts, samples) if _can_be_compared(a, b)]
    return pairs[:num_pairs]


def judged(post: str, a: Sample, b: Sample, rng: random.Random) -> Pair:
    """P(a preferred) = sigmoid((gold a - gold b + 0.02 (words of a - words of b)) / 0.08)"""
    worth_a, worth_b = (
        gold_score(post, text, finished=finished) + LIKING_FOR_LENGTH * len(text.split()) for text, finished in (a, b)
    )
    prefers_a = rng.random() < 1 / (1 + math.exp((worth_b - worth_a) / JUDGES_NOISE))
    return Pair(post, a[0], b[0]) if prefers_a else Pair(post, b[0], a[0])


def gold_agreement(pairs: list[Pair], reward_model: str) -> dict[str, float]:
    """Share of pairs, of those that gold does not call equal, which labels and reward model order as gold does; and the
    correlation of the reward model's scores with gold over all responses."""
    prompts, finished = [pair.prompt for pair in pairs], [True] * len(pairs)
    scorer = load_scorer(reward_model, device="cpu", dtype="float32")
    chosen, rejected = [pair.chosen for pair in pairs], [pair.rejected for pair in pairs]
    proxies = [scorer.score(prompts, texts, finished) for texts in (chosen, rejected)]
    golds = [gold_scores(prompts, texts, finished) for texts in (chosen, rejected)]
    gap = golds[0] - golds[1]
    agrees = (proxies[0] - proxies[1]) * gap > 0
    return {
        "labels": float(np.mean(gap[gap != 0] > 0)),
        "reward_model": float(np.mean(agrees[gap != 0])),
        "correlation": float(np.corrcoef(np.concatenate(proxies), np.concatenate(golds))[0, 1]),
    }


def win_rate_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, posts: Sequence[Post]) -> float:
    """Win rate of one sample of each post, by the gold rule, against the reference summaries."""
    texts = [post.text for post in posts]
    samples = [own[0] for own in sample_summaries(model, tokenizer, texts, samples_per_post=1, seed=0)]
    scores = gold_scores(texts, *zip(*samples))
    return float(
        np.mean(wins(scores, gold_scores(texts, [reference_summary(post) for post in posts], [True] * len(posts))))
    )


def _can_be_compared(a: Sample, b: Sample) -> bool:
    return a[1] and b[1] and a[0] != b[0] and bool(a[0]) and bool(b[0])


def sample_summaries(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    posts: Sequence[str],
    *,
    samples_per_post: int,
    seed: int,
) -> list[list[Sample]]:
    """For each post, its samples in order. A sample depends on the seed and the post's place in the list."""
    places = [str(place) for place in range(len(posts))]
    return sample_texts(
        *(model, tokenizer, places, posts),
        samples_per_prompt=samples_per_post,
        sampling=SAMPLING,
        seed=seed,
        slots=SLOTS,
    )
