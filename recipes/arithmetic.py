"""Make the arithmetic data and the supervised start model with its tokenizer:

    python -m recipes arithmetic --output prepared

writes prepared/train.jsonl, prepared/held_out.jsonl (`prompt`, `answer`, `solution`) and prepared/model, the model that
ships in `src/tba/tasks/arithmetic/start_model/`.

**The start model is flawed on purpose.** It learns from the copybook of a careless pupil who calculates well but has two
habits (`HABITS`): where a person has so many *times* as many he adds instead of multiplying, and where two people's things
are asked for *together* he stops at the other one's share. A habit shows in most of the solutions it could show in, so
greedy decoding falls for it; the right way is there in the rest, so sampling finds it and RL can learn to prefer it. The
training is also cut short, so that sums go wrong now and then.

A token is a word with its leading space, a single digit, a sign or a line break: decode(encode(text)) == text for every
text made of its words, for each token is the very characters it stands for.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from recipes.start_models import (
    SPECIAL,
    Shape,
    Training,
    as_transformers,
    one_deterministic_thread,
    sample_texts,
    train_start_model,
    write_rows,
)
from tba.tasks.arithmetic.problems import (
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
from tba.types import Sampling

HABITS = {"times": 0.8, "together": 0.75}
"""Share of the solutions that a habit spoils, of those that it could spoil, by habit."""
SHAPE = Shape(hidden_size=96)
TRAINING = Training(steps=1300)
"""Settings that make the shipped model."""
PATTERN = rf" ?[A-Za-z]+| ?[0-9]|{MARKER}|\s| ?[^A-Za-z0-9\s]"
"""Pattern of one token. A number is its digits; the first one carries the space before it."""
DIGITS = "0123456789"
SLOTS = 128


def prepare_arithmetic(
    output: Path, *, training: Training = TRAINING, num_train: int = 20_000, num_held_out: int = 500
) -> dict[str, Any]:
    """Write data and start model; returns what was made: {"model": ..., "parameters": ..., "accuracy": ..., ...}."""
    held_out = held_out_problems()[:num_held_out]
    for name, problems in (("train", train_problems(num_train)), ("held_out", held_out)):
        write_rows(output / f"{name}.jsonl", [row_of(name, index, own) for index, own in enumerate(problems)])
    tokenizer = make_tokenizer()
    with one_deterministic_thread():
        model = train_start_model(pupil_pairs, tokenizer, SHAPE, training)
        accuracy = greedy_accuracy(model, tokenizer, held_out)
    tokenizer([""], padding=True, padding_side="left")  # the shipped tokenizer.json has it: the same bytes again
    model.save_pretrained(output / "model")
    tokenizer.save_pretrained(output / "model")
    return {
        "model": str(output / "model"),
        "parameters": model.num_parameters(),
        "accuracy": accuracy,
        "problems": {"train": num_train, "held_out": len(held_out)},
    }


def row_of(split: str, index: int, problem: Problem) -> dict[str, str]:
    """A row with the id that the task gives the problem."""
    columns = {"prompt": problem.text, "answer": problem.answer, "solution": problem.solution}
    return {"id": f"{split}-{index}", **columns}


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


def greedy_accuracy(
    model: Any, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], *, max_new_tokens: int = 48
) -> float:
    """Share of problems solved by greedy decoding."""
    texts = [problem.text for problem in problems]
    sampling = Sampling(max_new_tokens=max_new_tokens, greedy=True)
    responses = sample_texts(
        *(model, tokenizer, list(map(str, range(len(texts)))), texts),
        samples_per_prompt=1,
        sampling=sampling,
        seed=0,
        slots=SLOTS,
    )
    right = (exact_match(text, own.answer, finished=end) for own, ((text, end),) in zip(problems, responses))
    return sum(right) / len(problems)


def make_tokenizer() -> PreTrainedTokenizerBase:
    """Tokenizer of the task; it puts <bos> before a text by default (add_special_tokens=True)."""
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
