"""The interface of a task: its prompts, the reward of a response, the rule by which it counts as solved, and its evaluation.

What a user's own task (task.name=file.py:Class) returns is checked at once: a wrong outcome would otherwise show far from
its cause, or not at all, as two prompts of one id. Its errors are reported with the user's file and line.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from tba.config import Config, RewardConfig, TaskConfig
from tba.engine.contract import Engine, Scorer
from tba.engine.sampling import training_sampling
from tba.tasks.data.make_prompt import Split as Split
from tba.tasks.data.make_prompt import make_prompt
from tba.tasks.outcomes import Outcome
from tba.tasks.outcomes import RewardFailed as RewardFailed  # what a user's task imports from here
from tba.tasks.rewards.load_function import describe
from tba.types import Completion, Prompt, Sampling


@dataclass(frozen=True, kw_only=True, eq=False)
class FinishedGroup:
    """A rollout whose responses are complete: FinishedGroup(prompt=..., completions=[...], texts=[...])"""

    prompt: Prompt
    completions: Sequence[Completion]
    texts: Sequence[str]
    rollout: int = -1
    """Number of the rollout among all rollouts of the run; -1 = it is not one of them."""
    step_values: Sequence[np.ndarray] | None = None
    """Monte-Carlo values of each response's steps, see Trajectory; None = not estimated."""

    def values_of_samples(self) -> Sequence[np.ndarray | None]:
        return [None] * len(self.completions) if self.step_values is None else self.step_values


class Rewards(Protocol):
    """Takes groups to score, hands them back with one outcome per sample, in any order."""

    @property
    def outstanding(self) -> int:
        """Number of groups submitted and not handed back yet."""

    def submit(self, group: FinishedGroup) -> None: ...

    def ready(self, wait_seconds: float = 0.0) -> list[tuple[FinishedGroup, list[Outcome]]]:
        """Groups that are scored; waits for an answer of a worker, but not longer than the time."""

    def close(self) -> None: ...


BetweenSteps = Callable[[], None]
"""Function called between decode steps and between parts of a long scoring: a heartbeat for processes that wait."""

KeepResponses = Callable[[str, Sequence[FinishedGroup], Sequence[Sequence[Outcome]], Sequence[Sequence[bool]]], None]
"""Function that is given the responses of an evaluation: (greedy or sampled, groups, their outcomes, whether solved)."""


class Evaluator(Protocol):
    """Says how good an engine's weights are, by metrics; the first one is the headline."""

    @property
    def prompts(self) -> Sequence[Prompt]:
        """Prompts that are evaluated on; empty = there is nothing to evaluate on."""

    def __call__(self, engine: Engine, between_steps: BetweenSteps | None = None) -> dict[str, float]: ...


class Task(Protocol):
    """A problem to train on. `score` is called by searchers, one prompt's samples at a time."""

    @property
    def isolated_rewards(self) -> Sequence[RewardConfig]:
        """Reward functions of a user, called in worker processes that can be killed when they hang; empty = the searcher
        itself calls `score`."""

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """Names of the components and their factors in the sum."""

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """The prompts of a split, always the same; a ValueError that says what to do where the task has no such split."""

    def score(self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]) -> list[Outcome]:
        """One outcome per sample; `texts` are the completions decoded without special tokens."""

    def solved(self, outcome: Outcome) -> bool:
        """Whether a sample counts as solved in evaluations."""

    def make_evaluator(self, inputs: EvaluationInputs) -> Evaluator:
        """Evaluator that says how good a policy is at this task; AnswerEvaluator where accuracy says it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskInputs:
    """Arguments from which every task is made: TaskInputs(config=TaskConfig(), tokenizer=tokenizer,
    max_prompt_tokens=200)"""

    config: TaskConfig
    tokenizer: PreTrainedTokenizerBase
    max_prompt_tokens: int
    settings: Any = None
    """The task's own settings, task.settings: an instance of the task's class attribute `Settings`, a pydantic model; None
    for a task without that attribute."""
    trains: bool = True
    """Whether the task is to be trained on; False = it is made for an evaluation alone."""
    device: str = "auto"
    """Device of models that score, the policy's; auto = cuda where there is one, else cpu."""

    def prompt(self, id: str, text: str | list[dict[str, str]], columns: dict[str, Any], *, place: str = "") -> Prompt:
        """A prompt for the task's model; see make_prompt."""
        return make_prompt(
            id=id,
            text=text,
            columns=columns,
            tokenizer=self.tokenizer,
            max_tokens=self.max_prompt_tokens,
            place=place,
            template=self.config.chat_template_kwargs,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationInputs:
    """Arguments from which an evaluator is made: EvaluationInputs(config=config, tokenizer=tokenizer,
    rewards=DirectRewards(task))"""

    config: Config
    tokenizer: PreTrainedTokenizerBase
    rewards: Rewards
    """Rewards of the evaluator's own, not shared with a running search."""
    start: Callable[[], Scorer] | None = None
    """Function that gives a scorer with the start model, for KL; called only where KL is measured. None = it is not."""
    keep: KeepResponses | None = None
    """For tasks whose responses are right or wrong; None = responses are forgotten."""

    @property
    def sampling(self) -> Sampling:
        """Sampling of training."""
        return training_sampling(self.config)

    def prompts(self, task: Task) -> Sequence[Prompt]:
        """The first evaluate.num_prompts prompts of evaluate.split."""
        # The first ones and no draw: two runs are evaluated on the same prompts.
        return task.prompts(self.config.evaluate.split)[: self.config.evaluate.num_prompts]

    @property
    def final_beta(self) -> float | None:
        """Value of beta at the end of training; None where the target is shaped and reward - beta x KL not maximised."""
        last = self.config.train.max_steps or sys.maxsize  # a schedule in steps has reached its last value
        return self.config.beta_at(last, 1.0) if self.config.has_plain_target_at(last, 1.0) else None


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
        # None: the package's own class, or one in no file.
        try:
            file = inspect.getsourcefile(kind)
        except TypeError:
            file = None
        file = None if file is None or file.startswith(PACKAGE) else file
        frames = traceback.extract_tb(error.__traceback__)
        # Whose code raised is said by the innermost frame of the two: what other packages do, they do for the one above.
        own = [frame for frame in frames if frame.filename == file or frame.filename.startswith(PACKAGE)]
        if file is not None and isinstance(error, TypeError) and len(frames) == FRAMES_OF_A_CALL:
            raise TaskFailed(f"{kind.__name__}{part} in {file} does not fit its call: {describe(error)}") from error
        if file is None or not own or own[-1].filename != file:
            raise
        raise TaskFailed(f"{kind.__name__}{part} failed at {file}:{own[-1].lineno}: {describe(error)}") from error


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
    checked: list[Outcome] = []
    for outcome in found:
        if isinstance(outcome, RewardFailed):
            checked.append(outcome)
            continue
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
                raise WrongOutcomes(
                    f"{what}.score returned {name}={value!r}: it is a number, or None = not applicable."
                )
        checked.append(components)
    return checked


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
