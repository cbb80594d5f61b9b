"""The base of tasks of questions with a stored answer: rows, splits and prompts.

The test rows are held out, or task.eval_data. data/make_prompt.py splits the other rows into train and validation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tba.tasks.data.make_prompt import QuestionAnswer, Source, make_prompt, nothing_left, read_splits, uses_chat
from tba.tasks.data.rows import BadRows
from tba.tasks.evaluation import AnswerEvaluator
from tba.tasks.outcomes import Outcome
from tba.tasks.task import EvaluationInputs, Evaluator, Split, TaskInputs
from tba.types import Completion, Prompt

WHY_MISSING: dict[Split, str] = {
    "validation": "task.num_validation_prompts is 0: set it to a number of train rows to tune on.",
    "held_out": "task.data={data} is one file, taken as the train rows. Give the rows to report on as task.eval_data, or a "
    "folder with both as task.data, or evaluate on evaluate.split=validation.",
}


class RightOrWrong(ABC):
    """A task whose only reward, `exact_match`, is 1 for a right response and 0 for a wrong one."""

    isolated_rewards = ()
    reward_weights: ClassVar[Mapping[str, float]] = {"exact_match": 1.0}

    @abstractmethod
    def prompts(self, split: Split) -> Sequence[Prompt]: ...

    @abstractmethod
    def score(self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]) -> list[Outcome]: ...

    def solved(self, outcome: Outcome) -> bool:
        return isinstance(outcome, dict) and outcome["exact_match"] == 1.0

    def make_evaluator(self, inputs: EvaluationInputs) -> Evaluator:
        return AnswerEvaluator(self, inputs)


class RowsTask(ABC):
    """A task whose prompts are rows of a dataset, each with a stored answer."""

    isolated_rewards = ()
    source: ClassVar[Source]

    def __init__(self, inputs: TaskInputs) -> None:
        """Make the task; all rows are read and checked now."""
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
        """The prompt for a question."""
        return question

    def columns(self, problem: QuestionAnswer) -> dict[str, Any]:
        """Fields of a row that the reward reads."""
        return {"question": problem.question, "answer": problem.answer}

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Prompts of a split, tokenised when first asked for: a searcher that never evaluates does not pay for others."""
        if split not in self._prompts:
            # Over-long prompts show here only: how long one is depends on the tokenizer.
            bad = BadRows(self.config.on_bad_row)
            found = bad.keep(self.problems(split), lambda problem: self._prompt(split, problem))
            bad.report()
            if not found:
                raise ValueError(f"task.data={self.config.data}: no {split} row is left, all {bad.total} are bad.")
            self._prompts[split] = found
        return self._prompts[split]

    def _prompt(self, split: Split, problem: QuestionAnswer) -> Prompt:
        return make_prompt(
            id=f"{split}-{problem.line}",
            text=self.ask(problem.question),
            columns=self.columns(problem),
            tokenizer=self.inputs.tokenizer,
            max_tokens=self.inputs.max_prompt_tokens,
            place=problem.place,
            template=self.config.chat_template_kwargs,
        )


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
        return [
            # Cheap first: grading may ask sympy, which a cut-off response need not.
            {"exact_match": float(self._counts(completion) and self.is_right(text, question=question, answer=answer))}
            for text, completion in zip(texts, completions)
        ]

    def _counts(self, completion: Completion) -> bool:
        """Whether a response may be right: one that is cut off at the length limit is wrong (the no-EOS rule)."""
        return completion.finish == "stop" or not self.config.cut_off_is_wrong

    def ask(self, question: str) -> str | list[dict[str, str]]:
        """The question in the template; in a chat it is a user's message, with the instruction after it."""
        template = self.config.prompt_template
        if template is None:
            template = f"{{question}}\n\n{self.instruction}" if self._chat else self.template
        # Not str.format: questions and templates are full of braces in LaTeX.
        text = template.replace("{question}", question)
        return [{"role": "user", "content": text}] if self._chat else text
