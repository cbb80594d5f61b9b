"""Evaluation of summaries: win rate against reference summaries by the gold scorer, which the policy never sees.

At the sampling temperature, and greedily; a tie counts half. KL to the start model is that of the samples, the paper's
"perplexity" that of the greedy responses. Standard errors are over posts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from transformers import PreTrainedTokenizerBase

from tba.generate.contract import Engine
from tba.observe.metrics import mean_metrics
from tba.tasks.evaluation import BetweenSteps, Distance, greedy, in_parts, respond
from tba.tasks.rewards.pool import FinishedGroup
from tba.tasks.tldr.world import wins
from tba.types import Prompt, Sampling

SUMMARIES_AT_ONCE = 64
"""Number of summaries that are scored together, between two signs of life."""

ScoreTexts = Callable[[Sequence[str], Sequence[str], Sequence[bool]], np.ndarray]
"""Function from posts, summaries and whether each ended by itself to scores."""


@dataclass(frozen=True, kw_only=True)
class SummaryEvaluator:
    """`win_rate`, and, where the start model is known, `kl` to it, `perplexity`, `perplexity_per_sample` and
    `regularised_reward`."""

    gold_scores: ScoreTexts
    """The judge's scores, which training never sees."""
    proxy_scores: ScoreTexts
    """The reward model's scores, which training is rewarded by."""
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Prompt]
    sampling: Sampling
    distance: Distance | None
    beta: float | None
    """Value of beta at the end of training; None = the reward minus beta x KL is not what is maximised."""
    cut_off_reward: float | None
    """Reward that training gives a summary that does not end; None = its score."""
    _reference_gold: list[np.ndarray] = field(default_factory=list)
    """Gold scores of the reference summaries, once they are known."""

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
        if not self._reference_gold:
            self._reference_gold.append(self._scores(self.gold_scores, *self._references(), between_steps))
        (references,) = self._reference_gold
        gold, gold_of_best = (
            self._scores(self.gold_scores, *_responses(groups), between_steps) for groups in (sampled, best)
        )
        cut_off = np.array([group.completions[0].finish == "length" for group in sampled])
        reward = self._scores(self.proxy_scores, *_responses(sampled), between_steps)
        if self.cut_off_reward is not None:
            reward = np.where(cut_off, self.cut_off_reward, reward)
        means = {
            "win_rate": wins(gold, references),
            "win_rate_greedy": wins(gold_of_best, references),
            "gold": gold,
            "reward": reward,
            "mean_length": np.array([len(group.completions[0].token_ids) for group in sampled]),
            "cut_off": cut_off,
        }
        perplexities = {}
        if self.distance is not None:
            means["kl"] = self.distance.kl(sampled, self.sampling.training_temperature, between_steps)
            perplexities = self.distance.perplexity(best, between_steps)
            if self.beta is not None:
                means["regularised_reward"] = reward - self.beta * means["kl"]
        metrics = mean_metrics({name: values.tolist() for name, values in means.items()})
        return {**metrics, **perplexities, "num_prompts": float(len(self.prompts))}

    def _references(self) -> tuple[list[str], list[str], list[bool]]:
        texts = [prompt.columns["reference"] for prompt in self.prompts]
        return [_post(prompt) for prompt in self.prompts], texts, [True] * len(texts)

    @staticmethod
    def _scores(
        score: ScoreTexts,
        posts: Sequence[str],
        texts: Sequence[str],
        finished: Sequence[bool],
        between_steps: BetweenSteps | None,
    ) -> np.ndarray:
        parts = in_parts(len(posts), SUMMARIES_AT_ONCE, between_steps)
        return np.concatenate([score(posts[part], texts[part], finished[part]) for part in parts])


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
