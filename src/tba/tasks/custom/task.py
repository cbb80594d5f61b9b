"""The task `custom`: a user's prompts from a JSONL file, rewards from the user's Python functions.

{"prompt": "What is 2 + 2?", "answer": "4"}
{"prompt": [{"role": "user", "content": "What is 2 + 3?"}], "answer": "5"}
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from tba.config import TaskConfig
from tba.tasks.base import Outcome, RewardFailed, Split
from tba.tasks.custom.prompt_file import FilePrompts
from tba.tasks.custom.reward_functions import RewardSet
from tba.tasks.encoding import make_prompt
from tba.tasks.inputs import TaskInputs
from tba.tasks.overlap import not_held_out, nothing_left, question_key
from tba.tasks.rows import BadRow, BadRows, Row, jsonl_rows
from tba.types import Completion, Prompt, combined_reward


class CustomTask:
    """`solved` means that the combined reward reaches 1, the usual meaning of a 0/1 reward."""

    name = "custom"
    isolated = True

    def __init__(self, inputs: TaskInputs) -> None:
        config = inputs.config
        self.rewards = RewardSet(config.rewards, inputs.functions)
        assert config.data is not None
        reader = PromptReader(inputs.tokenizer, inputs.max_prompt_tokens)
        fraction = config.eval_fraction if config.eval_data is None else 0.0
        train, held_out = _read_prompts(config, Path(config.data), reader, fraction)
        if not train.prompts:
            raise ValueError(f"task.eval_fraction={fraction} leaves no prompt to train on: lower it or add data.")
        if config.eval_data is not None:
            held_out, _ = _read_prompts(config, Path(config.eval_data), reader, 0.0)
        held_out_words = f"task.eval_data={config.eval_data}" if config.eval_data else f"task.eval_fraction={fraction}"
        train.leave_out(held_out, data=f"task.data={config.data}", held_out_words=held_out_words)
        self._config = config
        self._prompts: dict[Split, Sequence[Prompt]] = {"train": train.prompts, "held_out": held_out.prompts}

    @property
    def reward_weights(self) -> Mapping[str, float]:
        return self.rewards.weights

    def prompts(self, split: Split) -> Sequence[Prompt]:
        if split == "validation":
            raise ValueError(
                "evaluate.split=validation: your own data (task.name=custom) has no validation split. Leave evaluate.split "
                "at held_out, pass your validation file as task.eval_data, and keep the test file for "
                "`tba evaluate RUN task.eval_data=test.jsonl`."
            )
        if split == "train" and not self._prompts["train"]:
            raise nothing_left(self._config.data)
        return self._prompts[split]

    def score(self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]) -> list[Outcome]:
        ids = [completion.token_ids.tolist() for completion in completions]
        return self.rewards.score(prompt.text, prompt.columns, texts, ids)

    def solved(self, outcome: Outcome) -> bool:
        if isinstance(outcome, RewardFailed):
            return False
        return combined_reward(outcome, self.reward_weights) >= 1.0 - 1e-9


@dataclass(frozen=True)
class PromptReader:
    """Makes a prompt of a row; it is asked again whenever a prompt that stayed in its file is visited."""

    tokenizer: PreTrainedTokenizerBase
    max_tokens: int

    def __call__(self, row: Row, path: Path) -> Prompt:
        return make_prompt(
            text=_prompt_text(row),
            id=_id(row, path),
            columns={name: value for name, value in row.value.items() if name != "prompt"},
            tokenizer=self.tokenizer,
            max_tokens=self.max_tokens,
            place=row.place,
        )


@dataclass
class Side:
    """The prompts on one side of the split, with the keys of their questions."""

    prompts: list[Prompt] | FilePrompts
    keys: array[int] = field(default_factory=lambda: array("Q"))
    """question_key of each prompt."""

    def add(self, prompt: Prompt, row: Row) -> None:
        if isinstance(self.prompts, FilePrompts):
            self.prompts.append(row)
        else:
            self.prompts.append(prompt)
        self.keys.append(question_key(prompt.text))

    def leave_out(self, held_out: Side, *, data: str, held_out_words: str) -> None:
        """Drop the prompts whose question is on the other side too, with a warning. A task of one prompt has no others to be
        evaluated on: it keeps it."""
        if len(set(self.keys)) == 1:
            return
        kept = not_held_out(self.keys, set(held_out.keys), data=data, held_out=held_out_words)
        if all(kept):
            return
        if isinstance(self.prompts, FilePrompts):
            self.prompts.keep(kept)
        else:
            self.prompts = list(compress(self.prompts, kept))


def _place(prompt: Prompt) -> float:
    """A number in [0, 1) from the prompt's text: equal prompts fall on the same side."""
    digest = hashlib.blake2b(json.dumps(prompt.text, sort_keys=True).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def _read_prompts(config: TaskConfig, path: Path, reader: PromptReader, held_out_fraction: float) -> tuple[Side, Side]:
    """The prompts of a file, and those of them that a hash of their text holds out. Every row is checked now; prompts of a
    plain file stay there, so that it may be larger than memory."""
    if not path.is_file():
        raise ValueError(f"task.data: file {path} does not exist.")
    bad, ids, packed = BadRows(config.on_bad_row), set[int](), path.suffix == ".gz"
    sides = [Side([] if packed else _file_prompts(path, reader)) for _ in range(2)]

    def check(row: Row) -> None:
        prompt = reader(row, path)
        key = _key(prompt.id)
        if key in ids:
            raise BadRow("duplicate id", f"{row.place}: id {prompt.id!r} occurs twice; ids must be unique.")
        ids.add(key)
        sides[_place(prompt) < held_out_fraction].add(prompt, row)

    bad.keep(jsonl_rows(path, bad), check)
    bad.report()
    if not any(side.prompts for side in sides):
        but = f" but for {bad.total} bad rows" if bad.total else ""
        raise ValueError(f"{path} is empty{but}: it needs at least one row with a `prompt` column.")
    return sides[0], sides[1]


def _file_prompts(path: Path, reader: PromptReader) -> FilePrompts:
    return FilePrompts(path, lambda row: reader(row, path))


def _key(id: str) -> int:
    """64 bits instead of the text: of many million prompts the ids themselves would fill the memory."""
    return int.from_bytes(hashlib.blake2b(id.encode(), digest_size=8).digest(), "little")


def _prompt_text(row: Row) -> str | list[dict[str, str]]:
    wanted = (
        f"{row.place} has no usable `prompt` column: it must be text or a list of chat messages "
        '({"role": ..., "content": ...}).'
    )
    if not isinstance(row.value, dict):
        raise BadRow("no object", wanted)
    if "prompt" not in row.value:
        raise BadRow("missing column", wanted)
    prompt = row.value["prompt"]
    if not isinstance(prompt, str) and not _is_chat(prompt):
        raise BadRow("wrong type", wanted)
    contents = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    if not any(content.strip() for content in contents):
        raise BadRow("empty prompt", f"{row.place} has no usable `prompt` column: it is empty.")
    return prompt


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in value
    )


def _id(row: Row, path: Path) -> str:
    """The `id` column; where there is none, the file's name and the line."""
    id = row.value.get("id")
    if id is None:
        return f"{path.stem}-{row.line}"
    if not isinstance(id, str | int):
        raise BadRow("wrong type", f"{row.place}: `id` is {id!r}, it must be text or a whole number.")
    return str(id)
