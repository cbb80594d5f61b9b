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
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
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


@dataclass(frozen=True, kw_only=True)
class Host:
    """Where a trainer runs: Host(counters="/proc/4711/fd/9", owner=Holder(...), cluster=None)"""

    counters: str
    owner: Holder
    """The process that lives as long as the run, and holds the claim on its folder."""
    cluster: str | None = None
    """Address of the Ray cluster that its trainer was placed on; None = a trainer on a cluster joins it itself."""


@dataclass
class Supervisor:
    """consumes: heartbeats of the trainer, and its end
    waits for: that end, never longer than CHECK_SECONDS
    produces: a trainer that lives
    unblocked by: nothing
    """

    config: Config
    counters: SharedCounters
    folder: RunFolder
    """Where checkpoints are found: a trainer that has come to a new one may be started again."""
    status: StatusWriter
    start_trainer: Callable[[], Role]
    requests: int = field(default=0, init=False)
    """Number of times that the run was asked to end."""
    _idleness: Idleness = field(default_factory=Idleness, init=False)
    _restarts: int = field(default=0, init=False)
    _checkpoint_at_restart: int = field(default=-1, init=False)
    _failed_starts: int = field(default=0, init=False)
    """Trainers in a row that never began, for want of a node."""

    def __post_init__(self) -> None:
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
                self.counters.supervisor["trainer_restarts"] += 1
                self._end_searchers()  # before the next trainer, which may need the memory that they hold
                self._begin_trainer()
            while self._trainer.alive and self._requests_passed_on < self.requests:
                self._requests_passed_on += 1
                self._trainer.signal(signal.SIGINT if self._requests_passed_on < MOST_REQUESTS else signal.SIGKILL)
            self._kill_where_it_hangs()
            self.status.tick()

    def close(self) -> None:
        """End the trainer, if it runs, and with it its searchers."""
        if self._trainer.alive:
            self._trainer.kill()
        self._end_searchers()
        self._trainer.link.close()

    def handling_signals(self) -> AbstractContextManager[None]:
        """Ctrl-C has the trainer save and end; a second one ends it at once, a third kills it. Ctrl-Z suspends all roles."""

        def end(number: int, frame: Any) -> None:
            self.requests += 1  # no more within a signal handler: `run` passes it on

        def to_roles(number: int) -> None:
            for pid in self._searchers():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            self._trainer.signal(number)

        def suspend(number: int, frame: Any) -> None:
            to_roles(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)  # not SIGTSTP, which this handler has taken
            to_roles(signal.SIGCONT)  # here this process goes on

        return _handled({**dict.fromkeys(ENDING_SIGNALS, end), signal.SIGTSTP: suspend})

    def _begin_trainer(self) -> None:
        self.counters.trainer_begins()
        self._hangs = False  # or was killed because it does, which may take long
        self._trainer = self.start_trainer()
        self.counters.trainer["pid"] = self._trainer.pid
        self._requests_passed_on = max(0, self.requests - 1)  # what came while it was started, once

    def _kill_where_it_hangs(self) -> None:
        row = self.counters.trainer
        # Without searchers the trainer loads or closes, and has no heartbeat to be judged by.
        if not row["searchers"] or self._hangs:
            self._idleness = Idleness()
            return
        limit = self.config.runtime.wait_seconds
        if self._idleness.look(row["beats"]) > limit:
            logger.error(
                "the trainer (process %d) has not looked for groups for runtime.wait_seconds=%g s: it is killed; the stacks "
                "of all roles are in %s.",
                *(self._trainer.pid, limit, self.config.run_folder / "logs"),
            )
            self._trainer.show_stacks()
            dump_stacks(self._searchers())
            self._hangs = True
            self._trainer.kill()

    def _searchers(self) -> list[int]:
        return self.counters.searcher_pids() if self.config.runtime.kind == "local" else []

    def _end_searchers(self) -> None:
        """Wait for searchers whose trainer is gone: the system kills them with it."""
        deadline = time.monotonic() + KILL_SECONDS
        for pid in self._searchers():
            with suppress(psutil.NoSuchProcess):
                while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
                    time.sleep(0.01)

    def _may_restart(self, status: int) -> bool:
        """Whether to start the trainer again: not where that has been of no use a few times."""
        newest = max(self.folder.checkpoints_by_step(), default=-1)
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
        logger.warning("the trainer %s at step %d; it is resumed.", how, int(self.counters.trainer["step"]))
        return True


def supervise(config: Config, *, resume: bool | Path, target: str, accept_lost_replay: bool = False) -> int:
    """Run a training whose trainer is a child process, `target(link, config=..., resume=..., accept_lost_replay=...,
    host=...)`; returns its exit status, 130 after Ctrl-C."""
    if isinstance(resume, Path) and config.replay.durability == "node":
        raise ConfigError(
            f"{resume} cannot be gone back to with replay.durability=node: the run folder is on the trainer's node. Name "
            "the run to go on from its newest checkpoint."
        )
    owner, replica = Holder.of_this_process(), open_replica(config, resume=bool(resume))
    here = replica or RunFolder(config.run_folder)
    if replica is None:  # otherwise the trainer's process locks the folder, on its node
        here.claim(holder=owner)
    counters = SharedCounters.create()
    try:
        if config.runtime.kind == "local":
            start_mps(config)  # before anything touches the GPU
            prepare_roles()
        given_up = later_checkpoints(here, resume) if isinstance(resume, Path) else set()
        status, trainers, cluster_address = StatusWriter(here, counters), None, None

        def start_trainer() -> Role:
            begun = replica is None and status.begun  # otherwise the trainer's node knows
            # The first trainer goes back to the checkpoint that was named. Once it has, the next goes on from the newest.
            came_back = isinstance(resume, Path) and begun and not given_up & later_checkpoints(here, resume)
            arguments = {
                "config": config,
                # True = from the newest checkpoint, a path = from that one.
                "resume": came_back or resume or begun,
                "accept_lost_replay": accept_lost_replay and not status.begun,  # of what was lost before
                "host": Host(counters=counters.memory.handle, owner=owner, cluster=cluster_address),
            }
            if trainers is not None:
                return trainers.start(target, arguments)
            threads = max(threads_of(config).trainer, workers_of(config))
            starts_roles = not config.is_synchronous or config.train.ranks > 1
            return RoleProcess(
                "trainer", target, arguments, log=None, threads=threads, forked=True, starts_roles=starts_roles
            )

        with ExitStack() as stack:
            if config.runtime.kind == "ray" and not config.is_synchronous:
                from tba.runtime.cluster import cluster

                cluster_address = stack.enter_context(cluster(config.runtime))
                from tba.runtime.cluster.roles import ClusterTrainers

                trainers = ClusterTrainers(config, counters, replica, owner)
            supervisor = Supervisor(config, counters, here, status, start_trainer)
            stack.callback(status.close)
            stack.callback(supervisor.close)
            stack.enter_context(supervisor.handling_signals())
            stack.enter_context(above_the_table(counters))
            status.exit_status = supervisor.run()
            return status.exit_status
    finally:
        counters.memory.close()
        here.release()


@contextmanager
def above_the_table(counters: SharedCounters) -> Iterator[None]:
    """While active, the lines that this process logs stand above the table that the trainer shows on the same terminal: each
    clears it, and leaves the cursor where the trainer's next one begins by going up."""

    class AboveTheTable(logging.Formatter):
        def __init__(self, own: logging.Formatter | None) -> None:
            super().__init__()
            self.own = own or logging.Formatter()

        def format(self, record: logging.LogRecord) -> str:
            text, below = self.own.format(record), int(counters.trainer["table_lines"]) - 1
            # \r\x1b[2K clears a line and \x1b[1A goes one up; the line feeds make room for the table again.
            return text if below < 0 else "\r\x1b[2K" + "\x1b[1A\x1b[2K" * below + text + "\n" * below

    before = [(handler, handler.formatter) for handler in logging.getLogger().handlers]
    for handler, formatter in before:
        handler.setFormatter(AboveTheTable(formatter))
    try:
        yield
    finally:
        for handler, formatter in before:
            handler.setFormatter(formatter)


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


def open_replica(config: Config, *, resume: bool) -> RunFolder | None:
    """The second copy of a run, on this node and with the layout of the run folder, which is on the trainer's node. Its
    metrics and status are copied. None without replay.durability=node."""
    if config.replay.durability != "node":
        return None
    path = replica_folder(config.run_folder)
    folder = RunFolder(path) if resume else RunFolder.create(path, overwrite=config.overwrite)
    if resume:
        folder.claim()
    Replica(path / GROUPS, capacity=config.replay.capacity).close()  # one that cannot be used is refused now
    return folder


def later_checkpoints(folder: RunFolder, path: Path) -> set[tuple[Path, int]]:
    """Checkpoints that a run gives up when it goes back to this one, with the time of writing: the same step may be made
    again. Nothing where there is no such checkpoint."""
    step_of = {found.resolve(): step for step, found in folder.checkpoints_by_step().items()}
    own = step_of.get(path.resolve(), math.inf)
    later = [other for other, step in step_of.items() if step > own]
    return {(other, (other / MANIFEST).stat().st_mtime_ns) for other in later}


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


@dataclass
class Interrupt:
    """While active, SIGINT, SIGTERM and SIGHUP set `asked`; a second one raises KeyboardInterrupt at once. A step is never
    cut in the middle: half an optimizer update must not be saved."""

    asked: bool = False
    tell: Callable[[], None] = lambda: None
    """Called once, when the run is asked to end, in the middle of anything: it must not wait or write."""

    def active(self) -> AbstractContextManager[None]:
        def handle(number: int, frame: Any) -> None:
            if self.asked:
                raise KeyboardInterrupt
            self.asked = True
            self.tell()

        return _handled(dict.fromkeys(ENDING_SIGNALS, handle))
