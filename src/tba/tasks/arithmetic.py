"""Grade-school word problems from a seeded generator: the task that everything can be tried on in minutes.

    Mia has 4 boxes with 6 pens each. She gives 5 to Tom. She buys 12 more. How many pens does she have now?
    4*6=24
    24-5=19
    19+12=31
    #### 31

A problem is an opening, one or two events and a question, 2 to 4 calculation steps in all. Its *canonical content* is the
kind of each part with its numbers, without names and things: `boxes 4 6|gives 5|buys 12|now`. A hash of it decides the
split, so a held-out problem cannot occur in training under any seed, not even with other names.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "held_out"]

HELD_OUT_SHARE = 16
"""One in so many canonical contents is held out."""
LARGEST = 60
"""No number in a problem or its worked solution is larger."""
HELD_OUT_SEED = 20_250_318
"""The held-out set is the same whatever the seed of a run."""

PEOPLE = (
    ("Mia", "she"), ("Tom", "he"), ("Ann", "she"), ("Leo", "he"), ("Eva", "she"), ("Ben", "he"), ("Zoe", "she"), ("Max", "he"),
)  # fmt: skip
THINGS = ("pens", "apples", "cards", "books", "stamps", "shells", "coins", "rolls")

OPENINGS = {
    "has": "{Name} has {a} {things}.",
    "boxes": "{Name} has {a} boxes with {b} {things} each.",
}
EVENTS = {
    "buys": "{She} buys {a} more.",
    "gives": "{She} gives {a} to {Other}.",
    "loses": "{She} loses {a}.",
    "gets": "{She} gets {a} bags with {b} {things} each.",
}
QUESTIONS = {
    "now": "How many {things} does {she} have now?",
    "times": "{Other} has {a} times as many. How many {things} does {Other} have?",
    "fewer": "{Other} has {a} fewer. How many {things} do they have together?",
    "more": "{Other} has {a} more. How many {things} do they have together?",
    "shares": "{She} shares them equally among {a} friends. How many {things} does each friend get?",
}


@dataclass(frozen=True)
class Earlier:
    """The result of an earlier step, as an operand."""

    step: int


@dataclass(frozen=True)
class Step:
    """One calculation: Step(Earlier(0), "-", 5) takes 5 from the first step's result."""

    left: int | Earlier
    operator: Literal["+", "-", "*", "/"]
    right: int | Earlier
    part: str
    """The kind of sentence that asks for it."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Problem(text="Mia has 7 pens. She buys 2 more. ...", steps=(Step(7, "+", 2, "buys"), ...), canonical="has 7|buys 2|...")"""

    text: str
    steps: tuple[Step, ...]
    canonical: str

    @property
    def lines(self) -> list[str]:
        return [line for line, _ in calculate(self.steps) or []]

    @property
    def answer(self) -> int:
        return (calculate(self.steps) or [])[-1][1]

    @property
    def solution(self) -> str:
        return write_solution(self.steps) or ""

    @property
    def split(self) -> Split:
        digest = hashlib.blake2b(self.canonical.encode(), digest_size=8).digest()
        return "held_out" if int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0 else "train"


def calculate(steps: Sequence[Step]) -> list[tuple[str, int]] | None:
    """Each step's equation and result; None where one leaves the whole numbers from 1 to LARGEST."""
    done: list[tuple[str, int]] = []
    for step in steps:
        left, right = (done[x.step][1] if isinstance(x, Earlier) else x for x in (step.left, step.right))
        if step.operator == "/" and left % right:
            return None
        result = {"+": left + right, "-": left - right, "*": left * right, "/": left // right}[step.operator]
        if not 1 <= result <= LARGEST:
            return None
        done.append((f"{left}{step.operator}{right}={result}", result))
    return done


def write_solution(steps: Sequence[Step]) -> str | None:
    done = calculate(steps)
    return None if not done else "\n".join([line for line, _ in done] + [f"#### {done[-1][1]}"])


def draw_problem(rng: random.Random) -> Problem:
    """The next problem of the generator, of either split."""
    while True:
        problem = _draw(rng)
        if 2 <= len(problem.steps) <= 4 and calculate(problem.steps) is not None:
            return problem


def _draw(rng: random.Random) -> Problem:
    opening = rng.choice(list(OPENINGS))
    events = [rng.choice(list(EVENTS)) for _ in range(rng.choice((1, 1, 1, 2)))]
    question = rng.choice(list(QUESTIONS))
    parts = [(kind, _numbers(kind, rng)) for kind in (opening, *events, question)]
    canonical = "|".join(" ".join([kind, *map(str, numbers)]) for kind, numbers in parts)
    return Problem(text=_write_text(parts, rng), steps=_steps(parts), canonical=canonical)


def _numbers(kind: str, rng: random.Random) -> tuple[int, ...]:
    if kind in ("boxes", "gets"):
        return rng.randint(2, 6), rng.randint(2, 9)
    if kind in ("times", "shares"):
        return (rng.randint(2, 4),)
    if kind == "now":
        return ()
    return (rng.randint(8, 40) if kind == "has" else rng.randint(2, 15),)


def _steps(parts: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[Step, ...]:
    steps: list[Step] = []
    total: int | Earlier = parts[0][1][0]
    operators: dict[str, Literal["+", "-", "*", "/"]]
    operators = {"buys": "+", "gives": "-", "loses": "-", "times": "*", "shares": "/", "fewer": "-", "more": "+"}
    for kind, numbers in parts:
        if kind in ("boxes", "gets"):
            steps.append(Step(numbers[0], "*", numbers[1], kind))
        if kind == "gets":
            steps.append(Step(total, "+", Earlier(len(steps) - 1), kind))
        if kind in operators:
            steps.append(Step(total, operators[kind], numbers[0], kind))
        if kind in ("fewer", "more"):
            steps.append(Step(total, "+", Earlier(len(steps) - 1), "together"))
        total = Earlier(len(steps) - 1) if steps else total
    return tuple(steps)


def _write_text(parts: Sequence[tuple[str, tuple[int, ...]]], rng: random.Random) -> str:
    (name, she), *others = rng.sample(PEOPLE, len(parts) + 1)
    things = rng.choice(THINGS)
    sentences = []
    for (kind, numbers), (other, _) in zip(parts, others):
        values = dict(zip("ab", numbers))
        template = {**OPENINGS, **EVENTS, **QUESTIONS}[kind]
        sentences.append(
            template.format(Name=name, She=she.capitalize(), she=she, Other=other, things=things, **values)
        )
    return " ".join(sentences) + "\n"
