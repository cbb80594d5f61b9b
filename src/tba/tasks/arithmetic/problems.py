"""Arithmetic: grade-school word problems from a seeded generator, the task that everything can be tried on in minutes.

    Mia has 4 boxes with 6 pens each. She gives 5 to Tom. She buys 12 more. How many pens does she have now?
    4*6=24
    24-5=19
    19+12=31
    #### 31

A problem is an opening, one or two events and a question, 2 to 4 calculation steps in all. Its *canonical content* is the
kind of each part with its numbers, without names and things: `boxes 4 6|gives 5|buys 12|now`. A hash of it decides the
split, so a held-out problem cannot occur in training under any seed. Validation problems, to tune on, are of the training
side, less the contents that the run trains on. `recipes/arithmetic.py` made the start model.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal, NamedTuple

from tba.tasks.data.make_prompt import LazyPrompts
from tba.tasks.gsm8k import final_number, same_number
from tba.tasks.outcomes import Outcome
from tba.tasks.questions import RightOrWrong
from tba.tasks.task import Split, TaskInputs
from tba.types import Completion, Prompt

HELD_OUT_ONE_IN = 8
"""Number of canonical contents of which one is held out."""
HELD_OUT_PROBLEMS = 2000
"""Size of the held-out set; evaluations take its first evaluate.num_prompts."""
HELD_OUT_SEED = 20_250_318
VALIDATION_PROBLEMS = 1000
"""Size of the validation set; evaluations take its first evaluate.num_prompts."""
VALIDATION_SEED = 20_250_319
TRAIN_SEED = 0
"""Seed of the training problems, which are the same in every run; the run's seed decides their order."""
LARGEST = 60
"""Largest number in a problem or its worked solution."""

Side = Literal["train", "held_out"]
"""Side of the split that the hash of a content decides; validation problems are on the training side."""
Operator = Literal["+", "-", "*", "/"]
Part = tuple[str, tuple[int, ...]]
"""Kind of sentence and its numbers: ("boxes", (4, 6))."""

PEOPLE = {"Mia": "she", "Tom": "he", "Ann": "she", "Leo": "he", "Eva": "she", "Ben": "he", "Zoe": "she", "Max": "he"}
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
SENTENCES = {**OPENINGS, **EVENTS, **QUESTIONS}
NAMES, OPENING_KINDS, EVENT_KINDS, QUESTION_KINDS = map(tuple, (PEOPLE, OPENINGS, EVENTS, QUESTIONS))
NUMBERS: dict[str, tuple[range, ...]] = {
    "boxes": (range(2, 7), range(2, 10)), "gets": (range(2, 7), range(2, 10)),
    "times": (range(2, 5),), "shares": (range(2, 5),), "now": (), "has": (range(8, 41),),
}  # fmt: skip
"""Ranges that the numbers of a sentence are drawn from, where they are not 2 to 15."""
OPERATORS: dict[str, Operator] = {
    "buys": "+", "gives": "-", "loses": "-", "times": "*", "fewer": "-", "more": "+", "shares": "/",
}  # fmt: skip
"""Operator by which a sentence with one number changes the total."""


class ArithmeticTask(RightOrWrong):
    """Reward `exact_match`: 1 where the response ended by itself and the number after its last `####` is the answer."""

    def __init__(self, inputs: TaskInputs) -> None:
        self._inputs = inputs
        self._problems: dict[Split, Sequence[Problem]] = {}
        # Made one by one, each time they are asked for: drawing and encoding all takes seconds, and the trainer, which only
        # counts them, need not wait for that. None is kept, or a searcher's memory would grow with every rollout.
        counts: dict[Split, int] = {
            "train": inputs.config.num_train_prompts,
            "held_out": HELD_OUT_PROBLEMS,
            "validation": VALIDATION_PROBLEMS,
        }
        self._prompts = {split: LazyPrompts(count, partial(self._prompt, split)) for split, count in counts.items()}

    def prompts(self, split: Split) -> Sequence[Prompt]:
        # Whether prompts fit the model's context shows at once. Problems differ by a few words only: one stands for all.
        self._inputs.prompt(f"{split}-0", train_problems(1)[0].text, {})
        return self._prompts[split]

    def _prompt(self, split: Split, place: int) -> Prompt:
        if split not in self._problems:
            # Drawn once, and kept as small objects.
            if split == "held_out":
                self._problems[split] = held_out_problems()
            else:
                draw = train_problems if split == "train" else validation_problems
                self._problems[split] = draw(self._inputs.config.num_train_prompts)
        problem = self._problems[split][place]
        columns = {"answer": problem.answer, "solution": problem.solution}
        return self._inputs.prompt(f"{split}-{place}", problem.text, columns)

    def score(self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]) -> list[Outcome]:
        return [
            {"exact_match": exact_match(text, prompt.columns["answer"], finished=completion.finish == "stop")}
            for text, completion in zip(texts, completions)
        ]


def exact_match(text: str, answer: str, *, finished: bool) -> float:
    """Reward 1 or 0. A response cut off at the length limit is wrong, whatever it says (the no-EOS rule)."""
    return float(finished and same_number(final_number(text), answer))


class Earlier(NamedTuple):
    """The result of an earlier step, as an operand."""

    step: int


class Step(NamedTuple):
    """One calculation. Step(Earlier(0), "-", 5, "gives") takes 5 from the first step's result."""

    left: int | Earlier
    operator: Operator
    right: int | Earlier
    kind: str
    """The kind of sentence that asks for it."""


Worked = list[tuple[str, int]]
"""Equation and result of each step: [("4*6=24", 24), ("24-5=19", 19)]."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Problem(text="Mia has 7 pens. ...", steps=(Step(7, "+", 2, "buys"), ...), canonical="has 7|buys 2|...")"""

    text: str
    steps: tuple[Step, ...]
    canonical: str

    @property
    def split(self) -> Side:
        digest = hashlib.blake2b(self.canonical.encode(), digest_size=8).digest()
        # blake2b and not hash(): Python's differs between processes.
        return "held_out" if int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0 else "train"

    @property
    def worked(self) -> Worked:
        worked = work(self.steps)
        assert worked is not None, "draw_problem only lets workable problems through"
        return worked

    @property
    def answer(self) -> str:
        return str(self.worked[-1][1])

    @property
    def solution(self) -> str:
        return write_solution(self.worked)


def calculate(step: Step, left: int, right: int) -> tuple[Operator, int | None]:
    """The operator as written and the result; None where a division leaves a remainder."""
    if step.operator == "/":
        return "/", None if left % right else left // right
    return step.operator, {"+": left + right, "-": left - right, "*": left * right}[step.operator]


def work(
    steps: Sequence[Step], by: Callable[[Step, int, int], tuple[Operator, int | None]] = calculate
) -> Worked | None:
    """Work the steps out in order; None where a result is no whole number from 1 to LARGEST."""
    worked: Worked = []
    for step in steps:
        left, right = (worked[x.step][1] if isinstance(x, Earlier) else x for x in (step.left, step.right))
        operator, result = by(step, left, right)
        if result is None or not 1 <= result <= LARGEST:
            return None
        worked.append((f"{left}{operator}{right}={result}", result))
    return worked


def write_solution(worked: Worked) -> str:
    return "\n".join([*(equation for equation, _ in worked), f"#### {worked[-1][1]}"])


def draw_problem(rng: random.Random) -> Problem:
    """The next problem of the generator, of either split."""
    choice = rng.choice
    while True:
        events = [choice(EVENT_KINDS) for _ in range(choice((1, 1, 1, 2)))]
        kinds = [choice(OPENING_KINDS), *events, choice(QUESTION_KINDS)]
        # The order of draws is part of the problem set: another order gives other problems for the same seed.
        parts = [(kind, tuple(map(choice, NUMBERS.get(kind, (range(2, 16),))))) for kind in kinds]
        steps = _steps(parts)
        if 2 <= len(steps) <= 4 and work(steps) is not None:
            canonical = "|".join(" ".join([kind, *map(str, numbers)]) for kind, numbers in parts)
            name, *others = rng.sample(NAMES, len(parts) + 1)
            words = {"Name": name, "She": PEOPLE[name].capitalize(), "she": PEOPLE[name], "things": rng.choice(THINGS)}
            sentences = (
                SENTENCES[kind].format(**words, Other=other, **dict(zip("ab", numbers)))
                for (kind, numbers), other in zip(parts, others)
            )
            return Problem(text=" ".join(sentences) + "\n", steps=steps, canonical=canonical)


def draw_problems(split: Side, *, seed: int) -> Iterator[Problem]:
    """Problems of one side of the hash without end."""
    rng = random.Random(seed)
    while True:
        problem = draw_problem(rng)
        if problem.split == split:
            yield problem


@cache
def held_out_problems() -> tuple[Problem, ...]:
    """The held-out set: always the same, no two with the same canonical content, the first n as hard as the rest."""
    return _distinct_problems("held_out", HELD_OUT_PROBLEMS, seed=HELD_OUT_SEED)


@cache
def validation_problems(num_train: int) -> tuple[Problem, ...]:
    """Problems to tune on: like the held-out set, but of contents that could be trained on and that the run's num_train
    problems leave out. Those are the rarer ones, so these are a little longer: 3.2 steps on average, against 3.1."""
    # By content: the same numbers with other names would be known to the policy.
    trained_on = {problem.canonical for problem in train_problems(num_train)}
    return _distinct_problems("train", VALIDATION_PROBLEMS, seed=VALIDATION_SEED, without=trained_on)


def train_problems(num_problems: int) -> list[Problem]:
    """The first problems of the training stream; a few contents occur twice, with other names."""
    # A prefix of one stream: more training problems hold all of the fewer.
    problems = draw_problems("train", seed=TRAIN_SEED)
    return [next(problems) for _ in range(num_problems)]


def _distinct_problems(
    split: Side, num_problems: int, *, seed: int, without: Collection[str] = frozenset()
) -> tuple[Problem, ...]:
    """The first problems of a stream with different canonical contents, none of them in `without`, shuffled."""
    found: dict[str, Problem] = {}
    for problem in draw_problems(split, seed=seed):
        if problem.canonical not in without:
            found.setdefault(problem.canonical, problem)
        if len(found) == num_problems:
            break
    problems = list(found.values())
    # Short problems repeat sooner, so later finds are harder on average.
    random.Random(seed).shuffle(problems)
    return tuple(problems)


def _steps(parts: Sequence[Part]) -> tuple[Step, ...]:
    steps: list[Step] = []
    total: int | Earlier = parts[0][1][0]
    for kind, numbers in parts:
        if kind in ("boxes", "gets"):
            steps.append(Step(numbers[0], "*", numbers[1], kind))
        if kind == "gets":
            steps.append(Step(total, "+", Earlier(len(steps) - 1), kind))
        if kind in OPERATORS:
            steps.append(Step(total, OPERATORS[kind], numbers[0], kind))
        if kind in ("fewer", "more"):
            steps.append(Step(total, "+", Earlier(len(steps) - 1), "together"))
        total = Earlier(len(steps) - 1) if steps else total
    return tuple(steps)
