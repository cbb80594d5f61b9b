"""Evaluation by outcomes: greedy accuracy, pass@k and avg@k at the sampling temperature, and means of the rewards.

Every figure is a mean over prompts of what their samples reached, and its standard error is over prompts too: the samples
of a prompt are solved or not together, and counting each would make the error look smaller than it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb

from transformers import PreTrainedTokenizerBase

from tba.generate.engine import Engine
from tba.observe.metrics import mean_metrics
from tba.tasks.base import Outcome, RewardFailed, Task
from tba.tasks.evaluation import BetweenSteps, EvaluationInputs, greedy, respond
from tba.tasks.rewards.pool import Rewards, score_all
from tba.types import Prompt, Sampling, combined_reward

Components = Mapping[str, float | None]
"""Reward components of one sample by name, where the reward did not fail."""


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

    @staticmethod
    def of_task(task: Task, inputs: EvaluationInputs, *, mean_rewards: bool = False) -> AnswerEvaluator:
        """The evaluator that most tasks make."""
        return AnswerEvaluator(
            task=task,
            rewards=inputs.rewards,
            tokenizer=inputs.tokenizer,
            prompts=inputs.prompts(task),
            sampling=inputs.sampling,
            samples_per_prompt=inputs.config.evaluate.samples_per_prompt,
            mean_rewards=mean_rewards,
        )


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Probability that at least one of k samples drawn without replacement is solved (unbiased, arXiv 2107.03374)."""
    if num_samples < k:
        raise ValueError(f"pass@{k} needs at least {k} samples per prompt, got {num_samples}.")
    return 1.0 - comb(num_samples - num_solved, k) / comb(num_samples, k)


def sampled_metrics(solved: Sequence[Sequence[bool]], k: int) -> dict[str, float]:
    """pass@k and avg@k over prompts; solved[p] has the k samples of prompt p."""
    return mean_metrics(
        {
            f"pass@{k}": [pass_at_k(len(samples), sum(samples), k) for samples in solved],
            f"avg@{k}": [sum(samples) / max(1, len(samples)) for samples in solved],
        }
    )


def reward_metrics(
    outcomes: Sequence[Sequence[Outcome]], weights: Mapping[str, float], *, name: str
) -> dict[str, float]:
    """The mean combined reward under `name` and, where there are several rewards, the mean of each under `name/reward`, with
    standard errors over prompts; `outcomes` are of each prompt's samples.

    Responses whose reward failed are left out, as in training, and so is a reward where it is not applicable. A reward of
    weight 0 is measured here without being trained on.
    """
    scored = [[outcome for outcome in own if not isinstance(outcome, RewardFailed)] for own in outcomes]
    values = {name: _prompt_means(scored, lambda components: combined_reward(components, weights))}
    if len(weights) > 1:
        for component in weights:
            values[f"{name}/{component}"] = _prompt_means(scored, _picker(component))
    return mean_metrics({metric: found for metric, found in values.items() if found})


def _picker(component: str) -> Callable[[Components], float | None]:
    return lambda components: components.get(component)


def _prompt_means(scored: Sequence[Sequence[Components]], value: Callable[[Components], float | None]) -> list[float]:
    """The mean over each prompt's samples; a prompt without a value is left out."""
    by_prompt = [[found for found in map(value, own) if found is not None] for own in scored]
    return [sum(own) / len(own) for own in by_prompt if own]
