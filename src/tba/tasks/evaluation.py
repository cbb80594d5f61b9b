"""Evaluations: the evaluator for tasks whose responses are right or wrong, and the base of all evaluators.

Every figure is a mean over prompts of what their samples reached. Its standard error is over prompts too: the samples of a
prompt are solved or not together, and counting each would make the error look smaller than it is.

Responses may be kept in a file, one JSON line a prompt, and two models be compared on the same prompts:

    tba evaluate RUN_A --samples 8 --responses a.jsonl
    tba evaluate RUN_B --samples 8 --responses b.jsonl --against a.jsonl

Most of the spread of an evaluation is between prompts, which are hard or easy for both models. A paired difference is free
of it, so it needs far fewer prompts than their own standard errors suggest.
"""

from __future__ import annotations

import json
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from tba.config import Config
from tba.engine.contract import Engine, Scorer
from tba.models.load import LoadedModel
from tba.observe.files import check_may_replace
from tba.observe.metrics import mean_metrics
from tba.runtime.counters import RoleCounters
from tba.tasks.outcomes import Outcome, RewardFailed, components_of, why_no_reward
from tba.tasks.rewards.pool import finished_group, outcomes_of
from tba.tasks.task import (
    BetweenSteps,
    CheckedEvaluator,
    EvaluationInputs,
    Evaluator,
    FinishedGroup,
    KeepResponses,
    Rewards,
    Task,
    user_code,
)
from tba.types import Completion, Prompt, Request, Sampling, combined_reward

logger = logging.getLogger("tba.tasks")

RESPONSES_AT_ONCE = 256
"""Number of responses that the start model scores together, between two heartbeats."""


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
    # Only code of a user's file is checked; AnswerEvaluator is ours also where a user's task returns it.
    own = config.task.is_own_file and type(made) is not AnswerEvaluator
    return CheckedEvaluator(made, what=f"task.name={config.task.name}") if own else made


class TaskEvaluator:
    """Base of evaluators: the prompts that a task is evaluated on, and the responses to them."""

    def __init__(self, task: Any, inputs: EvaluationInputs) -> None:
        self.task, self.inputs = task, inputs
        self.prompts, self.sampling = inputs.prompts(task), inputs.sampling

    def respond(
        self,
        engine: Engine,
        samples_per_prompt: int,
        sampling: Sampling,
        between_steps: BetweenSteps | None,
        finished: Callable[[FinishedGroup], None] = lambda group: None,
    ) -> list[FinishedGroup]:
        asked = (engine, self.inputs.tokenizer, self.prompts, samples_per_prompt, sampling)
        return respond(*asked, between_steps=between_steps, finished=finished)


class AnswerEvaluator(TaskEvaluator):
    """`accuracy`, and with samples `pass@k` and `avg@k`, with standard errors over prompts. Where responses have no reward,
    `num_responses_without_reward` says how many.

    Where rewards may be anything (`mean_rewards`), `reward` of the greedy responses comes first, `reward@k` is of the
    sampled ones, and `solved` is the share that reaches 1; it is called `accuracy` too where every reward of the evaluation
    was 0 or 1.
    """

    def __init__(self, task: Any, inputs: EvaluationInputs, *, mean_rewards: bool = False) -> None:
        super().__init__(task, inputs)
        self._measures_means = mean_rewards

    def __call__(self, engine: Engine, between_steps: BetweenSteps | None = None) -> dict[str, float]:
        rewards, samples, keep = self.inputs.rewards, self.inputs.config.evaluate.samples_per_prompt, self.inputs.keep
        weights, metrics = self.task.reward_weights, dict[str, float]()
        # Submitted as soon as they are there: a slow reward is called while others are written.
        first = self.respond(engine, 1, greedy(self.sampling), between_steps, rewards.submit)
        others = self.respond(engine, samples, self.sampling, between_steps, rewards.submit) if samples else []
        # Both passes are waited for at once, so that slow rewards of both are called side by side.
        found = outcomes_of(rewards, [*first, *others], between_polls=between_steps)
        with user_code(type(self.task), ".solved"):
            solved = [[bool(self.task.solved(outcome)) for outcome in own] for own in found]
        outcomes, sampled = found[: len(first)], found[len(first) :]
        best, of_samples = solved[: len(first)], solved[len(first) :]
        if keep is not None:
            keep("greedy", first, outcomes, best)
            if samples:
                keep("sampled", others, sampled, of_samples)
        # The order counts: the first metric is the headline, which also decides about the best checkpoint.
        shares = ["accuracy"]
        if self._measures_means:
            metrics |= reward_metrics(outcomes, weights, name="reward")
            # By all responses, not by the greedy ones alone: a graded reward may be 0 or 1 there by chance.
            values = [combined_reward(components, weights) for own in found for components in _scored(own)]
            binary = bool(values) and all(min(abs(value), abs(value - 1.0)) < 1e-6 for value in values)
            shares = ["accuracy", "solved"] if binary else ["solved"]
        metrics |= mean_metrics({name: [own[0] for own in best] for name in shares})
        if samples:
            metrics |= sampled_metrics(of_samples, samples)
            if self._measures_means:
                metrics |= reward_metrics(sampled, weights, name=f"reward@{samples}")
        metrics["num_prompts"] = float(len(self.prompts))
        # Reported and counted: responses without a reward are not solved, whatever they say.
        if reasons := [why for own in found for outcome in own if (why := why_no_reward(outcome))]:
            message = "%d of the %d responses of an evaluation have no reward and count as not solved, the last: %s"
            logger.warning(message, len(reasons), sum(map(len, found)), reasons[-1])
            metrics["num_responses_without_reward"] = float(len(reasons))
        return metrics


def _scored(outcomes: Sequence[Outcome]) -> list[Mapping[str, float | None]]:
    """The components of the samples that have a reward."""
    return [components for components in map(components_of, outcomes) if components is not None]


def sampled_metrics(solved: Sequence[Sequence[bool]], k: int) -> dict[str, float]:
    """Metrics pass@k and avg@k over prompts; solved[p] has the k samples of prompt p."""
    shares = [sum(samples) / max(1, len(samples)) for samples in solved]
    return mean_metrics({f"pass@{k}": map(any, solved), f"avg@{k}": shares})


def reward_metrics(
    outcomes: Sequence[Sequence[Outcome]], weights: Mapping[str, float], *, name: str
) -> dict[str, float]:
    """The mean combined reward under `name` and, where there are several rewards, the mean of each under `name/reward`, with
    standard errors over prompts; `outcomes` are of each prompt's samples.

    Responses without a reward, because it failed or because none was applicable, are left out, as in training; and so is one
    of several rewards where it is not applicable. A reward of weight 0 is measured here without being trained on.
    """
    scored = [_scored(own) for own in outcomes]
    values = {name: [[combined_reward(components, weights) for components in own] for own in scored]}
    if len(weights) > 1:
        for key in weights:
            values[f"{name}/{key}"] = [[v for c in own if (v := c.get(key)) is not None] for own in scored]
    # Means are over prompts first: a prompt of which samples failed counts as much as the others.
    return mean_metrics({metric: [sum(own) / len(own) for own in of if own] for metric, of in values.items()})


class CountedEngine:
    """An engine that shows how many of the responses it was asked for are `done`; the rest is the engine's own."""

    def __init__(self, engine: Engine, row: RoleCounters) -> None:
        self._engine = engine
        self._row = row

    def generate(
        self, requests: Iterable[Request | None], *, samples_per_prompt: int, **options: Any
    ) -> Iterator[Completion]:
        # The number of responses must be known before the first, and an iterator can be gone through once.
        asked = list(requests)
        self._row["done"], self._row["of"] = 0, len(asked) * samples_per_prompt
        try:
            for completion in self._engine.generate(asked, samples_per_prompt=samples_per_prompt, **options):
                self._row["done"] += 1
                yield completion
        finally:
            # 0 = no evaluation goes on: the display then shows no progress; also where the caller stops early.
            self._row["of"] = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def respond(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    samples_per_prompt: int,
    sampling: Sampling,
    *,
    between_steps: BetweenSteps | None = None,
    finished: Callable[[FinishedGroup], None] = lambda group: None,
) -> list[FinishedGroup]:
    """The responses to each prompt, in the order of the prompts, samples in order; prompts have different ids. `finished` is
    called with a prompt's responses as soon as the last of them is there."""
    by_id = {prompt.id: prompt for prompt in prompts}
    completions: dict[str, list[Completion]] = defaultdict(list)
    groups: dict[str, FinishedGroup] = {}
    for completion in engine.generate(
        [Request(prompt=prompt) for prompt in prompts],
        samples_per_prompt=samples_per_prompt,
        sampling=sampling,
        between_steps=between_steps,
    ):
        # Responses of all prompts come mixed; a group is whole when it has samples_per_prompt of them.
        own = completions[completion.prompt_id]
        own.append(completion)
        if len(own) == samples_per_prompt:
            # An engine hands completions back in the order in which they end: short ones first.
            own.sort(key=lambda completion: completion.sample_index)
            group = groups[completion.prompt_id] = finished_group(tokenizer, by_id[completion.prompt_id], own)
            finished(group)
    return [groups[prompt.id] for prompt in prompts]


def in_parts(count: int, size: int, between_steps: BetweenSteps | None) -> Iterator[slice]:
    """Slices of `size`, with a heartbeat before each: what scores many responses at once may take minutes."""
    for start in range(0, count, size):
        if between_steps is not None:
            between_steps()
        yield slice(start, start + size)


def greedy(sampling: Sampling) -> Sampling:
    """Sampling with the same limits that always takes the most likely token."""
    return replace(sampling, greedy=True, temperature=1.0, top_p=1.0, top_k=0)


@dataclass(frozen=True)
class Distance:
    """How far a policy has gone from the model it started as: `Distance(start).kl(groups)`."""

    start: Scorer
    """A scorer that holds the start model."""
    temperature: float = 1.0
    """Temperature of training, at which the KL is."""

    @classmethod
    def of(cls, inputs: EvaluationInputs) -> Distance | None:
        """The distance to the start model; None = it is not measured."""
        return None if inputs.start is None else cls(inputs.start(), inputs.sampling.training_temperature)

    def kl(self, groups: Sequence[FinishedGroup], between_steps: BetweenSteps | None = None) -> np.ndarray:
        """KL in nats of each sampled response, float64 [n]: log pi - log pi_start, summed over its tokens."""
        completions = [completion for group in groups for completion in group.completions]
        # Both sides at the training temperature: the difference is then the KL that training penalises.
        log_start = self._log_probs(groups, self.temperature, between_steps)
        return np.array(
            [float((c.policy_log_probs - start)[c.loss_mask].sum()) for c, start in zip(completions, log_start)]
        )

    def means(
        self,
        groups: Sequence[FinishedGroup],
        reward: np.ndarray,
        beta: float | None,
        between_steps: BetweenSteps | None = None,
    ) -> dict[str, np.ndarray]:
        """`kl` of each response and, where reward - beta x KL is what is maximised (`beta`), `regularised_reward`."""
        kl = self.kl(groups, between_steps)
        return {"kl": kl} if beta is None else {"kl": kl, "regularised_reward": reward - beta * kl}

    def perplexity(
        self, groups: Sequence[FinishedGroup], between_steps: BetweenSteps | None = None
    ) -> dict[str, float]:
        """Perplexity under the start model as in the paper, of all responses as one text: exp(NLL of the responses / number
        of all tokens, prompts included); and `perplexity_per_sample`, the mean of each response's own."""
        # Perplexity is of the model itself, at temperature 1, whatever training samples at.
        log_start = self._log_probs(groups, 1.0, between_steps)
        nll = np.array([-float(start.sum()) for start in log_start])
        tokens = np.array(
            [len(group.prompt.token_ids) + len(c.token_ids) for group in groups for c in group.completions]
        )
        per_sample = mean_metrics({"perplexity_per_sample": np.exp(nll / tokens)})
        return {"perplexity": exp(nll.sum() / max(1, tokens.sum())), **per_sample}

    def _log_probs(
        self, groups: Sequence[FinishedGroup], temperature: float, between_steps: BetweenSteps | None
    ) -> list[np.ndarray]:
        """Log-probabilities of every response's tokens under the start model, group after group."""
        prompts = [group.prompt.token_ids for group in groups for _ in group.completions]
        responses = [own.token_ids for group in groups for own in group.completions]
        return [
            scores
            for part in in_parts(len(prompts), RESPONSES_AT_ONCE, between_steps)
            for scores in self.start.score(prompts[part], responses[part], temperature)
        ]


RESAMPLES = 10_000
"""Number of bootstrap samples behind an interval."""
RESAMPLES_AT_ONCE = 500
"""Bootstrap samples whose prompts are drawn together: 10 MB of indices for 2,000 prompts."""


@contextmanager
def responses_file(path: Path) -> Iterator[KeepResponses]:
    """Gives a function that adds a line for each prompt of one pass over the prompts. What lay at `path` stays until all is
    there, and also where the evaluation fails. Says at once where the file cannot be written, or is something else."""

    def is_ours(path: Path) -> bool:
        with path.open(encoding="utf-8") as file:
            return {"prompt_id", "kind", "responses"} <= json.loads(file.readline()).keys()

    def add(
        kind: str,
        groups: Sequence[FinishedGroup],
        outcomes: Sequence[Sequence[Outcome]],
        solved: Sequence[Sequence[bool]],
    ) -> None:
        with partial.open("a", encoding="utf-8") as file:
            for group, of_group, right in zip(groups, outcomes, solved, strict=True):
                responses = []
                for text, outcome, own in zip(group.texts, of_group, right, strict=True):
                    rewards: dict[str, object] = (
                        {"reward_failed": str(outcome)}
                        if isinstance(outcome, RewardFailed)
                        else {"rewards": dict(outcome)}
                    )
                    responses.append({"text": text, **rewards, "solved": bool(own)})
                line = {"prompt_id": group.prompt.id, "kind": kind, "prompt": group.prompt.text, "responses": responses}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")

    check_may_replace("--responses", path, is_ours)
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text("")
    except OSError as error:
        raise ValueError(f"--responses {path} cannot be written: {error.strerror}. Give another file.") from None
    try:
        yield add
        # Atomic: a reader sees the old file or the whole new one.
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_responses(path: Path) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, list[float]]]]:
    """By metric and prompt id: the share of the prompt's responses that are solved (accuracy, avg@k), and the values of each
    reward (reward/NAME, reward@k/NAME)."""
    found: dict[str, dict[str, float]] = {}
    rewards: dict[str, dict[str, list[float]]] = {}
    try:
        # Not splitlines: it also breaks at U+2028, which JSON text may hold as it is.
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        for line in lines:
            solved = [bool(response["solved"]) for response in line["responses"]]
            is_greedy, count = line["kind"] == "greedy", len(solved)
            found.setdefault("accuracy" if is_greedy else f"avg@{count}", {})[line["prompt_id"]] = float(
                np.mean(solved)
            )
            for response in line["responses"]:
                for name, value in response.get("rewards", {}).items():
                    metric = f"{'reward' if is_greedy else f'reward@{count}'}/{name}"
                    if value is not None:
                        rewards.setdefault(metric, {}).setdefault(line["prompt_id"], []).append(float(value))
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror}. Give a file that --responses has written."
        ) from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{path} is not what --responses writes ({error!r}). Give a file that it has written."
        ) from None
    return found, rewards


def paired_differences(own: Path, other: Path) -> dict[str, dict[str, float]]:
    """For each metric that both files have: mean of own - other over the prompts of both, its standard error, and the
    interval that holds 95% of its bootstrap samples. Rewards that are all 0 or 1 are left out: the share that is solved says
    the same."""
    # Differences are taken within a prompt: how hard a prompt is cancels out.
    (ours, our_rewards), (theirs, their_rewards) = read_responses(own), read_responses(other)
    for name in sorted(our_rewards.keys() & their_rewards.keys()):
        both = (our_rewards[name], their_rewards[name])
        if any(value not in (0.0, 1.0) for values in both for of_prompt in values.values() for value in of_prompt):
            ours[name], theirs[name] = ({id: float(np.mean(of)) for id, of in values.items()} for values in both)
    # Sorted, so that the bootstrap draws the same prompts in every process.
    metrics = {name: sorted(set(ours[name]) & set(theirs[name])) for name in ours if name in theirs}
    if not any(metrics.values()):
        contents = [
            ", ".join(f"{name} of {len(values)} prompts" for name, values in side.items()) or "nothing"
            for side in (ours, theirs)
        ]
        raise ValueError(
            f"{own} and {other} have no prompt and metric in common ({contents[0]}; {contents[1]}): evaluate both "
            "with the same task, split and number of samples."
        )
    return {
        name: difference([ours[name][prompt] - theirs[name][prompt] for prompt in prompts])
        for name, prompts in metrics.items()
        if prompts
    }


def difference(gaps: Sequence[float]) -> dict[str, float]:
    """Mean, standard error (of one prompt there is none) and bootstrap interval of differences that were found on each
    prompt."""
    values = np.asarray(gaps, np.float64)
    draw = np.random.default_rng(0)
    parts = [
        # Prompts are drawn, not responses: the samples of a prompt are not independent.
        values[draw.integers(0, len(values), (RESAMPLES_AT_ONCE, len(values)))].mean(axis=1)
        for _ in range(RESAMPLES // RESAMPLES_AT_ONCE)
    ]
    low, high = np.quantile(np.concatenate(parts), [0.025, 0.975])
    error = {"standard_error": float(values.std(ddof=1) / np.sqrt(len(values)))} if len(values) > 1 else {}
    return {
        "difference": float(values.mean()),
        **error,
        "low": float(low),
        "high": float(high),
        "num_prompts": float(len(values)),
    }
