"""Questions with right answers: greedy accuracy, and pass@k / avg@k at the sampling temperature; for a user's own rewards
their means beside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from tba.evaluate.accuracy import sampled_metrics
from tba.evaluate.base import BetweenSteps, greedy, respond
from tba.evaluate.rewards import reward_metrics
from tba.generate.engine import Engine
from tba.observe.metrics import mean_metrics
from tba.tasks.base import Outcome, Task
from tba.tasks.rewards.pool import Rewards, score_all
from tba.types import Prompt, Sampling


@dataclass(frozen=True, kw_only=True)
class AnswerEvaluator:
    """`accuracy`, and with samples `pass@k` and `avg@k`, with standard errors over prompts. `rewards` is its own, not shared
    with a running search."""

    task: Task
    rewards: Rewards
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Prompt]
    sampling: Sampling
    samples_per_prompt: int
    """k of pass@k and avg@k; 0 = greedy accuracy only."""
    mean_rewards: bool = False
    """True adds `reward` of the greedy responses and `reward@k` of the sampled ones, for rewards that are not 0 or 1."""

    def __call__(self, engine: Engine, between_steps: BetweenSteps | None = None) -> dict[str, float]:
        outcomes = self._outcomes(engine, greedy(self.sampling), 1, between_steps)
        metrics = dict(self._mean_rewards(outcomes, "reward"))  # first, hence the headline
        metrics |= mean_metrics({"accuracy": [samples[0] for samples in self._solved(outcomes)]})
        if self.samples_per_prompt:
            outcomes = self._outcomes(engine, self.sampling, self.samples_per_prompt, between_steps)
            metrics |= sampled_metrics(self._solved(outcomes), self.samples_per_prompt)
            metrics |= self._mean_rewards(outcomes, f"reward@{self.samples_per_prompt}")
        return {**metrics, "num_prompts": float(len(self.prompts))}

    def _outcomes(
        self, engine: Engine, sampling: Sampling, samples: int, between_steps: BetweenSteps | None
    ) -> list[list[Outcome]]:
        """For each prompt, the rewards of each of its samples."""
        groups = respond(
            engine,
            self.tokenizer,
            self.prompts,
            samples_per_prompt=samples,
            sampling=sampling,
            between_steps=between_steps,
        )
        return score_all(self.rewards, groups, between_polls=between_steps)

    def _solved(self, outcomes: Sequence[Sequence[Outcome]]) -> list[list[bool]]:
        return [[self.task.solved(outcome) for outcome in own] for own in outcomes]

    def _mean_rewards(self, outcomes: Sequence[Sequence[Outcome]], name: str) -> Mapping[str, float]:
        if not self.mean_rewards:
            return {}
        return reward_metrics(outcomes, self.task.reward_weights, name=name)
