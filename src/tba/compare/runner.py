"""The loop of a study: take a run that nobody has, do it, write down how it ended."""

from __future__ import annotations

import time

from tba.compare.claims import Claims, read_holder
from tba.compare.display import Display
from tba.compare.host import commit_hash
from tba.compare.plan import Cell, Plan
from tba.compare.records import changes, clear, read_metric, state_of, write_done, write_failed
from tba.compare.tuning import tuned_values
from tba.compare.warm import WarmInputs
from tba.launch import train

POLL_SECONDS = 1.0
FAILURES = (RuntimeError, ValueError, FloatingPointError)
"""What a run may raise without stopping the study."""


class Runner:
    """Does the runs of a study, together with other processes that do the same.

    Consumes: the plan, and what is on disk about its runs.
    Waits for: other processes, when they have all the runs that are left.
    Produces: run folders with cell.json or failed.json.
    Unblocked by: the other processes' results, or their end.
    """

    def __init__(self, plan: Plan, display: Display, *, retry_failed: bool, wait_seconds: float) -> None:
        self.plan = plan
        self.display = display
        self.claims = Claims(plan.root / "claims.lock")
        self.inputs = WarmInputs()
        self.retry_before = time.time() if retry_failed else 0.0
        """Older failures are tried again; new ones are not, or a study would never end."""
        self.wait_seconds = wait_seconds
        self.commit = commit_hash()
        self._waits_for: list[str] = []
        self._waits_since = 0.0

    def run(self) -> None:
        """Until every run is done or has failed."""
        while open_cells := self.open_cells():
            self.display.update(open_cells)
            cell = self.claim_one(open_cells)
            if cell is None:
                self.wait(open_cells)
            else:
                self.step(cell)

    def step(self, cell: Cell) -> None:
        """Do one claimed run."""
        try:
            self.display.starts(cell, changes(cell))
            self.train(cell)
        finally:
            self.claims.release(cell.claim)

    def train(self, cell: Cell) -> None:
        started = time.monotonic()
        clear(cell)
        try:
            train(cell.config, inputs=self.inputs.make(cell.config))
        except FAILURES as error:
            write_failed(cell, error)
            self.display.failed(cell, error)
            return
        write_done(cell, seconds=time.monotonic() - started, commit=self.commit)
        self.display.done(cell, read_metric(cell, self.plan.study.metric))

    def open_cells(self) -> list[Cell]:
        """What is left to do and can be started: tuning first, then seed by seed, so that every cell soon has a number."""
        tuned = tuned_values(self.plan, self.is_settled)
        tuning = [cell for row, cells in self.plan.tuning.items() if row not in tuned for cell in cells]
        runs = [cell for row, value in tuned.items() for cell in self.plan.runs[row, value]]
        runs.sort(key=lambda cell: self.plan.study.seeds.index(cell.seed))
        return [cell for cell in [*tuning, *runs] if not self.is_settled(cell)]

    def is_settled(self, cell: Cell) -> bool:
        return state_of(cell, retry_before=self.retry_before) in ("done", "failed")

    def claim_one(self, cells: list[Cell]) -> Cell | None:
        for cell in cells:
            if self.claims.take(cell.claim):
                if not self.is_settled(cell):
                    return cell
                self.claims.release(cell.claim)  # its holder finished it since we looked
        return None

    def wait(self, cells: list[Cell]) -> None:
        """For other processes, at most wait_seconds without any of them finishing a run."""
        holders = {cell.label: read_holder(cell.claim) for cell in cells}
        names = [f"{label} (process {pid})" for label, pid in holders.items() if pid is not None]
        if not names:
            return  # they were finished since we looked
        if names != self._waits_for:
            self._waits_for, self._waits_since = names, time.monotonic()
            self.display.waits_for(names)
        if time.monotonic() - self._waits_since >= self.wait_seconds:
            raise RuntimeError(
                f"waited {self.wait_seconds:g} s for runs that other processes have: {', '.join(names)}. Run the same "
                "command again for the table, or raise --wait-seconds."
            )
        time.sleep(POLL_SECONDS)
