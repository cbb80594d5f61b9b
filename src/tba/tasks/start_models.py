"""Start models of the embedded tasks: small Llamas trained from scratch on pairs of prompt and answer, and their tokenizers.

One thread and deterministic kernels: the same machine makes the same bytes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tba.models.cpu import use_cpu

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
    """Sums in another order give other weights: one thread, deterministic kernels, products as this machine computes them
    best whoever calls, and all of it put back after."""
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.learning_rate, betas=(0.9, 0.99), weight_decay=0.01)
    model.train()
    for step, (token_ids, labels) in enumerate(islice(_batches(pairs, tokenizer, training), training.steps)):
        warmup, decay = (step + 1) / training.warmup_steps, 1 - step / training.steps
        for group in optimizer.param_groups:
            group["lr"] = training.learning_rate * min(1.0, warmup) * decay
        logits = model(input_ids=token_ids[:, :-1]).logits
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        if not math.isfinite(loss.item()):
            raise RuntimeError(f"supervised loss is {loss.item()} at step {step}: lower the learning rate.")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


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
    """decode(encode(text)) == text for every text of these words. Puts <bos> before a text unless told not to add special
    tokens."""
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
