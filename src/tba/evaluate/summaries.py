"""Preference tuning: win rate against reference summaries by the gold scorer, which the policy never sees.

At the sampling temperature, and greedily; a tie counts half. KL to the start model is that of the samples, the paper's
"perplexity" that of the greedy responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from transformers import PreTrainedTokenizerBase

from tba.evaluate.base import BetweenSteps, greedy, respond
from tba.evaluate.distance import kl_per_response, perplexity, start_log_probs
from tba.generate.engine import Engine, Scorer
from tba.tasks.preference.task import PreferenceTask
from tba.tasks.rewards import FinishedGroup
from tba.types import Prompt, Sampling


@dataclass(frozen=True, kw_only=True)
class SummaryEvaluator:
    """`win_rate`, `kl` and more."""

    task: PreferenceTask
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Prompt]
    sampling: Sampling
    start: Scorer
    beta: float
    """At the end of training."""

    def __call__(self, engine: Engine, between_steps: BetweenSteps | None = None) -> dict[str, float]:
        sampled, best = (
            respond(
                engine,
                self.tokenizer,
                self.prompts,
                samples_per_prompt=1,
                sampling=sampling,
                between_steps=between_steps,
            )
            for sampling in (self.sampling, greedy(self.sampling))
        )
        gold, gold_of_best = self._gold(sampled), self._gold(best)
        log_start = start_log_probs(self.start, sampled, self.sampling.training_temperature)
        log_start_of_best = start_log_probs(self.start, best, 1.0)
        kl, reward = kl_per_response(sampled, log_start), float(self.task.proxy_scores(*_responses(sampled)).mean())
        lengths = [len(completion.token_ids) for group in sampled for completion in group.completions]
        return {
            "win_rate": win_rate(gold, self._reference_gold),
            "kl": kl,
            "win_rate_greedy": win_rate(gold_of_best, self._reference_gold),
            "perplexity": perplexity(best, log_start_of_best),
            "gold": float(gold.mean()),
            "reward_model": reward,
            "regularised_reward": reward - self.beta * kl,
            "mean_length": float(np.mean(lengths)),
            "cut_off": float(np.mean([group.completions[0].finish == "length" for group in sampled])),
        }

    def _gold(self, groups: Sequence[FinishedGroup]) -> np.ndarray:
        return self.task.gold_scores(*_responses(groups))

    @cached_property
    def _reference_gold(self) -> np.ndarray:
        texts = [prompt.columns["reference"] for prompt in self.prompts]
        return self.task.gold_scores([_post(prompt) for prompt in self.prompts], texts, [True] * len(texts))


def win_rate(scores: np.ndarray, others: np.ndarray) -> float:
    """Share of scores above the others', ties counted half."""
    return float((scores > others).mean() + 0.5 * (scores == others).mean())


def _responses(groups: Sequence[FinishedGroup]) -> tuple[list[str], list[str], list[bool]]:
    """Post, text and whether it ended by itself, of the one response in each group."""
    return (
        [_post(group.prompt) for group in groups],
        [group.texts[0] for group in groups],
        [group.completions[0].finish == "stop" for group in groups],
    )


def _post(prompt: Prompt) -> str:
    assert isinstance(prompt.text, str), "posts are plain text"
    return prompt.text
