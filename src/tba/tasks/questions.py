"""The bases of tasks: of reward functions, of rows with a stored answer, and of problems that another package draws."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, ClassVar

from tba.config import RewardConfig
from tba.tasks.data.make_prompt import (
    LazyPrompts,
    QuestionAnswer,
    Source,
    nothing_left,
    question_key,
    read_splits,
    uses_chat,
)
from tba.tasks.data.rows import BadRow, BadRows
from tba.tasks.evaluation import AnswerEvaluator
from tba.tasks.outcomes import Outcome, RewardFailed
from tba.tasks.rewards.functions import RewardSet, episode_ends, named_rewards
from tba.tasks.task import EvaluationInputs, Evaluator, Split, TaskInputs
from tba.types import Completion, Prompt, combined_reward

logger = logging.getLogger("tba.tasks")

WHY_MISSING: dict[Split, str] = {
    "validation": "task.num_validation_prompts is 0: set it to a number of train rows to tune on.",
    "held_out": "task.data={data} is one file, taken as the train rows. Give the rows to report on as task.eval_data, or a "
    "folder with both as task.data, or evaluate on evaluate.split=validation.",
}
Problem = Mapping[str, Any]
"""A problem of another package, with its `question`, text or chat messages."""
MOST_TRIES = 1000
"""Problems that are looked at for one that may be asked."""


class RewardsTask:
    """A task whose rewards are functions, called in workers that can be killed. `solved` means that the combined reward
    reaches 1, the usual meaning of a 0/1 reward."""

    reward_weights: Mapping[str, float]

    def __init__(self, rewards: Sequence[RewardConfig]) -> None:
        self.isolated_rewards = rewards
        self._functions = named_rewards(rewards)
        self._prompts: Mapping[Split, Sequence[Prompt]] = {}

    def prompts(self, split: Split) -> Sequence[Prompt]:
        self._prompts["held_out"][0]  # whether prompts fit the model's context shows at once
        return self._prompts[split]

    def score(self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]) -> list[Outcome]:
        # For callers of their own: in a run the files of rewards are imported in the workers alone.
        ids = [completion.token_ids.tolist() for completion in completions]
        ends = episode_ends(completions)
        return RewardSet(self._functions).score(prompt.text, prompt.columns, texts, ids, episodes=ends)

    def solved(self, outcome: Outcome) -> bool:
        if isinstance(outcome, RewardFailed):
            return False
        return combined_reward(outcome, self.reward_weights) >= 1.0 - 1e-9

    def make_evaluator(self, inputs: EvaluationInputs) -> Evaluator:
        """An evaluator with means of the rewards, which say how good a policy is where no reward of 1 means solved."""
        return AnswerEvaluator(self, inputs, mean_rewards=True)


class PackageTask(RewardsTask):
    """A task of another package with one reward, `score`, of the package's own rule, which may compute for hours over a line
    of babble."""

    def __init__(self, scorer: Callable[..., list[Any]], prompts: Mapping[Split, LazyPrompts]) -> None:
        super().__init__((RewardConfig(function=scorer, name="score"),))
        self.reward_weights, self._prompts = {"score": 1.0}, prompts


class DrawnPrompts(LazyPrompts):
    """The prompts of a split of problems that are drawn by their place. A problem is replaced by the next where its prompt
    is too long for the model, or where another split (`without`) has its question."""

    def __init__(
        self,
        draw: Callable[[int], Problem],
        make: Callable[[str, Problem], Prompt],
        split: Split,
        count: int,
        *,
        without: Sequence[DrawnPrompts] = (),
    ) -> None:
        super().__init__(count, self._at)
        self._prompt, self._split, self._without = make, split, without
        # Held-out problems are few and asked again by every evaluation; some take a second to make.
        self._problem = draw if split == "train" else cache(draw)
        self._has_warned = False

    def _at(self, place: int) -> Prompt:
        too_long: BadRow | None = None
        for tried in range(min(self._count, MOST_TRIES)):
            problem = self._problem((place + tried) % self._count)
            if question_key(problem["question"]) in self._others:
                continue
            try:
                return self._prompt(f"{self._split}-{place}", problem)
            except BadRow as error:
                too_long = error
                if not self._has_warned:
                    message = "%s Such problems are replaced by the next. Reported for the first only."
                    logger.warning(message, error)
                self._has_warned = True
        raise too_long or ValueError(
            f"task.settings.num_held_out: the generator has too few different questions for the split {self._split}: all "
            "of them are held out. Lower it, or give the generator options with more questions (task.settings.options)."
        )

    @cached_property
    def keys(self) -> frozenset[int]:
        """Keys of the questions that a prompt of this split may have."""
        return frozenset(question_key(self._problem(place)["question"]) for place in range(self._count))

    @cached_property
    def _others(self) -> frozenset[int]:
        # Drawn with the first prompt, and not in processes that only count prompts: slow generators take seconds.
        return frozenset[int]().union(*(other.keys for other in self._without))


class RightOrWrong:
    """A task whose only reward, `exact_match`, is 1 for a right response and 0 for a wrong one."""

    isolated_rewards = ()
    reward_weights: ClassVar[Mapping[str, float]] = {"exact_match": 1.0}

    def solved(self, outcome: Outcome) -> bool:
        return isinstance(outcome, dict) and outcome["exact_match"] == 1.0

    def make_evaluator(self, inputs: EvaluationInputs) -> Evaluator:
        return AnswerEvaluator(self, inputs)


class RowsTask(ABC):
    """A task whose prompts are rows of a dataset, each with a stored answer. All rows are checked when it is made."""

    isolated_rewards = ()
    source: ClassVar[Source]

    def __init__(self, inputs: TaskInputs) -> None:
        self.config, self.inputs = inputs.config, inputs
        self._problems = self.read()
        self._prompts: dict[Split, list[Prompt]] = {}

    def read(self) -> dict[Split, list[QuestionAnswer]]:
        """The splits that the data has, in the order of their files."""
        return read_splits(self.config, self.source, trains=self.inputs.trains)

    def problems(self, split: Split) -> list[QuestionAnswer]:
        """The rows of a split; a ValueError where there are none."""
        # A missing split and an empty one differ: the first was not given, of the second all rows were held out.
        if split not in self._problems:
            raise ValueError(f"evaluate.split={split}: {WHY_MISSING[split].format(data=self.config.data)}")
        if not self._problems[split]:
            raise nothing_left(self.config.data)
        return self._problems[split]

    def ask(self, question: str) -> str | list[dict[str, str]]:
        return question

    def columns(self, problem: QuestionAnswer) -> dict[str, Any]:
        """Fields of a row that the reward reads."""
        return {"question": problem.question, "answer": problem.answer}

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Prompts of a split, tokenised when first asked for: a searcher that never evaluates does not pay for others."""
        if split not in self._prompts:
            # Over-long prompts show here only: how long one is depends on the tokenizer.
            bad = BadRows(self.config.on_bad_row)
            found = bad.keep(
                self.problems(split),
                lambda problem: self.inputs.prompt(
                    f"{split}-{problem.line}", self.ask(problem.question), self.columns(problem), place=problem.place
                ),
            )
            bad.report()
            if not found:
                raise ValueError(f"task.data={self.config.data}: no {split} row is left, all {bad.total} are bad.")
            self._prompts[split] = found
        return self._prompts[split]


class QuestionTask(RowsTask, RightOrWrong):
    """Reward `exact_match`: 1 where the response's answer is the problem's, and it ended by itself or need not have."""

    template: ClassVar[str]
    """The prompt without chat, with {question} where the question goes; task.prompt_template stands in for it."""
    instruction: ClassVar[str]
    """Text after the question in a chat, unless there is a task.prompt_template."""

    def __init__(self, inputs: TaskInputs) -> None:
        self._chat = uses_chat(inputs.config, inputs.tokenizer)  # refused before a long file is read
        super().__init__(inputs)

    @abstractmethod
    def is_right(self, text: str, *, question: str, answer: str) -> bool:
        """Whether a response gives the answer of a problem. A response that only restates the question does not."""

    def score(self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]) -> list[Outcome]:
        question, answer = prompt.columns["question"], prompt.columns["answer"]
        may_count = [own.finish == "stop" or not self.config.cut_off_is_wrong for own in completions]
        return [
            # Cheap first: grading may ask sympy, which a cut-off response need not.
            {"exact_match": float(counts and self.is_right(text, question=question, answer=answer))}
            for text, counts in zip(texts, may_count)
        ]

    def ask(self, question: str) -> str | list[dict[str, str]]:
        """The question in the template; in a chat it is a user's message, with the instruction after it."""
        template = self.config.prompt_template
        if template is None:
            template = f"{{question}}\n\n{self.instruction}" if self._chat else self.template
        # Not str.format: questions and templates are full of braces in LaTeX.
        text = template.replace("{question}", question)
        return [{"role": "user", "content": text}] if self._chat else text
