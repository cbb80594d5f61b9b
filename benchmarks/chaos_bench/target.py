"""The run that faults are done to: it is started, found in the table of processes, watched and resumed from outside, as its
user would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

GONE_SECONDS = 10.0
"""Time in which the processes of a run must be gone after it was killed."""
NO_STEP_SECONDS = 240.0
"""Time without an optimizer step after which a run counts as stuck."""
TAIL_BYTES = 2000


class Stuck(RuntimeError):
    """A run does not go on."""


@dataclass
class Target:
    """A run in a folder, with its processes. Target(folder=Path("/tmp/x/run"), settings=["train.max_steps=100"], ...)"""

    folder: Path
    """The run folder."""
    settings: Sequence[str]
    acknowledged: Path
    """Folder for what searchers note."""
    log: Path
    """File for the output of all its processes, one after the other."""
    left_running: list[str] = field(default_factory=list)
    """Processes that outlived the run they belonged to; they were ended here."""
    gone_seconds: float = GONE_SECONDS
    no_step_seconds: float = NO_STEP_SECONDS
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self, *, resume: bool = False) -> None:
        environment = {**os.environ, "TBA_ACKNOWLEDGED_LOG": str(self.acknowledged)}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tba", "train", *self.arguments(resume=resume)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def arguments(self, *, resume: bool) -> list[str]:
        """Of `tba train`."""
        if resume:
            return [str(self.folder), "--resume"]
        return ["configs/quickstart.yaml", *self.settings, f"output={self.folder.parent}", f"name={self.folder.name}"]

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """Of the process that was started last; None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def tree(self) -> list[psutil.Process]:
        """The process that was started and all that come from it."""
        try:
            root = psutil.Process(self.pid)
            found = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
        return [process for process in found if is_alive(process)]

    def roles(self) -> dict[str, psutil.Process]:
        """Processes by role: supervisor, trainer, searcher-0 and so on; those that are being replaced are not there.

        status.json names them. It may be a second old, or of the run's last life, so that only processes of the tree count;
        a role that it does not name is known by the name of its process. Where it names no processes at all there is no
        supervisor, and the process that was started is the trainer too.
        """
        tree = {process.pid: process for process in self.tree()}
        if self.pid not in tree:
            return {}
        found = {"supervisor": tree[self.pid]}
        status = self.status()
        for role in status.get("roles", []):
            if role.get("pid") in tree:
                found[role["name"]] = tree[role["pid"]]
        for process in tree.values():
            try:
                name = process.name()
            except psutil.NoSuchProcess:
                continue
            if name == "trainer" or name.startswith("searcher-"):
                found.setdefault(name, process)
        if status.get("pid") == self.pid and not any("pid" in role for role in status.get("roles", [])):
            found.setdefault("trainer", tree[self.pid])
        return found

    def status(self) -> dict[str, Any]:
        return read_json(self.folder / "status.json")

    def step(self) -> int:
        """Optimizer steps done, by the newest status of this life; 0 where there is none yet."""
        return int(self.status().get("step", 0))

    def finished(self, steps: int) -> bool:
        """Whether the run has come to its end: its last process has written a summary."""
        return read_json(self.folder / "summary.json").get("steps", 0) >= steps

    def wait_until_gone(self, tree: Sequence[psutil.Process]) -> None:
        """The first process of a tree is gone: the others must end by themselves; those that do not are noted and ended."""
        deadline = time.monotonic() + self.gone_seconds
        if self._process is not None:
            self._process.wait(self.gone_seconds)
        while any(is_alive(process) for process in tree) and time.monotonic() < deadline:
            time.sleep(0.01)
        for process in [process for process in tree if is_alive(process)]:
            self.left_running.append(describe(process))
            process.kill()

    def end(self) -> None:
        """Kill all processes of the run, if it was started."""
        if self._process is not None:
            for process in self.tree():
                process.kill()
            self._process.wait(GONE_SECONDS)

    def stop(self, seconds: float) -> None:
        """Ask the run to save and end, as `tba stop` does."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(seconds)

    def last_line(self) -> str:
        """The last line of the run's output, which for an error is its message."""
        lines = self.last_words().splitlines()
        return lines[-1].strip()[:300] if lines else "no output"

    def last_words(self) -> str:
        """The end of the run's output."""
        text = self.log.read_bytes()[-TAIL_BYTES:].decode(errors="replace") if self.log.exists() else ""
        return "\n".join(f"    {line}" for line in text.splitlines()[-12:])


class StepWatch:
    """Sees optimizer steps in metrics.jsonl as they are written, also where a resume has cut the file off."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self.step = 0
        """The newest step that was seen."""
        self.made_again = 0
        """Steps that were made a second time, after a checkpoint."""
        self.moved = time.monotonic()
        """When a step was seen last."""

    def look(self) -> bool:
        """Whether a step was made since the last look."""
        try:
            size = self._path.stat().st_size
            if size <= self._read:
                self._read = size
                return False
            with self._path.open("rb") as file:
                file.seek(self._read)
                text = file.read()
        except OSError:
            return False
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        steps = [record["step"] for record in map(_record, whole.splitlines()) if "loss" in record]
        for step in steps:
            self.made_again += max(0, self.step - step + 1)
            self.step = step
        if steps:
            self.moved = time.monotonic()
        return bool(steps)


def _record(line: bytes) -> dict[str, Any]:
    """A line of metrics.jsonl; empty for one that a full disk has cut off."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def describe(process: psutil.Process) -> str:
    try:
        return f"{process.name()} ({process.pid})"
    except psutil.NoSuchProcess:
        return f"process {process.pid}"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is none that can be read."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
