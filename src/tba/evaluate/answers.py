"""Questions with right answers: greedy accuracy, and pass@k / avg@k at the sampling temperature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from tba.evaluate.accuracy import sampled_metrics
from tba.evaluate.base import BetweenSteps, greedy, respond
from tba.generate.engine import Engine
from tba.observe.metrics import mean_metrics
from tba.tasks.base import Task
from tba.tasks.rewards import Rewards, score_all
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

    def __call__(self, engine: Engine, between_steps: BetweenSteps | None = None) -> dict[str, float]:
        solved = self._solved(engine, greedy(self.sampling), 1, between_steps)
        metrics = mean_metrics({"accuracy": [samples[0] for samples in solved]})
        if self.samples_per_prompt:
            sampled = self._solved(engine, self.sampling, self.samples_per_prompt, between_steps)
            metrics |= sampled_metrics(sampled, self.samples_per_prompt)
        return {**metrics, "num_prompts": float(len(self.prompts))}

    def _solved(
        self, engine: Engine, sampling: Sampling, samples: int, between_steps: BetweenSteps | None
    ) -> list[list[bool]]:
        """For each prompt, whether each of its samples is solved."""
        groups = respond(
            engine,
            self.tokenizer,
            self.prompts,
            samples_per_prompt=samples,
            sampling=sampling,
            between_steps=between_steps,
        )
        outcomes = score_all(self.rewards, groups, between_polls=between_steps)
        return [[self.task.solved(outcome) for outcome in own] for own in outcomes]
