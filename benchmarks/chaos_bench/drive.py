"""Takes a run through a plan of faults, resumes it as its user would, and brings it to its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psutil

from chaos_bench.inject import Injector
from chaos_bench.plan import Fault
from chaos_bench.target import StepWatch, Stuck, Target

TICK_SECONDS, REMEMBER_SECONDS = 0.02, 1.0
MOST_OWN_ENDS = 20
"""How often the run may end by itself before it is not resumed any more."""


@dataclass
class Chaos:
    """Drives a run through a plan, and to its end."""

    target: Target
    injector: Injector
    watch: StepWatch
    steps: int
    seconds: float = 0.0
    """How long there were faults."""
    not_reached: int = 0
    """Faults that were still to come when the run was done."""
    own_ends: list[str] = field(default_factory=list)
    """Outcome of the run when it ended by itself."""
    _tree: list[psutil.Process] = field(default_factory=list)
    """The run's processes, as they were a moment ago."""
    _remembered: float = 0.0

    def run(self, plan: Sequence[Fault]) -> None:
        """Do the faults of the plan."""
        self.target.start()
        checkpoints = self.target.folder / "checkpoints"
        self._wait(lambda: any(checkpoints.glob("step-*/manifest.json")))
        started, waiting = time.monotonic(), list(plan)
        while waiting and not self.target.finished(self.steps):
            now = time.monotonic() - started
            due = [fault for fault in waiting if fault.at <= now]
            settled = [fault for fault in due if self.injector.attempt(fault, late=now - fault.at)]
            waiting = [fault for fault in waiting if fault not in settled]
            self._tick()
        self._wait(lambda: not self.injector.busy or self.target.finished(self.steps))
        self.not_reached = len(waiting)
        self.seconds = time.monotonic() - started
        print(f"the faults are over after {self.seconds:.0f} s, at step {self.watch.step}", flush=True)

    def finish(self, *, stop: bool) -> None:
        """Let the run come to its end, or ask it to save and end now."""
        if stop and self.target.exit_status is None:
            self.target.stop(self.target.no_step_seconds)
        if not stop:
            self._wait(lambda: self.target.exit_status is not None and self.target.finished(self.steps))
        self.target.wait_until_gone(self._tree)

    def _wait(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self._tick()

    def _tick(self) -> None:
        self.injector.tick()
        if self.target.exit_status is not None:
            self._resume()
        elif time.monotonic() - self._remembered > REMEMBER_SECONDS:
            self._tree, self._remembered = self.target.tree(), time.monotonic()
        if time.monotonic() - self.watch.moved > self.target.no_step_seconds:
            raise Stuck(
                f"no optimizer step within {self.target.no_step_seconds:g} s, the last one was {self.watch.step}"
            )
        time.sleep(TICK_SECONDS)

    def _resume(self) -> None:
        """Resume the run after its first process has ended, unless it is done. A user would not resume while the disk is
        full."""
        if self.injector.full or self.target.finished(self.steps):
            return
        if not self.injector.killed:
            self.own_ends.append(f"exit status {self.target.exit_status}: {self.target.last_line()}")
            print(f"  the run ended by itself, {self.own_ends[-1]}", flush=True)
        if len(self.own_ends) > MOST_OWN_ENDS:
            raise Stuck(f"the run ended by itself {len(self.own_ends)} times")
        self.target.wait_until_gone(self.injector.killed or self._tree)
        self.injector.killed = []
        self.target.start(resume=True)
