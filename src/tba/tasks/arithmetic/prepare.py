"""Make the arithmetic data and the supervised start model with its tokenizer:

    tba prepare arithmetic --output prepared

writes prepared/train.jsonl, prepared/held_out.jsonl (`prompt`, `answer`, `solution`) and prepared/model, the model that
ships in `start_model/`.

**The start model is flawed on purpose.** It learns from the copybook of a careless pupil who calculates well but has two
habits (`HABITS`): where somebody has so many *times* as many he adds instead of multiplying, and where two people's things
are asked for *together* he stops at the other one's share. A habit shows in most of the solutions it could show in, so
greedy decoding falls for it; the right way is there in the rest, so sampling finds it and RL can learn to prefer it. The
training is also cut short, so that sums go wrong now and then.

A token is a word with its leading space, a single digit, a sign or a line break: decode(encode(text)) == text for every
text made of its words, for each token is the very characters it stands for.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from tba.tasks.arithmetic.task import (
    PEOPLE,
    SENTENCES,
    THINGS,
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
from tba.tasks.gsm8k import MARKER
from tba.tasks.start_models import (
    SPECIAL,
    Shape,
    Training,
    as_transformers,
    one_deterministic_thread,
    train_start_model,
)

HABITS = {"times": 0.8, "together": 0.75}
"""Share of the solutions that a habit spoils, of those that it could spoil, by habit."""
SHAPE = Shape(hidden_size=96)
TRAINING = Training(steps=1300)
"""Settings that make the shipped model."""
PATTERN = rf" ?[A-Za-z]+| ?[0-9]|{MARKER}|\s| ?[^A-Za-z0-9\s]"
"""Pattern of one token. A number is its digits; the first one carries the space before it."""
DIGITS = "0123456789"


def prepare_arithmetic(
    output: Path, *, training: Training = TRAINING, num_train: int = 20_000, num_held_out: int = 500
) -> dict[str, Any]:
    """Write data and start model; returns what was made: {"model": ..., "parameters": ..., "accuracy": ..., ...}."""
    started = time.monotonic()
    output.mkdir(parents=True, exist_ok=True)
    held_out = held_out_problems()[:num_held_out]
    write_problems(output / "train.jsonl", train_problems(num_train))
    write_problems(output / "held_out.jsonl", held_out)
    tokenizer = make_tokenizer()
    with one_deterministic_thread():
        model = train_start_model(pupil_pairs, tokenizer, SHAPE, training)
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


def pupil_pairs(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Problems and what the pupil writes. Not the stream that RL trains on: what the start model has seen should not be
    easier than the rest."""
    return ((problem.text, pupil_solution(problem, rng)) for problem in draw_problems("train", seed=TRAIN_SEED + 1))


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


def make_tokenizer() -> PreTrainedTokenizerBase:
    """Tokenizer of the task; it puts <bos> before a text unless told not to add special tokens."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *_tokens()))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return as_transformers(tokenizer)


def _tokens() -> list[str]:
    """Everything the generator can write, in a fixed order."""
    signs = [*DIGITS, *(f" {digit}" for digit in DIGITS), *"+-*/=.?", "\n", " ", MARKER]
    words: set[str] = set()
    for template in SENTENCES.values():
        for name in PEOPLE:
            for things in THINGS:
                filled = template.format(
                    Name=name, Other=name, things=things, She=PEOPLE[name].capitalize(), she=PEOPLE[name], a=1, b=1
                )
                # A sentence opens the text or follows a space.
                words |= {*re.findall(PATTERN, filled), *re.findall(PATTERN, f" {filled}")}
    return signs + sorted(words - set(signs))
