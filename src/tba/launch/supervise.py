"""A run under its supervisor: `tba train` is the supervisor itself, with the trainer as a child, resumed when it dies; for
`train(config)` from Python the supervisor is a thread beside the trainer.

Nothing here imports torch: Ctrl-C and `tba status` work from the first moment, and the imports of all roles happen once, in
the process that they are forked from.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tba.config import Config, ConfigError, SearchConfig
from tba.launch.operate import Control, StatusWriter
from tba.observe.files import read_summary, tell_failure
from tba.observe.run_folder import MANIFEST, Holder, RunFolder
from tba.runtime.board import Board
from tba.runtime.links import Link
from tba.runtime.mps import start_mps
from tba.runtime.processes import prepare_roles
from tba.runtime.replica import GROUPS, Replica, replica_folder
from tba.runtime.supervisor import Host, HostHandle, LocalRoles, Supervisor
from tba.runtime.threads import threads_of

if TYPE_CHECKING:
    from tba.runtime.cluster.roles import ClusterRoles

logger = logging.getLogger("tba")

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a run to save and end."""


class Outside:
    """What the supervisor does once a second for those who look at the run from outside."""

    def __init__(self, folder: RunFolder, search: SearchConfig, board: Board) -> None:
        self._folder = folder
        self._config_before = _state_of(folder.config)
        self._board = board
        self._control = Control(folder.control)
        self._asked: int | None = None
        """Number of searchers that was asked for last."""
        self._status: StatusWriter | None = None
        self.exit_status: int | None = None
        """How the trainer's process has ended; None = it is this process, or has not."""

    @property
    def begun(self) -> bool:
        """Whether a trainer has begun the run since this was made: then config.yaml was written anew."""
        return _state_of(self._folder.config) not in (None, self._config_before)

    def look(self, supervisor: Supervisor) -> None:
        if not self.begun:
            return
        if self._status is None:
            self._status = StatusWriter(self._folder, self._board)
        self._status.write()
        asked = self._control.searchers()
        if asked is not None and asked != self._asked:
            self._asked = asked
            supervisor.ask_for_searchers(asked)

    def close(self) -> None:
        """Say how the run has ended; its process may go on with something else."""
        if not self.begun:
            return
        if self.exit_status and read_summary(self._folder) is None:
            words = (
                f"the trainer ended with exit status {self.exit_status} and did not say why; see {self._folder.logs}."
            )
            tell_failure(self._folder, RuntimeError(words))
        if self._status is None:
            self._status = StatusWriter(self._folder, self._board)
        self._status.write(ended=True)


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
    if replica is None:  # otherwise the trainer's process locks the folder, on its node
        folder.claim(holder=owner)
    try:
        return _supervise(config, folder, replica, owner, resume, target, accept_lost_replay)
    finally:
        if replica is not None:
            replica.groups.close()
            replica.folder.release()
        folder.release()


def _supervise(
    config: Config,
    folder: RunFolder,
    replica: OpenReplica | None,
    owner: Holder,
    resume: bool | Path,
    target: str,
    accept_lost_replay: bool,
) -> int:
    """Run a training in a folder that is claimed."""
    if config.runtime.kind == "local":
        start_mps(config)  # before anything touches the GPU
        prepare_roles()
    board = Board.create()
    given_up = later_checkpoints(folder, resume) if isinstance(resume, Path) else set()
    outside = Outside(folder if replica is None else replica.folder, config.search, board)
    host = HostHandle(board=board.memory.handle(), owner=owner)

    def trainer_arguments() -> dict[str, Any]:
        begun = replica is None and outside.begun  # otherwise the trainer's node knows
        # The first trainer goes back to the checkpoint that was named. Once it has, the next goes on from the newest.
        came_back = isinstance(resume, Path) and begun and not given_up & later_checkpoints(folder, resume)
        return {
            "config": config,
            "resume": came_back or resume or begun,
            "accept_lost_replay": accept_lost_replay and not outside.begun,  # of what was lost before
            "host": host,
        }

    with starters(config, board, folder.logs, None if replica is None else replica.folder) as start:
        supervisor = Supervisor(
            config.runtime,
            board,
            logs=folder.logs,
            start_trainer=lambda make_link: start.trainer(target, trainer_arguments(), make_link),
            start_searcher=start.searcher,
            newest_checkpoint=partial(newest_step, folder if replica is None else replica.folder),
            look_outside=outside.look,
            replica=None if replica is None else replica.groups,
        )
        try:
            with _signals(supervisor), above_the_table(board):
                outside.exit_status = supervisor.run()
                return outside.exit_status
        finally:
            supervisor.close()
            outside.close()


class AboveTheTable(logging.Formatter):
    """Puts the lines that this process logs above the table that the trainer shows on the same terminal: clears it, and
    leaves the cursor where the trainer's next one begins by going up."""

    def __init__(self, own: logging.Formatter | None, board: Board) -> None:
        super().__init__()
        self._own = own or logging.Formatter()
        self._board = board

    def format(self, record: logging.LogRecord) -> str:
        text, below = self._own.format(record), int(self._board.trainer["table_lines"]) - 1
        return text if below < 0 else "\r\x1b[2K" + "\x1b[1A\x1b[2K" * below + text + "\n" * below


@contextmanager
def above_the_table(board: Board) -> Iterator[None]:
    """While active, what is logged here and what the trainer shows do not overwrite each other."""
    before = [(handler, handler.formatter) for handler in logging.getLogger().handlers]
    for handler, formatter in before:
        handler.setFormatter(AboveTheTable(formatter, board))
    try:
        yield
    finally:
        for handler, formatter in before:
            handler.setFormatter(formatter)


@dataclass(frozen=True, kw_only=True)
class OpenReplica:
    """The second copy of a run, on this node, with replay.durability=node."""

    folder: RunFolder
    """Laid out like the run folder, which is on the trainer's node: what the run tells of itself is here too."""
    groups: Replica


def open_replica(config: Config, *, resume: bool) -> OpenReplica | None:
    """Claim the replica of a run, empty where the run is new; None without replay.durability=node."""
    if config.replay.durability != "node":
        return None
    path = replica_folder(config.run_folder)
    if resume:
        folder = RunFolder(path)
        folder.claim()
    else:
        folder = RunFolder.create(path, overwrite=config.overwrite)
    return OpenReplica(folder=folder, groups=Replica(path / GROUPS, capacity=config.replay.capacity))


@contextmanager
def hosted(config: Config, folder: RunFolder) -> Iterator[Host]:
    """A host for a trainer in this process, with the supervisor in a thread."""
    board = Board.create()
    outside = Outside(folder, config.search, board)
    with starters(config, board, folder.logs) as start:
        supervisor = Supervisor(
            config.runtime, board, logs=folder.logs, start_searcher=start.searcher, look_outside=outside.look
        )

        def run() -> None:
            try:
                supervisor.run()
            except BaseException:
                logger.exception("the supervisor of the run has failed")
            finally:
                supervisor.close()  # the trainer sees that the link is closed

        thread = threading.Thread(target=run, daemon=True, name="supervisor")
        thread.start()
        link = Link(supervisor.trainer_connection)
        try:
            yield Host(link=link, board=supervisor.board, owner=Holder.of_this_process())
        except Exception as error:
            tell_failure(folder, error)  # before the status says how the run has ended
            raise
        finally:
            link.close()
            thread.join()
            outside.close()


@contextmanager
def starters(
    config: Config, board: Board, logs: Path, replica: RunFolder | None = None
) -> Iterator[LocalRoles | ClusterRoles]:
    """What starts the roles of a run: processes of this machine or, under runtime.kind=ray, actors of a cluster. `replica`
    is where the run folder is copied to; None = it is not."""
    if config.runtime.kind == "local" or config.takes_turns:
        yield LocalRoles(config=config, logs=logs)
        return
    from tba.runtime.cluster.connect import cluster

    with cluster(config.runtime):
        import ray

        from tba.runtime.cluster.copies import RunCopy
        from tba.runtime.cluster.roles import ClusterRoles, share_of_gpus

        available = 0.0 if config.model.device == "cpu" else ray.cluster_resources().get("GPU", 0.0)
        gpus = share_of_gpus(available, config.train.ranks + config.search.count)
        copy = None if replica is None else RunCopy(replica)
        threads, ranks = threads_of(config), config.train.ranks
        with closing(ClusterRoles(board, logs=logs, threads=threads, gpus_each=gpus, ranks=ranks, copy=copy)) as roles:
            yield roles


def _state_of(path: Path) -> tuple[int, int] | None:
    """Which file this is, and when it was written; None = there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def later_checkpoints(folder: RunFolder, path: Path) -> set[tuple[Path, int]]:
    """What a run that goes back to this checkpoint gives up, with the time of writing: the same step may be made again.
    Nothing where there is no such checkpoint."""
    step_of = {found.resolve(): step for step, found in folder.resumable()}
    own = step_of.get(path.resolve(), math.inf)
    later = [other for other, step in step_of.items() if step > own]
    return {(other, (other / MANIFEST).stat().st_mtime_ns) for other in later}


def newest_step(folder: RunFolder) -> int | None:
    return max((step for step, _ in folder.resumable()), default=None)


@contextmanager
def _signals(supervisor: Supervisor) -> Iterator[None]:
    """Ctrl-C and its like go to the trainer, which saves; Ctrl-Z suspends all roles. One that was ignored stays ignored."""

    def end(number: int, frame: Any) -> None:
        supervisor.interrupt()

    def suspend(number: int, frame: Any) -> None:
        supervisor.signal_roles(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        supervisor.signal_roles(signal.SIGCONT)  # here this process goes on

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {**dict.fromkeys(ENDING_SIGNALS, end), signal.SIGTSTP: suspend}
    heeded = [number for number in handlers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handlers[number]) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
