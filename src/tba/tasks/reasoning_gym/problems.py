"""The task `reasoning_gym:NAME`: problems of one of the package's generators, scored by its own rule.

    tba train model.path=MODEL task.name=reasoning_gym:countdown
    tba train model.path=MODEL task.name=reasoning_gym:gcd 'task.settings.options={max_value: 60}' task.settings.size=2000

A problem is made when it is drawn, from its place and the split's seed: always the same one. Splits have seeds of their own,
and a problem to train on whose question is held out too is replaced by the next. Scores are computed in reward workers:
some scorers work with sympy, which may compute for hours over a line of babble.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import Any, ClassVar

from pydantic import Field

from tba.config import RewardConfig
from tba.config.section import Section
from tba.tasks.data.make_prompt import LazyPrompts, make_prompt, question_key, uses_chat
from tba.tasks.data.rows import BadRow
from tba.tasks.evaluation import AnswerEvaluator
from tba.tasks.outcomes import Outcome, RewardFailed
from tba.tasks.reasoning_gym.generators import AnswerPlace, Generator, Problem, Scorer
from tba.tasks.rewards.functions import RewardSet
from tba.tasks.task import EvaluationInputs, Evaluator, Split, TaskInputs
from tba.types import Completion, Prompt, combined_reward

logger = logging.getLogger("tba.tasks")

SEEDS: dict[Split, int] = {"train": 0, "validation": 1_000_000_000, "held_out": 2_000_000_000}
"""Far apart: most generators seed the problem at a place with seed + place, so neighbouring seeds have equal problems."""
MOST_TRIES = 1000
"""Problems that are looked at for one that may be asked."""
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


class ReasoningGymTask:
    """Reward `score`: the package's score of the answer, 0 to 1. `solved` means a score of 1."""

    Settings = Settings
    reward_weights: ClassVar[Mapping[str, float]] = {"score": 1.0}

    def __init__(self, inputs: TaskInputs) -> None:
        settings: Settings = inputs.settings
        name = inputs.config.name.partition(":")[2]
        self._inputs, self._settings = inputs, settings
        self._is_chat = uses_chat(inputs.config, inputs.tokenizer)
        self._scorer = Scorer(name, settings.options, settings.answer)
        make = partial(GeneratedPrompts, partial(Generator, name, settings.options), self._prompt)
        held_out = make("held_out", settings.num_held_out)
        validation = make("validation", settings.num_held_out, without=(held_out,))
        train = make("train", settings.size, without=(held_out, validation))
        self._prompts: dict[Split, GeneratedPrompts] = {"train": train, "validation": validation, "held_out": held_out}

    @property
    def isolated_rewards(self) -> Sequence[RewardConfig]:
        return (RewardConfig(function=self._scorer, name="score"),)

    def prompts(self, split: Split) -> Sequence[Prompt]:
        self._prompts["held_out"].at(0)  # whether prompts fit the model's context shows at once
        return self._prompts[split]

    def score(self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]) -> list[Outcome]:
        ids = [completion.token_ids.tolist() for completion in completions]
        return RewardSet({"score": self._scorer}).score(prompt.text, prompt.columns, texts, ids)

    def solved(self, outcome: Outcome) -> bool:
        if isinstance(outcome, RewardFailed):
            return False
        return combined_reward(outcome, self.reward_weights) >= 1.0 - 1e-9

    def make_evaluator(self, inputs: EvaluationInputs) -> Evaluator:
        return AnswerEvaluator(self, inputs, mean_rewards=True)

    def _prompt(self, id: str, problem: Problem) -> Prompt:
        return make_prompt(
            id=id,
            text=self._ask(problem["question"]),
            columns={"problem": problem},
            tokenizer=self._inputs.tokenizer,
            max_tokens=self._inputs.max_prompt_tokens,
            template=self._inputs.config.chat_template_kwargs,
        )

    def _ask(self, question: str) -> str | list[dict[str, str]]:
        """The question in the template; in a chat it is a user's message."""
        ends_with = f"\n\n{INSTRUCTION}" if self._settings.answer != "text" else ""
        template = self._inputs.config.prompt_template or f"{{question}}{ends_with if self._is_chat else chr(10)}"
        text = template.replace("{question}", question)
        return [{"role": "user", "content": text}] if self._is_chat else text


class GeneratedPrompts(LazyPrompts):
    """The prompts of a split. A problem is replaced by the next where its prompt is too long for the model, or where another
    split (`without`) has its question."""

    def __init__(
        self,
        generator: Callable[..., Generator],
        make: Callable[[str, Problem], Prompt],
        split: Split,
        count: int,
        *,
        without: Sequence[GeneratedPrompts] = (),
    ) -> None:
        self._make, self._split, self._count, self._without = make, split, count, without
        self._generator = cache(partial(generator, seed=SEEDS[split], size=count))
        # Held-out problems are few and asked again by every evaluation; some take a second to make.
        self._problem = self._draw if split == "train" else cache(self._draw)
        self._has_warned = False

    def __len__(self) -> int:
        return self._count

    def at(self, place: int) -> Prompt:
        too_long: BadRow | None = None
        for tried in range(min(self._count, MOST_TRIES)):
            problem = self._problem((place + tried) % self._count)
            if question_key(problem["question"]) in self._others:
                continue
            try:
                return self._make(f"{self._split}-{place}", problem)
            except BadRow as error:
                self._warn(error)
                too_long = error
        raise too_long or ValueError(
            f"task.settings.num_held_out: the generator has too few different questions for the split {self._split}: all "
            "of them are held out. Lower it, or give the generator options with more questions (task.settings.options)."
        )

    @cached_property
    def keys(self) -> frozenset[int]:
        """Keys of the questions that a prompt of this split may have."""
        return frozenset(question_key(self._problem(place)["question"]) for place in range(self._count))

    @cached_property
    def _others(self) -> frozenset[int]:
        # Drawn with the first prompt, and not in processes that only count prompts: slow generators take seconds.
        return frozenset[int]().union(*(other.keys for other in self._without))

    def _draw(self, place: int) -> Problem:
        return self._generator().problem(place)

    def _warn(self, error: BadRow) -> None:
        if not self._has_warned:
            logger.warning("%s Such problems are replaced by the next. Reported for the first only.", error)
        self._has_warned = True
