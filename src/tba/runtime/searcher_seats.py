"""The searchers of a run, as its supervisor looks after them: each has a seat, and a process that dies or hangs is replaced
by another one in its seat, unless too many in a row have ended at once."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tba.config import RuntimeConfig
from tba.runtime.board import MAX_SEARCHERS, PLACES, Board
from tba.runtime.deadlines import Idleness
from tba.runtime.forked_roles import ServerGone
from tba.runtime.links import RelayedLink, SearcherEnded, SearchersFailed, SearcherStarted, StartSearchers, Stop
from tba.runtime.processes import Role, last_lines, stop_all
from tba.runtime.seats import MakeLink, Seat, StartSearcher

logger = logging.getLogger("tba")

MAX_EARLY_ENDS, FEW_GROUPS = 4, 16
"""Processes in a row that may end before they have sent so many groups; a seat is given up then. A prompt that kills every
searcher is handed to the next one first, so that it does not last much longer."""
FIRST_BACK_OFF_SECONDS = 1.0
"""Before a seat is filled again after the second process that ended early; doubled with each."""


class SearcherSeats:
    """Iterates over the seats; `look_after` fills those that are empty, and empties those whose process is gone."""

    def __init__(
        self,
        config: RuntimeConfig,
        board: Board,
        *,
        logs: Path,
        start: StartSearcher,
        make_link: MakeLink,
        tell_trainer: Callable[[Any], None],
    ) -> None:
        self.orders: StartSearchers | None = None
        """How searchers are started, by the present trainer; None = there is none that they could work for."""
        self._config = config
        self._board = board
        self._logs = logs
        self._start = start
        self._make_link = make_link
        self._tell_trainer = tell_trainer
        self._seats: list[Seat] = []
        self._wanted: int | None = None
        """Number of searchers that was asked for from outside; None = what the trainer says."""

    def __iter__(self) -> Iterator[Seat]:
        return iter(self._seats)

    def find(self, *, holder: str | None = None, link: RelayedLink | None = None) -> Seat | None:
        """The seat whose present process has this name, or this link; None = it is gone."""
        for seat in self._seats:
            if seat.process is not None and (seat.holder == holder or seat.process.link is link):
                return seat
        return None

    def work_for(self, orders: StartSearchers) -> None:
        """Start searchers for a trainer."""
        self.orders = orders
        self._set_count(self._wanted or orders.count)

    def ask_for(self, count: int) -> None:
        """Somebody wants the run to go on with so many searchers, whatever trainers say."""
        self._wanted = count
        if self.orders is not None:
            self._set_count(count)

    def _set_count(self, count: int) -> None:
        """New ones start; those with the highest numbers end, and their visits go to others."""
        for seat in self._seats[count:]:
            if seat.process is not None:
                seat.process.link.send(Stop())
            seat.closed = True
        for seat in self._seats[:count]:
            seat.closed = seat.given_up = False
        self._seats += [Seat(index) for index in range(len(self._seats), min(count, MAX_SEARCHERS))]

    def look_after(self, *, may_fill: bool) -> None:
        """`may_fill`: the trainer lives; one that has just died may not have been missed yet."""
        for seat in self._seats:
            if seat.process is not None:
                self._look_at(seat, seat.process)
            elif seat.place == "empty" and time.monotonic() >= seat.starts_at and may_fill and self.orders is not None:
                self._fill(seat, self.orders)
            self._board.searcher(seat.index)["place"] = PLACES.index(seat.place)

    def stop(self, *, timeout_seconds: float) -> None:
        """End all of them, by force after the time; no searcher is started until a trainer orders some."""
        self.orders = None
        processes = [seat.process for seat in self._seats if seat.process is not None]
        stop_all(processes, Stop(), timeout_seconds=timeout_seconds)
        for seat in self._seats:
            if seat.process is not None:
                seat.process.link.close()
            row = self._board.searcher(seat.index)
            row["pid"], row["place"] = 0, PLACES.index("none")
        self._seats = []

    def _look_at(self, seat: Seat, process: Role[RelayedLink]) -> None:
        self._board.searcher(seat.index)["pid"] = process.pid
        failure = seat.failure
        overdue = failure is not None and time.monotonic() > seat.failed_at + self._config.stop_seconds
        if (seat.hung_up and not process.alive) or overdue:
            if failure is not None:
                self.lose(seat, f"failed: {failure.error}", final=failure.final)
            else:
                self.lose(seat, f"ended (exit status {process.status})")
            return
        beats = self._board.searcher(seat.index)["heartbeat"]
        setting = "wait_seconds" if beats else "start_seconds"
        limit = getattr(self._config, setting)
        if seat.idleness.look(beats) > limit:
            what = f"(process {process.pid}) has shown no sign of life for runtime.{setting}={limit:g} s"
            # Where none has ever come up, the next would be as slow.
            never = not any(self._board.searcher(other.index)["groups"] for other in self._seats)
            self.lose(seat, what, final=not beats and never)

    def _fill(self, seat: Seat, orders: StartSearchers) -> None:
        self._logs.mkdir(parents=True, exist_ok=True)  # somebody may have tidied up
        row = self._board.searcher(seat.index)
        row.clear()
        row["place"] = PLACES.index("filled")  # or it would show as not wanted for a moment
        seat.incarnation, seat.idleness = secrets.token_hex(4), Idleness()
        seat.hung_up, seat.failure = False, None
        try:
            seat.process = self._start(seat, orders, self._make_link)
        except (OSError, ServerGone) as error:  # no process or no descriptor is to be had: perhaps later
            self._vacate(seat, f"{seat.name} could not be started: {error}", early=True)
            return
        self._tell_trainer(SearcherStarted(holder=seat.holder))

    def lose(self, seat: Seat, what: str, *, final: bool = False, at_fault: bool = True) -> None:
        """A searcher is gone, or as good as: others take its visits, and another process its seat."""
        assert seat.process is not None
        process, seat.process = seat.process, None
        process.kill()
        process.link.close()
        row = self._board.searcher(seat.index)
        row["pid"] = 0
        if final and not seat.closed:
            self._tell_trainer(SearcherEnded(holder=seat.holder, replaced=False))
            seat.given_up = True
            self._tell_failure(f"{seat.name} {what} (log: {process.log})")
            return
        # A traceback stays in the log: what a person can mend is in its last line.
        last = "" if what.startswith("failed: ") else f", which ends with: {last_lines(process.log, 1).strip()}"
        words = f"{seat.name} {what} (log: {process.log}{last})."
        self._vacate(seat, words, early=row["groups"] < FEW_GROUPS and at_fault)

    def _vacate(self, seat: Seat, words: str, *, early: bool) -> None:
        """Decide whether another process takes a seat, and when. `early`: the last one has hardly worked."""
        seat.early_ends = seat.early_ends + 1 if early else 0
        seat.given_up = seat.early_ends > MAX_EARLY_ENDS and not seat.closed
        self._tell_trainer(SearcherEnded(holder=seat.holder, replaced=not (seat.given_up or seat.closed)))
        if seat.closed:
            logger.info("%s has ended, as was asked.", seat.name)
        elif all(other.given_up or other.closed for other in self._seats):
            why = f"{MAX_EARLY_ENDS + 1} searchers in a row ended before they had sent {FEW_GROUPS} groups."
            self._tell_failure(f"{words}\n{why}")
        elif seat.given_up:
            logger.error("%s\nIts place stays empty: %d in a row ended early.", words, seat.early_ends)
        else:
            wait = FIRST_BACK_OFF_SECONDS * 2.0 ** (seat.early_ends - 2) if seat.early_ends > 1 else 0.0
            seat.starts_at = time.monotonic() + wait
            self._board.supervisor["replaced"] += 1
            logger.warning("%s\nIt is replaced; its visits to prompts are handed to others.", words)

    def _tell_failure(self, error: str) -> None:
        """Tell the trainer that there are no searchers any more. One that is being started begins with new ones."""
        if self.orders is not None:
            self._tell_trainer(SearchersFailed(error=error))
