"""The task `reasoning_gym:NAME`: problems of one of the package's generators, scored by its own rule.

    tba train model.path=MODEL task.name=reasoning_gym:countdown
    tba train model.path=MODEL task.name=reasoning_gym:gcd 'task.settings.options={max_value: 60}' task.settings.size=2000

A problem is made when it is drawn, from its place and the split's seed: always the same one. Splits have seeds of their own,
and a problem to train on whose question is held out too is replaced by the next. Scores are computed in reward workers:
some scorers work with sympy, which may compute for hours over a line of babble.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from pydantic import Field

from tba.config.sections import Section
from tba.tasks.data.make_prompt import uses_chat
from tba.tasks.questions import DrawnPrompts, PackageTask
from tba.tasks.reasoning_gym.generators import AnswerPlace, Generator, Problem, Scorer
from tba.tasks.task import Split, TaskInputs
from tba.types import Prompt

SEEDS: dict[Split, int] = {"train": 0, "validation": 1_000_000_000, "held_out": 2_000_000_000}
"""Far apart: most generators seed the problem at a place with seed + place, so neighbouring seeds have equal problems."""
INSTRUCTION = "Give the final answer between <answer> and </answer> tags."
"""Text after the question in a chat, where the answer is looked for in tags."""


class Settings(Section):
    """task.settings of reasoning_gym:NAME."""

    size: int = Field(default=5000, ge=1, le=100_000_000)
    """Number of problems to train on, the same ones whatever the run's seed."""
    num_held_out: int = Field(default=250, ge=1)
    """Number of held-out problems, and of validation problems."""
    answer: AnswerPlace = "auto"
    """Where the answer of a response stands: tags = in its last <answer> tags; text = it is the whole response; auto = in
    tags where there are any, else the whole."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the generator, such as {max_value: 60}; others keep the package's defaults."""


class ReasoningGymTask(PackageTask):
    """Reward `score`: the package's score of the answer, 0 to 1. `solved` means a score of 1."""

    Settings = Settings

    def __init__(self, inputs: TaskInputs) -> None:
        settings: Settings = inputs.settings
        name = inputs.config.name.partition(":")[2]
        self._inputs, self._settings = inputs, settings
        self._is_chat = uses_chat(inputs.config, inputs.tokenizer)

        def split(split: Split, count: int, *without: DrawnPrompts) -> DrawnPrompts:
            made = cache(partial(Generator, name, settings.options, seed=SEEDS[split], size=count))
            return DrawnPrompts(lambda place: made().problem(place), self._prompt, split, count, without=without)

        held_out = split("held_out", settings.num_held_out)
        validation = split("validation", settings.num_held_out, held_out)
        train = split("train", settings.size, held_out, validation)
        super().__init__(
            Scorer(name, settings.options, settings.answer),
            {"train": train, "validation": validation, "held_out": held_out},
        )

    def _prompt(self, id: str, problem: Problem) -> Prompt:
        ends_with = f"\n\n{INSTRUCTION}" if self._settings.answer != "text" else ""
        template = self._inputs.config.prompt_template or f"{{question}}{ends_with if self._is_chat else chr(10)}"
        text = template.replace("{question}", problem["question"])
        return self._inputs.prompt(
            id, [{"role": "user", "content": text}] if self._is_chat else text, {"problem": problem}
        )
