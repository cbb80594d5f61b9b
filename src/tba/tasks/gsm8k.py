"""GSM8K: grade-school maths in words (github openai/grade-school-math), the paper's first experiment.

    {"question": "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. ...",
     "answer": "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\\nNatalia sold ... altogether.\\n#### 72"}

The data is read from where it lies and never shipped:

    tba train configs/gsm8k_one_gpu.yaml model.path=MODEL task.data=FOLDER     train.jsonl and test.jsonl, or .jsonl.gz
    tba evaluate MODEL --task gsm8k task.data=openai/gsm8k                     from the hub, with `datasets` installed

Held out are the test rows. Validation problems, to tune on, are train rows that a hash of the question picks: the same in
every run. An answer is the last number of the response; tba.tasks.answers.given_answer says which number that is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from tba.config import TaskConfig
from tba.tasks.answers import equal_answers, given_answer, marked_answer
from tba.tasks.base import Outcome, Split
from tba.tasks.encoding import make_prompt
from tba.tasks.rows import Row, jsonl_rows, split_rows
from tba.types import Completion, Prompt

HUB_SUBSET = "main"
"""The hub's dataset has another subset with Socratic sub-questions."""

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
    """The worked solution, with a number after its last `####`."""


class GSM8KTask:
    """Reward `exact_match`: 1 where the response's answer is the problem's, and it ended by itself or need not have."""

    name = "gsm8k"
    isolated = False

    def __init__(
        self,
        config: TaskConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_tokens: int,
        functions: Sequence[Callable[..., Any]] | None = None,
    ) -> None:
        """Reads and checks all rows. `functions` is there because every task's factory takes it."""
        self._config = config
        self._chat = uses_chat(config, tokenizer)
        self._tokenizer = tokenizer
        self._max_prompt_tokens = max_prompt_tokens
        self._problems = read_splits(config)
        self._prompts: dict[Split, list[Prompt]] = {}

    @property
    def reward_weights(self) -> dict[str, float]:
        return {"exact_match": 1.0}

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Tokenised when first asked for: a searcher that never evaluates does not pay for the other splits."""
        if split not in self._problems:
            raise ValueError(f"evaluate.split={split}: {WHY_MISSING[split].format(data=self._config.data)}")
        if split not in self._prompts:
            self._prompts[split] = [self._prompt(split, problem) for problem in self._problems[split]]
        return self._prompts[split]

    def score(self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]) -> list[Outcome]:
        wanted = marked_answer(prompt.columns["answer"])
        assert wanted is not None, "rows are checked when they are read"
        return [
            {"exact_match": float(self._counts(completion) and equal_answers(given_answer(text), wanted))}
            for text, completion in zip(texts, completions)
        ]

    def solved(self, outcome: Outcome) -> bool:
        return isinstance(outcome, dict) and outcome["exact_match"] == 1.0

    def _counts(self, completion: Completion) -> bool:
        """The no-EOS rule: a response cut off at the length limit is wrong, whatever it says."""
        return completion.finish == "stop" or not self._config.cut_off_is_wrong

    def _prompt(self, split: Split, problem: Problem) -> Prompt:
        return make_prompt(
            id=f"{split}-{problem.line}",
            text=prompt_text(problem.question, self._config, chat=self._chat),
            columns={"question": problem.question, "answer": problem.answer},
            tokenizer=self._tokenizer,
            max_tokens=self._max_prompt_tokens,
        )


def uses_chat(config: TaskConfig, tokenizer: PreTrainedTokenizerBase) -> bool:
    """What task.chat means for this tokenizer."""
    has_template = tokenizer.chat_template is not None
    if config.chat is True and not has_template:
        raise ValueError("task.chat=true, but the tokenizer has no chat template: use task.chat=false or a chat model.")
    return has_template if config.chat == "auto" else config.chat


def prompt_text(question: str, config: TaskConfig, *, chat: bool) -> str | list[dict[str, str]]:
    """The question as the model is asked it: in the template, or as a user's message with the instruction after it."""
    if not chat:
        return config.prompt_template.replace("{question}", question)
    content = f"{question}\n\n{config.instruction}" if config.instruction else question
    return [{"role": "user", "content": content}]


def read_splits(config: TaskConfig) -> dict[Split, list[Problem]]:
    """The splits that the data has, in the order of their files."""
    assert config.data is not None, "TaskConfig checks it"
    data, eval_data = Path(config.data).expanduser(), config.eval_data
    rows = jsonl_rows(data) if data.is_file() else split_rows(config.data, "train", hub_subset=HUB_SUBSET)
    splits = split_off_validation(read_problems(rows), config.num_validation_prompts)
    if eval_data is not None:
        splits["held_out"] = read_problems(jsonl_rows(Path(eval_data).expanduser()))
    elif not data.is_file():
        splits["held_out"] = read_problems(split_rows(config.data, "test", hub_subset=HUB_SUBSET))
    empty = [split for split, problems in splits.items() if not problems]
    if empty:
        raise ValueError(f"task.data={config.data} has no rows for {' and '.join(empty)}.")
    return splits


def read_problems(rows: Iterable[Row]) -> list[Problem]:
    return [_problem(row) for row in rows]


def split_off_validation(problems: Sequence[Problem], num_validation: int) -> dict[Split, list[Problem]]:
    """The questions with the smallest hashes are for validation; one that occurs twice falls on one side."""
    if num_validation == 0:
        return {"train": list(problems)}
    chosen = set(sorted({problem.question for problem in problems}, key=_hash)[:num_validation])
    splits: dict[Split, list[Problem]] = {
        "train": [problem for problem in problems if problem.question not in chosen],
        "validation": [problem for problem in problems if problem.question in chosen],
    }
    if not splits["train"]:
        raise ValueError(
            f"task.num_validation_prompts={num_validation} leaves nothing of the {len(problems)} train rows to train on: "
            "lower it, or set it to 0 to train on all."
        )
    return splits


def _hash(question: str) -> bytes:
    return hashlib.blake2b(question.encode(), digest_size=8).digest()


def _problem(row: Row) -> Problem:
    value = row.value
    if not isinstance(value, dict):
        raise ValueError(f"{row.place} is no object with a `question` and an `answer`.")
    for column in ("question", "answer"):
        if column not in value:
            raise ValueError(f"{row.place} has no `{column}` column; it has {', '.join(value) or 'none'}.")
        if not isinstance(value[column], str):
            raise ValueError(f"{row.place}: `{column}` is {value[column]!r}, it must be text.")
    question, answer = value["question"].strip(), value["answer"]
    if not question:
        raise ValueError(f"{row.place}: `question` is empty.")
    if marked_answer(answer) is None:
        raise ValueError(f"{row.place}: `answer` has no number after `####`; it ends with {answer[-40:]!r}.")
    return Problem(line=row.line, question=question, answer=answer)
