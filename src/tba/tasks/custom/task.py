"""The task `custom`: a user's prompts from a JSONL file, rewards from the user's Python functions.

{"prompt": "What is 2 + 2?", "answer": "4"}
{"prompt": [{"role": "user", "content": "What is 2 + 3?"}], "answer": "5"}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tba.config import RewardConfig
from tba.tasks.answer_evaluator import AnswerEvaluator
from tba.tasks.base import Outcome, RewardFailed, Split, TaskInputs
from tba.tasks.custom.prompts import PromptReader, read_prompts
from tba.tasks.data.splits import nothing_left
from tba.tasks.evaluation import EvaluationInputs, Evaluator
from tba.tasks.rewards.functions import RewardSet
from tba.types import Completion, Prompt, combined_reward


class CustomTask:
    """`solved` means that the combined reward reaches 1, the usual meaning of a 0/1 reward."""

    def __init__(self, inputs: TaskInputs) -> None:
        config = inputs.config
        self.rewards = RewardSet(config.rewards)
        assert config.data is not None
        reader = PromptReader(inputs.tokenizer, inputs.max_prompt_tokens)
        fraction = config.eval_fraction if config.eval_data is None else 0.0
        train, held_out = read_prompts(config, Path(config.data), reader, fraction)
        if not train.prompts:
            raise ValueError(f"task.eval_fraction={fraction} leaves no prompt to train on: lower it or add data.")
        if config.eval_data is not None:
            held_out, _ = read_prompts(config, Path(config.eval_data), reader, 0.0)
        held_out_words = f"task.eval_data={config.eval_data}" if config.eval_data else f"task.eval_fraction={fraction}"
        train.leave_out(held_out, data=f"task.data={config.data}", held_out_words=held_out_words)
        self._config = config
        self._prompts: dict[Split, Sequence[Prompt]] = {"train": train.prompts, "held_out": held_out.prompts}

    @property
    def isolated_rewards(self) -> Sequence[RewardConfig]:
        return self._config.rewards

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

    def make_evaluator(self, inputs: EvaluationInputs) -> Evaluator:
        """An evaluator with means of the rewards, which say how good a policy is where no reward of 1 means solved."""
        return AnswerEvaluator.of_task(self, inputs, mean_rewards=True)
