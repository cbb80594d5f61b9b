"""Start models of the embedded tasks: small Llamas trained from scratch on pairs of prompt and answer, and their tokenizers.

One thread and deterministic kernels: the same machine makes the same bytes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from tba.engine.native.engine import NativeEngine
from tba.models.load import use_cpu
from tba.tasks.data.make_prompt import make_prompt
from tba.tasks.evaluation import respond
from tba.tasks.tldr.reward_model import fit
from tba.types import Sampling

BATCHES_SORTED_TOGETHER = 8
"""Sequences of so many batches are sorted by length before they are cut into batches: less padding."""
IGNORED = -100
"""Label of the tokens that are not trained on: prompts and padding."""
Pairs = Callable[[random.Random], Iterator[tuple[str, str]]]
"""Prompts and answers without end; what is random in them comes from the given generator."""
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Size of a start model. Shape(hidden_size=96) has 3 layers of 4 heads."""

    hidden_size: int
    intermediate_size: int = 256
    num_layers: int = 3
    num_heads: int = 4
    num_key_value_heads: int = 2
    context: int = 256


@dataclass(frozen=True, kw_only=True)
class Training:
    """How it is trained: learning_rate is reached after warmup_steps, then falls to 0 linearly."""

    steps: int
    batch_size: int = 32
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    seed: int = 0


@contextmanager
def one_deterministic_thread() -> Iterator[None]:
    """Compute with one thread, deterministic kernels and this machine's best products, and restore the settings after. Sums
    in another order would give other weights."""
    num_threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    through_onednn = torch.backends.mkldnn.enabled
    use_cpu(threads=1)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(num_threads)
        torch.backends.mkldnn.set_flags(through_onednn)
        torch.use_deterministic_algorithms(deterministic)


def make_model(tokenizer: PreTrainedTokenizerBase, shape: Shape, *, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_key_value_heads,
        intermediate_size=shape.intermediate_size,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        # About 1 / sqrt(hidden_size): with the default 0.02 so narrow a model needs several times the steps to start.
        initializer_range=0.1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def train_start_model(
    pairs: Pairs, tokenizer: PreTrainedTokenizerBase, shape: Shape, training: Training
) -> LlamaForCausalLM:
    """A model that answers like the pairs; only the answers, each with its EOS, are learned."""
    model = make_model(tokenizer, shape, seed=training.seed)
    model.train()

    def backward(batch: tuple[Tensor, Tensor]) -> float:
        token_ids, labels = batch
        logits = model(input_ids=token_ids[:, :-1]).logits
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()
        return loss.item()

    batches = islice(_batches(pairs, tokenizer, training), training.steps)
    rate, warmup = training.learning_rate, training.warmup_steps
    fit(model, batches, backward, steps=training.steps, learning_rate=rate, warmup_steps=warmup)
    return model.eval()


def save_rounded(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> PreTrainedModel:
    """Save in bfloat16; returns the model with the very numbers that are shipped, in float32."""
    rounded: Any = model.to(torch.bfloat16)
    rounded.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return rounded.float().eval()


def sample_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[str],
    prompts: Sequence[str],
    *,
    samples_per_prompt: int,
    sampling: Sampling,
    seed: int,
    slots: int,
) -> list[list[tuple[str, bool]]]:
    """For each prompt the texts of its samples in order, each with whether it ended by itself, with an EOS. A sample depends
    on the seed and its prompt's id."""
    longest = int(model.config.max_position_embeddings)
    made = [
        make_prompt(id=id, text=text, columns={}, tokenizer=tokenizer, max_tokens=longest - sampling.max_new_tokens)
        for id, text in zip(ids, prompts, strict=True)
    ]
    stop = [tokenizer.eos_token_id]
    engine = NativeEngine(model, stop_ids=stop, seed=seed, slots=slots, max_length=longest, dtype=torch.float32)
    groups = respond(engine, tokenizer, made, samples_per_prompt, sampling)
    return [
        [(text, completion.finish == "stop") for text, completion in zip(group.texts, group.completions)]
        for group in groups
    ]


def write_rows(path: Path, rows: Sequence[Any]) -> None:
    """Write JSON Lines, in a folder that is made where it does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _batches(pairs: Pairs, tokenizer: PreTrainedTokenizerBase, training: Training) -> Iterator[tuple[Tensor, Tensor]]:
    rng = random.Random(training.seed)
    endless = pairs(rng)
    while True:
        drawn = list(islice(endless, BATCHES_SORTED_TOGETHER * training.batch_size))
        prompts = tokenizer([prompt for prompt, _ in drawn])["input_ids"]
        answers = tokenizer([answer + tokenizer.eos_token for _, answer in drawn], add_special_tokens=False)[
            "input_ids"
        ]
        encoded = sorted(zip(prompts, answers), key=lambda pair: len(pair[0]) + len(pair[1]))
        batches = [
            encoded[start : start + training.batch_size] for start in range(0, len(encoded), training.batch_size)
        ]
        rng.shuffle(batches)
        for batch in batches:
            yield _pad(batch, tokenizer.pad_token_id)


def _pad(pairs: list[tuple[list[int], list[int]]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Token ids and labels, padded on the right; only answers are labelled."""
    length = max(len(prompt) + len(answer) for prompt, answer in pairs)
    token_ids = torch.full((len(pairs), length), pad_id)
    labels = torch.full((len(pairs), length), IGNORED)
    for row, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        token_ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return token_ids, labels


def make_word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerBase:
    """decode(encode(text)) == text for every text of these words. Puts <bos> before a text by default
    (add_special_tokens=True)."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *words))}
    if len(vocabulary) != len(SPECIAL) + len(words):
        raise ValueError("a word occurs twice in the vocabulary.")
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return as_transformers(tokenizer)


def as_transformers(tokenizer: Tokenizer) -> PreTrainedTokenizerBase:
    """A tokenizer whose vocabulary starts with SPECIAL, for transformers; it puts <bos> before a text."""
    bos = ("<bos>", SPECIAL.index("<bos>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[bos])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
