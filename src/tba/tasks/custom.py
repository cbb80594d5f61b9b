"""The task `custom`: a user's prompts from a JSONL file, rewards from the user's Python functions.

{"prompt": "What is 2 + 2?", "answer": "4"}
{"prompt": [{"role": "user", "content": "What is 2 + 3?"}], "answer": "5"}

data/prompt_file.py reads the file; `tasks/rewards` calls the functions.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from tba.config import RewardConfig, TaskConfig
from tba.tasks.base import EvaluationInputs, Evaluator, Split, TaskInputs
from tba.tasks.data.prompt_file import PromptReader, Reader, Side, read_prompts, read_text
from tba.tasks.data.rows import RowNames
from tba.tasks.data.splits import nothing_left
from tba.tasks.evaluation import AnswerEvaluator
from tba.tasks.outcomes import Outcome, RewardFailed
from tba.tasks.rewards.files import check_reward_function
from tba.tasks.rewards.functions import RewardSet, named_rewards
from tba.types import Completion, Prompt, combined_reward

logger = logging.getLogger("tba.tasks")

LEAST_TO_SPLIT = 20
"""Number of different prompts from which on some are held out: of fewer a tenth says nothing, and each is missed in
training."""


class CustomTask:
    """The task of a user's data and reward functions. `solved` means that the combined reward reaches 1, the usual meaning
    of a 0/1 reward."""

    def __init__(self, inputs: TaskInputs) -> None:
        config = inputs.config
        needed = {name: reward.label for reward in config.rewards for name in check_reward_function(reward.function)}
        self._functions = named_rewards(config.rewards)
        self.reward_weights: Mapping[str, float] = {reward.label: reward.weight for reward in config.rewards}
        reader = PromptReader(inputs.tokenizer, inputs.max_prompt_tokens, config.chat_template_kwargs, needed)
        train, held_out = read_sides(config, reader, trains=inputs.trains)
        self.split_words = _split_words(
            len(train.prompts), len(held_out.prompts), _held_out_words(config), held_out is train
        )
        """How the data is split, for the user."""
        self._config = config
        self._prompts: dict[Split, Sequence[Prompt]] = {"train": train.prompts, "held_out": held_out.prompts}

    @property
    def isolated_rewards(self) -> Sequence[RewardConfig]:
        return self._config.rewards

    @cached_property
    def rewards(self) -> RewardSet:
        """The functions themselves. A run never asks for them: their files are imported in the workers alone."""
        return RewardSet(self._functions)

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

    def make_evaluator(self, inputs: EvaluationInputs) -> Evaluator:
        """An evaluator with means of the rewards, which say how good a policy is where no reward of 1 means solved."""
        return AnswerEvaluator(self, inputs, mean_rewards=True)


def _split_words(num_train: int, num_held_out: int, words: str, is_same: bool) -> str:
    if is_same:
        return (
            f"trains and is evaluated on the same {num_train} prompts: fewer than {LEAST_TO_SPLIT} different ones are not "
            "split. Give others as task.eval_data (eval_dataset)."
        )
    if not num_held_out:
        return f"trains on {num_train} prompts and is not evaluated: none is held out ({words}). task.eval_data gives some."
    return f"trains on {num_train} prompts and is evaluated on {num_held_out} others ({words})."


def _held_out_words(config: TaskConfig) -> str:
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
    try:
        return len(read_sides(config, read_text, trains=False, tells=False)[0].prompts)
    except (OSError, ValueError):
        return 0


def read_sides(config: TaskConfig, reader: Reader, *, trains: bool = True, tells: bool = True) -> tuple[Side, Side]:
    """The prompts to train on and those held out, one and the same where there are too few to split. `tells` is False where
    bad rows are to be left out in silence."""
    assert config.data is not None
    fraction = config.eval_fraction if config.eval_data is None else 0.0
    train, held_out = read_prompts(config, Path(config.data), reader, fraction, tells=tells)
    data, different = _given_as("task.data", config.data), len({*train.keys, *held_out.keys})
    if fraction > 0.0 and different < LEAST_TO_SPLIT:
        train, _ = read_prompts(config, Path(config.data), reader, 0.0, tells=tells)
        held_out = train
    elif not train.prompts:
        raise ValueError(f"task.eval_fraction={fraction} leaves no prompt to train on: lower it or add data.")
    elif config.eval_data is not None:
        held_out, _ = read_prompts(config, Path(config.eval_data), reader, 0.0, tells=tells)
    if trains and different == 1:
        also = ", and that is what evaluations ask too" if set(train.keys) <= set(held_out.keys) else ""
        words = "%s has one prompt, in %d rows: all that is learned is how to answer this one%s."
        logger.warning(words, data, len(train.prompts), also)
    if held_out is not train:
        train.leave_out(held_out, data=data, held_out_words=_held_out_words(config), trains=trains)
    return train, held_out
