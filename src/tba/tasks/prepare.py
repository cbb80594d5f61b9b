"""Make the arithmetic data and the supervised start model:

    tba prepare arithmetic --output prepared

writes prepared/train.jsonl, prepared/held_out.jsonl (`prompt`, `answer`, `solution`) and prepared/model, the model that
ships in `arithmetic_start/`.

**The start model is flawed on purpose.** It learns from the copybook of a careless pupil who calculates well but has two
habits (`HABITS`): where somebody has so many *times* as many he adds instead of multiplying, and where two people's things
are asked for *together* he stops at the other one's share. A habit shows in most of the solutions it could show in, so
greedy decoding falls for it; the right way is there in the rest, so sampling finds it and RL can learn to prefer it. The
training is also cut short, so that sums go wrong now and then.

One thread and deterministic kernels: the same machine makes the same bytes.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from tba.tasks.arithmetic import (
    TRAIN_SEED,
    Operator,
    Problem,
    Step,
    calculate,
    draw_problems,
    exact_match,
    held_out_problems,
    train_problems,
    work,
    write_solution,
)
from tba.tasks.arithmetic_tokens import make_tokenizer

HABITS = {"times": 0.8, "together": 0.75}
"""Habit -> share of the solutions it could show in that it shows in."""
BATCHES_SORTED_TOGETHER = 8
"""Sequences of so many batches are sorted by length before they are cut into batches: less padding."""
IGNORED = -100
"""Label of the tokens that are not trained on: prompts and padding."""


@dataclass(frozen=True, kw_only=True)
class StartTraining:
    """How the start model is trained; the defaults make the shipped one."""

    steps: int = 1300
    batch_size: int = 32
    learning_rate: float = 3e-3
    """Highest; reached after warmup_steps, then linear to 0."""
    warmup_steps: int = 50
    seed: int = 0


def prepare_arithmetic(
    output: Path, *, training: StartTraining | None = None, num_train: int = 20_000, num_held_out: int = 500
) -> dict[str, Any]:
    """Write data and start model; returns what was made: {"model": ..., "parameters": ..., "accuracy": ..., ...}."""
    started = time.monotonic()
    output.mkdir(parents=True, exist_ok=True)
    held_out = held_out_problems()[:num_held_out]
    write_problems(output / "train.jsonl", train_problems(num_train))
    write_problems(output / "held_out.jsonl", held_out)
    tokenizer = make_tokenizer()
    with one_deterministic_thread():
        model = train_start_model(training or StartTraining(), tokenizer)
        accuracy = greedy_accuracy(model, tokenizer, held_out)
    model.save_pretrained(output / "model")
    tokenizer.save_pretrained(output / "model")
    return {
        "model": str(output / "model"),
        "parameters": model.num_parameters(),
        "accuracy": accuracy,
        "problems": {"train": num_train, "held_out": len(held_out)},
        "seconds": round(time.monotonic() - started, 1),
    }


def write_problems(path: Path, problems: list[Problem] | tuple[Problem, ...]) -> None:
    """One row per problem, with the id the task gives it."""
    with path.open("w", encoding="utf-8") as file:
        for index, problem in enumerate(problems):
            row = {"id": f"{path.stem}-{index}", "prompt": problem.text, "answer": problem.answer}
            file.write(json.dumps(row | {"solution": problem.solution}) + "\n")


def pupil_solution(problem: Problem, rng: random.Random) -> str:
    """What the careless pupil writes. He sees when a habit leads to nonsense, and then works it out properly."""

    def habit(name: str) -> bool:
        return name in HABITS and rng.random() < HABITS[name]

    def by(step: Step, left: int, right: int) -> tuple[Operator, int | None]:
        return ("+", left + right) if step.kind == "times" and habit("times") else calculate(step, left, right)

    forgets = problem.steps[-1].kind == "together" and habit("together")
    worked = work(problem.steps[:-1] if forgets else problem.steps, by)
    return problem.solution if worked is None else write_solution(worked)


@contextmanager
def one_deterministic_thread() -> Iterator[None]:
    """Sums in another order give other weights: one thread, deterministic kernels, and all of it put back after."""
    num_threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(num_threads)
        torch.use_deterministic_algorithms(deterministic)


def make_model(tokenizer: PreTrainedTokenizerBase, *, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=256,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        # 1 / sqrt(hidden_size): with the default 0.02 so narrow a model needs several times the steps to start learning.
        initializer_range=0.1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def train_start_model(training: StartTraining, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """Supervised training on the pupil's solutions; every problem is seen once."""
    model = make_model(tokenizer, seed=training.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.learning_rate, betas=(0.9, 0.99), weight_decay=0.01)
    model.train()
    for step, (token_ids, labels) in enumerate(islice(_batches(training, tokenizer), training.steps)):
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


def _batches(training: StartTraining, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[Tensor, Tensor]]:
    rng = random.Random(training.seed)
    # Not the stream that RL trains on: what the start model has seen should not be easier than the rest.
    problems = draw_problems("train", seed=TRAIN_SEED + 1)
    while True:
        drawn = list(islice(problems, BATCHES_SORTED_TOGETHER * training.batch_size))
        prompts = tokenizer([problem.text for problem in drawn])["input_ids"]
        solutions = [pupil_solution(problem, rng) + tokenizer.eos_token for problem in drawn]
        answers = tokenizer(solutions, add_special_tokens=False)["input_ids"]
        pairs = sorted(zip(prompts, answers), key=lambda pair: len(pair[0]) + len(pair[1]))
        batches = [pairs[start : start + training.batch_size] for start in range(0, len(pairs), training.batch_size)]
        rng.shuffle(batches)
        for batch in batches:
            yield _pad(batch, tokenizer.pad_token_id)


def _pad(pairs: list[tuple[list[int], list[int]]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Token ids and labels, padded on the right; only solutions are labelled."""
    length = max(len(prompt) + len(answer) for prompt, answer in pairs)
    token_ids = torch.full((len(pairs), length), pad_id)
    labels = torch.full((len(pairs), length), IGNORED)
    for row, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        token_ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return token_ids, labels


@torch.no_grad()
def greedy_accuracy(
    model: Any, tokenizer: PreTrainedTokenizerBase, problems: tuple[Problem, ...], *, max_new_tokens: int = 48
) -> float:
    """Share of problems solved by greedy decoding, by plain transformers `generate`."""
    solved = 0.0
    for start in range(0, len(problems), 250):
        batch = problems[start : start + 250]
        inputs = tokenizer([p.text for p in batch], return_tensors="pt", padding=True, padding_side="left")
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=False,
            max_new_tokens=max_new_tokens,
        )
        responses = output[:, inputs["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        finished = (responses == tokenizer.eos_token_id).any(dim=1).tolist()
        solved += sum(exact_match(text, p.answer, finished=end) for p, text, end in zip(batch, texts, finished))
    return solved / len(problems)
