"""Summaries sampled from a model, quickly: what reward models are trained on and start models are measured by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tba.generate.native import NativeEngine
from tba.tasks.encoding import make_prompt
from tba.types import Completion, Request, Sampling

SLOTS = 128


class Sampled(NamedTuple):
    """Sampled(text="place harbour day friday", finished=True)"""

    text: str
    """Without special tokens."""
    finished: bool
    """It ended by itself, with an EOS."""


def sample_summaries(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    posts: Sequence[str],
    *,
    samples_per_post: int,
    sampling: Sampling,
    seed: int,
) -> list[list[Sampled]]:
    """For each post, its samples in order. A sample depends on the seed and the post's place in the list."""
    longest = int(model.config.max_position_embeddings)
    prompts = [
        make_prompt(id=str(i), text=post, columns={}, tokenizer=tokenizer, max_tokens=longest - sampling.max_new_tokens)
        for i, post in enumerate(posts)
    ]
    engine = NativeEngine(
        model, stop_ids=[tokenizer.eos_token_id], seed=seed, slots=SLOTS, max_length=longest, dtype=torch.float32
    )
    completions: list[list[Completion]] = [[] for _ in posts]
    requests = [Request(prompt=prompt) for prompt in prompts]
    for completion in engine.generate(requests, samples_per_prompt=samples_per_post, sampling=sampling):
        completions[int(completion.prompt_id)].append(completion)
    return [[_sampled(c, tokenizer) for c in sorted(own, key=lambda c: c.sample_index)] for own in completions]


def _sampled(completion: Completion, tokenizer: PreTrainedTokenizerBase) -> Sampled:
    text = tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)
    return Sampled(text, completion.finish == "stop")
