"""Prompts as tokens (plain text or chat messages, one BOS, within the context), and what tasks of questions with one right
answer share: GSM8K and MATH.

Held out are the test rows, or task.eval_data; data/splits.py says which rows are trained and tuned on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from tba.config import TaskConfig
from tba.tasks.base import Outcome, Split, TaskInputs
from tba.tasks.data.rows import BadRow, keep_some
from tba.tasks.data.splits import QuestionAnswer, Source, nothing_left, read_splits
from tba.tasks.evaluation import AnswerEvaluator, EvaluationInputs, Evaluator
from tba.types import Completion, Prompt

WHY_MISSING: dict[Split, str] = {
    "validation": "task.num_validation_prompts is 0: set it to a number of train problems to tune on.",
    "held_out": "task.data={data} is one file, taken as the train rows. Give the test rows as task.eval_data, or a folder "
    "with both as task.data, or evaluate on evaluate.split=validation.",
}


class QuestionTask(ABC):
    """Reward `exact_match`: 1 where the response's answer is the problem's, and it ended by itself or need not have."""

    isolated_rewards = ()
    source: ClassVar[Source]
    template: ClassVar[str]
    """The prompt without chat, with {question} where the question goes; task.prompt_template stands in for it."""
    instruction: ClassVar[str]
    """Text after the question in a chat, unless there is a task.prompt_template."""

    def __init__(self, inputs: TaskInputs) -> None:
        """Make the task; all rows are read and checked now."""
        config = inputs.config
        self._config = config
        self._chat = uses_chat(config, inputs.tokenizer)
        self._tokenizer = inputs.tokenizer
        self._max_prompt_tokens = inputs.max_prompt_tokens
        self._problems = read_splits(config, self.source, trains=inputs.trains)
        self._prompts: dict[Split, list[Prompt]] = {}

    @abstractmethod
    def is_right(self, text: str, *, question: str, answer: str) -> bool:
        """Whether a response gives the answer of a problem; the question tells an answer from a restatement."""

    @property
    def reward_weights(self) -> dict[str, float]:
        return {"exact_match": 1.0}

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Prompts of a split, tokenised when first asked for: a searcher that never evaluates does not pay for others."""
        if split not in self._problems:
            raise ValueError(f"evaluate.split={split}: {WHY_MISSING[split].format(data=self._config.data)}")
        if not self._problems[split]:
            raise nothing_left(self._config.data)
        if split not in self._prompts:
            self._prompts[split] = self._make_prompts(split)
        return self._prompts[split]

    def score(self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]) -> list[Outcome]:
        question, answer = prompt.columns["question"], prompt.columns["answer"]
        return [
            {"exact_match": float(self._counts(completion) and self.is_right(text, question=question, answer=answer))}
            for text, completion in zip(texts, completions)
        ]

    def solved(self, outcome: Outcome) -> bool:
        return isinstance(outcome, dict) and outcome["exact_match"] == 1.0

    def make_evaluator(self, inputs: EvaluationInputs) -> Evaluator:
        return AnswerEvaluator.of_task(self, inputs)

    def _counts(self, completion: Completion) -> bool:
        """Whether a response may be right: one that is cut off at the length limit is wrong (the no-EOS rule)."""
        return completion.finish == "stop" or not self._config.cut_off_is_wrong

    def _make_prompts(self, split: Split) -> list[Prompt]:
        return keep_some(
            self._problems[split],
            lambda problem: self._prompt(split, problem),
            on_bad_row=self._config.on_bad_row,
            what=f"task.data={self._config.data}: no {split} row",
        )

    def _prompt(self, split: Split, problem: QuestionAnswer) -> Prompt:
        return make_prompt(
            id=f"{split}-{problem.line}",
            text=self._ask(problem.question),
            columns={"question": problem.question, "answer": problem.answer},
            tokenizer=self._tokenizer,
            max_tokens=self._max_prompt_tokens,
            place=problem.place,
            template=self._config.chat_template_kwargs,
        )

    def _ask(self, question: str) -> str | list[dict[str, str]]:
        """The question in the template; in a chat it is a user's message, with the instruction after it."""
        template = self._config.prompt_template
        if template is None:
            template = f"{{question}}\n\n{self.instruction}" if self._chat else self.template
        text = template.replace("{question}", question)
        return [{"role": "user", "content": text}] if self._chat else text


def make_prompt(
    *,
    id: str,
    text: str | list[dict[str, str]],
    columns: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    place: str = "",
    template: Mapping[str, Any] | None = None,
) -> Prompt:
    """Tokenise a prompt; one that does not fit is refused, never cut. `place` is where it was read, `template` is what the
    chat template gets besides the messages."""
    name = f"{place}: prompt {id!r}" if place else f"prompt {id!r}"
    try:
        token_ids = encode(text, tokenizer, template)
    except PromptRefused as error:
        raise BadRow("refused prompt", f"{name} {error}") from None
    if not token_ids:
        raise BadRow("empty prompt", f"{name} is empty: it gives no tokens.")
    if len(token_ids) > max_tokens:
        raise BadRow(
            "over-long prompt",
            f"{name} has {len(token_ids)} tokens, beyond the {max_tokens} that the model's context leaves beside "
            "generate.max_new_tokens (or task.max_prompt_tokens): shorten it, or lower generate.max_new_tokens.",
        )
    return Prompt(id=id, token_ids=np.array(token_ids, np.int32), text=text, columns=columns)


class PromptRefused(ValueError):
    """The chat template or the tokenizer fails on a prompt."""


def encode(
    text: str | list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids with at most one BOS; chat messages through the tokenizer's template, ready for the answer."""
    if isinstance(text, str):
        starts_with_bos = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        return _tokens(text, tokenizer, add_special_tokens=not starts_with_bos)
    if tokenizer.chat_template is None:
        raise ValueError(
            "the data has chat messages but the tokenizer has no chat template: give plain text prompts, or a model with "
            "a template."
        )
    try:
        words = tokenizer.apply_chat_template(text, tokenize=False, add_generation_prompt=True, **(template or {}))
    except Exception as error:  # a template is a program: it may raise what it likes
        roles = ", ".join(message["role"] for message in text)
        raise PromptRefused(
            f"with the roles {roles} is refused by the tokenizer's chat template: {type(error).__name__}: {error}. Change "
            "the messages, or the template (chat_template of the tokenizer)."
        ) from None
    return _tokens(words, tokenizer, add_special_tokens=False)


def _tokens(text: str, tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool) -> list[int]:
    try:
        return tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
    except Exception as error:  # tokenizers raises nothing more specific
        raise PromptRefused(f"is refused by the tokenizer: {error}. Change the text, or the tokenizer.") from None


def uses_chat(config: TaskConfig, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether prompts are chat messages: what task.chat means for this tokenizer."""
    has_template = tokenizer.chat_template is not None
    if config.chat is True and not has_template:
        raise ValueError("task.chat=true, but the tokenizer has no chat template: use task.chat=false or a chat model.")
    return has_template if config.chat == "auto" else config.chat
