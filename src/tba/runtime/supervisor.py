"""The supervisor of a run: starts trainer and searchers, passes on what they tell each other, replaces searchers that die or
hang, starts both anew when the trainer dies, and ends all of them.

It holds nothing that a run could lose. A searcher that is gone is replaced. When the trainer is gone its searchers end too,
and the run goes on from the newest checkpoint and the durable replay, as a resume does. With replay.durability=node it
stores a second copy of every group (replica.py), for a trainer that has lost its disk.

The trainer is a child process, or the process that the supervisor is a thread of, which then cannot be started again.
Nothing here imports torch: the supervisor is there in a moment.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tba.config import Config, RuntimeConfig
from tba.observe.run_folder import Holder
from tba.runtime.board import MAX_SEARCHERS, PLACES, Board, MemoryHandle, Place, SharedMemory
from tba.runtime.channels import WaitedTooLong
from tba.runtime.deadlines import Idleness, dump_stacks
from tba.runtime.fork_server import ServerGone
from tba.runtime.links import (
    PARENT,
    REPLICA,
    EndSearchers,
    Failed,
    Link,
    RelayedLink,
    ReplaceSearcher,
    SearcherEnded,
    SearchersEnded,
    SearchersFailed,
    SearcherStarted,
    ShowStacks,
    StartSearchers,
    Stop,
    group_of,
)
from tba.runtime.processes import STOP_SECONDS, Role, RoleProcess, last_lines, may_fork, stop_all
from tba.runtime.replica import Replica
from tba.runtime.threads import threads_of, workers_of

logger = logging.getLogger("tba")

LOOK_SECONDS = 0.1
"""Longest time between two looks at the processes."""
OUTSIDE_SECONDS = 1.0
"""Time between two calls of `look_outside`."""
MAX_EARLY_ENDS, FEW_GROUPS = 4, 16
"""Processes in a row that may end before they have sent so many groups; a seat is given up then. A prompt that kills every
searcher is handed to the next one first, so that it does not last much longer."""
FIRST_BACK_OFF_SECONDS = 1.0
"""Before a seat is filled again after the second process that ended early; doubled with each."""
MAX_RESTARTS = 3
"""Times in a row that a trainer is resumed which was killed or lost its GPU without a new checkpoint between."""
MAX_STILLBORN = 5
"""Trainers in a row that may find their node gone before they begin, beyond MAX_RESTARTS."""
MOST_REQUESTS = 3
"""Requests to end after which the trainer is killed."""
TRY_AGAIN = 75
"""Exit status of a trainer that wants to be started again, as after a failure of its GPU."""

MakeLink = Callable[[Connection], RelayedLink]
"""Makes the supervisor's end of a role's link."""
StartTrainer = Callable[[MakeLink], Role[RelayedLink]]
StartSearcher = Callable[["Seat", StartSearchers, MakeLink], Role[RelayedLink]]


@dataclass(frozen=True, kw_only=True)
class LocalRoles:
    """Starts roles as processes of this machine (on a cluster: cluster/roles.py)."""

    config: Config
    logs: Path

    def trainer(self, target: str, arguments: Mapping[str, Any], make_link: MakeLink) -> Role[RelayedLink]:
        """Start `target(link, **arguments)`; `arguments["host"]` is the supervisor's HostHandle."""
        return RoleProcess(
            "trainer",
            target,
            arguments,
            log=None,
            threads=max(threads_of(self.config).trainer, workers_of(self.config)),
            forked=may_fork(),
            starts_roles=arguments["config"].train.ranks > 1,
            make_link=make_link,
        )

    def searcher(self, seat: Seat, orders: StartSearchers, make_link: MakeLink) -> Role[RelayedLink]:
        """Start the role that fills a seat, as the trainer has ordered it."""
        return RoleProcess(
            seat.name,
            orders.recipe,
            {"index": seat.index, "incarnation": seat.incarnation, "ends": orders.ends},
            log=self.logs / f"{seat.name}.log",
            threads=threads_of(self.config, num_searchers=seat.index + 1).searcher,
            forked=orders.forked,
            make_link=make_link,
        )


@dataclass(frozen=True, kw_only=True)
class Host:
    """Where a trainer runs: its link to the supervisor, and the board that all see. Host(link=..., board=..., owner=...)"""

    link: Link
    board: Board
    owner: Holder
    """The supervisor's process, which is there for as long as the run, and has its folder."""


@dataclass(frozen=True, kw_only=True)
class HostHandle:
    """How the trainer's process finds its host. HostHandle(board=MemoryHandle(...), owner=Holder(...))"""

    board: MemoryHandle
    owner: Holder

    def open(self, link: Link) -> Host:
        return Host(link=link, board=Board(SharedMemory.attach(self.board)), owner=self.owner)


@dataclass
class Seat:
    """A searcher's place: the process that fills it now, and how its predecessors fared."""

    index: int
    process: Role[RelayedLink] | None = None
    """None while nobody fills it."""
    incarnation: str = ""
    """Name of the present process among all that ever filled a seat: group ids and leases carry it."""
    idleness: Idleness = field(default_factory=Idleness)
    """How long there has been no sign of life."""
    hung_up: bool = False
    """Whether all that the present process has ever sent was passed on."""
    failure: Failed | None = None
    """Last words of the present process."""
    failed_at: float = 0.0
    early_ends: int = 0
    """Processes in a row that ended before they had sent FEW_GROUPS groups."""
    starts_at: float = 0.0
    """When the next process may start."""
    given_up: bool = False
    """Whether too many in a row ended at once."""
    closed: bool = False
    """Whether the run goes on without it, as was asked."""

    @property
    def name(self) -> str:
        return f"searcher-{self.index}"

    @property
    def holder(self) -> str:
        return f"{self.name}.{self.incarnation}"

    @property
    def place(self) -> Place:
        if self.process is not None:
            return "filled"
        if self.closed:
            return "none"
        return "given_up" if self.given_up else "empty"


class SearcherPool:
    """Iterates over the seats; `look_after` fills those that are empty, and empties those whose process is gone."""

    def __init__(
        self,
        config: RuntimeConfig,
        board: Board,
        *,
        logs: Path,
        start: StartSearcher,
        make_link: MakeLink,
        tell_trainer: Callable[[Any], object],
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
        overdue = failure is not None and time.monotonic() > seat.failed_at + STOP_SECONDS
        if (seat.hung_up and not process.alive) or overdue:
            if failure is not None:
                self.lose(seat, f"failed: {failure.error}", final=failure.final)
            else:
                self.lose(seat, f"ended (exit status {process.status})")
            return
        beats = self._board.searcher(seat.index)["heartbeat"]
        limit = self._config.wait_seconds
        if seat.idleness.look(beats) > limit:
            what = f"(process {process.pid}) has shown no sign of life for runtime.wait_seconds={limit:g} s"
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

    def lose(self, seat: Seat, what: str, *, final: bool = False) -> None:
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
        self._vacate(seat, words, early=row["groups"] < FEW_GROUPS)

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


class Supervisor:
    """consumes: frames of all roles
    waits for: any of them, never longer than LOOK_SECONDS
    produces: roles that live, and their frames at whom they are addressed to
    unblocked by: everybody
    """

    def __init__(
        self,
        config: RuntimeConfig,
        board: Board,
        *,
        logs: Path,
        start_trainer: StartTrainer | None = None,
        start_searcher: StartSearcher,
        newest_checkpoint: Callable[[], int | None] = lambda: None,
        look_outside: Callable[[Supervisor], None] = lambda supervisor: None,
        replica: Replica | None = None,
    ) -> None:
        """`start_trainer` starts the trainer's process, also again after it has died; None = the trainer is in this process
        and uses `trainer_connection`. `newest_checkpoint` is the step of the last one, which tells whether a trainer that
        was started again has come further. `look_outside` is called once a second. `replica` keeps a copy of every group
        that is acknowledged; None = there is none."""
        self.config = config
        self.board = board
        self.requests = 0
        """Number of times that the run was asked to end."""
        self._requests_told = 0
        """Those that the trainer knows of."""
        self._logs = logs
        self._start_trainer = start_trainer
        self._newest_checkpoint = newest_checkpoint
        self._look_outside = look_outside
        self._replica = replica
        self._events: queue.SimpleQueue[tuple[RelayedLink, str, bytes | None]] = queue.SimpleQueue()
        self._make_link = partial(RelayedLink, deliver=lambda *event: self._events.put(event))
        self._trainer_process: Role[RelayedLink] | None = None
        self._searchers = SearcherPool(
            config,
            board,
            logs=logs,
            start=start_searcher,
            make_link=self._make_link,
            tell_trainer=lambda message: self._trainer.send(message),
        )
        self._trainer_hung_up = False
        self._trainer_idleness = Idleness()
        self._restarts, self._checkpoint_at_restart = 0, -1
        self._stillborn = 0
        """Trainers in a row that never began, for want of a node."""
        self._looked_outside = 0.0
        self._ends = False
        if start_trainer is None:
            ours, self.trainer_connection = Pipe()
            self._trainer = self._make_link(ours)
        else:
            self._begin_trainer()

    def run(self) -> int:
        """Look after the roles until the trainer has ended for good; returns its exit status."""
        while True:
            with suppress(queue.Empty):
                self._pass_on(*self._events.get(timeout=LOOK_SECONDS))
                while True:
                    self._pass_on(*self._events.get_nowait())
            self.board.supervisor["beats"] += 1
            replaced = self.board.supervisor["replaced"]
            trainer_lives = self._trainer_process is None or self._trainer_process.alive
            self._searchers.look_after(may_fill=trainer_lives and not self.requests)
            self._pass_on_requests()
            status = self._look_after_trainer()
            if status is not None:
                return status
            # Before a searcher that is gone is replaced, which may take seconds: its end must not be seen only then.
            gone = self.board.supervisor["replaced"] > replaced
            if gone or time.monotonic() - self._looked_outside > OUTSIDE_SECONDS:
                self._looked_outside = time.monotonic()
                self._look_outside(self)

    def close(self) -> None:
        """End everything; nothing is left running. May be called more than once."""
        self._ends = True
        self._searchers.stop(timeout_seconds=STOP_SECONDS)
        if self._trainer_process is not None and self._trainer_process.alive:
            self._trainer_process.kill()
        self._trainer.close()
        self.board.memory.close()

    def interrupt(self) -> None:
        """Have the trainer save and end. Asked again it ends at once; the third time it is killed, whatever it does. Signal
        handlers call this, so that nothing more is done here: `run` tells the trainer in a moment."""
        self.requests += 1

    def _pass_on_requests(self) -> None:
        process = self._trainer_process
        while process is not None and process.alive and self._requests_told < self.requests:
            self._requests_told += 1
            process.signal(signal.SIGINT if self._requests_told < MOST_REQUESTS else signal.SIGKILL)

    def signal_roles(self, number: int) -> None:
        """Send a signal to all roles: they are suspended, and go on, with this process."""
        for process in self._running():
            process.signal(number)
        if self._start_trainer is None:
            os.kill(os.getpid(), number)

    def show_stacks(self) -> None:
        """Have all roles write to their logs what they are doing, this process included where the trainer is in it."""
        for process in self._running():
            process.show_stacks()
        if self._start_trainer is None:
            dump_stacks([os.getpid()])

    def _running(self) -> list[Role[RelayedLink]]:
        processes = [self._trainer_process, *(seat.process for seat in self._searchers)]
        return [process for process in processes if process is not None and process.alive]

    # Frames

    def _pass_on(self, link: RelayedLink, address: str, body: bytes | None) -> None:
        if link is self._trainer:
            if body is None:
                self._trainer_hung_up = True
            elif address == PARENT:
                self._heed(pickle.loads(body))
            else:
                seat = self._searchers.find(holder=address)
                if seat is not None and seat.process is not None:  # what is for one that is gone is lost with it
                    if self._replica is not None:
                        self._replica.commit()  # it may be told that groups are stored
                    seat.process.link.send_frame(PARENT, body)
            return
        seat = self._searchers.find(link=link)
        if seat is None:
            return  # the last words of one that was replaced already
        if body is None:
            seat.hung_up = True
        elif address != PARENT:
            group = group_of(address)
            if group is not None and self._replica is not None:
                self._replica.add(*group, body)
            self._trainer.send_frame(seat.holder, body)
        else:
            seat.failure, seat.failed_at = pickle.loads(body), time.monotonic()
            if seat.failure.error.startswith(WaitedTooLong.__name__):
                self.show_stacks()  # what the others did meanwhile

    def _heed(self, message: object) -> None:
        """A word of the trainer's."""
        if isinstance(message, StartSearchers):
            self._trainer_idleness = Idleness()
            if self._replica is not None:
                for body in self._replica.rows(after=message.stored):  # none on the disk that they were stored on
                    self._trainer.send_frame(REPLICA, body)
            self._searchers.work_for(message)
        if isinstance(message, ReplaceSearcher):
            seat = self._searchers.find(holder=message.holder)
            if seat is not None:
                self._searchers.lose(seat, f"is replaced: {message.why}")
        if isinstance(message, EndSearchers):
            orders, self._ends = self._searchers.orders, message.go_on_from is None
            self._searchers.stop(timeout_seconds=STOP_SECONDS if self._ends else 0.0)
            if self._replica is not None and message.go_on_from is not None:
                self._replica.return_to(message.go_on_from)
            self._trainer.send(SearchersEnded())
            if orders is not None and not self._ends:
                self._searchers.work_for(orders)
        if isinstance(message, ShowStacks):
            self.show_stacks()

    def ask_for_searchers(self, count: int) -> None:
        """Somebody wants the run to go on with so many searchers, whatever trainers say."""
        self._searchers.ask_for(count)

    # The trainer

    def _begin_trainer(self) -> None:
        assert self._start_trainer is not None
        self.board.trainer.clear()
        self._trainer_hung_up = False
        self._trainer_process = self._start_trainer(self._make_link)
        self._trainer = self._trainer_process.link
        self.board.trainer["pid"] = self._trainer_process.pid
        self._requests_told = max(0, self.requests - 1)  # what came while it was started, once

    def _look_after_trainer(self) -> int | None:
        """Exit status of a trainer that has ended for good; None = there is one that goes on, or another one now."""
        process = self._trainer_process
        if process is None:
            return 0 if self._trainer_hung_up or self._ends else None
        if self._searchers.orders is not None:
            limit = self.config.wait_seconds
            if self._trainer_idleness.look(self.board.trainer["beats"]) > limit:
                logger.error(
                    "the trainer (process %d) has not looked for groups for runtime.wait_seconds=%g s: it is killed; the "
                    "stacks of all roles are in %s.",
                    *(process.pid, limit, self._logs),
                )
                self.show_stacks()
                process.kill()
                self._searchers.orders = None  # once: it may take long to end
        if process.alive or not self._trainer_hung_up:
            return None
        status = process.status
        assert status is not None
        if (status >= 0 and status != TRY_AGAIN) or self.requests:
            return status if status >= 0 else 128 - status
        return self._trainer_died(status)

    def _trainer_died(self, status: int) -> int | None:
        """Start the trainer again, unless that has been of no use a few times."""
        newest = self._newest_checkpoint()
        newest = -1 if newest is None else newest
        # Whoever comes to a new checkpoint each time comes to the end too.
        self._restarts = self._restarts + 1 if newest <= self._checkpoint_at_restart else 1
        self._checkpoint_at_restart = newest
        if self._trainer_process is not None and self._trainer_process.pid == 0 and self._stillborn < MAX_STILLBORN:
            # Its node was gone before it had begun, as where Ray has not missed a lost node yet and chooses it again.
            self._restarts, self._stillborn = self._restarts - 1, self._stillborn + 1
        else:
            self._stillborn = 0
        how = f"was killed by signal {-status}" if status < 0 else "failed"
        if self._restarts > MAX_RESTARTS:
            logger.error(
                "the trainer %s, %d times in a row without a new checkpoint between: the run ends. `tba train RUN --resume` "
                "goes on from the last checkpoint.",
                how,
                self._restarts,
            )
            return 128 - status if status < 0 else 2
        logger.warning("the trainer %s at step %d; it is resumed.", how, int(self.board.trainer["step"]))
        self.board.supervisor["trainer_restarts"] += 1
        self._trainer.close()
        self._searchers.stop(timeout_seconds=0.0)  # before the next trainer, which may need the memory that they hold
        self._begin_trainer()
        return None
