"""Make the embedded edition's data, start model and reward model:

    tba prepare tldr --output prepared

writes train.jsonl, validation.jsonl, held_out.jsonl (`prompt`, `reference`), pairs.jsonl, pairs_held_out.jsonl (`prompt`,
`chosen`, `rejected`), model/ and reward_model/ under prepared/. Shipped beside this file are the two models, as
`start_model/` and `reward_model/`.

**The start model is flawed on purpose**: it learns from sloppy summaries. **So is the reward model**: it sees some thousand
pairs of the start model's samples, with labels by noisy judges who like length a little, and knows nothing of flaws that the
start model does not have. A policy that follows it too far gets worse by the gold rule.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from tba.config import TaskConfig
from tba.generate.native.engine import NativeEngine
from tba.tasks.base import Split
from tba.tasks.data.prompts import make_prompt
from tba.tasks.evaluation import respond
from tba.tasks.start_models import Shape, Training, make_word_tokenizer, one_deterministic_thread, train_start_model
from tba.tasks.tldr.reward_model import load_scorer
from tba.tasks.tldr.train_reward import Pair, RewardTraining, train_reward_model, write_pairs
from tba.tasks.tldr.world import (
    HELD_OUT_POSTS,
    MAX_SUMMARY_TOKENS,
    SEEDS,
    VALIDATION_POSTS,
    WORDS,
    Post,
    draw_posts,
    first_posts,
    gold_score,
    gold_scores,
    reference_summary,
    sloppy_summary,
    win_rate,
)
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
    started = time.monotonic()
    disable_progress_bar()
    output.mkdir(parents=True, exist_ok=True)
    write_posts(output / "train.jsonl", list(islice(draw_posts("train", seed=SEEDS["train"]), preparing.num_train)))
    write_posts(output / "validation.jsonl", first_posts("validation", preparing.num_validation))
    write_posts(output / "held_out.jsonl", first_posts("held_out", preparing.num_held_out))
    tokenizer = make_word_tokenizer(WORDS)
    with one_deterministic_thread():
        model = make_start_model(output / "model", tokenizer, preparing)
        pairs = make_pairs(model, tokenizer, "train", preparing.num_pairs, seed=PAIRS_SEED)
        measured = make_pairs(model, tokenizer, "validation", preparing.num_pairs_held_out, seed=PAIRS_HELD_OUT_SEED)
        write_pairs(output / "pairs.jsonl", pairs)
        write_pairs(output / "pairs_held_out.jsonl", measured)
        reward = train_reward_model(
            str(output / "model"),
            output / "pairs.jsonl",
            output / "reward_model",
            preparing.reward,
            held_out=output / "pairs_held_out.jsonl",
        )
        start = win_rate_of(model, tokenizer, first_posts("validation", preparing.num_validation), SAMPLING)
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
        "seconds": round(time.monotonic() - started, 1),
    }


def write_posts(path: Path, posts: tuple[Post, ...] | list[Post]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for post in posts:
            file.write(json.dumps({"prompt": post.text, "reference": reference_summary(post)}) + "\n")


def make_start_model(folder: Path, tokenizer: PreTrainedTokenizerBase, preparing: Preparing) -> PreTrainedModel:
    """Trained, saved in bfloat16, and read back in float32: the very numbers that are shipped."""
    model = train_start_model(sloppy_pairs, tokenizer, preparing.shape, preparing.supervised)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def sloppy_pairs(rng: random.Random) -> Iterator[tuple[str, str]]:
    return ((post.text, sloppy_summary(post, rng)) for post in draw_posts("train", seed=SUPERVISED_SEED))


def make_pairs(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, split: Split, num_pairs: int, *, seed: int
) -> list[Pair]:
    """Two different samples of each post, ended by themselves, in the order that a judge prefers."""
    posts, rng, pairs = draw_posts(split, seed=seed), random.Random(seed), list[Pair]()
    while len(pairs) < num_pairs:
        texts = [post.text for post in islice(posts, num_pairs)]
        samples = sample_summaries(
            model, tokenizer, texts, samples_per_post=2, sampling=SAMPLING, seed=seed + len(pairs)
        )
        pairs += [judged(text, a, b, rng) for text, (a, b) in zip(texts, samples) if _can_be_compared(a, b)]
    return pairs[:num_pairs]


def judged(post: str, a: SampledSummary, b: SampledSummary, rng: random.Random) -> Pair:
    """P(a preferred) = sigmoid((gold a - gold b + 0.02 (words of a - words of b)) / 0.08)"""
    worth_a, worth_b = (
        gold_score(post, sample.text, finished=sample.finished) + LIKING_FOR_LENGTH * len(sample.text.split())
        for sample in (a, b)
    )
    prefers_a = rng.random() < 1 / (1 + math.exp((worth_b - worth_a) / JUDGES_NOISE))
    return Pair(post, a.text, b.text) if prefers_a else Pair(post, b.text, a.text)


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


def win_rate_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, posts: tuple[Post, ...], sampling: Sampling
) -> float:
    """Win rate of one sample of each post, by the gold rule, against the reference summaries."""
    texts = [post.text for post in posts]
    sampled = [
        own[0] for own in sample_summaries(model, tokenizer, texts, samples_per_post=1, sampling=sampling, seed=0)
    ]
    scores = gold_scores(texts, [sample.text for sample in sampled], [sample.finished for sample in sampled])
    return win_rate(scores, gold_scores(texts, [reference_summary(post) for post in posts], [True] * len(posts)))


def _can_be_compared(a: SampledSummary, b: SampledSummary) -> bool:
    return a.finished and b.finished and a.text != b.text and bool(a.text) and bool(b.text)


class SampledSummary(NamedTuple):
    """SampledSummary(text="place harbour day friday", finished=True)"""

    text: str
    """Text of the summary, without special tokens."""
    finished: bool
    """Whether it ended by itself, with an EOS."""


def sample_summaries(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    posts: Sequence[str],
    *,
    samples_per_post: int,
    sampling: Sampling,
    seed: int,
) -> list[list[SampledSummary]]:
    """For each post, its samples in order. A sample depends on the seed and the post's place in the list."""
    longest = int(model.config.max_position_embeddings)
    prompts = [
        make_prompt(id=str(i), text=post, columns={}, tokenizer=tokenizer, max_tokens=longest - sampling.max_new_tokens)
        for i, post in enumerate(posts)
    ]
    engine = NativeEngine(
        model, stop_ids=[tokenizer.eos_token_id], seed=seed, slots=SLOTS, max_length=longest, dtype=torch.float32
    )
    groups = respond(engine, tokenizer, prompts, samples_per_prompt=samples_per_post, sampling=sampling)
    return [
        [SampledSummary(text, completion.finish == "stop") for text, completion in zip(group.texts, group.completions)]
        for group in groups
    ]
