"""The supervisor of a run. `tba train` is a supervisor with the trainer as its child, and resumes the trainer when it dies.
`train(config)` from Python has the trainer in the caller's process, and a thread beside it that writes its status.

The supervisor holds nothing that a run could lose. When the trainer dies its searchers end too. The run then continues
from the newest checkpoint and the durable replay, as a resume does.

Nothing here imports torch: Ctrl-C and `tba status` work from the first moment, and the imports of all roles happen once, in
the process that they are forked from.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tba.config import Config, ConfigError
from tba.observe.files import report_failure
from tba.observe.run_folder import MANIFEST, Holder, RunFolder
from tba.run.status import StatusWriter
from tba.runtime.counters import SharedCounters
from tba.runtime.deadlines import Idleness, dump_stacks
from tba.runtime.placement import start_mps, threads_of, workers_of
from tba.runtime.processes import KILL_SECONDS, Role, RoleProcess, prepare_roles
from tba.runtime.replica import GROUPS, Replica, replica_folder

logger = logging.getLogger("tba")

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a run to save and end."""
CHECK_SECONDS = 0.1
"""Longest time between two looks at the trainer."""
MAX_RESTARTS = 3
"""Times in a row that a trainer is resumed which was killed or lost its GPU without a new checkpoint between."""
MAX_FAILED_STARTS = 5
"""Trainers in a row that may find their node gone before they begin, beyond MAX_RESTARTS."""
MOST_REQUESTS = 3
"""Requests to end after which the trainer is killed."""
TRY_AGAIN = os.EX_TEMPFAIL
"""Exit status of a trainer that wants to be started again, as after a failure of its GPU."""

StartTrainer = Callable[[str, Mapping[str, Any]], Role]
"""Starts the process of a trainer, which runs a target with these arguments; `arguments["host"]` is its Host."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """Where a trainer runs. Host(counters="/proc/4711/fd/9", owner=Holder(...), cluster=None)"""

    counters: str
    """Handle of its memory."""
    owner: Holder
    """The process that lives as long as the run, and holds the claim on its folder."""
    cluster: str | None = None
    """Address of the Ray cluster that its trainer was placed on; None = a trainer on a cluster joins it itself."""


def start_local_trainer(target: str, arguments: Mapping[str, Any]) -> Role:
    """Start a trainer as a process of this machine (on a cluster: runtime/cluster/roles.py)."""
    config: Config = arguments["config"]
    return RoleProcess(
        "trainer",
        target,
        arguments,
        log=None,
        threads=max(threads_of(config).trainer, workers_of(config)),
        forked=True,
        starts_roles=not config.is_synchronous or config.train.ranks > 1,
    )


class Supervisor:
    """consumes: heartbeats of the trainer, and its end
    waits for: that end, never longer than CHECK_SECONDS
    produces: a trainer that lives
    unblocked by: nothing
    """

    def __init__(
        self,
        config: Config,
        counters: SharedCounters,
        folder: RunFolder,
        status: StatusWriter,
        start_trainer: Callable[[], Role],
    ) -> None:
        """`folder` is where checkpoints are found: a trainer that has come to a new one may be started again."""
        self.requests = 0
        """Number of times that the run was asked to end."""
        self._requests_passed_on = 0
        """Number of these that the trainer has received."""
        self._config = config
        self._counters = counters
        self._folder = folder
        self._status = status
        self._start_trainer = start_trainer
        self._idleness = Idleness()
        self._hangs = False
        """Whether the trainer was killed because it hangs; it may take long to end."""
        self._restarts, self._checkpoint_at_restart = 0, -1
        self._failed_starts = 0
        """Trainers in a row that never began, for want of a node."""
        self._begin_trainer()

    def run(self) -> int:
        """Look after the trainer until it has ended for good; returns its exit status."""
        while True:
            if self._trainer.wait(CHECK_SECONDS):
                status = self._trainer.status
                assert status is not None
                # A negative status is the signal that killed it. One that ends by itself begins again only with TRY_AGAIN.
                if (status >= 0 and status != TRY_AGAIN) or self.requests:
                    # 128 + the signal, as shells report it.
                    return status if status >= 0 else 128 - status
                if not self._may_restart(status):
                    return 128 - status if status < 0 else 2
                self._counters.supervisor["trainer_restarts"] += 1
                self._end_searchers()  # before the next trainer, which may need the memory that they hold
                self._begin_trainer()
            self._pass_on_requests()
            self._kill_where_it_hangs()
            self._status.tick()

    def close(self) -> None:
        """End the trainer, if it runs, and with it its searchers."""
        if self._trainer.alive:
            self._trainer.kill()
        self._end_searchers()
        self._trainer.link.close()

    def interrupt(self) -> None:
        """Have the trainer save and end. The second request ends it at once, and the third kills it. Signal handlers call
        this, so it only counts: `run` passes the request to the trainer."""
        self.requests += 1

    def signal_roles(self, number: int) -> None:
        """Send a signal to the trainer and, on this machine, its searchers: they are suspended, and go on, with this
        process."""
        for pid in self._searchers():
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        self._trainer.signal(number)

    def _begin_trainer(self) -> None:
        self._counters.trainer_begins()
        self._hangs = False
        self._trainer = self._start_trainer()
        self._counters.trainer["pid"] = self._trainer.pid
        self._requests_passed_on = max(0, self.requests - 1)  # what came while it was started, once

    def _pass_on_requests(self) -> None:
        while self._trainer.alive and self._requests_passed_on < self.requests:
            self._requests_passed_on += 1
            self._trainer.signal(signal.SIGINT if self._requests_passed_on < MOST_REQUESTS else signal.SIGKILL)

    def _kill_where_it_hangs(self) -> None:
        row = self._counters.trainer
        # Without searchers the trainer loads or closes, and has no heartbeat to be judged by.
        if not row["searchers"] or self._hangs:
            self._idleness = Idleness()
            return
        limit = self._config.runtime.wait_seconds
        if self._idleness.look(row["beats"]) > limit:
            logger.error(
                "the trainer (process %d) has not looked for groups for runtime.wait_seconds=%g s: it is killed; the stacks "
                "of all roles are in %s.",
                *(self._trainer.pid, limit, self._config.run_folder / "logs"),
            )
            self._trainer.show_stacks()
            dump_stacks(self._searchers())
            self._hangs = True
            self._trainer.kill()

    def _searchers(self) -> list[int]:
        """Processes of the searchers on this machine."""
        return self._counters.searcher_pids() if self._config.runtime.kind == "local" else []

    def _end_searchers(self) -> None:
        """Wait for searchers whose trainer is gone: the system kills them with it."""
        deadline = time.monotonic() + KILL_SECONDS
        for pid in self._searchers():
            while _runs(pid) and time.monotonic() < deadline:
                time.sleep(0.01)

    def _may_restart(self, status: int) -> bool:
        """Whether to start the trainer again: not where that has been of no use a few times."""
        newest = max((step for step, _ in self._folder.resumable()), default=-1)
        # A trainer that reaches a new checkpoint each time also reaches the end.
        self._restarts = self._restarts + 1 if newest <= self._checkpoint_at_restart else 1
        self._checkpoint_at_restart = newest
        if self._trainer.pid == 0 and self._failed_starts < MAX_FAILED_STARTS:
            # Its node was gone before it had begun, as where Ray has not missed a lost node yet and chooses it again.
            self._restarts, self._failed_starts = self._restarts - 1, self._failed_starts + 1
        else:
            self._failed_starts = 0
        how = f"was killed by signal {-status}" if status < 0 else "failed"
        if self._restarts > MAX_RESTARTS:
            logger.error(
                "the trainer %s, %d times in a row without a new checkpoint between: the run ends. `tba train RUN --resume` "
                "goes on from the last checkpoint.",
                how,
                self._restarts,
            )
            return False
        logger.warning("the trainer %s at step %d; it is resumed.", how, int(self._counters.trainer["step"]))
        return True


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def supervise(config: Config, *, resume: bool | Path, target: str, accept_lost_replay: bool = False) -> int:
    """Run a training whose trainer is a child process, `target(link, config=..., resume=..., accept_lost_replay=...,
    host=...)`; returns its exit status, 130 after Ctrl-C."""
    if isinstance(resume, Path) and config.replay.durability == "node":
        raise ConfigError(
            f"{resume} cannot be gone back to with replay.durability=node: the run folder is on the trainer's node. Name "
            "the run to go on from its newest checkpoint."
        )
    folder, owner = RunFolder(config.run_folder), Holder.of_this_process()
    replica = open_replica(config, resume=bool(resume))
    here = replica or folder
    if replica is None:  # otherwise the trainer's process locks the folder, on its node
        folder.claim(holder=owner)
    counters = SharedCounters.create()
    try:
        if config.runtime.kind == "local":
            start_mps(config)  # before anything touches the GPU
            prepare_roles()
        given_up = later_checkpoints(folder, resume) if isinstance(resume, Path) else set()
        status = StatusWriter(here, counters)

        def trainer_arguments(cluster: str | None) -> dict[str, Any]:
            begun = replica is None and status.begun  # otherwise the trainer's node knows
            # The first trainer goes back to the checkpoint that was named. Once it has, the next goes on from the newest.
            came_back = isinstance(resume, Path) and begun and not given_up & later_checkpoints(folder, resume)
            return {
                "config": config,
                # True = from the newest checkpoint, a path = from that one.
                "resume": came_back or resume or begun,
                "accept_lost_replay": accept_lost_replay and not status.begun,  # of what was lost before
                "host": Host(counters=counters.memory.handle, owner=owner, cluster=cluster),
            }

        with trainers(config, counters, replica, owner) as (start, cluster):
            supervisor = Supervisor(config, counters, here, status, lambda: start(target, trainer_arguments(cluster)))
            try:
                with _signals(supervisor), above_the_table(counters):
                    status.exit_status = supervisor.run()
                    return status.exit_status
            finally:
                supervisor.close()
                status.close()
    finally:
        counters.memory.close()
        here.release()


class AboveTheTable(logging.Formatter):
    """Puts the lines that this process logs above the table that the trainer shows on the same terminal: clears it, and
    leaves the cursor where the trainer's next one begins by going up."""

    def __init__(self, own: logging.Formatter | None, counters: SharedCounters) -> None:
        super().__init__()
        self._own = own or logging.Formatter()
        self._counters = counters

    def format(self, record: logging.LogRecord) -> str:
        text, below = self._own.format(record), int(self._counters.trainer["table_lines"]) - 1
        # \r\x1b[2K clears a line and \x1b[1A goes one up; the line feeds make room for the table again.
        return text if below < 0 else "\r\x1b[2K" + "\x1b[1A\x1b[2K" * below + text + "\n" * below


@contextmanager
def above_the_table(counters: SharedCounters) -> Iterator[None]:
    """While active, what is logged here and what the trainer shows do not overwrite each other."""
    before = [(handler, handler.formatter) for handler in logging.getLogger().handlers]
    for handler, formatter in before:
        handler.setFormatter(AboveTheTable(formatter, counters))
    try:
        yield
    finally:
        for handler, formatter in before:
            handler.setFormatter(formatter)


def open_replica(config: Config, *, resume: bool) -> RunFolder | None:
    """Folder of the second copy of a run. It is on this node and has the layout of the run folder, which is on the trainer's
    node. The run's metrics and status are copied to it. Empty where the run is new; None without replay.durability=node."""
    if config.replay.durability != "node":
        return None
    path = replica_folder(config.run_folder)
    if resume:
        folder = RunFolder(path)
        folder.claim()
    else:
        folder = RunFolder.create(path, overwrite=config.overwrite)
    Replica(path / GROUPS, capacity=config.replay.capacity).close()  # one that cannot be used is refused now
    return folder


@contextmanager
def hosted(folder: RunFolder) -> Iterator[Host]:
    """A host for a trainer in this process, with a thread that looks after its status."""
    counters, ended = SharedCounters.create(), threading.Event()
    status = StatusWriter(folder, counters)

    def run() -> None:
        try:
            while not ended.wait(CHECK_SECONDS):
                status.tick()
        except Exception:
            logger.exception("the status of the run is not written any more")

    # A daemon, so that it never keeps a script alive whose main thread has died.
    thread = threading.Thread(target=run, daemon=True, name="status")
    thread.start()
    try:
        yield Host(counters=counters.memory.handle, owner=Holder.of_this_process())
    except Exception as error:
        report_failure(folder, error)  # before the status says how the run has ended
        raise
    finally:
        ended.set()
        # Before the last status, which this thread could overwrite with an older one.
        thread.join()
        status.close()
        counters.memory.close()


@contextmanager
def trainers(
    config: Config, counters: SharedCounters, replica: RunFolder | None, owner: Holder
) -> Iterator[tuple[StartTrainer, str | None]]:
    """Starter of the trainer of a run: as a process of this machine or, under runtime.kind=ray, as an actor of a cluster,
    with the cluster's address."""
    if config.runtime.kind == "local" or config.is_synchronous:
        yield start_local_trainer, None
        return
    from tba.runtime.cluster import cluster

    with cluster(config.runtime) as address:
        from tba.runtime.cluster.roles import ClusterTrainers

        yield ClusterTrainers(config, counters, replica, owner).start, address


def later_checkpoints(folder: RunFolder, path: Path) -> set[tuple[Path, int]]:
    """Checkpoints that a run gives up when it goes back to this one, with the time of writing: the same step may be made
    again. Nothing where there is no such checkpoint."""
    step_of = {found.resolve(): step for step, found in folder.resumable()}
    own = step_of.get(path.resolve(), math.inf)
    later = [other for other, step in step_of.items() if step > own]
    return {(other, (other / MANIFEST).stat().st_mtime_ns) for other in later}


@contextmanager
def _signals(supervisor: Supervisor) -> Iterator[None]:
    """Ctrl-C and its like go to the trainer, which saves; Ctrl-Z suspends all roles."""

    def end(number: int, frame: Any) -> None:
        supervisor.interrupt()

    def suspend(number: int, frame: Any) -> None:
        supervisor.signal_roles(signal.SIGSTOP)
        # Not SIGTSTP, which this handler has taken.
        os.kill(os.getpid(), signal.SIGSTOP)
        supervisor.signal_roles(signal.SIGCONT)  # here this process goes on

    with _handled({**dict.fromkeys(ENDING_SIGNALS, end), signal.SIGTSTP: suspend}):
        yield


@contextmanager
def _handled(handlers: Mapping[int, Callable[[int, Any], None]]) -> Iterator[None]:
    """Handle these signals, in the main thread. One that was ignored (SIGHUP under nohup) stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heeded = [number for number in handlers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handlers[number]) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Interrupt:
    """While active, SIGINT, SIGTERM and SIGHUP set `asked`; a second one raises KeyboardInterrupt at once.

    A step is never cut in the middle: half an optimizer update must not be saved.
    """

    def __init__(self) -> None:
        self.asked = False
        self.tell: Callable[[], None] = lambda: None
        """Called once, when the run is asked to end, in the middle of anything: it must not wait or write."""
        self._handlers = _handled(dict.fromkeys(ENDING_SIGNALS, self._handle))

    def __enter__(self) -> Interrupt:
        self._handlers.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._handlers.__exit__(*error)

    def _handle(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self.tell()
