"""Every metric the program writes: name, unit, how parts of a step are put together.

A metric that is not listed here is refused, so that dashboards and docs never meet an unknown name. `*` stands for one
part of a name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from statistics import stdev
from typing import Literal

Reduction = Literal["mean", "rms", "sum", "max", "last"]
STANDARD_ERROR = "_standard_error"
"""Ending of the name of a standard error: an evaluation's `accuracy_standard_error` belongs to its `accuracy`."""
COUNT = "num_"
"""Beginning of the name of a count: an evaluation's `num_prompts` says what its means are over."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric that the program may write.

    Metric(name="kl", unit="nats per response", reduction="mean", meaning="...")
    """

    name: str
    unit: str
    meaning: str
    reduction: Reduction = "mean"


METRICS = (
    Metric(
        name="loss", unit="reward", reduction="sum", meaning="What is back-propagated; for TB (beta / 2) x tb/loss."
    ),
    Metric(
        name="seconds", unit="seconds", reduction="last", meaning="Seconds of training, as train.max_seconds counts."
    ),
    Metric(
        name="reward",
        unit="reward",
        meaning="Mean combined reward of the responses that came since the step before, as they were sampled.",
    ),
    Metric(name="batch/reward", unit="reward", meaning="Mean combined reward of the trained responses."),
    Metric(name="rewards/*/mean", unit="reward", meaning="Mean of one component, not-applicable values left out."),
    Metric(name="reward_std", unit="reward", meaning="Standard deviation within a prompt, mean over prompts."),
    Metric(
        name="off_policy/agreement",
        unit="correlation",
        meaning="Rewards with the drift of log_pi since generation, within prompts: the signal in recent updates.",
    ),
    Metric(name="frac_reward_zero_std", unit="share", meaning="Share of prompts with one reward for all responses."),
    Metric(name="kl", unit="nats per response", meaning="Mean log_pi - log_ref of the trained responses."),
    Metric(name="entropy", unit="nats per token", meaning="Entropy of the policy at the trained tokens."),
    Metric(
        name="target_temperature", unit="", reduction="last", meaning="tau of TB's target: all of it is divided by tau."
    ),
    Metric(name="grad_norm", unit="reward", reduction="last", meaning="Norm of the gradient before clipping."),
    Metric(name="learning_rate", unit="", reduction="last", meaning="Learning rate of this step."),
    Metric(name="beta", unit="reward per nat", reduction="last", meaning="Beta of this step."),
    Metric(name="completions/mean_length", unit="tokens", meaning="Mean length of the trained responses."),
    Metric(name="completions/clipped_ratio", unit="share", meaning="Share of responses cut off at the length limit."),
    Metric(name="tb/loss", unit="nats^2", reduction="sum", meaning="The paper's VarGrad loss."),
    Metric(name="tb/log_z", unit="nats", meaning="Mean estimate of log Z."),
    Metric(name="tb/log_z_std", unit="nats", reduction="rms", meaning="Root mean square residual."),
    Metric(name="tb/max_abs_residual", unit="nats", reduction="max", meaning="Largest |log Z estimate - prompt mean|."),
    Metric(name="tb/held_back", unit="share", meaning="Share of the gradient that objective.off_policy holds back."),
    Metric(
        name="tb/target_reached",
        unit="share",
        meaning="Slope, within prompts, of beta x (log_pi - log_ref) on the reward: 0 at the reference, 1 at the target.",
    ),
    Metric(
        name="tb/reward_spread",
        unit="reward",
        meaning="Standard deviation of the rewards within prompts, of those whose responses differ in it.",
    ),
    Metric(
        name="off_policy/drift", unit="nats", meaning="Mean |log_pi now - log_pi when generated| of a late response."
    ),
    Metric(name="off_policy/drift_lag", unit="steps", meaning="Mean lag of the responses that drift is measured on."),
    Metric(
        name="off_policy/signal",
        unit="correlation",
        reduction="last",
        meaning="Mean of off_policy/agreement over recent batches; the learning rate follows it.",
    ),
    Metric(name="objective/*", unit="", meaning="A number of the objective; its own file says which."),
    Metric(
        name="reference_version",
        unit="steps",
        reduction="last",
        meaning="Version of the weights that are the reference.",
    ),
    Metric(name="off_policy/lag_mean", unit="steps", meaning="Trainer step - oldest version of the response."),
    Metric(name="off_policy/lag_max", unit="steps", reduction="max", meaning="Largest lag in the step."),
    Metric(name="off_policy/ess", unit="share", meaning="Effective sample size of pi / pi_behaviour, over responses."),
    Metric(
        name="off_policy/kl",
        unit="nats per response",
        meaning="Policy that generated against the current one: mean policy log-prob when generated - log_pi now.",
    ),
    Metric(
        name="off_policy/mismatch_kl",
        unit="nats per token",
        meaning="Searcher against trainer at one version: KL of the engine's policy to the trainer's, on its responses.",
    ),
    Metric(
        name="off_policy/dropped", unit="responses", reduction="sum", meaning="Responses without weight in the step."
    ),
    Metric(
        name="empty_step", unit="0 or 1", reduction="last", meaning="1 where no response had weight: no weight moved."
    ),
    Metric(name="buffer/*", unit="", reduction="last", meaning="State of the replay buffer."),
    Metric(
        name="search/open_visits",
        unit="visits",
        reduction="last",
        meaning="Visits to prompts that a searcher has and whose group has not arrived.",
    ),
    Metric(name="searchers/alive", unit="", reduction="last", meaning="Searchers that run."),
    Metric(
        name="searchers/replaced", unit="", reduction="last", meaning="Searchers that died or hung and were replaced."
    ),
    Metric(name="trainer/restarts", unit="", reduction="last", meaning="Times that the trainer died and was resumed."),
    Metric(
        name="searcher/*/mismatch_kl",
        unit="nats per token",
        reduction="last",
        meaning="One searcher against the trainer at the version compared last: distance on the 64 canary tokens.",
    ),
    Metric(
        name="searcher/*/*",
        unit="",
        reduction="last",
        meaning="State of one searcher, by its number.",
    ),
    Metric(name="search/*", unit="", reduction="last", meaning="All searchers together."),
    Metric(
        name="time/receive",
        unit="seconds",
        reduction="sum",
        meaning="Wall-clock time in which the trainer took in groups since the step before: replay, durable replay, counts.",
    ),
    Metric(
        name="time/second_update",
        unit="seconds",
        reduction="sum",
        meaning="Wall-clock time of the second update on an earlier batch (train.second_update_after).",
    ),
    Metric(
        name="time/wait_for_batch",
        unit="seconds",
        reduction="sum",
        meaning="Wall-clock time in which the trainer had nothing to train on and no group to take in.",
    ),
    Metric(
        name="time/step",
        unit="seconds",
        reduction="sum",
        meaning="Wall-clock time from sampling the batch to the published weights, without a second update in between.",
    ),
    Metric(name="time/*", unit="seconds", reduction="sum", meaning="Wall-clock time of a part of the step."),
    Metric(name="perf/*", unit="per second", reduction="last", meaning="Rate since the first step."),
    Metric(
        name="guard/alarm", unit="0 or 1", reduction="last", meaning="1 while an alarm of the collapse guard lasts."
    ),
    Metric(
        name="guard/rollbacks",
        unit="",
        reduction="last",
        meaning="Times that the run went back to a checkpoint from before a collapse.",
    ),
    Metric(
        name="guard/*",
        unit="",
        meaning="A number the collapse guard watches, over all sampled responses, with weight or not.",
    ),
    Metric(
        name="eval/*/*",
        unit="",
        reduction="last",
        meaning="A metric of an evaluation, on the prompts of evaluate.split.",
    ),
)


def standard_error(values: Sequence[float]) -> float | None:
    """Standard error of the mean of independent values, sqrt(sum (x - mean)^2 / (n - 1) / n); None below two values."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def mean_metrics(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Each metric's mean with its standard error beside it, of one value for each prompt (or response, where they all answer
    one prompt): mean_metrics({"accuracy": [1, 0]}) == {"accuracy": 0.5, "accuracy_standard_error": 0.5}"""
    found: dict[str, float] = {}
    for name, own in values.items():
        numbers = [float(value) for value in own]
        if not numbers:
            continue  # nothing was measured, which is not 0
        found[name] = sum(numbers) / len(numbers)
        error = standard_error(numbers)
        if error is not None:
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
    for known in METRICS:
        if fnmatchcase(name, known.name):
            return known
    raise KeyError(f"metric {name!r} is not listed in tba/observe/metrics.py: add it there with its unit and meaning.")


def deciding_metric(chosen: str | None, first: Mapping[str, float], metrics: Mapping[str, float]) -> str:
    """What an evaluation is judged by: evaluate.best_metric or, where none is `chosen`, the first metric of the run's first
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


def mean_over_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of several optimizer steps as those of one: sums over a step become their mean, the rest follows each metric's
    rule. A step in which one is NaN, such as a reward that was not applicable to any response, says nothing about it."""
    names = dict.fromkeys(name for metrics in steps for name in metrics)
    known = {name: [own[name] for own in steps if name in own and not math.isnan(own[name])] for name in names}
    found = {name: values or [math.nan] for name, values in known.items()}
    return {
        name: sum(values) / len(values)
        if metric(name).reduction == "sum"
        else _reduce(name, [(v, 1.0) for v in values])
        for name, values in found.items()
    }


def _reduce(name: str, values: list[tuple[float, float]]) -> float:
    reduction = metric(name).reduction
    if reduction == "sum":
        return sum(value for value, _ in values)
    if reduction == "max":
        return max(value for value, _ in values)
    if reduction == "last":
        return values[-1][0]
    power = 2.0 if reduction == "rms" else 1.0
    mean = sum(value**power * weight for value, weight in values) / max(1e-12, sum(weight for _, weight in values))
    return mean ** (1.0 / power)
