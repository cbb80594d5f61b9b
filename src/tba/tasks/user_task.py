"""A user's own task (task.name=file.py:Class): its prompts, outcomes and metrics are checked as soon as it returns them. A
wrong one would otherwise show far from its cause, or not at all, as two prompts of one id. Errors of the task are reported
with the user's file and line.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tba.config import TaskConfig
from tba.tasks.outcomes import Outcome, RewardFailed
from tba.tasks.rewards.load_function import describe
from tba.tasks.task import Split, Task
from tba.types import Prompt

if TYPE_CHECKING:  # it imports this file
    from tba.engine.contract import Engine
    from tba.tasks.task import BetweenSteps, Evaluator


FRAMES_OF_A_CALL = 2
"""Number of frames of an error that calling a function raises itself: of `user_code`, and of the caller."""
PACKAGE = str(Path(__file__).parents[1])


class TaskFailed(ValueError):
    """A user's task has raised: the message has the line of its file."""


class WrongOutcomes(ValueError):
    """A user's task returned something else than outcomes, which it would do again."""


@contextmanager
def user_code(kind: Any, part: str = "") -> Iterator[None]:
    """Around a call of a user's class: an error that its file or what it uses has raised becomes a TaskFailed with the
    innermost line of that file. What the package raises, asked by the file or not, stays as it is."""
    try:
        yield
    except Exception as error:
        file, frames = _file_of(kind), traceback.extract_tb(error.__traceback__)
        # Whose code raised is said by the innermost frame of the two: what other packages do, they do for the one above.
        own = [frame for frame in frames if frame.filename == file or frame.filename.startswith(PACKAGE)]
        if file is not None and isinstance(error, TypeError) and len(frames) == FRAMES_OF_A_CALL:
            raise TaskFailed(f"{kind.__name__}{part} in {file} does not fit its call: {describe(error)}") from error
        if file is None or not own or own[-1].filename != file:
            raise
        raise TaskFailed(f"{kind.__name__}{part} failed at {file}:{own[-1].lineno}: {describe(error)}") from error


def _file_of(kind: Any) -> str | None:
    """The file of a class; None = it is the package's own, or in no file."""
    try:
        file = inspect.getsourcefile(kind)
    except TypeError:
        return None
    return None if file is None or file.startswith(PACKAGE) else file


def check_prompts(task: Task, config: TaskConfig, split: Split) -> None:
    """Refuse prompts that cannot be drawn, and ids that occur twice: an engine knows a response by the id of its prompt."""
    with user_code(type(task), f".prompts({split!r})"):
        prompts = task.prompts(split)
    what = f"task.name={config.name}: {config.label}.prompts({split!r})"
    if not isinstance(prompts, Sequence):
        raise ValueError(f"{what} is a {type(prompts).__name__}: return a list of prompts.")
    if not prompts and split == "train":
        raise ValueError(f"{what} is empty: there is nothing to train on. Return at least one prompt.")
    seen = set[str]()
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, Prompt):
            raise ValueError(
                f"{what}[{number}] is a {type(prompt).__name__}: make prompts with tba.tasks.data.make_prompt.make_prompt."
            )
        # Random numbers, the replay buffer and the prompt queue all know a prompt by its id.
        if prompt.id in seen:
            raise ValueError(f"{what}: id {prompt.id!r} occurs twice; ids must be unique.")
        seen.add(prompt.id)


def checked_outcomes(found: Any, *, count: int, weights: Mapping[str, float], what: str) -> list[Outcome]:
    """The outcomes that `score` returned for so many samples, with plain numbers. WrongOutcomes names the error in them."""
    if not isinstance(found, Sequence) or len(found) != count:
        given = f"{len(found)} outcomes" if isinstance(found, Sequence) else f"a {type(found).__name__}"
        raise WrongOutcomes(f"{what}.score returned {given} for {count} responses: return a list with one for each.")
    return [_checked_outcome(outcome, weights, what) for outcome in found]


def _checked_outcome(outcome: Any, weights: Mapping[str, float], what: str) -> Outcome:
    if isinstance(outcome, RewardFailed):
        return outcome
    if not isinstance(outcome, Mapping):
        raise WrongOutcomes(
            f"{what}.score returned {outcome!r} for a response: return its reward components by name, such as "
            f"{dict.fromkeys(weights, 1.0)}, or a RewardFailed."
        )
    components: dict[str, float | None] = {}
    for name, value in outcome.items():
        if name not in weights:
            raise WrongOutcomes(
                f"{what}.score returned {name!r}, without a weight: reward_weights has {', '.join(weights)}."
            )
        # Plain floats: tensors and NumPy scalars would be pickled and stored as such.
        components[name] = None if value is None else _number(value)
        if value is not None and components[name] is None:
            raise WrongOutcomes(f"{what}.score returned {name}={value!r}: it is a number, or None = not applicable.")
    return components


def _number(value: Any) -> float | None:
    """A number of any kind (NumPy's, a tensor of one) as a plain one; None = it is none."""
    try:
        # float("1") works, and a text as a reward is a mistake.
        return None if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError):
        return None


@dataclass(frozen=True)
class CheckedEvaluator:
    """The evaluator of a user's task; what it returns is checked, and made plain numbers."""

    own: Evaluator
    what: str

    @property
    def prompts(self) -> Sequence[Prompt]:
        return self.own.prompts

    def __call__(self, engine: Engine, between_steps: BetweenSteps | None = None) -> dict[str, float]:
        with user_code(type(self.own)):
            found: Any = self.own(engine, between_steps)
        if not isinstance(found, Mapping):
            raise ValueError(f"{self.what}: the evaluator returned {found!r}: return metrics by name.")
        metrics = {}
        for name, value in found.items():
            number = _number(value)
            if number is None:
                raise ValueError(f"{self.what}: the evaluator returned {name}={value!r}: a metric is a number.")
            metrics[str(name)] = number
        return metrics
