"""The display of a run. While it runs: evaluations, reward, lag, speed, and which role waits for which. At its end: a
table of before and after, the steadiness of the run, its curve, and the first setting to change if it went badly."""

from __future__ import annotations

import math
import shlex
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.table import Table

from tba.config import Config
from tba.observe.files import lasting
from tba.observe.metrics import Evaluation
from tba.observe.run_folder import PLOT
from tba.observe.watches import no_signal_lines

LINE_SECONDS, LINE_SHARE = 10.0, 0.02
"""Time between two lines where there is no terminal: at least so long, and this share of the time that has passed."""
SHARES = ("accuracy", "solved", "pass@", "avg@", "win_rate", "success", "cut_off", "distinct")
"""Beginnings of the names of metrics that are shares, which are shown in percent."""
MEANS = {"drift_nats": "off_policy/kl", "masked_fraction": "tb/masked_fraction"}
"""Metrics whose mean over the steps goes into the summary, by their name there."""
LASTS = {"trained_per_generated": "buffer/replay_ratio", "learning_rate": "learning_rate"}
"""Metrics whose last value goes into the summary, by their name there."""
MUCH_MASKED = 0.4
"""Share of the gradient masked above which most responses are too old when they are trained."""
MUCH_WAITED = 0.3
"""Share of its time that a trainer waits for responses above which it could train those it has once more."""


@dataclass(frozen=True, kw_only=True)
class RoleStatus:
    """State of a role, for the display.

    RoleStatus(name="searcher-0", doing="waits: pace", waited_share=0.12, responses_per_second=410.0)
    """

    name: str
    doing: str
    waited_share: float
    """Share of the time since the roles were made that this one waited."""
    responses_per_second: float
    pid: int | None = None
    """Its process; None where it has none at the moment."""


class Progress:
    """The display while a run goes on: a table on a terminal; elsewhere, and with observe.progress=false, a line now and
    then. A thread of its own draws them, so that they also show a trainer that waits."""

    def __init__(
        self,
        config: Config,
        roles: Callable[[], Sequence[RoleStatus]] = list,
        clock: Callable[[], tuple[float, float | None]] = lambda: (0.0, None),
        report_height: Callable[[int], None] = lambda lines: None,
    ) -> None:
        """`clock` gives the seconds since the run began, and those that its steps will still take, None = not known yet.
        `report_height` is called with the number of lines that the table has now."""
        self._config, self._roles, self._clock, self._report_height = config, roles, clock, report_height
        self._console = Console(file=lasting(sys.stderr))
        self._enabled = config.observe.progress
        self._metrics: Mapping[str, float] = {}
        self._step = 0
        self._evaluations: list[tuple[int, Mapping[str, float]]] = []
        self.stopping = False
        """Whether the run was asked to end."""
        self.trained = False
        """Whether its last step is made."""
        self.no_signal: str | None = None
        """Why nothing could be learned so far; None = rewards differ, or there are too few yet to say."""
        self._closed = threading.Event()
        self._live: Live | None = None
        if self._enabled and sys.stderr.isatty() and not self._console.is_dumb_terminal:
            # Transient: at the end the table leaves the screen to the summary.
            self._live = Live(get_renderable=self._table, console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        elif not isinstance(sys.stderr, FileProxy):  # a study has a live display of its own
            # A daemon: a trainer that dies must not wait for a thread that sleeps until its next line.
            threading.Thread(target=self._print_lines, daemon=True, name="progress").start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        # The drawing thread reads both without a lock: each is replaced whole, never changed.
        self._step, self._metrics = step, metrics

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._evaluations.append((step, metrics))
        found = Evaluation.of(metrics)
        names = table_names(found.values, found.values)
        figures = ", ".join(f"{name} {shown(name, found.values[name], found.errors.get(name))}" for name in names)
        if self._live is None and figures:
            self.note(f"evaluation of {weights_of(step)}: {figures}")

    def note(self, message: str) -> None:
        """A line that stays on the screen."""
        if self._enabled:
            self._console.print(message, markup=False, highlight=False, soft_wrap=True)

    def resume(self, step: int, evaluations: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Show what an earlier process of the run has done."""
        self._step, self._evaluations = step, list(evaluations)

    def close(self) -> None:
        self._closed.set()
        if self._live is not None:
            self._live.stop()
            self._live = None
            # The supervisor writes its log lines above a table of this height (AboveTheTable in run/supervise.py).
            self._report_height(0)

    def _print_lines(self) -> None:
        while not self._closed.wait(max(LINE_SECONDS, LINE_SHARE * self._clock()[0])):
            doing = [f"{role.name} {role.doing}" for role in self._roles()]
            figures = [f"{name} {figure}" for name, figure in self._figures()]
            message = "; ".join([self._time(), *(figures if self._step > 0 and not self.trained else doing)])
            self._console.print(f"{self._config.run_name}: {message}", markup=False, highlight=False, soft_wrap=True)

    def _time(self) -> str:
        """step 3 of 60, 1 min 05 s elapsed, about 20 min left"""
        elapsed, left = self._clock()
        rest = "" if left is None else f", about {duration(left)} left"
        rest = ", stops after this step" if self.stopping else rest
        return f"{steps_text(self._config, self._step)}, {duration(elapsed)} elapsed{rest}"

    def _figures(self) -> list[tuple[str, str]]:
        """Metrics of the last step; none before the first."""
        if not self._metrics:
            return []
        # Taken once, since the trainer's thread may put the next step's metrics in their place.
        value = self._metrics.get
        found = [
            ("reward", f"{value('reward', math.nan):.3f}"),
            ("KL", f"{value('kl', math.nan):.2f} nats"),
            ("length", f"{value('completions/mean_length', math.nan):.1f} tokens"),
            ("lag", f"{value('off_policy/lag_mean', math.nan):.1f} steps (max {value('off_policy/lag_max', 0):.0f})"),
            ("trained", f"{value('perf/responses_per_second', 0):.3g} responses/s"),
        ]
        # A step may lack a metric, as one in which no response has weight.
        found = [(name, figure) for name, figure in found if "nan" not in figure]
        return found if self.no_signal is None else [("warning", f"so far {self.no_signal}"), *found]

    def _table(self) -> Table:
        # One width: a table that follows its longest line jumps about.
        width = min(100, self._console.width)
        table = Table(title=f"tba {self._config.run_name}", title_justify="left", show_header=False, width=width)
        for row in self._rows():
            table.add_row(*row)
        self._report_height(len(self._console.render_lines(table)))
        return table

    def _rows(self) -> list[tuple[str, str]]:
        rows = [("progress", self._time())]
        if self._evaluations:
            # The first metric, at the start and in the last three: reward 0.25 (step 0)  0.28 (step 4)
            name = next(iter(self._evaluations[0][1]), "")
            found = [(step, metrics[name]) for step, metrics in self._evaluations if name in metrics]
            values = [f"{shown(name, value)} (step {step})" for step, value in [*found[:1], *found[1:][-3:]]]
            rows.append(("evaluation", "  ".join([name, *values])))
        rows += self._figures()
        if self._metrics.get("guard/alarm"):
            rows.append(("guard", "the run is collapsing: see the warning"))
        for role in self._roles():
            rate = role.responses_per_second
            waited = f"; waited {role.waited_share:.0%}" if self._metrics else ""
            rows.append((role.name, f"{role.doing}{waited}{f'; {rate:.3g} responses/s' if rate else ''}"))
        return rows


def weights_of(step: int) -> str:
    """the start model, or: step 20"""
    return f"step {step}" if step else "the start model"


def steps_text(config: Config, step: int) -> str:
    """step 3 of 60, or where the number of steps is open: step 3"""
    return f"step {step}" if config.train.max_steps is None else f"step {step} of {config.train.max_steps}"


def duration(seconds: float) -> str:
    """42 s, 3 min 05 s, 2 h 10 min"""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{round(whole / 60)} min" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60:02} min"


def pace_message(config: Config, *, steps: int, seconds: float, waited: float) -> str:
    """How long a run will take that is far from done, how many steps it makes in that time, and what its time goes into;
    `waited` is the share of its time that the trainer waited for responses."""
    total = f"at this pace {steps} step{'s take' if steps != 1 else ' takes'} {duration(seconds)}"
    less = "A smaller train.responses_per_step or generate.max_new_tokens makes steps shorter"
    if config.is_synchronous:
        return f"{total}; searching and training take turns. {less}, and so may mode=async."
    if waited > MUCH_WAITED:
        return f"{total}; generating is the bottleneck, the trainer waits {waited:.0%} of its time. {less}."
    return f"{total}; the trainer is the bottleneck. {less}."


def show_line(message: str) -> None:
    """One line on the screen, as it stands."""
    Console(file=lasting(sys.stderr)).print(message, markup=False, highlight=False, soft_wrap=True)


def show_summary(summary: Mapping[str, Any], curve: Curve, folder: Path, *, config: Config) -> None:
    """Print the results of a finished run, and save the curve as a picture in its folder."""
    console = Console(file=lasting(sys.stdout))

    def say(message: str, style: str | None = None, *, whole: bool = not console.is_terminal) -> None:
        """`whole` lines are not broken: in a log they are searched for, and paths and commands are copied."""
        console.print(message, style=style, markup=False, highlight=False, soft_wrap=whole)

    say(f"{folder} has finished: {summary['task']}, {summary['objective']}, seed {summary['seed']}", style="bold")
    if summary["final"]:
        console.print(metrics_table(summary))
        counted = {name.removeprefix("num_").replace("_", " "): count for name, count in summary["evaluated"].items()}
        say(f"means over {', '.join(f'{count} {name}' for name, count in counted.items())}, with their standard errors")
    else:
        say("nothing was evaluated: there are no held-out prompts.")
    say(
        f"{summary['steps']} steps in {duration(summary['seconds'])} of training, "
        f"{duration(summary['elapsed_seconds'])} with loading and evaluations; {summary['responses_trained']} responses "
        f"trained of {summary['responses_generated']} generated; lag mean {summary['lag']['mean']:.1f}, max "
        f"{summary['lag']['max']}"
    )
    if count := summary["empty_steps"]:
        say(f"{count} steps moved no weights: train.truncated left nothing of their batches", style="bold red")
    if summary["lost"] is not None:
        say(
            f"{summary['lost']['responses']} responses ({summary['lost']['share']:.0%}) had no reward and were not trained "
            f"on; the last: {summary['lost']['last']}",
            style="bold red",
        )
    if summary["collapse"] is not None:
        say(f"step {summary['collapse']['step']}: {summary['collapse']['message']}", style="bold red")
    say(stability_line(summary))
    if summary["no_signal"] is not None:
        for line in no_signal_lines(summary["no_signal"], max_new_tokens=config.generate.max_new_tokens):
            say(line, style="bold red")
    if summary["target"] is not None and summary["target"]["message"] is not None:
        say(f"beta: {summary['target']['message']}", style="bold")
    if went_badly(summary):
        is_auto, drift = config.train.learning_rate is None, config.train.target_drift
        say(advice(summary, auto_rate=is_auto, target_drift=drift), style="bold")
    elif config.mode == "async" and (spare_time := waiting_advice(summary)) is not None:
        say(spare_time)
    # A function of a script has no file that a command could name.
    by_command = all(isinstance(reward.function, str) for reward in config.task.rewards)
    say(weights_line(summary, folder, by_command=by_command), whole=True)
    # Two points say no more than the table above.
    if len(curve.points) > 2:
        with suppress(OSError):  # a full disk must not hide the figures, which are also in summary.json
            save_plot(curve, folder / PLOT, title=f"{folder.name}: {curve.name}")
            say(f"plot: {folder / PLOT}", whole=True)


def metrics_table(summary: Mapping[str, Any]) -> Table:
    """A row per metric: its value with its standard error at the start, at the best step and at the end."""
    best = summary["best"] or {"step": 0}
    is_best = ", the best" if best["step"] == summary["final_step"] else ""
    is_between = 0 < best["step"] < summary["final_step"]
    columns = {"start": "start"} | ({"best_values": f"best (step {best['step']})"} if is_between else {})
    columns["final"] = f"final (step {summary['final_step']}{is_best})"
    errors = {"start": "start_standard_error", "best_values": "best_standard_error", "final": "final_standard_error"}
    table = Table(box=None, padding=(0, 3, 0, 0))
    for heading in ("", *columns.values()):
        table.add_column(heading)
    for name in table_names(summary["start"], summary["final"]):
        values = [(summary[key].get(name), summary[errors[key]].get(name)) for key in columns]
        table.add_row(name, *("-" if value is None else shown(name, value, error) for value, error in values))
    return table


def weights_line(summary: Mapping[str, Any], folder: Path, *, by_command: bool) -> str:
    """Where the best weights are, or the last ones where none were evaluated, and how to use them; `by_command` says that
    the rewards are in files, so that a command can evaluate them."""
    best = (summary["best"] or {"step": summary["steps"]})["step"]
    names = {f"best-step-{best}": "best", f"step-{best}": "best", f"step-{summary['steps']}": "last"}
    # In this order: the best under their own name, the best as a regular checkpoint, the last.
    found = next((name for name in names if (folder / "checkpoints" / name).is_dir()), None)
    if found is None:
        return "no weights were kept (train.keep_checkpoints)."
    path = folder / "checkpoints" / found
    if not by_command:
        return f"{names[found]} weights: from_pretrained({str(path)!r})"
    return f"{names[found]} weights: tba evaluate {shlex.quote(str(path))}  (in Python: from_pretrained of that folder)"


def table_names(start: Mapping[str, float], final: Mapping[str, float]) -> list[str]:
    """The metrics to show. A user's rewards that are 0 or 1 now and were something else before, or the other way round, have
    no `accuracy` on both sides: then it is `solved`, which is the same number."""
    repeated = "solved" if "accuracy" in start and "accuracy" in final else "accuracy"
    return [name for name in final if name != repeated or "solved" not in final]


def shown(name: str, value: float, error: float | None = None) -> str:
    """A metric's value for reading, with its standard error where that is given: shares in percent."""
    is_share = name.startswith(SHARES)
    spread = "" if error is None else f" ± {100 * error:.1f}" if is_share else f" ± {error:.2g}"
    return (f"{value:.1%}" if is_share else f"{value:.3g}") + spread


@dataclass
class Stability:
    """How steady a run is: means and last values of a few metrics, gathered step by step."""

    _sums: dict[str, float] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)
    _lasts: dict[str, float] = field(default_factory=dict)
    _steps: int = 0
    _waited_seconds: float = 0.0
    _worked_seconds: float = 0.0
    """Of all steps but the first, which waits until searchers have started."""

    def step(self, metrics: Mapping[str, float]) -> None:
        self._steps += 1
        # The first step waits for searchers to start, which says nothing about who is the bottleneck.
        if self._steps > 1:
            self._waited_seconds += metrics.get("time/wait_for_batch", 0.0)
            worked = ("time/step", "time/receive", "time/second_update")
            self._worked_seconds += sum(metrics.get(part, 0.0) for part in worked)
        for name, metric in MEANS.items():
            if metric in metrics:
                self._sums[name] = self._sums.get(name, 0.0) + metrics[metric]
                self._counts[name] = self._counts.get(name, 0) + 1
        self._lasts |= {name: metrics[metric] for name, metric in LASTS.items() if metric in metrics}

    def summary(self) -> dict[str, float]:
        """{"drift_nats": 0.02, "masked_fraction": 0.1, "trained_per_generated": 1.0, "learning_rate": 3e-06, ...}"""
        means = {name: self._sums[name] / self._counts[name] for name in self._sums}
        if self._worked_seconds:
            means["waited"] = self._waited_seconds / (self._waited_seconds + self._worked_seconds)
        return {name: float(f"{value:.4g}") for name, value in (means | self._lasts).items()}


def stability_line(summary: Mapping[str, Any]) -> str:
    """One line about a run from its summary.json."""
    found, collapse, rollbacks = summary["stability"], summary["collapse"], summary.get("rollbacks", [])
    parts = [f"collapse alarm at step {r['step']}, rolled back to step {r['to']}" for r in rollbacks]
    if collapse is not None:
        recovered = f", recovered by step {collapse['recovered']}" if collapse.get("recovered") else ""
        parts.append(f"collapse alarm at step {collapse['step']}{recovered}")
    parts = parts or ["nothing could be learned" if summary.get("no_signal") else "no alarm"]
    if "drift_nats" in found:
        parts.append(f"the policy moved {found['drift_nats']:.2g} nats between generating and training a response")
    if "masked_fraction" in found:
        parts.append(f"{found['masked_fraction']:.0%} of the gradient was masked")
    if "trained_per_generated" in found:
        parts.append(f"each response was trained {found['trained_per_generated']:.2g} times")
    if found.get("waited"):
        parts.append(f"the trainer waited {found['waited']:.0%} of its time for responses")
    return f"stability: {'; '.join(parts)}"


def went_badly(summary: Mapping[str, Any]) -> bool:
    """Whether a run ended in a collapse that lasts, or with a final score clearly below its best one."""
    collapse, best = summary["collapse"], summary["best"]
    if collapse is not None and not collapse.get("recovered"):
        return True
    # Two standard errors of the last evaluation below: the best of many is above the mean by chance alone.
    name = next(iter(summary["final"]), None)
    if best is None or name is None:
        return False
    return summary["final"][name] < best["score"] - 2.0 * summary["final_standard_error"].get(name, 0.0)


def advice(summary: Mapping[str, Any], *, auto_rate: bool, target_drift: float) -> str:
    """The setting to change first after a run that went badly; the summary says which."""
    found = summary["stability"]
    if found.get("masked_fraction", 0.0) > MUCH_MASKED and found.get("trained_per_generated", 1.0) > 1.5:
        return (
            "change first: train.second_update_after=0, or a lower replay.max_replay_ratio where one was given: "
            "responses are too old when they are trained."
        )
    if found.get("masked_fraction", 0.0) > MUCH_MASKED:
        return "change first: replay.max_lag=1 (or fewer searchers), responses are too old when trained."
    if not auto_rate:
        return "change first: leave train.learning_rate unset (auto), or divide it by 3."
    return f"change first: train.target_drift={target_drift / 2:g} (half of what it was), then a higher objective.beta."


def waiting_advice(summary: Mapping[str, Any]) -> str | None:
    """How a run that went well would learn more in the same time, where its trainer waited for responses; None = it did
    not. Measured in notes/asynchrony.md."""
    found = summary["stability"]
    if found.get("waited", 0.0) < MUCH_WAITED or found.get("trained_per_generated", 1.0) > 1.5:
        return None
    return (
        "the trainer has time to spare: more searchers, or replay.max_replay_ratio=2 with twice the "
        "train.max_steps, which trains every response twice."
    )


class Curve(NamedTuple):
    """An evaluation metric over steps, with standard errors: Curve("accuracy", [(0, 0.37), (50, 0.61)], [0.02, 0.02])"""

    name: str
    points: Sequence[tuple[int, float]]
    errors: Sequence[float] = ()
    """One for each point; empty = there are none."""


def save_plot(curve: Curve, path: Path, *, title: str) -> None:
    """Write the curve as a PNG, with its standard errors."""
    from matplotlib.figure import Figure  # slow to import, needed once, at the end

    figure = Figure(figsize=(6, 3.5))
    axes = figure.subplots()
    steps, values = zip(*curve.points)
    axes.errorbar(steps, values, yerr=curve.errors or None, marker="o", markersize=3, capsize=2)
    axes.set(xlabel="optimizer steps", ylabel=curve.name, title=title)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
