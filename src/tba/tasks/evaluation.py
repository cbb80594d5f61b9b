"""How good a policy is at a task: what an evaluator is and is made from, the one for tasks whose responses are right or
wrong, and what evaluators of several tasks do: generate, and measure the distance to the start model.

A task makes its own evaluator (`Task.make_evaluator`): AnswerEvaluator, or one of its own as red_team/ and tldr/ have. Every
figure is a mean over prompts of what their samples reached, and its standard error is over prompts too: the samples of a
prompt are solved or not together, and counting each would make the error look smaller than it is.
"""

from __future__ import annotations

import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb, exp
from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from tba.config import Config
from tba.generate.contract import Engine, Scorer
from tba.generate.sampling import training_sampling
from tba.models.load import LoadedModel
from tba.observe.metrics import mean_metrics
from tba.runtime.board import Row
from tba.tasks.base import Outcome, Task, components_of, why_no_reward
from tba.tasks.checked import CheckedEvaluator, user_code
from tba.tasks.rewards.pool import FinishedGroup, Rewards, outcomes_of, texts_of
from tba.types import Completion, Prompt, Request, Sampling, combined_reward

logger = logging.getLogger("tba.tasks")

RESPONSES_AT_ONCE = 256
"""Number of responses that the start model scores together, between two signs of life."""

BetweenSteps = Callable[[], None]
"""Function called between decode steps and between parts of a long scoring: a sign of life for whoever waits."""

Components = Mapping[str, float | None]
"""Reward components by name of one sample that has a reward."""


KeepResponses = Callable[[str, Sequence[FinishedGroup], Sequence[Sequence[Outcome]], Sequence[Sequence[bool]]], None]
"""Function that is given the responses of an evaluation: (greedy or sampled, groups, their outcomes, whether solved)."""


class Evaluator(Protocol):
    """Says how good an engine's weights are, by metrics; the first one is the headline."""

    @property
    def prompts(self) -> Sequence[Prompt]:
        """Prompts that are evaluated on; empty = there is nothing to evaluate on."""
        ...

    def __call__(self, engine: Engine, between_steps: BetweenSteps | None = None) -> dict[str, float]: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationInputs:
    """What an evaluator is made from: EvaluationInputs(config=config, tokenizer=tokenizer, rewards=DirectRewards(task))"""

    config: Config
    tokenizer: PreTrainedTokenizerBase
    rewards: Rewards
    """Rewards of the evaluator's own, not shared with a running search."""
    start: Callable[[], Scorer] | None = None
    """Function that gives a scorer with the start model, for KL; called only where KL is measured. None = it is not."""
    keep: KeepResponses | None = None
    """For tasks whose responses are right or wrong; None = responses are forgotten."""

    @property
    def sampling(self) -> Sampling:
        """Sampling of training."""
        return training_sampling(self.config)

    def prompts(self, task: Task) -> Sequence[Prompt]:
        """The first evaluate.num_prompts prompts of evaluate.split."""
        return task.prompts(self.config.evaluate.split)[: self.config.evaluate.num_prompts]

    def distance(self) -> Distance | None:
        """The distance to the start model; None = it is not measured."""
        return None if self.start is None else Distance(self.start())

    @property
    def final_beta(self) -> float | None:
        """Value of beta at the end of training; None where the target is shaped and reward - beta x KL not maximised."""
        config, last = (
            self.config,
            self.config.train.max_steps or sys.maxsize,
        )  # a schedule in steps has come to its end
        return config.beta_at(last, 1.0) if config.has_plain_target_at(last, 1.0) else None


def make_evaluator(
    config: Config,
    loaded: LoadedModel,
    task: Task,
    rewards: Rewards,
    *,
    start: Callable[[], Scorer] | None = None,
    keep: KeepResponses | None = None,
) -> Evaluator:
    """The evaluator that a task makes for a loaded model; see EvaluationInputs."""
    inputs = EvaluationInputs(config=config, tokenizer=loaded.tokenizer, rewards=rewards, start=start, keep=keep)
    with user_code(type(task), ".make_evaluator"):
        made = task.make_evaluator(inputs)
    own = ":" in config.task.name and not isinstance(made, AnswerEvaluator)
    return CheckedEvaluator(made, what=f"task.name={config.task.name}") if own else made


@dataclass(frozen=True, kw_only=True)
class AnswerEvaluator:
    """`accuracy`, and with samples `pass@k` and `avg@k`, with standard errors over prompts. `rewards` is its own, not shared
    with a running search. Where responses have no reward, `num_responses_without_reward` says how many.

    Where rewards may be anything (`mean_rewards`), `reward` comes first and `solved` is the share that reaches 1; it is
    called `accuracy` too where every reward of the evaluation was 0 or 1.
    """

    task: Task
    rewards: Rewards
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Prompt]
    sampling: Sampling
    samples_per_prompt: int
    """Number k of samples for pass@k and avg@k; 0 = greedy accuracy only."""
    mean_rewards: bool = False
    """True adds `reward` of the greedy responses and `reward@k` of the sampled ones, for rewards that are not 0 or 1."""
    keep: KeepResponses | None = None

    def __call__(self, engine: Engine, between_steps: BetweenSteps | None = None) -> dict[str, float]:
        samples = self.samples_per_prompt
        first = self._respond(engine, greedy(self.sampling), 1, between_steps)
        others = self._respond(engine, self.sampling, samples, between_steps) if samples else []
        found = outcomes_of(self.rewards, [*first, *others], between_polls=between_steps)
        outcomes, sampled = found[: len(first)], found[len(first) :]
        if self.keep is not None:
            self.keep("greedy", first, outcomes, self._solved(outcomes))
            if samples:
                self.keep("sampled", others, sampled, self._solved(sampled))
        metrics = dict(self._mean_rewards(outcomes, "reward"))  # first, hence the headline
        solved = [own[0] for own in self._solved(outcomes)]
        metrics |= mean_metrics(dict.fromkeys(self._shares([*outcomes, *sampled]), solved))
        if samples:
            metrics |= sampled_metrics(self._solved(sampled), samples)
            metrics |= self._mean_rewards(sampled, f"reward@{samples}")
        return {**metrics, "num_prompts": float(len(self.prompts)), **_without_reward(found)}

    def _respond(
        self, engine: Engine, sampling: Sampling, samples: int, between_steps: BetweenSteps | None
    ) -> list[FinishedGroup]:
        """The responses to every prompt, each submitted to its reward as soon as it is there: a slow reward is called while
        others are written."""
        return respond(
            engine,
            self.tokenizer,
            self.prompts,
            samples_per_prompt=samples,
            sampling=sampling,
            between_steps=between_steps,
            finished=self.rewards.submit,
        )

    def _solved(self, outcomes: Sequence[Sequence[Outcome]]) -> list[list[bool]]:
        with user_code(type(self.task), ".solved"):
            return [[bool(self.task.solved(outcome)) for outcome in own] for own in outcomes]

    def _shares(self, outcomes: Sequence[Sequence[Outcome]]) -> list[str]:
        """Names for the share of greedy responses that are solved."""
        if not self.mean_rewards:
            return ["accuracy"]
        weights = self.task.reward_weights
        rewards = [combined_reward(components, weights) for own in outcomes for components in _scored(own)]
        binary = bool(rewards) and all(min(abs(reward), abs(reward - 1.0)) < 1e-6 for reward in rewards)
        return ["accuracy", "solved"] if binary else ["solved"]

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
            keep=inputs.keep,
        )


def _without_reward(outcomes: Sequence[Sequence[Outcome]]) -> dict[str, float]:
    """The number of responses without a reward, told and counted: they are not solved, whatever they say. Empty = all have
    one."""
    reasons = [why for own in outcomes for outcome in own if (why := why_no_reward(outcome))]
    if not reasons:
        return {}
    words = "%d of the %d responses of an evaluation have no reward and count as not solved, the last: %s"
    logger.warning(words, len(reasons), sum(map(len, outcomes)), reasons[-1])
    return {"num_responses_without_reward": float(len(reasons))}


def _scored(outcomes: Sequence[Outcome]) -> list[Components]:
    """The components of the samples that have a reward."""
    return [components for components in map(components_of, outcomes) if components is not None]


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Probability that at least one of k samples drawn without replacement is solved (unbiased, arXiv 2107.03374)."""
    if num_samples < k:
        raise ValueError(f"pass@{k} needs at least {k} samples per prompt, got {num_samples}.")
    return 1.0 - comb(num_samples - num_solved, k) / comb(num_samples, k)


def sampled_metrics(solved: Sequence[Sequence[bool]], k: int) -> dict[str, float]:
    """Metrics pass@k and avg@k over prompts; solved[p] has the k samples of prompt p."""
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

    Responses without a reward, because it failed or because none was applicable, are left out, as in training; and so is one
    of several rewards where it is not applicable. A reward of weight 0 is measured here without being trained on.
    """
    scored = [_scored(own) for own in outcomes]
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


class CountedEngine:
    """An engine that shows how many of the responses it was asked for are `done`; the rest is the engine's own."""

    def __init__(self, engine: Engine, row: Row) -> None:
        self._engine = engine
        self._row = row

    def generate(
        self, requests: Iterable[Request | None], *, samples_per_prompt: int, **options: Any
    ) -> Iterator[Completion]:
        asked = list(requests)
        self._row["done"], self._row["of"] = 0, len(asked) * samples_per_prompt
        try:
            for completion in self._engine.generate(asked, samples_per_prompt=samples_per_prompt, **options):
                self._row["done"] += 1
                yield completion
        finally:
            self._row["of"] = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def respond(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    samples_per_prompt: int,
    sampling: Sampling,
    between_steps: BetweenSteps | None = None,
    finished: Callable[[FinishedGroup], None] = lambda group: None,
) -> list[FinishedGroup]:
    """The responses to each prompt, in the order of the prompts, samples in order; prompts have different ids. `finished` is
    told of each prompt's as soon as all of them are there."""
    by_id = {prompt.id: prompt for prompt in prompts}
    completions: dict[str, list[Completion]] = defaultdict(list)
    groups: dict[str, FinishedGroup] = {}
    for completion in engine.generate(
        [Request(prompt=prompt) for prompt in prompts],
        samples_per_prompt=samples_per_prompt,
        sampling=sampling,
        between_steps=between_steps,
    ):
        own = completions[completion.prompt_id]
        own.append(completion)
        if len(own) == samples_per_prompt:
            group = groups[completion.prompt_id] = _group(tokenizer, by_id[completion.prompt_id], own)
            finished(group)
    return [groups[prompt.id] for prompt in prompts]


def _group(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, completions: Sequence[Completion]) -> FinishedGroup:
    # An engine hands completions back in the order in which they end: short ones first.
    ordered = sorted(completions, key=lambda completion: completion.sample_index)
    return FinishedGroup(prompt=prompt, completions=ordered, texts=texts_of(tokenizer, ordered))


def in_parts(count: int, size: int, between_steps: BetweenSteps | None) -> Iterator[slice]:
    """Slices of `size`, with a sign of life before each: what scores many responses at once may take minutes."""
    for start in range(0, count, size):
        if between_steps is not None:
            between_steps()
        yield slice(start, start + size)


def greedy(sampling: Sampling) -> Sampling:
    """Sampling with the same limits that always takes the most likely token."""
    return replace(sampling, greedy=True, temperature=1.0, top_p=1.0, top_k=0)


@dataclass(frozen=True)
class Distance:
    """How far a policy has gone from the model it started as: `Distance(start).kl(groups, temperature)`."""

    start: Scorer
    """A scorer that holds the start model."""

    def kl(
        self, groups: Sequence[FinishedGroup], temperature: float, between_steps: BetweenSteps | None = None
    ) -> np.ndarray:
        """KL in nats of each sampled response, float64 [n]."""
        return kl_per_response(groups, self._log_probs(groups, temperature, between_steps))

    def perplexity(
        self, groups: Sequence[FinishedGroup], between_steps: BetweenSteps | None = None
    ) -> dict[str, float]:
        """The paper's, of any responses: `perplexity` of all of them as one text, `perplexity_per_sample` the mean of each
        response's own, as the official code has it."""
        log_start = self._log_probs(groups, 1.0, between_steps)
        per_sample = {"perplexity_per_sample": perplexity_per_sample(groups, log_start).tolist()}
        return {"perplexity": perplexity(groups, log_start), **mean_metrics(per_sample)}

    def _log_probs(
        self, groups: Sequence[FinishedGroup], temperature: float, between_steps: BetweenSteps | None
    ) -> list[np.ndarray]:
        """Log-probabilities of every response's tokens under the start model, group after group."""
        prompts = [group.prompt.token_ids for group in groups for _ in group.completions]
        responses = [completion.token_ids for group in groups for completion in group.completions]
        parts = in_parts(len(responses), RESPONSES_AT_ONCE, between_steps)
        return [scores for part in parts for scores in self.start.score(prompts[part], responses[part], temperature)]


def kl_per_response(groups: Sequence[FinishedGroup], log_start: Sequence[np.ndarray]) -> np.ndarray:
    """KL in nats of each sampled response, float64 [n]: log pi - log pi_start, summed over its tokens."""
    completions = [completion for group in groups for completion in group.completions]
    return np.array([float((c.policy_log_probs - start).sum()) for c, start in zip(completions, log_start)])


def perplexity(groups: Sequence[FinishedGroup], log_start: Sequence[np.ndarray]) -> float:
    """Perplexity: exp(NLL of the responses under the start model / number of all tokens, prompts included)."""
    nll = -sum(float(start.sum()) for start in log_start)
    return exp(nll / max(1, sum(_num_tokens(groups))))


def perplexity_per_sample(groups: Sequence[FinishedGroup], log_start: Sequence[np.ndarray]) -> np.ndarray:
    """Perplexity of each response, float64 [n]: exp(its NLL under the start model / its tokens, its prompt's included)."""
    return np.array([exp(-float(start.sum()) / num) for start, num in zip(log_start, _num_tokens(groups))])


def _num_tokens(groups: Sequence[FinishedGroup]) -> list[int]:
    """Number of tokens of each response with its prompt."""
    return [len(group.prompt.token_ids) + len(c.token_ids) for group in groups for c in group.completions]
