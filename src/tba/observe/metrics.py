"""Every metric the program writes: name, unit, how parts of a step are put together.

A metric that is not listed here is refused, so that dashboards and docs never meet an unknown name. `*` stands for one
part of a name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from statistics import stdev
from typing import NamedTuple

STANDARD_ERROR = "_standard_error"
"""Ending of the name of a standard error: an evaluation's `accuracy_standard_error` belongs to its `accuracy`."""
COUNT = "num_"
"""Beginning of the name of a count: an evaluation's `num_prompts` says what its means are over."""


class Metric(NamedTuple):
    """A metric that the program may write: Metric("kl", "mean", "nats per response", "Mean log_pi - log_ref ...")"""

    name: str
    reduction: str
    """How the parts of a step are put together: mean, rms, sum, max or last."""
    unit: str
    """Its unit; - where it has none."""
    meaning: str


_TABLE = """
    loss | sum | reward | What is back-propagated; for TB (beta / 2) x tb/loss.
    seconds | last | seconds | Seconds of training, as train.max_seconds counts.
    reward | mean | reward | Mean combined reward of the responses that came since the step before, as they were sampled.
    batch/reward | mean | reward | Mean combined reward of the trained responses.
    rewards/*/mean | mean | reward | Mean of one component, not-applicable values left out.
    reward_std | mean | reward | Standard deviation within a prompt, mean over prompts.
    off_policy/drift_reward_correlation | mean | correlation | Rewards with the drift of log_pi since generation, within
        prompts: the signal in recent updates.
    frac_reward_zero_std | mean | share | Share of prompts with one reward for all responses.
    kl | mean | nats per response | Mean log_pi - log_ref of the trained responses.
    entropy | mean | nats per token | Entropy of the policy at the trained tokens.
    target_temperature | last | - | tau of TB's target: all of it is divided by tau.
    grad_norm | last | reward | Norm of the gradient before clipping.
    learning_rate | last | - | Learning rate of this step.
    beta | last | reward per nat | Beta of this step.
    completions/mean_length | mean | tokens | Mean length of the trained responses.
    completions/clipped_ratio | mean | share | Share of responses cut off at the length limit.
    tb/loss | sum | nats^2 | The mean squared residual: the paper's loss.
    tb/log_z | mean | nats | Mean estimate of log Z.
    tb/log_z_std | rms | nats | Root mean square residual.
    tb/max_abs_residual | max | nats | Largest |log Z estimate - prompt mean|.
    tb/masked_fraction | mean | share | Share of the gradient that the trust region masks.
    tb/target_reached | mean | share | Slope, within prompts, of beta x (log_pi - log_ref) on the reward: 0 at the
        reference, 1 at the target.
    tb/reward_spread | mean | reward | Standard deviation of the rewards within prompts, of those whose responses differ
        in it.
    off_policy/drift | mean | nats | Mean |log_pi now - log_pi when generated| of a late response.
    off_policy/drift_lag | mean | steps | Mean lag of the responses that drift is measured on.
    off_policy/signal | last | correlation | Mean of off_policy/drift_reward_correlation over recent batches; the learning
        rate follows it.
    objective/* | mean | - | A number of the objective; its own file says which.
    reference_version | last | steps | Version of the weights that are the reference.
    off_policy/lag_mean | mean | steps | Trainer step - oldest version of the response.
    off_policy/lag_max | max | steps | Largest lag in the step.
    off_policy/ess | mean | share | Effective sample size of pi / pi_behaviour, over responses.
    off_policy/kl | mean | nats per response | Policy that generated against the current one: mean policy log-prob when
        generated - log_pi now.
    off_policy/mismatch_kl | mean | nats per token | Searcher against trainer at one version: KL of the engine's policy to
        the trainer's, on its responses.
    off_policy/dropped | sum | responses | Responses without weight in the step.
    empty_step | last | 0 or 1 | 1 where no response had weight: no weight moved.
    buffer/* | last | - | State of the replay buffer.
    search/rollouts_in_flight | last | rollouts | Rollouts that a searcher has and whose group has not arrived.
    searchers/alive | last | - | Searchers that run.
    searchers/replaced | last | - | Searchers that died or hung and were replaced.
    trainer/restarts | last | - | Times that the trainer died and was resumed.
    searcher/*/mismatch_kl | last | nats per token | One searcher against the trainer at the version compared last:
        distance on the 64 canary tokens.
    searcher/*/tool_calls | last | calls | Tool calls of one searcher's episodes so far.
    searcher/*/tool_errors | last | calls | Those that could not be read, or gave an error.
    searcher/*/* | last | - | State of one searcher, by its number.
    search/* | last | - | All searchers together.
    time/receive | sum | seconds | Wall-clock time in which the trainer took in groups since the step before: replay,
        durable replay, counts.
    time/second_update | sum | seconds | Wall-clock time of the second update on an earlier batch
        (train.second_update_after).
    time/wait_for_batch | sum | seconds | Wall-clock time in which the trainer had nothing to train on and no group to
        take in.
    time/step | sum | seconds | Wall-clock time from sampling the batch to the published weights, without a second update
        in between.
    time/* | sum | seconds | Wall-clock time of a part of the step.
    perf/* | last | per second | Rate since the first step.
    guard/alarm | last | 0 or 1 | 1 while an alarm of the collapse guard lasts.
    guard/rollbacks | last | - | Times that the run went back to a checkpoint from before a collapse.
    guard/* | mean | - | A number the collapse guard watches, over all sampled responses, with weight or not.
    eval/*/* | last | - | A metric of an evaluation, on the prompts of evaluate.split.
"""
METRICS = [Metric(*row.split(" | ")) for row in re.sub(r"\n {5,}", " ", _TABLE).strip().split("\n    ")]
"""One for each line of the table; an indented line goes on with the one before. The first that fits a name counts."""
RENAMED = {
    "off_policy/agreement": "off_policy/drift_reward_correlation",
    "tb/held_back": "tb/masked_fraction",
    "search/open_visits": "search/rollouts_in_flight",
}
"""Names of earlier versions: {"old": "new"}."""


def standard_error(values: Sequence[float]) -> float | None:
    """Standard error of the mean of independent values, sqrt(sum (x - mean)^2 / (n - 1) / n); None below two values."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def mean_metrics(values: Mapping[str, Iterable[float]]) -> dict[str, float]:
    """Each metric's mean with its standard error beside it, of one value for each prompt (or response, where they all answer
    one prompt): mean_metrics({"accuracy": [1, 0]}) == {"accuracy": 0.5, "accuracy_standard_error": 0.5}"""
    found: dict[str, float] = {}
    for name, own in values.items():
        if numbers := [float(value) for value in own]:  # otherwise nothing was measured, which is not 0
            found[name] = sum(numbers) / len(numbers)
            if (error := standard_error(numbers)) is not None:
                found[name + STANDARD_ERROR] = error
    return found


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The metrics of an evaluation by kind.

    Evaluation(values={"accuracy": 0.5}, errors={"accuracy": 0.02}, counts={"num_prompts": 500})
    """

    values: Mapping[str, float]
    errors: Mapping[str, float]
    """Standard errors, by the name of the metric that they belong to."""
    counts: Mapping[str, float]

    @classmethod
    def of(cls, metrics: Mapping[str, float]) -> Evaluation:
        errors = {name.removesuffix(STANDARD_ERROR): e for name, e in metrics.items() if name.endswith(STANDARD_ERROR)}
        counts = {name: count for name, count in metrics.items() if name.startswith(COUNT)}
        rest = {name: v for name, v in metrics.items() if name not in counts and not name.endswith(STANDARD_ERROR)}
        return cls(values=rest, errors=errors, counts=counts)


MOVED_ERRORS = 2.0
"""Number of standard errors between two evaluations from which on a metric has moved."""


def moving_metric(evaluations: Sequence[Mapping[str, float]]) -> str:
    """The first metric that has moved since the first evaluation by more than its noise; where none has, the first one.
    Empty without evaluations."""
    parts = [Evaluation.of(metrics) for metrics in evaluations]
    if not parts:
        return ""
    # Against the first evaluation, which every run has: neighbours may drift by less than their noise each time.
    first = parts[0]
    for name, start in first.values.items():
        for part in parts[1:]:
            error = math.hypot(first.errors.get(name, 0.0), part.errors.get(name, 0.0))
            if abs(part.values.get(name, start) - start) > MOVED_ERRORS * error:
                return name
    return next(iter(first.values), "")


@lru_cache(maxsize=4096)
def metric(name: str) -> Metric:
    """The listed metric behind a name; a KeyError names it otherwise."""
    # In the order of the table: a name of its own stands before the pattern that it fits too.
    if name in RENAMED:
        raise KeyError(f"metric {name} is called {RENAMED[name]} now.")
    for known in METRICS:
        if fnmatchcase(name, known.name):
            return known
    raise KeyError(f"metric {name!r} is not listed in tba/observe/metrics.py: add it there with its unit and meaning.")


def deciding_metric(chosen: str | None, first: Mapping[str, float], metrics: Mapping[str, float]) -> str:
    """Metric that judges an evaluation: evaluate.best_metric or, where none is `chosen`, the first metric of the run's first
    evaluation."""
    name = chosen or next(iter(first))
    # Where a reward was neither 0 nor 1 there is no accuracy, only the share that it stands for.
    return "solved" if name == "accuracy" and "solved" in metrics else name


def reduce_metrics(parts: Sequence[tuple[Mapping[str, float], float]]) -> dict[str, float]:
    """Put (metrics, weight) of the parts of one optimizer step together by each metric's own rule."""
    names = dict.fromkeys(name for metrics, _ in parts for name in metrics)
    return {
        name: _reduce(name, [(metrics[name], weight) for metrics, weight in parts if name in metrics]) for name in names
    }


def _reduce(name: str, values: list[tuple[float, float]]) -> float:
    reduction = metric(name).reduction
    if reduction == "sum":
        return sum(value for value, _ in values)
    if reduction == "max":
        return max(value for value, _ in values)
    if reduction == "last":
        return values[-1][0]
    # Weighted by the responses of each part, or micro-batches of another size would change the numbers.
    power = 2.0 if reduction == "rms" else 1.0
    mean = sum(value**power * weight for value, weight in values) / max(1e-12, sum(weight for _, weight in values))
    return mean ** (1.0 / power)
