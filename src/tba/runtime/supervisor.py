"""The supervisor of a run: starts the trainer, starts another one when it dies or hangs, and ends it when it is asked to.

It holds nothing that a run could lose. When the trainer is gone its searchers end too, and the run goes on from the newest
checkpoint and the durable replay, as a resume does. Nothing here imports torch: the supervisor is there in a moment.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from tba.config import Config, RuntimeConfig
from tba.runtime.board import Board
from tba.runtime.deadlines import Idleness, dump_stacks
from tba.runtime.processes import KILL_SECONDS, Role, RoleProcess, may_fork
from tba.runtime.threads import threads_of, workers_of

logger = logging.getLogger("tba")

LOOK_SECONDS = 0.1
"""Longest time between two looks at the trainer."""
MAX_RESTARTS = 3
"""Times in a row that a trainer is resumed which was killed or lost its GPU without a new checkpoint between."""
MAX_STILLBORN = 5
"""Trainers in a row that may find their node gone before they begin, beyond MAX_RESTARTS."""
MOST_REQUESTS = 3
"""Requests to end after which the trainer is killed."""
TRY_AGAIN = 75
"""Exit status of a trainer that wants to be started again, as after a failure of its GPU."""

StartTrainer = Callable[[str, Mapping[str, Any]], Role]
"""Starts the process of a trainer, which runs a target with these arguments; `arguments["host"]` is its Host."""


def start_local_trainer(target: str, arguments: Mapping[str, Any]) -> Role:
    """Start a trainer as a process of this machine (on a cluster: cluster/roles.py)."""
    config: Config = arguments["config"]
    return RoleProcess(
        "trainer",
        target,
        arguments,
        log=None,
        threads=max(threads_of(config).trainer, workers_of(config)),
        forked=may_fork(),
        starts_roles=not config.takes_turns or config.train.ranks > 1,
    )


class Supervisor:
    """consumes: signs of life of the trainer, and its end
    waits for: that end, never longer than LOOK_SECONDS
    produces: a trainer that lives
    unblocked by: nobody
    """

    def __init__(
        self,
        config: RuntimeConfig,
        board: Board,
        *,
        logs: Path,
        start_trainer: Callable[[], Role],
        newest_checkpoint: Callable[[], int | None],
        look_outside: Callable[[], None],
    ) -> None:
        """`newest_checkpoint` is the step of the last one, which tells whether a trainer that was started again has come
        further. `look_outside` is called at every look."""
        self.requests = 0
        """Number of times that the run was asked to end."""
        self._requests_told = 0
        """Those that the trainer knows of."""
        self._config = config
        self._board = board
        self._logs = logs
        self._start_trainer = start_trainer
        self._newest_checkpoint = newest_checkpoint
        self._look_outside = look_outside
        self._idleness = Idleness()
        self._hangs = False
        """Whether the trainer was killed because it hangs; it may take long to end."""
        self._restarts, self._checkpoint_at_restart = 0, -1
        self._stillborn = 0
        """Trainers in a row that never began, for want of a node."""
        self._begin_trainer()

    def run(self) -> int:
        """Look after the trainer until it has ended for good; returns its exit status."""
        while True:
            if self._trainer.wait(LOOK_SECONDS):
                status = self._trainer.status
                assert status is not None
                if (status >= 0 and status != TRY_AGAIN) or self.requests:
                    return status if status >= 0 else 128 - status
                if not self._may_restart(status):
                    return 128 - status if status < 0 else 2
                self._board.supervisor["trainer_restarts"] += 1
                self._end_searchers()  # before the next trainer, which may need the memory that they hold
                self._begin_trainer()
            self._pass_on_requests()
            self._kill_where_it_hangs()
            self._look_outside()

    def close(self) -> None:
        """End the trainer, if it runs, and with it its searchers."""
        if self._trainer.alive:
            self._trainer.kill()
        self._end_searchers()
        self._trainer.link.close()

    def interrupt(self) -> None:
        """Have the trainer save and end. Asked again it ends at once; the third time it is killed, whatever it does. Signal
        handlers call this, so that nothing more is done here: `run` tells the trainer in a moment."""
        self.requests += 1

    def signal_roles(self, number: int) -> None:
        """Send a signal to the trainer and, on this machine, its searchers: they are suspended, and go on, with this
        process."""
        for pid in self._searchers():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        self._trainer.signal(number)

    def _begin_trainer(self) -> None:
        self._board.trainer_begins()
        self._hangs = False
        self._trainer = self._start_trainer()
        self._board.trainer["pid"] = self._trainer.pid
        self._requests_told = max(0, self.requests - 1)  # what came while it was started, once

    def _pass_on_requests(self) -> None:
        while self._trainer.alive and self._requests_told < self.requests:
            self._requests_told += 1
            self._trainer.signal(signal.SIGINT if self._requests_told < MOST_REQUESTS else signal.SIGKILL)

    def _kill_where_it_hangs(self) -> None:
        row = self._board.trainer
        if not row["searchers"] or self._hangs:
            self._idleness = Idleness()
            return
        limit = self._config.wait_seconds
        if self._idleness.look(row["beats"]) > limit:
            logger.error(
                "the trainer (process %d) has not looked for groups for runtime.wait_seconds=%g s: it is killed; the stacks "
                "of all roles are in %s.",
                *(self._trainer.pid, limit, self._logs),
            )
            self._trainer.show_stacks()
            dump_stacks(self._searchers())
            self._hangs = True
            self._trainer.kill()

    def _searchers(self) -> list[int]:
        """Processes of the searchers on this machine."""
        return self._board.searcher_pids() if self._config.kind == "local" else []

    def _end_searchers(self) -> None:
        """Wait for searchers whose trainer is gone: the system kills them with it."""
        deadline = time.monotonic() + KILL_SECONDS
        for pid in self._searchers():
            while _runs(pid) and time.monotonic() < deadline:
                time.sleep(0.01)

    def _may_restart(self, status: int) -> bool:
        """Whether to start the trainer again: not where that has been of no use a few times."""
        newest = self._newest_checkpoint()
        newest = -1 if newest is None else newest
        # Whoever comes to a new checkpoint each time comes to the end too.
        self._restarts = self._restarts + 1 if newest <= self._checkpoint_at_restart else 1
        self._checkpoint_at_restart = newest
        if self._trainer.pid == 0 and self._stillborn < MAX_STILLBORN:
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
            return False
        logger.warning("the trainer %s at step %d; it is resumed.", how, int(self._board.trainer["step"]))
        return True


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
