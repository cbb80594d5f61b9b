"""Look at a run and steer it from outside: `tba status RUN`, `tba stop RUN`, `tba scale RUN --count N`.

The first process of a run writes the state of its roles to status.json once a second, also while roles wait or start again.
It reads requests to the run from control.json as often.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import socket
import time
from pathlib import Path
from typing import Any

import psutil

from tba.config import Config, load_config
from tba.observe.display import duration, steps_text
from tba.observe.files import WriteFailures, read_summary, report_failure, write_json
from tba.observe.run_folder import RunFolder
from tba.runtime.counters import MAX_SEARCHERS, SharedCounters

CHECK_SECONDS = 1.0
"""Time between two looks at what is asked of a run, and between two status.json."""
LATE_SECONDS = 30.0
"""Age of a status from which on it is called out of date."""


class StatusWriter:
    """Writes the state of the roles to status.json once a second, and passes requests from control.json to the trainer."""

    def __init__(self, folder: RunFolder, counters: SharedCounters) -> None:
        self._folder, self._counters = folder, counters
        self._config_before = _state_of(folder.config)
        self._failures, self._started = WriteFailures(), time.monotonic()
        self._since: dict[str, tuple[str, float]] = {}
        """State of each role and its start, by a clock that is never set."""
        self._looked, self._replaced = 0.0, 0.0
        self.exit_status: int | None = None
        """How the trainer's process has ended; None = it is this process, or has not."""

    @property
    def begun(self) -> bool:
        """Whether a trainer has begun the run since this was made: then config.yaml was written anew."""
        return _state_of(self._folder.config) not in (None, self._config_before)

    def tick(self) -> None:
        """Write the status and pass requests to the trainer, if that is due."""
        # The status is due at once where a searcher is replaced: the replacement may take seconds.
        if self._counters.replaced == self._replaced and time.monotonic() < self._looked + CHECK_SECONDS:
            return
        self._looked, self._replaced = time.monotonic(), self._counters.replaced
        if self.begun:
            self.write()
            if (asked := searchers_asked(self._folder.control)) is not None:
                self._counters.supervisor["searchers_wanted"] = asked

    def close(self) -> None:
        """Say how the run has ended; its process may go on with something else."""
        if not self.begun:
            return
        # A trainer that was killed has written no summary.
        if self.exit_status and read_summary(self._folder) is None:
            how = f"the trainer ended with exit status {self.exit_status} and did not say why; see {self._folder.logs}."
            report_failure(self._folder, RuntimeError(how))
        self.write(ended=True)

    def write(self, *, ended: bool = False) -> None:
        now, clock = time.time(), time.monotonic()
        outcome = (read_summary(self._folder) or {}) if ended else {}
        roles = []
        for role in self._counters.statuses():
            does = role.doing.partition(":")[0]  # without how much of it is done
            if self._since.get(role.name, (None, clock))[0] != does:
                self._since[role.name] = (does, clock)
            # By a clock that is never set, and only then as a time of day.
            roles.append({**vars(role), "since": now - (clock - self._since[role.name][1])})
        status = {
            "step": int(self._counters.trainer["step"]),
            "time": now,
            "started": now - (clock - self._started),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "pid_started": start_of(os.getpid()),
            "ended": ended,
            "outcome": outcome.get("outcome"),
            "error": outcome.get("error"),
            "trainer_restarts": int(self._counters.supervisor["trainer_restarts"]),
            "searchers_replaced": int(self._counters.replaced),
            "roles": [] if ended else roles,
        }
        with self._failures.tolerated("status in", self._folder.status):
            write_json(self._folder.status, status)


def _state_of(path: Path) -> tuple[int, int] | None:
    """Which file this is, and when it was written; None = there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def searchers_asked(control: Path) -> int | None:
    """Number of searchers that is asked for in a run's control.json; None = it was not asked for."""
    try:
        asked = json.loads(control.read_text())["searchers"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # `type(...) is int`, because true is an integer to isinstance.
    return asked if type(asked) is int and asked >= 1 else None


def read_status(run: Path) -> dict[str, Any]:
    """The last status of a run, with `alive` (None = that cannot be seen from this host), `age` in seconds, `max_steps`, the
    last `reward`, `seconds_left` at the pace so far (None = not known), and of one that has ended `outcome` and `error`."""
    folder = RunFolder(run)
    if not folder.status.is_file():
        what = "has no status.json yet" if folder.config.is_file() else "is not a run folder (it has no config.yaml)"
        raise FileNotFoundError(f"{run} {what}: give the folder of a run, for example runs/NAME.")
    needed = {"host": str, "pid": int, "pid_started": object, "step": int, "time": int | float, "roles": list}
    of_role = {"name", "doing", "since", "responses_per_second"}
    try:
        status = json.loads(folder.status.read_text(encoding="utf-8"))
        is_whole = all(isinstance(status[name], kind) for name, kind in needed.items())
        is_whole = is_whole and all(isinstance(role, dict) and role.keys() >= of_role for role in status["roles"])
        is_whole = is_whole and math.isfinite(status["time"]) and isinstance(status.get("started", 0.0), int | float)
        why = "" if is_whole else "a value is of another type"
    except (OSError, ValueError, TypeError, KeyError) as error:
        why = f"{type(error).__name__}: {error}"
    if why:
        raise ValueError(
            f"{folder.status} is damaged ({why}): a run that goes on writes it again within a second. Look at the logs."
        )
    alive: bool | None = False
    if not status.get("ended"):
        started = start_of(status["pid"])
        alive = started is not None and started == status["pid_started"]
        alive = alive if status["host"] == socket.gethostname() else None
    summary = read_summary(folder) or {}
    # While it lives, a summary says only that the last evaluation is still to come.
    ended = {name: None if alive else summary.get(name) for name in ("outcome", "error")}
    age = max(0.0, time.time() - status["time"])  # the clock may have been set back
    last, begun = folder.last_step(), folder.config.is_file()  # the status comes before the model is loaded
    train = load_config(folder.config).train if begun else None
    max_steps, left = None if train is None else train.max_steps, []
    if alive and last["step"] > 1 and max_steps is not None and max_steps > last["step"]:
        left.append(last["seconds"] / last["step"] * (max_steps - last["step"]))
    if alive and last["step"] > 0 and train is not None and train.max_seconds is not None:
        left.append(max(0.0, train.max_seconds - last["seconds"]))
    found = {"max_steps": max_steps, "reward": last.get("reward"), "seconds_left": min(left, default=None)}
    return {**status, **found, "alive": alive, "age": age, **ended}


def start_of(pid: Any) -> str | None:
    """Which start of a process id this is: the machine's boot and the clock tick; None = there is no such process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # The command's name stands in brackets and may hold anything; the start is the 20th field after it.
        fields = Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else f"{boot}:{fields[19]}"
    except (OSError, ValueError, TypeError, IndexError):
        pass
    if Path("/proc/self/stat").exists():
        return None
    try:  # no Linux: that the id is in use must do
        os.kill(int(pid), 0)
    except (OSError, ValueError, TypeError):
        return None
    return "unknown"


def describe(status: dict[str, Any]) -> str:
    alive, age = status["alive"], status["age"]
    where = f"process {status['pid']} on {status['host']}"
    step = f"step {status['step']}" + (f" of {status['max_steps']}" if status["max_steps"] else "")
    if alive is False:
        how = status.get("outcome") or ("ended" if status.get("ended") else f"died ({where} is gone)")
        why = f": {status['error']}" if status.get("error") else ""
        head = f"{how} {duration(age)} ago at {step}{why}"
    elif age > LATE_SECONDS:
        head = f"silent for {duration(age)} at {step} ({where}): suspended, or its disk is full"
    else:
        head = f"at {step} ({where})"
    times = [f"{duration(status['time'] - status['started'])} elapsed"] if "started" in status else []
    times += [f"about {duration(status['seconds_left'])} left"] if status["seconds_left"] is not None else []
    times += [f"reward {status['reward']:.3f}"] if status["reward"] is not None else []
    lines = [head, f"  {', '.join(times)}"] if times else [head]
    for role in status["roles"] if alive is not False else ():
        seconds = status["time"] - role["since"] + age
        rate = f", {role['responses_per_second']:.1f} responses/s" if role["responses_per_second"] else ""
        lines.append(f"  {role['name']:<12} {role['doing']}, for {duration(seconds)}{rate}")
    return "\n".join(lines)


def stopped_message(config: Config, *, by_command: bool) -> str:
    """Message after Ctrl-C: where the run stopped, what was saved, and how to continue."""
    folder = RunFolder(config.run_folder)
    summary, newest = read_summary(folder) or {}, max(folder.checkpoints_by_step().items(), default=None)
    step = summary.get("steps", folder.last_step()["step"])  # a trainer that was killed has left no count
    after = f", after {duration(summary['elapsed_seconds'])}" if "elapsed_seconds" in summary else ""
    if newest is None:
        saved = "Nothing was saved: the run would begin again."
    else:
        saved = f"Saved: {newest[1]}" + ("." if newest[0] >= step else f", of step {newest[0]}; later steps are lost.")
    how = f"tba train {shlex.quote(str(folder.path))} --resume" if by_command else "train(resume_from_checkpoint=True)"
    return f"stopped at {steps_text(config, step)}{after}. {saved}\nGo on: {how}"


def stop_run(run: Path) -> dict[str, Any]:
    """Ask a run to save and end, as Ctrl-C does; returns its status."""
    status = read_status(run)
    if status["alive"] is None:
        raise ValueError(f"{run} runs on {status['host']}: stop it there.")
    if not status["alive"]:
        raise ValueError(f"{run} does not run: it ended at step {status['step']}.")
    owner, user = RunFolder(run).status.stat().st_uid, psutil.Process(status["pid"]).uids().real
    if owner != user:  # the status.json of another user may name any process of this user
        raise ValueError(
            f"{run} belongs to user {owner} and names process {status['pid']} of user {user}: not stopped."
        )
    # The supervisor passes it to the trainer as SIGINT; a script's own process heeds it itself (supervise.Interrupt).
    os.kill(status["pid"], signal.SIGTERM)
    return status


def ask_for_searchers(run: Path, count: int) -> None:
    """Ask a run to go on with so many searchers."""
    if not 1 <= count <= MAX_SEARCHERS:
        raise ValueError(f"--count {count}: a run has 1 to {MAX_SEARCHERS} searchers.")
    status = read_status(run)
    if status["alive"] is False:
        raise ValueError(f"{run} does not run: it ended at step {status['step']}.")
    if load_config(RunFolder(run).config).is_synchronous:
        raise ValueError(
            f"{run} has no searchers of its own: in mode=sync and mode=fixed_lag the trainer searches too."
        )
    write_json(RunFolder(run).control, {"searchers": count})
