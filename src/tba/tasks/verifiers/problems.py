"""The task `verifiers:NAME`: single-turn tasks of one of that package's tasksets, scored by their own rewards.

    tba train model.path=MODEL task.name=verifiers:gsm8k 'task.settings.options={split: train}'
    tba train model.path=MODEL task.name=verifiers:sums.py

All tasks are read at the start, in every role: a taskset must load the same ones each time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from tba.config.sections import Section
from tba.tasks.data.make_prompt import question_key, uses_chat
from tba.tasks.questions import DrawnPrompts, PackageTask, Problem
from tba.tasks.task import Split, TaskInputs
from tba.tasks.verifiers.tasksets import Scorer, SingleTurnTasks
from tba.types import Prompt

LEAST_TO_SPLIT = 20
"""Number of different tasks from which on some are held out."""
MOST_HELD_OUT = 10
"""Held-out tasks are one in ten at most."""


class Settings(Section):
    """task.settings of verifiers:NAME."""

    size: int | None = Field(default=None, ge=1)
    """Number of tasks that are read, held-out ones included; None = all."""
    num_held_out: int = Field(default=250, ge=1)
    """Number of held-out tasks, and of validation tasks, chosen by a hash of the prompt; at most a tenth each. Of fewer than
    20 tasks none is held out, and evaluations ask those that are trained on."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The taskset's config, such as {split: train, task: {judges: [...]}}."""


class VerifiersTask(PackageTask):
    """Reward `score`: the sum of the task's weighted rewards."""

    Settings = Settings

    def __init__(self, inputs: TaskInputs) -> None:
        settings: Settings = inputs.settings
        name = inputs.config.name.partition(":")[2]
        self._inputs, self._is_chat = inputs, uses_chat(inputs.config, inputs.tokenizer)
        rows = SingleTurnTasks(name, settings.options).rows(settings.size)
        prompts = {split: self._split(split, own) for split, own in split_rows(rows, settings.num_held_out).items()}
        super().__init__(Scorer(name, settings.options), prompts)

    def _split(self, split: Split, rows: list[Problem]) -> DrawnPrompts:
        return DrawnPrompts(rows.__getitem__, self._prompt, split, len(rows))

    def _prompt(self, id: str, problem: Problem) -> Prompt:
        return self._inputs.prompt(id, self._ask(problem["question"]), {"task": problem["task"]})

    def _ask(self, messages: list[dict[str, str]]) -> str | list[dict[str, str]]:
        """The messages, the last one in the template; as one text where the tokenizer has no chat template."""
        *others, last = messages
        template = self._inputs.config.prompt_template or ("{question}" if self._is_chat else "{question}\n")
        asked = [*others, {**last, "content": template.replace("{question}", last["content"])}]
        return asked if self._is_chat else "\n\n".join(message["content"] for message in asked)


def split_rows(rows: list[Problem], num_held_out: int) -> Mapping[Split, list[Problem]]:
    """Tasks by split. Those with the smallest hashes are held out: the same in every run, and equal prompts together."""
    keys = [question_key(row["question"]) for row in rows]
    different = sorted(set(keys))
    if len(different) < LEAST_TO_SPLIT:
        return {"train": rows, "validation": rows, "held_out": rows}
    count = min(num_held_out, len(different) // MOST_HELD_OUT)
    sides: dict[int, Split] = dict.fromkeys(different[:count], "held_out")
    sides |= dict.fromkeys(different[count : 2 * count], "validation")
    splits: dict[Split, list[Problem]] = {"train": [], "validation": [], "held_out": []}
    for key, row in zip(keys, rows):
        splits[sides.get(key, "train")].append(row)
    return splits
