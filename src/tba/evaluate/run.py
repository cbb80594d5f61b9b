"""Evaluate an engine on held-out or validation prompts: greedy accuracy, and pass@k / avg@k at the sampling temperature."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from tba.config import Config
from tba.evaluate.accuracy import sampled_metrics
from tba.generate.engine import Engine
from tba.generate.settings import training_sampling
from tba.models.load import LoadedModel
from tba.tasks.base import Task
from tba.tasks.rewards import FinishedGroup, Rewards, score_all
from tba.types import Completion, Prompt, Request, Sampling


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Scores the prompts of evaluate.split with an engine. `rewards` is its own, not shared with a running search."""

    task: Task
    rewards: Rewards
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Prompt]
    sampling: Sampling
    samples_per_prompt: int
    """k of pass@k and avg@k; 0 = greedy accuracy only."""

    def __call__(self, engine: Engine, between_steps: Callable[[], None] | None = None) -> dict[str, float]:
        """Metrics by name: `accuracy`, and with samples `pass@k` and `avg@k`."""
        greedy = replace(self.sampling, greedy=True, temperature=1.0, top_p=1.0, top_k=0)
        solved = self._solved(engine, greedy, 1, between_steps)
        metrics = {"accuracy": sum(samples[0] for samples in solved) / max(1, len(solved))}
        if self.samples_per_prompt:
            sampled = self._solved(engine, self.sampling, self.samples_per_prompt, between_steps)
            metrics |= sampled_metrics(sampled, self.samples_per_prompt)
        return metrics

    def _solved(
        self, engine: Engine, sampling: Sampling, samples: int, between_steps: Callable[[], None] | None
    ) -> list[list[bool]]:
        """For each prompt, whether each of its samples is solved."""
        completions = defaultdict(list)
        requests = [Request(prompt=prompt) for prompt in self.prompts]
        for completion in engine.generate(
            requests, samples_per_prompt=samples, sampling=sampling, between_steps=between_steps
        ):
            completions[completion.prompt_id].append(completion)
        groups = [self._group(prompt, completions[prompt.id]) for prompt in self.prompts]
        outcomes = score_all(self.rewards, groups, between_polls=between_steps)
        return [[self.task.solved(outcome) for outcome in own] for own in outcomes]

    def _group(self, prompt: Prompt, completions: list[Completion]) -> FinishedGroup:
        texts = self.tokenizer.batch_decode([c.token_ids.tolist() for c in completions], skip_special_tokens=True)
        return FinishedGroup(prompt=prompt, completions=completions, texts=texts)


def make_evaluator(config: Config, loaded: LoadedModel, task: Task, rewards: Rewards) -> Evaluator:
    return Evaluator(
        task=task,
        rewards=rewards,
        tokenizer=loaded.tokenizer,
        prompts=task.prompts(config.evaluate.split)[: config.evaluate.num_prompts],
        sampling=training_sampling(config),
        samples_per_prompt=config.evaluate.samples_per_prompt,
    )
