"""The recorder: everything a run writes about itself, as metrics, samples, progress and summary. TrainingClock counts its
seconds, and a caller of `train` gets callbacks through RunListener."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tba.config import Config
from tba.observe.display import Curve, Progress, RoleStatus, Stability, pace_message
from tba.observe.files import RunOutcome, Sinks, WriteFailures, append_line, keep_lines, one_line, write_json
from tba.observe.metrics import STANDARD_ERROR, Evaluation, moving_metric
from tba.observe.run_folder import RunFolder
from tba.observe.watches import BetaWatch, LostResponses, MismatchWatch, RewardSignal
from tba.types import ResponseCounts, Trajectory, TrajectoryGroup, total_reward

logger = logging.getLogger("tba")

COUNTED = (
    *("steps", "empty_steps", "evaluations", "best", "collapse", "rollbacks"),
    *("_last_sample", "_num_samples", "_num_lines", "_seconds_at", "_lag_sum", "_lag_max", "_stability", "_mismatch"),
    *("_lost", "_signal", "_beta", "_warned_of_pace"),
)
"""Attributes of the recorder that a checkpoint holds."""
KEPT_TIMES = 10_000
"""Number of steps whose time is remembered."""
SAMPLES_EVERY = 20
"""Steps between two entries of samples.jsonl."""


class PastLine(NamedTuple):
    """A line of metrics.jsonl from before a run was resumed, with what a listener heard of it then.

    PastLine(step=20, metrics={"loss": 0.1, "reward": 0.5}, is_evaluation=False)
    """

    step: int
    metrics: Mapping[str, float]
    is_evaluation: bool


@dataclass
class RunListener:
    """Callbacks of a run, in the process of the trainer. Each method does nothing; override those you need. The fields are
    requests, which the run reads after every step."""

    stop: bool = False
    """Whether the run is to end after this step, as if it were the last."""
    save: bool = False
    """Whether a checkpoint is wanted."""
    evaluate: bool = False
    """Whether an evaluation is wanted."""
    model: Any = None
    """The model that is trained, as it stands; None before and after the run."""
    tokenizer: Any = None

    def begins(self, step: int, past: Callable[[], Sequence[PastLine]]) -> None:
        """Training goes on from this step, 0 for a new run; `past` reads the lines of the steps before, for who asks."""

    def step_begins(self, step: int) -> None:
        """Optimizer step `step`, counted from 0, is about to begin; an asynchronous trainer may wait for data first."""

    def step_ends(self, step: int) -> None:
        """So many optimizer steps are done."""

    def logged(self, step: int, metrics: Mapping[str, float]) -> None:
        """A line of metrics.jsonl was written."""

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """The evaluation of the weights of a step has come."""

    def saved(self, step: int, path: Path, wait: Callable[[], None]) -> None:
        """A checkpoint is being written; `wait` returns when it is there."""

    def ends(self, step: int) -> None:
        """The run is over."""


def past_lines(config: Config, folder: RunFolder) -> list[PastLine]:
    """The lines of metrics.jsonl, but for a last one that a killed process left unfinished: null in there is NaN again."""
    if not folder.metrics.is_file():
        return []
    found, prefix = [], f"eval/{config.task.label}/"
    # Behind the last line feed there is nothing, or half a line.
    for number, text in enumerate(folder.metrics.read_bytes().split(b"\n")[:-1], start=1):
        try:
            record = json.loads(text)
        except ValueError:
            raise ValueError(
                f"{folder.metrics} line {number} is damaged, it is no JSON: remove the line, or move the file away."
            ) from None
        step = record.pop("step")
        line = {name: math.nan if value is None else value for name, value in record.items()}
        own = {name.removeprefix(prefix): value for name, value in line.items() if name.startswith(prefix)}
        found.append(PastLine(step=step, metrics=own or line, is_evaluation=bool(own)))
    return found


@dataclass
class TrainingClock:
    """Seconds of training. It starts when the first response may be generated, stands still while a run in one process
    evaluates, and never goes back."""

    _before: float = 0.0
    """Seconds before it was started last."""
    _since: float | None = None
    """Time at which it was started; None = it stands still."""

    @property
    def seconds(self) -> float:
        return self._before + (0.0 if self._since is None else time.perf_counter() - self._since)

    def start(self) -> None:
        """Run from now on; one that runs goes on."""
        if self._since is None:
            self._since = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stand still while this lasts; one that was not started stays as it is."""
        # The right side comes first: `seconds` still counts the time since the start.
        ran, self._before, self._since = self._since is not None, self.seconds, None
        try:
            yield
        finally:
            if ran:
                self.start()

    def go_on_from(self, seconds: float) -> None:
        """Add the seconds of the processes before. A run that goes back to a checkpoint has used more than that holds."""
        self._before += max(0.0, seconds - self.seconds)


@dataclass(frozen=True, kw_only=True)
class SampleLog:
    """The file samples.jsonl: what the policy was asked, what it answered and what it got, of a group's best and its worst
    response by the reward that is trained on."""

    path: Path
    reward_weights: Mapping[str, float]
    """Factors of the reward components in the sum."""
    cut_off_reward: float | None = None
    """Reward that training gives a response that was cut off; None = the one that it got."""

    def write(self, step: int, group: TrajectoryGroup, texts: list[str]) -> None:
        rewards = [self.reward(trajectory) for trajectory in group.trajectories]
        responses = []
        # A set, since with equal rewards the best and the worst are one response.
        for i in sorted({rewards.index(max(rewards)), rewards.index(min(rewards))}):
            completion, own = group.trajectories[i].completion, group.trajectories[i].rewards
            known = {name: None if math.isnan(value) else value for name, value in own.items()}
            reward = {"reward": None if math.isnan(rewards[i]) else rewards[i], "rewards": known}
            length = {"tokens": len(completion.token_ids), "finish": completion.finish}
            responses.append({"text": texts[i], **reward, **length})
        of_group = {"prompt_id": group.prompt.id, "version": group.version, "prompt": group.prompt.text}
        record = {"step": step, **of_group, "responses": responses}
        append_line(self.path, json.dumps(record, ensure_ascii=False))

    def reward(self, trajectory: Trajectory) -> float:
        """The reward that is trained on."""
        if self.cut_off_reward is not None and trajectory.completion.finish == "length":
            return self.cut_off_reward
        names, values = list(trajectory.rewards), list(trajectory.rewards.values())
        return float(total_reward(values, [self.reward_weights[name] for name in names]))


class Recorder:
    """Takes the events of the loops and writes metrics.jsonl, samples.jsonl, the display and summary.json."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        *,
        decode: Callable[[TrajectoryGroup], list[str]],
        reward_weights: Mapping[str, float],
        counts: ResponseCounts,
        roles: Callable[[], Sequence[RoleStatus]] = list,
        more_metrics: Callable[[], Mapping[str, float]] = dict,
        listener: RunListener | None = None,
        report_height: Callable[[int], None] = lambda lines: None,
    ) -> None:
        """`reward_weights` are the task's; `counts` are kept by the trainer; `roles` says who does what, for the display;
        `more_metrics` adds numbers of the runtime to every record."""
        self.config, self.folder = config, folder
        self._counts, self._decode, self._more_metrics = counts, decode, more_metrics
        self._listener = listener or RunListener()
        self.failures = WriteFailures()
        """Writes that failed; the run continues without them."""
        self._sinks = Sinks(config, folder, self.failures)
        cut_off = config.train.cut_off_reward
        self._samples = SampleLog(path=folder.samples, reward_weights=reward_weights, cut_off_reward=cut_off)
        self._closed = False
        self._last_sample: int | None = None
        self.began = time.perf_counter()
        """Time at which this process began the run."""
        self._elapsed_before = 0.0
        """Seconds of the processes that this one resumes, with loading and evaluations."""
        self.clock = TrainingClock()
        self.seconds = 0.0
        """Seconds of training until the last step was done, as train.max_seconds counts them."""
        self.progress = 0.0
        """Share of the run that was done as its last weights were, 0 to 1."""
        self._progress_of, self._progress_before = 0, 0.0
        """Step of these weights, and the share that was done a step before."""
        self._seconds_at: dict[int, float] = {0: 0.0}
        """Time at which each of the last steps was done: an evaluation arrives later than the weights that it is of."""
        self._lag_sum, self._lag_max = 0.0, 0.0
        self._stability, self._mismatch, self._beta = Stability(), MismatchWatch(), BetaWatch()
        self._lost, self._signal = LostResponses(), RewardSignal()
        self._warned_of_pace = False
        self._num_lines, self._num_samples = 0, 0
        self.best: tuple[int, float] | None = None
        """Step and first metric of the best evaluation, whose weights are kept."""
        self.steps = 0
        self.empty_steps = 0
        """Number of steps in which no response had weight, so that the optimizer did not move."""
        self.evaluations: list[tuple[int, Mapping[str, float]]] = []
        self.late: list[tuple[int, Mapping[str, float]]] = []
        """Evaluations that came after the state that was loaded was saved, of weights from before."""
        self.collapse: Mapping[str, Any] | None = None
        """The collapse guard's last alarm; None = there was none."""
        self.rollbacks: list[Mapping[str, Any]] = []
        """The alarms after which the run went back, each with the step that it went back `to`."""
        self._progress = Progress(config, roles, lambda: (self.elapsed, self.seconds_left), report_height)

    def step_done(self, step: int) -> None:
        """The weights of this step are there: from now on, until the next are, the run is as far as it is at this moment."""
        if step != self._progress_of:
            self._progress_before, self._progress_of = self.progress, step
        self.progress = self.config.progress_at(step, self.clock.seconds)
        self._progress.trained = self.progress >= 1.0

    def _read_clock(self, step: int) -> None:
        self.seconds = self._seconds_at[step] = self.clock.seconds
        # One time leaves with each that comes: the table is part of every checkpoint.
        self._seconds_at.pop(step - KEPT_TIMES, None)

    @property
    def why_lost(self) -> str:
        """Why the last response without a reward has none."""
        return self._lost.last or "its rewards are None"

    @property
    def is_time_over(self) -> bool:
        """Whether the run has no time for another step; there is always time for the first."""
        limit = self.config.train.max_seconds
        return limit is not None and self.steps > 0 and self.clock.seconds >= limit

    @property
    def passed_tenth(self) -> bool:
        """Whether another tenth of the run was done with the last step."""
        return int(10 * self.progress) > int(10 * self._progress_before)

    def evaluation_due(self, step: int) -> bool:
        return self.config.evaluation_due(step, progress=self.progress, before=self._progress_before)

    def group_received(self, step: int, group: TrajectoryGroup) -> None:
        self._lost.count(generated=group.num_generated, lost=group.num_lost, why=group.why_lost)
        if not self._signal.differs and not self.config.replay.imports:  # what is imported may differ
            rewards = [self._samples.reward(trajectory) for trajectory in group.trajectories]
            self._signal.count(group, rewards, lambda: self._decode(group))
            self._progress.no_signal = self._signal.warning
        if group.trajectories and (self._last_sample is None or step - self._last_sample >= SAMPLES_EVERY):
            self._last_sample = step
            with self.failures.tolerated("samples in", self.folder.samples):
                self._samples.write(step, group, self._decode(group))
            self._num_samples += 1

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step != self._progress_of:
            self.step_done(step)
        self._read_clock(step)
        self.steps = step
        self.empty_steps += metrics.get("empty_step", 0.0) > 0
        self._stability.step(metrics)
        if (note := self._beta.step(step, metrics)) is not None:
            self.note(note)
        self._lag_sum += metrics.get("off_policy/lag_mean", 0.0)
        self._lag_max = max(self._lag_max, metrics.get("off_policy/lag_max", 0.0))
        # Counted by the trainer, by its clock: evaluations and the time before the first response are no training.
        rate = self._counts.trained / max(self.seconds, 1e-9)
        metrics = {"seconds": self.seconds, **metrics, "perf/responses_per_second": rate, **self._more_metrics()}
        self._mismatch.step(step, metrics)
        self._write(step, metrics)
        self._listener.logged(step, metrics)
        self._progress.step(step, metrics)
        # Once, early: how long a run will take that is far from done.
        if not self._warned_of_pace and step >= 4 and (left := self.seconds_left) is not None and self.pace is not None:
            self._warned_of_pace = True
            if left > 600.0:
                waited, steps = self._stability.summary().get("waited", 0.0), step + round(left / max(self.pace, 1e-9))
                self.note(pace_message(self.config, steps=steps, seconds=self.seconds + left, waited=waited))

    def time_is_over(self) -> None:
        """The last step ends the run: its seconds ran out while the trainer waited."""
        self.step_done(self.steps)
        self._read_clock(self.steps)

    def note(self, message: str) -> None:
        """A line that stays on the screen."""
        self._progress.note(message)

    def stops(self) -> None:
        """The run was asked to end."""
        self._progress.stopping = True

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        # First the line in the file: a listener may raise.
        self._add_evaluation(step, metrics)
        self._listener.evaluated(step, metrics)
        self._progress.evaluation(step, metrics)

    def _add_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.evaluations.append((step, metrics))
        values = {f"eval/{self.config.task.label}/{name}": value for name, value in metrics.items()}
        self._write(step, {"seconds": self._seconds_at.get(step, self.seconds), **values})

    def saved(self, step: int, wait: Callable[[], None]) -> None:
        self._listener.saved(step, self.folder.checkpoints / f"step-{step}", wait)

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._sinks.write(step, metrics)
        # The length that cut_files goes back to.
        self._num_lines += 1

    def lacks_evaluation(self, step: int) -> bool:
        """Whether weights that a process begins with are still to be evaluated: those of the start, or of a step at which an
        evaluation is due and its result is not in the checkpoint."""
        due = step == 0 or self.evaluation_due(step)
        return due and all(evaluated < step for evaluated, _ in self.evaluations)

    @property
    def elapsed(self) -> float:
        """Time since the run began, with loading and evaluations; of a run that was resumed, without the time in between."""
        return self._elapsed_before + time.perf_counter() - self.began

    @property
    def seconds_left(self) -> float | None:
        """Time until the steps to come are made, at the pace so far, or train.max_seconds is over; None = it is not known
        yet."""
        train, pace = self.config.train, self.pace
        left = []
        if train.max_steps is not None and pace is not None:
            # Time that the step in progress has used, at most that of a usual one.
            in_step = min(pace, self.clock.seconds - self.seconds)
            left.append(max(0.0, pace * max(0, train.max_steps - self.steps) - in_step))
        if train.max_seconds is not None:
            left.append(max(0.0, train.max_seconds - self.clock.seconds))
        return min(left, default=None)

    @property
    def pace(self) -> float | None:
        """Seconds a step in the later half of those so far; None = it is not known yet."""
        # Not min() of those that are remembered: the display asks four times a second, and there are 10,000.
        first = max(self.steps // 2, self.steps + 1 - KEPT_TIMES)
        if self.steps < 2 or first not in self._seconds_at or first >= self.steps:
            return None
        return (self.seconds - self._seconds_at[first]) / (self.steps - first)

    def state(self) -> dict[str, Any]:
        """Counts of the summary, and the lengths of the files."""
        counted = {name: getattr(self, name) for name in COUNTED}
        return {**counted, "seconds": self.seconds, "elapsed": self.elapsed}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on counting. Of what was written after the state was saved, evaluations that will not be asked for again are
        read (`late`): they are of weights from before. The lines are dropped by `cut_files`."""
        for name in COUNTED:
            setattr(self, name, state[name])
        # A rollback loads a state in a process that has trained: its clock and its time go on.
        if self.clock.seconds == 0.0:  # otherwise this process goes back, and has counted its time
            self._elapsed_before = state["elapsed"]
        self.clock.go_on_from(state["seconds"])
        self.seconds = self.clock.seconds
        self.step_done(self.steps)
        before = max(0, self.steps - 1)
        self._progress_before = self.config.progress_at(before, self._seconds_at.get(before, 0.0))
        # An evaluation of this very step that will be asked for again is not taken from the file.
        newest = self.steps - 1 if self.lacks_evaluation(self.steps) else self.steps
        after = past_lines(self.config, self.folder)[self._num_lines :]
        self.late = [(line.step, line.metrics) for line in after if line.is_evaluation and line.step <= newest]

    def past(self) -> list[PastLine]:
        """Lines that were logged before this process; valid after `load_state`."""
        return past_lines(self.config, self.folder) if self.steps > 0 else []

    def cut_files(self) -> None:
        """Drop the lines of files that came after what is counted: they are of steps that will be made again. Late
        evaluations are written once more."""
        # First the files, then the late evaluations: these are lines after the cut, which count again.
        keep_lines(self.folder.metrics, self._num_lines)
        keep_lines(self.folder.samples, self._num_samples)
        for step, metrics in self.late:
            self._add_evaluation(step, metrics)
        self._progress.resume(self.steps, self.evaluations)

    def summary(self, outcome: RunOutcome = "finished", error: BaseException | None = None) -> dict[str, Any]:
        first, last = (Evaluation.of(self.evaluations[i][1] if self.evaluations else {}) for i in (0, -1))
        best_step = None if self.best is None else self.best[0]
        best = Evaluation.of(next((metrics for step, metrics in self.evaluations if step == best_step), {}))
        return {
            "outcome": outcome,
            "error": None if error is None else one_line(error),
            "task": self.config.task.label,
            "objective": self.config.objective.name,
            "seed": self.config.seed,
            "steps": self.steps,
            "seconds": round(self.seconds, 2),
            "elapsed_seconds": round(self.elapsed, 2),
            "responses_generated": self._counts.generated,
            "responses_trained": self._counts.trained,
            "start": dict(first.values),
            "final": dict(last.values),
            "final_step": self.evaluations[-1][0] if self.evaluations else None,
            # Empty steps have no lag and have added nothing to the sum.
            "lag": {
                "mean": round(self._lag_sum / max(1, self.steps - self.empty_steps), 3),
                "max": int(self._lag_max),
            },
            "empty_steps": self.empty_steps,
            "collapse": None if self.collapse is None else dict(self.collapse),
            "rollbacks": [dict(rollback) for rollback in self.rollbacks],
            "start_standard_error": dict(first.errors),
            "final_standard_error": dict(last.errors),
            "evaluated": {name: int(count) for name, count in last.counts.items()},
            "best": None if self.best is None else {"step": self.best[0], "score": self.best[1]},
            "best_values": dict(best.values),
            "best_standard_error": dict(best.errors),
            "stability": self._stability.summary(),
            "no_signal": self._signal.summary(),
            "lost": self._lost.summary(),
            "target": self._beta.summary(),
        }

    def curve(self) -> Curve:
        """The metric that moved over the steps: the evaluations' first one, unless only another did."""
        name = moving_metric([metrics for _, metrics in self.evaluations])
        found = [(step, metrics) for step, metrics in self.evaluations if name in metrics]
        errors = [metrics.get(name + STANDARD_ERROR, 0.0) for _, metrics in found]
        return Curve(name, [(step, metrics[name]) for step, metrics in found], errors)

    def finish(self, outcome: RunOutcome = "finished", error: BaseException | None = None) -> dict[str, Any]:
        # The summary first: closing may hang on a logger's network, and a run without a summary has not ended.
        summary = self.write_summary(outcome, error)
        self.close()
        return summary

    def write_summary(self, outcome: RunOutcome = "finished", error: BaseException | None = None) -> dict[str, Any]:
        """Write summary.json as things stand; a later one replaces it."""
        summary = self.summary(outcome, error)
        with self.failures.tolerated("summary", self.folder.summary, must_not_be_lost=True):
            self.folder.path.mkdir(parents=True, exist_ok=True)
            write_json(self.folder.summary, summary)
        return summary

    def close(self) -> None:
        """Close the display and the sinks; may be called more than once."""
        if not self._closed:
            self._closed = True
            self._progress.close()
            self._sinks.close()
