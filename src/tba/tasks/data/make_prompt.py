"""Prompts from data: as tokens within the context, with one BOS, and as questions with answers in splits.

Held out are the rows to report on. Train rows whose question is held out too are counted, reported once and left out of
training. Questions are compared by their words in lower case. Validation questions, to tune on, are train rows that a hash
of the question picks: the same in every run.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from hashlib import blake2b
from itertools import compress
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
from transformers import PreTrainedTokenizerBase

from tba.config import TaskConfig
from tba.tasks.data.rows import BadRow, BadRows, DataRow, jsonl_rows, split_rows
from tba.types import Prompt

Split = Literal["train", "validation", "held_out"]
"""Name of a split: prompts that are trained on, tuned on, or reported on."""


class LazyPrompts(Sequence[Prompt]):
    """Prompts that are made when they are asked for, by `make` from their place, and not kept."""

    def __init__(self, count: int, make: Callable[[int], Prompt]) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        places = range(len(self))[index]
        return self._make(places) if isinstance(places, int) else [self._make(place) for place in places]


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
        # Data may hold the BOS as text: two of them are a sequence that no model has seen.
        starts_with_bos = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        return tokens_of(text, tokenizer, add_special_tokens=not starts_with_bos)
    if tokenizer.chat_template is None:
        raise ValueError(
            "the data has chat messages but the tokenizer has no chat template: give plain text prompts, or a model with "
            "a template."
        )
    return tokens_of(render_chat(text, tokenizer, template), tokenizer, add_special_tokens=False)


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    template: Mapping[str, Any] | None = None,
    *,
    add_generation_prompt: bool = True,
) -> str:
    """The text that the chat template writes for messages, special tokens included."""
    try:
        # As text first: the template writes its special tokens, and the tokenizer must add none.
        return tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **(template or {})
        )
    except Exception as error:  # a template is a program: it may raise what it likes
        roles = ", ".join(message["role"] for message in messages)
        raise PromptRefused(
            f"with the roles {roles} is refused by the tokenizer's chat template: {type(error).__name__}: {error}. Change "
            "the messages, or the template (chat_template of the tokenizer)."
        ) from None


def tokens_of(text: str, tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text."""
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


logger = logging.getLogger("tba.tasks")

ID_COLUMNS = ("id", "unique_id")
"""Columns that name a row: no two rows of a file may have the same value."""


@dataclass(frozen=True, kw_only=True)
class QuestionAnswer:
    """A row, checked: QuestionAnswer(line=1, question="Natalia sold ...", answer="... altogether.\\n#### 72")"""

    line: int
    """Number of the line in its file, from 1: `train-17` is the question of line 17."""
    question: str
    answer: str
    """Answer that the task's grader compares with, and can read."""
    place: str = ""
    """Place of the row, with which an error about it starts: `data/train.jsonl line 17`."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """How a dataset is read: Source(hub_subset="main", read=read_problem)"""

    hub_subset: str
    """Subset of the dataset on the hub."""
    read: Callable[[DataRow], tuple[str, str]]
    """Question and answer of a row; raises BadRow for a row without them."""
    held_out: tuple[str, ...] = ("test",)
    """Names of the split to report on; of a folder the first that it has, of a hub dataset the first."""


def read_splits(config: TaskConfig, source: Source, *, trains: bool = True) -> dict[Split, list[QuestionAnswer]]:
    """The splits that the data has, in the order of their files; `trains` is TaskInputs'. Held-out questions are left out
    of train and validation alike."""
    assert config.data is not None, "TaskConfig checks it"
    report_on = config.eval_data or config.data
    # One plain file has train rows only; a folder or hub dataset has splits.
    has_held_out = config.eval_data is not None or not Path(report_on).expanduser().is_file()
    train = read_problems(config, config.data, ("train",), source)
    held_out = read_problems(config, report_on, source.held_out, source) if has_held_out else None
    empty = [name for name, rows in (("train", train), ("held_out", held_out)) if rows is not None and not rows]
    if empty:
        raise ValueError(f"task.data={config.data} has no rows for {' and '.join(empty)}.")
    if held_out is not None:
        # The held-out side wins: what a run reports on must not depend on what it happens to train on.
        kept = not_held_out(
            [question_key(problem.question) for problem in train],
            {question_key(problem.question) for problem in held_out},
            data=f"task.data={config.data}",
            held_out=f"task.eval_data={config.eval_data}" if config.eval_data else "its held-out rows",
            trains=trains,
        )
        if not any(kept):
            return {"train": [], "held_out": held_out}
        train = list(compress(train, kept))
    splits = split_off_validation(train, config.num_validation_prompts)
    return splits if held_out is None else {**splits, "held_out": held_out}


def read_problems(config: TaskConfig, data: str, names: Sequence[str], source: Source) -> list[QuestionAnswer]:
    """The good rows of a file, or of the split with the first of these names in a folder or a hub dataset."""
    bad, file = BadRows(config.on_bad_row), Path(data).expanduser()
    rows = jsonl_rows(file, bad) if file.is_file() else split_rows(data, names, bad, hub_subset=source.hub_subset)
    ids = set[str]()

    def read(row: DataRow) -> QuestionAnswer:
        question, answer = source.read(row)
        id = next((str(row.value[column]) for column in ID_COLUMNS if row.value.get(column) is not None), None)
        if id in ids:
            raise BadRow("duplicate id", f"{row.place}: id {id!r} occurs twice; ids must be unique.")
        if id is not None:
            ids.add(id)
        return QuestionAnswer(line=row.line, question=question, answer=answer, place=row.place)

    problems = bad.keep(rows, read)
    bad.report()
    return problems


def split_off_validation(problems: Sequence[QuestionAnswer], num_validation: int) -> dict[Split, list[QuestionAnswer]]:
    """The questions with the smallest hashes are for validation; one that occurs twice falls on one side, also where only
    white space or capital letters differ."""
    if num_validation == 0:
        return {"train": list(problems)}
    # By hash, not by place: the same questions whatever the order of the rows, and whatever rows are added.
    questions = sorted({problem.question for problem in problems}, key=_hash)
    # By key: the same question in other spelling goes to the same side.
    chosen = {question_key(question) for question in questions[:num_validation]}
    splits: dict[Split, list[QuestionAnswer]] = {"train": [], "validation": []}
    for problem in problems:
        splits["validation" if question_key(problem.question) in chosen else "train"].append(problem)
    if not splits["train"]:
        raise ValueError(
            f"task.num_validation_prompts={num_validation} leaves nothing of the {len(problems)} train rows to train on: "
            "lower it, or set it to 0 to train on all."
        )
    return splits


def _hash(question: str) -> bytes:
    return blake2b(question.encode(), digest_size=8).digest()


def hash_64(text: str) -> int:
    """Hash of a text, 64 bits, the same on every machine."""
    return int.from_bytes(_hash(text), "little")


def share_of(prompt: str | Sequence[Mapping[str, str]]) -> float:
    """A number in [0, 1) from a prompt: equal prompts fall on the same side."""
    # Sorted keys: a chat message means the same in any order of role and content.
    return hash_64(json.dumps(prompt, sort_keys=True)) / 2**64


def not_held_out(
    train_keys: Sequence[int], held_out_keys: AbstractSet[int], *, data: str, held_out: str, trains: bool = True
) -> list[bool]:
    """For each train row whether it may be trained on; `data` and `held_out` name the two sources in the warning, which is
    left out where nothing is trained."""
    # Keys and not texts: of many million rows 8 bytes each are in memory.
    kept = [key not in held_out_keys for key in train_keys]
    dropped = len(kept) - sum(kept)
    if dropped and trains:
        words = (
            "%s: %d of %d rows to train on have a question that is held out too (%s): they are left out of training."
        )
        logger.warning(words, data, dropped, len(kept), held_out)
    return kept


def nothing_left(data: str | None) -> ValueError:
    """The error for a run that has nothing to train on. An evaluation may ask for trained questions: it needs no others."""
    return ValueError(
        f"task.data={data}: every row to train on has a question that is held out too, so nothing is left to train on. Give "
        "other train rows as task.data, or other rows to report on as task.eval_data."
    )


def question_key(question: str | Sequence[dict[str, str]]) -> int:
    """Hash of a question, 64 bits, the same for equal questions: " Two\\nTWOS" equals "two twos". A chat counts whole."""
    messages = [question] if isinstance(question, str) else [f"{m['role']}: {m['content']}" for m in question]
    text = "\n".join(" ".join(message.split()).casefold() for message in messages)
    return hash_64(text)
