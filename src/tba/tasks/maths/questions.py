"""Tasks of questions with one right answer, read from rows: what GSM8K and MATH share.

Held out are the test rows, or task.eval_data. Validation problems, to tune on, are train rows that a hash of the question
picks: the same in every run. Train rows with a held-out question are left out, with a warning that says how many.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from tba.config import TaskConfig
from tba.tasks.base import Outcome, Split
from tba.tasks.encoding import make_prompt
from tba.tasks.inputs import TaskInputs
from tba.tasks.overlap import not_held_out, nothing_left, question_key
from tba.tasks.rows import BadRow, BadRows, Row, jsonl_rows, keep_some, split_rows
from tba.types import Completion, Prompt

ID_COLUMNS = ("id", "unique_id")
"""Where a row has one of these, no other row of its file may have the same."""

WHY_MISSING: dict[Split, str] = {
    "validation": "task.num_validation_prompts is 0: set it to a number of train problems to tune on.",
    "held_out": "task.data={data} is one file, taken as the train rows. Give the test rows as task.eval_data, or a folder "
    "with both as task.data, or evaluate on evaluate.split=validation.",
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A row, checked: Problem(line=1, question="Natalia sold ...", answer="... altogether.\\n#### 72")"""

    line: int
    """In its file, from 1: `train-17` is the problem of line 17."""
    question: str
    answer: str
    """What the task's grader compares with; it can read it."""
    place: str = ""
    """The words that an error about it starts with: `data/train.jsonl line 17`."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """How a dataset is read: Source(hub_subset="main", read=read_problem)"""

    hub_subset: str
    """Of its dataset on the hub."""
    read: Callable[[Row], Problem]
    """Raises BadRow for a row that is no problem."""


class QuestionTask(ABC):
    """Reward `exact_match`: 1 where the response's answer is the problem's, and it ended by itself or need not have."""

    name: str
    isolated = False
    source: ClassVar[Source]
    template: ClassVar[str]
    """The prompt without chat, with {question} where the question goes; task.prompt_template stands in for it."""
    instruction: ClassVar[str]
    """What follows the question in a chat; task.instruction stands in for it."""

    def __init__(self, inputs: TaskInputs) -> None:
        """Reads and checks all rows."""
        config = inputs.config
        self._config = config
        self._chat = uses_chat(config, inputs.tokenizer)
        self._tokenizer = inputs.tokenizer
        self._max_prompt_tokens = inputs.max_prompt_tokens
        self._problems = read_splits(config, self.source)
        self._prompts: dict[Split, list[Prompt]] = {}

    @abstractmethod
    def is_right(self, text: str, *, question: str, answer: str) -> bool:
        """Whether a response gives the answer of a problem; the question tells an answer from a restatement."""

    @property
    def reward_weights(self) -> dict[str, float]:
        return {"exact_match": 1.0}

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Tokenised when first asked for: a searcher that never evaluates does not pay for the other splits."""
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

    def _counts(self, completion: Completion) -> bool:
        """The no-EOS rule: a response cut off at the length limit is wrong, whatever it says."""
        return completion.finish == "stop" or not self._config.cut_off_is_wrong

    def _make_prompts(self, split: Split) -> list[Prompt]:
        return keep_some(
            self._problems[split],
            lambda problem: self._prompt(split, problem),
            on_bad_row=self._config.on_bad_row,
            what=f"task.data={self._config.data}: no {split} row",
        )

    def _prompt(self, split: Split, problem: Problem) -> Prompt:
        return make_prompt(
            id=f"{split}-{problem.line}",
            text=self._ask(problem.question),
            columns={"question": problem.question, "answer": problem.answer},
            tokenizer=self._tokenizer,
            max_tokens=self._max_prompt_tokens,
            place=problem.place,
        )

    def _ask(self, question: str) -> str | list[dict[str, str]]:
        """The question in the template, or as a user's message with the instruction after it."""
        own = self._config
        if not self._chat:
            template = self.template if own.prompt_template is None else own.prompt_template
            return template.replace("{question}", question)
        instruction = self.instruction if own.instruction is None else own.instruction
        return [{"role": "user", "content": f"{question}\n\n{instruction}" if instruction else question}]


def uses_chat(config: TaskConfig, tokenizer: PreTrainedTokenizerBase) -> bool:
    """What task.chat means for this tokenizer."""
    has_template = tokenizer.chat_template is not None
    if config.chat is True and not has_template:
        raise ValueError("task.chat=true, but the tokenizer has no chat template: use task.chat=false or a chat model.")
    return has_template if config.chat == "auto" else config.chat


def read_splits(config: TaskConfig, source: Source) -> dict[Split, list[Problem]]:
    """The splits that the data has, in the order of their files."""
    assert config.data is not None, "TaskConfig checks it"
    held_out = config.eval_data or config.data
    has_held_out = config.eval_data is not None or not Path(held_out).expanduser().is_file()
    return make_splits(
        config,
        read_problems(config, config.data, "train", source),
        read_problems(config, held_out, "test", source) if has_held_out else None,
    )


def make_splits(
    config: TaskConfig, train: Sequence[Problem], held_out: Sequence[Problem] | None
) -> dict[Split, list[Problem]]:
    """The splits of a dataset's rows. Held-out questions are left out of train and validation alike."""
    empty = [name for name, rows in (("train", train), ("held_out", held_out)) if rows is not None and not rows]
    if empty:
        raise ValueError(f"task.data={config.data} has no rows for {' and '.join(empty)}.")
    if held_out is not None:
        kept = not_held_out(
            [question_key(problem.question) for problem in train],
            {question_key(problem.question) for problem in held_out},
            data=f"task.data={config.data}",
            held_out=f"task.eval_data={config.eval_data}" if config.eval_data else "its held-out rows",
        )
        if not any(kept):
            return {"train": [], "held_out": list(held_out)}
        train = list(compress(train, kept))
    splits = split_off_validation(train, config.num_validation_prompts)
    return splits if held_out is None else {**splits, "held_out": list(held_out)}


def read_problems(config: TaskConfig, data: str, split: str, source: Source) -> list[Problem]:
    """The good rows of a file, or of one split ("train", "test") of a folder or a hub dataset."""
    bad, file = BadRows(config.on_bad_row), Path(data).expanduser()
    rows = jsonl_rows(file, bad) if file.is_file() else split_rows(data, split, bad, hub_subset=source.hub_subset)
    ids = set[str]()

    def read(row: Row) -> Problem:
        problem = source.read(row)
        id = next((str(row.value[column]) for column in ID_COLUMNS if row.value.get(column) is not None), None)
        if id in ids:
            raise BadRow("duplicate id", f"{row.place}: id {id!r} occurs twice; ids must be unique.")
        if id is not None:
            ids.add(id)
        return problem

    problems = bad.keep(rows, read)
    bad.report()
    return problems


def split_off_validation(problems: Sequence[Problem], num_validation: int) -> dict[Split, list[Problem]]:
    """The questions with the smallest hashes are for validation; one that occurs twice falls on one side, also where only
    white space or capital letters differ."""
    if num_validation == 0:
        return {"train": list(problems)}
    questions = sorted({problem.question for problem in problems}, key=_hash)
    chosen = {question_key(question) for question in questions[:num_validation]}
    splits: dict[Split, list[Problem]] = {"train": [], "validation": []}
    for problem in problems:
        splits["validation" if question_key(problem.question) in chosen else "train"].append(problem)
    if not splits["train"]:
        raise ValueError(
            f"task.num_validation_prompts={num_validation} leaves nothing of the {len(problems)} train rows to train on: "
            "lower it, or set it to 0 to train on all."
        )
    return splits


def _hash(question: str) -> bytes:
    return hashlib.blake2b(question.encode(), digest_size=8).digest()
