"""The supervisor of a run: starts trainer and searchers, passes on what they tell each other, replaces those that die or
hang (searchers in searcher_seats.py), and ends all of them.

It holds nothing that a run could lose. A searcher that is gone is replaced. When the trainer is gone its searchers end too,
and the run goes on from the newest checkpoint and the durable replay, as a resume does. With replay.durability=node it
stores a second copy of every group (replica.py), for a trainer that has lost its disk.

It does not import torch, so it is there in a moment.
The trainer is a child process, or the process that the supervisor is a thread of, which then cannot be started again.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from tba.config import RuntimeConfig
from tba.runtime.board import Board
from tba.runtime.channels import WaitedTooLong
from tba.runtime.deadlines import Idleness, dump_stacks
from tba.runtime.links import (
    PARENT,
    REPLICA,
    AllReplaced,
    AllStopped,
    EndRun,
    RelayedLink,
    ReplaceSearchers,
    ReplicaSent,
    ReplicaStored,
    ShowStacks,
    StartSearchers,
    group_of,
    pickled,
)
from tba.runtime.processes import Role
from tba.runtime.replica import Replica
from tba.runtime.searcher_seats import SearcherSeats
from tba.runtime.seats import StartSearcher, StartTrainer

logger = logging.getLogger("tba")

LOOK_SECONDS = 0.1
"""Longest time between two looks at the processes."""
OUTSIDE_SECONDS = 1.0
"""Time between two calls of `look_outside`."""
MAX_STILLBORN = 5
"""Trainers in a row that may find their node gone before they begin, beyond those of runtime.max_trainer_restarts."""
MOST_REQUESTS = 3
"""Requests to end after which the trainer is killed."""
TRY_AGAIN = 75
"""Exit status of a trainer that wants to be started again, as after a failure of its GPU."""


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
        self._searchers = SearcherSeats(
            config,
            board,
            logs=logs,
            start=start_searcher,
            make_link=self._make_link,
            tell_trainer=self._tell_trainer,
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
        self._searchers.stop(timeout_seconds=self.config.stop_seconds)
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

    def _tell_trainer(self, message: Any) -> None:
        self._trainer.send(message)

    def _heed(self, message: object) -> None:
        """A word of the trainer's."""
        if isinstance(message, StartSearchers):
            self._trainer_idleness = Idleness()
            if self._trainer_process is not None:
                self._trainer_process.serve_weights(message)
                if self._replica is not None and self._trainer_process.lacks_groups:
                    for body in self._replica.rows():
                        self._trainer.send_frame(REPLICA, body)
                    self._trainer.send_frame(REPLICA, pickled(ReplicaSent()))
            self._searchers.work_for(message)
        if isinstance(message, ReplicaStored) and self._trainer_process is not None:
            self._trainer_process.lacks_groups = False
        if isinstance(message, ReplaceSearchers):
            for seat in self._searchers:
                if seat.process is not None and (message.holders is None or seat.holder in message.holders):
                    self._searchers.lose(seat, f"is replaced: {message.why}", at_fault=message.at_fault)
            if message.holders is None:
                if self._replica is not None and message.stay is not None:
                    self._replica.return_to(message.stay)
                self._trainer.send(AllReplaced())
        if isinstance(message, ShowStacks):
            self.show_stacks()
        if isinstance(message, EndRun):
            self._ends = True
            self._searchers.stop(timeout_seconds=self.config.stop_seconds)
            self._trainer.send(AllStopped())

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
            setting = "wait_seconds" if self.board.trainer["made"] else "start_seconds"  # the first step may compile
            limit = getattr(self.config, setting)
            if self._trainer_idleness.look(self.board.trainer["beats"]) > limit:
                logger.error(
                    "the trainer (process %d) has not looked for groups for runtime.%s=%g s: it is killed; the stacks of "
                    "all roles are in %s.",
                    *(process.pid, setting, limit, self._logs),
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
        if self._restarts > self.config.max_trainer_restarts:
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
