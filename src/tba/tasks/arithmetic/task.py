"""The arithmetic task: its prompts by split, and the reward for an answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tba.tasks.answer_evaluator import AnswerEvaluator
from tba.tasks.arithmetic.problems import Problem, held_out_problems, train_problems, validation_problems
from tba.tasks.base import Outcome, Split, TaskInputs
from tba.tasks.data.encoding import make_prompt
from tba.tasks.evaluation import EvaluationInputs, Evaluator
from tba.tasks.gsm8k import final_number, same_number
from tba.types import Completion, Prompt


class ArithmeticTask:
    """Reward `exact_match`: 1 where the response ended by itself and the number after its last `####` is the answer."""

    name = "arithmetic"
    isolated = False

    def __init__(self, inputs: TaskInputs) -> None:
        self._num_train = inputs.config.num_train_prompts
        self._tokenizer = inputs.tokenizer
        self._max_prompt_tokens = inputs.max_prompt_tokens
        self._prompts: dict[Split, list[Prompt]] = {}

    @property
    def reward_weights(self) -> dict[str, float]:
        return {"exact_match": 1.0}

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Made when first asked for: a searcher that never evaluates does not pay for the other splits."""
        if split not in self._prompts:
            self._prompts[split] = [self._prompt(f"{split}-{i}", p) for i, p in enumerate(self._problems(split))]
        return self._prompts[split]

    def score(self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]) -> list[Outcome]:
        return [
            {"exact_match": exact_match(text, prompt.columns["answer"], finished=completion.finish == "stop")}
            for text, completion in zip(texts, completions)
        ]

    def solved(self, outcome: Outcome) -> bool:
        return isinstance(outcome, dict) and outcome["exact_match"] == 1.0

    def make_evaluator(self, inputs: EvaluationInputs) -> Evaluator:
        return AnswerEvaluator.of_task(self, inputs)

    def _problems(self, split: Split) -> Sequence[Problem]:
        if split == "train":
            return train_problems(self._num_train)
        return held_out_problems() if split == "held_out" else validation_problems(self._num_train)

    def _prompt(self, id: str, problem: Problem) -> Prompt:
        columns = {"answer": problem.answer, "solution": problem.solution}
        return make_prompt(
            id=id, text=problem.text, columns=columns, tokenizer=self._tokenizer, max_tokens=self._max_prompt_tokens
        )


def exact_match(text: str, answer: str, *, finished: bool) -> float:
    """1 or 0. The no-EOS rule: a response cut off at the length limit is wrong, whatever it says."""
    return float(finished and same_number(final_number(text), answer))


def start_model_path() -> Path:
    """The folder of the shipped start model; `model.path=tba:arithmetic` means the same."""
    return Path(__file__).parent / "start_model"
