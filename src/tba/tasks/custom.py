"""The task `custom`: a user's prompts from a JSONL file, rewards from the user's Python functions (`tasks/rewards`).

{"prompt": "What is 2 + 2?", "answer": "4"}
{"prompt": [{"role": "user", "content": "What is 2 + 3?"}], "answer": "5"}

Every row is checked, and held out or trained on by a hash of its prompt. Prompts of a plain file stay there: two numbers of
each are kept in memory, the rest is read when it is drawn.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import weakref
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from tba.config import TaskConfig
from tba.config.task import code_name
from tba.tasks.data.make_prompt import LazyPrompts, hash_64, not_held_out, nothing_left, question_key, share_of
from tba.tasks.data.rows import BadRow, BadRows, DataRow, RowNames, jsonl_rows, parsed_row
from tba.tasks.questions import RewardsTask
from tba.tasks.rewards.load_function import GIVEN_ARGUMENTS, check_code, check_reward_function, shortened
from tba.tasks.task import Split, TaskInputs
from tba.types import Prompt

logger = logging.getLogger("tba.tasks")

HELD_OUT = 500
"""Number of held-out prompts of an environment without data."""
LEAST_TO_SPLIT = 20
"""Number of different prompts from which on some are held out: of fewer a tenth says nothing, and each is missed in
training."""


class CustomTask(RewardsTask):
    """The task of a user's data and reward functions."""

    def __init__(self, inputs: TaskInputs) -> None:
        config = inputs.config
        # Without importing the rewards' files: they may load models, and every role makes the task.
        for place in config.environment.code:
            check_code(place)
        needed = {name: reward.label for reward in config.rewards for name in check_reward_function(reward.function)}
        super().__init__(config.rewards)
        self.reward_weights = {
            # Rewards that environments give have weight 1, under the names of their classes.
            **{code_name(own): 1.0 for own in config.environment.players},
            **{reward.label: reward.weight for reward in config.rewards},
        }
        self._data = config.data
        if config.data is None:
            count = config.num_train_prompts
            self._prompts = {
                # The environment's reset, seeded by the prompt's id, says what there is to do.
                "train": LazyPrompts(count, lambda place: silent_prompt(f"train-{place}", {})),
                "held_out": LazyPrompts(HELD_OUT, lambda place: silent_prompt(f"held-out-{place}", {})),
            }
            self.split_message = f"trains on {count} numbered resets of the environment, and is evaluated on others."
            """How the data is split, for the user."""
            return
        train, held_out = read_sides(PromptReader(config, inputs, needed))
        self._prompts = {"train": train, "held_out": held_out}
        if held_out is train:
            self.split_message = (
                f"trains and is evaluated on the same {len(train)} prompts: fewer than {LEAST_TO_SPLIT} different ones are "
                "not split. Give others as task.eval_data (eval_dataset)."
            )
        elif held_out:
            message = f"is evaluated on {len(held_out)} others ({_held_out_message(config)})."
            self.split_message = f"trains on {len(train)} prompts and {message}"
        else:
            self.split_message = (
                f"trains on {len(train)} prompts and is not evaluated: none is held out ({_held_out_message(config)}). "
                "task.eval_data gives some."
            )

    def prompts(self, split: Split) -> Sequence[Prompt]:
        if split == "validation":
            raise ValueError(
                "evaluate.split=validation: your own data (task.name=custom) has no validation split. Leave evaluate.split "
                "at held_out, pass your validation file as task.eval_data, and keep the test file for "
                "`tba evaluate RUN task.eval_data=test.jsonl`."
            )
        if split == "train" and not self._prompts["train"]:
            raise nothing_left(self._data)
        return self._prompts[split]


def _held_out_message(config: TaskConfig) -> str:
    """The setting that says which prompts are held out."""
    if config.eval_data is None:
        return f"task.eval_fraction={config.eval_fraction}"
    return _given_as("task.eval_data", config.eval_data)


def _given_as(key: str, path: str) -> str:
    """How a user gave data: `task.data=prompts.jsonl`, or as `train_dataset` of a script."""
    return RowNames.of(Path(path)).dataset or f"{key}={path}"


def num_train_prompts(config: TaskConfig) -> int:
    """Number of prompts that a run of this config trains on, found without a tokenizer: rows that are bad or held out do not
    count, over-long ones do. 0 where the data cannot be read, which the run will say better."""
    if config.data is None:
        return config.num_train_prompts
    try:
        return len(read_sides(PromptReader(config))[0])
    except (OSError, ValueError):
        return 0


def read_sides(reader: PromptReader) -> tuple[FilePrompts, FilePrompts]:
    """The prompts to train on and those held out, one and the same where there are too few to split."""
    config, trains = reader.config, reader.inputs is not None and reader.inputs.trains
    assert config.data is not None
    fraction = config.eval_fraction if config.eval_data is None else 0.0
    train, held_out = read_prompts(reader, Path(config.data), fraction)
    data, different = _given_as("task.data", config.data), len({*train.keys, *held_out.keys})
    if fraction > 0.0 and different < LEAST_TO_SPLIT:
        # Read again, with nothing held out: held-out rows go back to their places.
        train, _ = read_prompts(reader, Path(config.data), 0.0)
        held_out = train
    elif not train:
        raise ValueError(f"task.eval_fraction={fraction} leaves no prompt to train on: lower it or add data.")
    elif config.eval_data is not None:
        held_out, _ = read_prompts(reader, Path(config.eval_data), 0.0)
    if trains and different == 1:
        also = ", and that is what evaluations ask too" if set(train.keys) <= set(held_out.keys) else ""
        message = "%s has one prompt, in %d rows: all that is learned is how to answer this one%s."
        logger.warning(message, data, len(train), also)
    # A task of one prompt has no others to be evaluated on: it keeps it.
    if held_out is not train and len(set(train.keys)) > 1:
        message = _held_out_message(config)
        train.keep(not_held_out(train.keys, set(held_out.keys), data=data, held_out=message, trains=trains))
    return train, held_out


def read_prompts(reader: PromptReader, path: Path, held_out_fraction: float) -> tuple[FilePrompts, FilePrompts]:
    """The prompts of a file, and those of them that a hash of their text holds out. Every row is checked now."""
    if not path.is_file():
        raise ValueError(f"task.data: file {path} does not exist.")
    names, ids = RowNames.of(path), set[int]()
    bad = BadRows(reader.config.on_bad_row, names=names)
    # sides[0] trains, sides[1] is held out.
    sides = [FilePrompts(path, reader) for _ in range(2)]

    def check(row: DataRow) -> None:
        prompt = reader(row, path)
        key = hash_64(prompt.id)  # the ids themselves of many million prompts would fill the memory
        if key in ids:
            raise BadRow("duplicate id", f"{row.place}: id {prompt.id!r} occurs twice; ids must be unique.")
        ids.add(key)
        # By the prompt's own hash: a row stays on its side whatever is added to the file.
        sides[share_of(_asked(prompt)) < held_out_fraction].add(prompt, row)

    bad.keep(jsonl_rows(path, bad), check)
    if reader.inputs is not None:  # a count of prompts leaves them out without a warning
        bad.report()
    if not any(sides):
        but = f" but for {bad.total} bad rows" if bad.total else ""
        raise ValueError(f"{names.dataset or path} is empty{but}: it needs at least one row with a `prompt` column.")
    return sides[0], sides[1]


SILENT = [{"role": "user", "content": ""}]
"""Messages of a prompt that leaves all words to the environment's reset."""


def silent_prompt(id: str, columns: Mapping[str, Any]) -> Prompt:
    # The tokens come with the environment's words; a prompt without any would be refused before.
    return Prompt(id=id, token_ids=np.zeros(1, np.int32), text=[*map(dict, SILENT)], columns=columns)


def _asked(prompt: Prompt) -> str | list[dict[str, str]]:
    """What makes a prompt another than the others: its text; of a silent one its id, by which its environment is seeded."""
    return prompt.id if prompt.text == SILENT else prompt.text


@dataclass(frozen=True)
class PromptReader:
    """Makes a prompt of a row; it is asked again whenever a prompt that stayed in its file is drawn."""

    config: TaskConfig
    inputs: TaskInputs | None = None
    """None = prompts are counted only, and have no tokens."""
    needed: Mapping[str, str] = field(default_factory=dict)
    """Columns that every row must have, each with the name of the reward that needs it."""

    def __call__(self, row: DataRow, path: Path) -> Prompt:
        unusable = (
            f"{row.place} has no usable `prompt` column: it must be text or a list of chat messages "
            '({"role": ..., "content": ...}).'
        )
        if not isinstance(row.value, dict):
            raise BadRow("no object", unusable)
        # An environment's reset says what there is to do: its rows may do without a prompt.
        is_silent = bool(self.config.environment.players) and "prompt" not in row.value
        if not is_silent and "prompt" not in row.value:
            others = f" It has {', '.join(row.value)}: rename the column with the prompts." if row.value else ""
            raise BadRow("missing column", unusable + others)
        text = SILENT if is_silent else row.value["prompt"]
        if not isinstance(text, str) and not is_chat(text):
            got = shortened(json.dumps(text, ensure_ascii=False), 120)
            raise BadRow("wrong type", f"{unusable} Each content is one text, without images or parts. Got {got}.")
        contents = [text] if isinstance(text, str) else [message["content"] for message in text]
        if not is_silent and not any(content.strip() for content in contents):
            raise BadRow("empty prompt", f"{row.place} has no usable `prompt` column: it is empty.")
        # The `id` column; where there is none, the file's name and the line.
        id = row.value.get("id")
        if id is not None and not isinstance(id, str | int):
            raise BadRow("wrong type", f"{row.place}: `id` is {id!r}, it must be text or a whole number.")
        id = f"{path.stem}-{row.line}" if id is None else str(id)
        if self.inputs is None:
            return Prompt(id=id, token_ids=np.zeros(0, np.int32), text=text)
        for column, reward in self.needed.items():
            # verl keeps its ground truth in a column of several values.
            of_verl = row.value.get("reward_model") if column == "ground_truth" else None
            if column not in row.value and not (isinstance(of_verl, dict) and column in of_verl):
                near = difflib.get_close_matches(column, GIVEN_ARGUMENTS, n=1, cutoff=0.8)
                hint = f" Did the reward mean `{near[0]}`, which every reward gets?" if near else ""
                raise BadRow(
                    "missing column",
                    f"{row.place} has no `{column}` column, which the reward {reward} needs; it has {', '.join(row.value)}."
                    f"{hint}",
                )
        known = self.config.environment.classes
        if len(known) > 1 and (own := row.value.get("environment")) not in known:
            raise BadRow(
                "unknown environment", f"{row.place} has environment={own!r}: it must be one of {', '.join(known)}."
            )
        if is_silent:
            return silent_prompt(id, row.value)
        columns = {name: value for name, value in row.value.items() if name != "prompt"}
        return self.inputs.prompt(id, text, columns, place=row.place)


class FilePrompts(LazyPrompts):
    """The prompts of some lines of a JSONL file, which must not change meanwhile. Two numbers of each are kept, and the key
    of its question; those of a compressed file are kept whole."""

    def __init__(self, path: Path, read: PromptReader) -> None:
        super().__init__(0, self._at)
        self._path, self._read = path, read
        # 64-bit arrays and no lists: 24 bytes a prompt with its key.
        self._offsets, self._lines = array("q"), array("q")
        self._kept: list[Prompt] | None = [] if path.suffix == ".gz" else None
        self.keys = array("Q")
        """Key of each prompt's question (question_key)."""
        # Held open for the whole run, also where the file is removed or replaced.
        self._file = path.open("rb")
        weakref.finalize(self, self._file.close)  # left open, PYTHONWARNINGS=error shows it as a traceback of ours
        self._stamp = self._stamp_now()

    def add(self, prompt: Prompt, row: DataRow) -> None:
        """Add a row of the file, of which `read` has made this prompt."""
        # Keys, offsets, lines and kept prompts are parallel: place i is the same prompt in all.
        self.keys.append(question_key(_asked(prompt)))
        if self._kept is not None:
            self._kept.append(prompt)
            return
        assert row.offset is not None, "rows of a plain file have a place to come back to"
        self._offsets.append(row.offset)
        self._lines.append(row.line)

    def keep(self, stays: Sequence[bool]) -> None:
        """Drop the prompts that are not to stay."""
        self.keys = array("Q", compress(self.keys, stays))
        self._offsets, self._lines = (array("q", compress(own, stays)) for own in (self._offsets, self._lines))
        self._kept = None if self._kept is None else list(compress(self._kept, stays))

    def __len__(self) -> int:
        return len(self.keys)

    def _at(self, place: int) -> Prompt:
        if self._kept is not None:
            return self._kept[place]
        if self._stamp_now() != self._stamp:
            raise RuntimeError(
                f"{self._path} has changed since the run began: its prompts are no longer those checked."
            )
        # Read and encoded again at each draw: a searcher draws a prompt once an epoch.
        self._file.seek(self._offsets[place])
        line = self._lines[place]
        row = parsed_row(self._file.readline(), RowNames.of(self._path).place(self._path, line), line)
        return self._read(row, self._path)

    def _stamp_now(self) -> tuple[int, int]:
        """Size and time of change of the file. A file that replaces this one does no harm: the old one stays open."""
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns


def is_chat(value: Any) -> bool:
    """Whether a value is a list of chat messages with a role and text."""
    return isinstance(value, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in value
    )
