"""The generators of the package reasoning-gym: their options, their problems and the scores of answers.

    {"question": "Find the Greatest Common Divisor (GCD) of these numbers: 26, 760. ...", "answer": "2", "metadata": {...}}

Nothing here imports torch or pydantic: reward workers load this file, and a killed one is back in a moment.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np

Problem = Mapping[str, Any]
"""A problem as the package makes it: `question`, `answer` and `metadata`, which its scorer may read."""
AnswerPlace = Literal["auto", "tags", "text"]
"""Where the answer of a response stands, see Settings.answer in problems.py."""
SET_HERE = ("seed", "size")
"""Options of every generator that the task sets itself."""


def require_reasoning_gym() -> None:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ValueError(
            "task.name=reasoning_gym:NAME needs the `reasoning-gym` package, which is not installed: "
            "`pip install 'tba-rl[reasoning-gym]'` or `pip install reasoning-gym`."
        )


class Generator:
    """Generator("gcd", {"max_value": 60}, seed=0, size=100).problem(17) is always the same problem."""

    def __init__(self, name: str, options: Mapping[str, Any], *, seed: int = 0, size: int = 1) -> None:
        """Refuses names and options that the package does not know, or whose values the generator does not take."""
        require_reasoning_gym()
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        self.seed = seed
        if name not in DATASETS:
            near = difflib.get_close_matches(name, DATASETS, n=3)
            known = f"did you mean {' or '.join(near)}?" if near else f"the package has {', '.join(sorted(DATASETS))}."
            raise ValueError(f"task.name=reasoning_gym:{name}: there is no generator {name!r}; {known}")
        if own := [option for option in SET_HERE if option in options]:
            raise ValueError(
                f"task.settings.options.{own[0]} is set by the task, so that splits stay apart: leave it out. "
                "task.settings.size is the number of problems to train on."
            )
        defaults = {
            field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            for field in dataclasses.fields(DATASETS[name][1])
            if field.name not in SET_HERE
        }
        options_of_it = ", ".join(f"{option}={default!r}" for option, default in defaults.items())
        takes = f"It takes {options_of_it}." if defaults else "It takes no options."
        for option in options:
            if option not in defaults:
                near = difflib.get_close_matches(option, defaults, n=1)
                meant = f" Did you mean {near[0]}?" if near else ""
                raise ValueError(
                    f"task.settings.options.{option}: reasoning_gym:{name} has no such option.{meant} {takes}"
                )
        try:
            with _seeded(seed):
                self._dataset = reasoning_gym.create_dataset(name, **options, seed=seed, size=size)
        except Exception as error:  # options are checked by assertions, and some first where they are used
            raise ValueError(
                f"task.settings.options={dict(options)}: reasoning_gym:{name} refuses them "
                f"({type(error).__name__}: {error}). {takes}"
            ) from None

    def problem(self, place: int) -> Problem:
        """The problem at a place below `size`."""
        with _seeded(self.seed + place):
            return self._dataset[place]

    def score(self, answer: str | None, problem: Problem) -> float:
        """The package's own score of an answer, 0 to 1."""
        return float(self._dataset.score_answer(answer, problem))


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Global random numbers of this seed, and afterwards those of before: nine generators draw from them too."""
    state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)


class Scorer:
    """The reward `score` with TRL's signature, for reward workers: Scorer("gcd", {}, "auto")(["2"], [problem]) == [1.0]"""

    per_sample = True
    """Rewards of samples are independent: where one hangs, only that one is lost."""

    def __init__(self, name: str, options: Mapping[str, Any], answer: AnswerPlace) -> None:
        self._made_from = (name, options, answer)
        self._generator, self._answer = Generator(name, options), answer
        self._has_raised = False

    def __reduce__(self) -> tuple[Any, ...]:
        # Made anew by the worker as it starts: the import of the package is not part of a call's time.
        return Scorer, self._made_from

    def __call__(self, completions: Sequence[Any], problem: Sequence[Problem]) -> list[float]:
        # A completion is a message where the prompt is a chat.
        texts = [own if isinstance(own, str) else own[0]["content"] for own in completions]
        return [self._score(text, own) for text, own in zip(texts, problem)]

    def _score(self, text: str, problem: Problem) -> float:
        from reasoning_gym.utils import extract_answer

        try:
            given = None if self._answer == "text" else extract_answer(text)
            if given is None and self._answer != "tags":
                given = text.strip()
            return self._generator.score(given, problem)
        except MemoryError:  # the worker must be replaced
            raise
        except Exception as error:
            # Some scorers raise on what is no answer at all. Such a response is wrong; left out it would go unpunished.
            if not self._has_raised:
                message = f"score_answer raised {error!r} for {text[:200]!r}: scored 0. Reported for the first only."
                print(message, flush=True)
            self._has_raised = True
            return 0.0
