"""A run and who watches it: `tba train` is a supervisor with the trainer as a child, resumed when it dies. `train(config)`
from Python has the trainer in the caller's process, and a thread beside it that writes its status.

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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tba.config import Config, ConfigError, SearchConfig
from tba.launch.operate import Control, StatusWriter
from tba.observe.files import read_summary, tell_failure
from tba.observe.run_folder import MANIFEST, Holder, RunFolder
from tba.runtime.board import Board, MemoryHandle
from tba.runtime.mps import start_mps
from tba.runtime.processes import prepare_roles
from tba.runtime.replica import GROUPS, Replica, replica_folder
from tba.runtime.supervisor import LOOK_SECONDS, StartTrainer, Supervisor, start_local_trainer

logger = logging.getLogger("tba")

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a run to save and end."""


OUTSIDE_SECONDS = 1.0
"""Time between two looks at what is asked of a run, and between two status.json."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """Where a trainer runs. Host(board=MemoryHandle(...), owner=Holder(...), cluster=None)"""

    board: MemoryHandle
    owner: Holder
    """The process that is there for as long as the run, and has its folder."""
    cluster: str | None = None
    """Address of the Ray cluster that its trainer was placed on; None = a trainer on a cluster joins it itself."""


class Outside:
    """What is done once a second for those who look at the run from outside."""

    def __init__(self, folder: RunFolder, search: SearchConfig, board: Board) -> None:
        self._folder = folder
        self._config_before = _state_of(folder.config)
        self._board = board
        self._control = Control(folder.control)
        self._asked: int | None = None
        """Number of searchers that was asked for last."""
        self._status: StatusWriter | None = None
        self._looked, self._replaced = 0.0, 0.0
        self.exit_status: int | None = None
        """How the trainer's process has ended; None = it is this process, or has not."""

    @property
    def begun(self) -> bool:
        """Whether a trainer has begun the run since this was made: then config.yaml was written anew."""
        return _state_of(self._folder.config) not in (None, self._config_before)

    def look(self) -> None:
        """Write the status, and tell the trainer what is asked of it, if that is due."""
        # At once where a searcher is replaced, which may take seconds: its end must not be seen only then.
        if self._board.replaced == self._replaced and time.monotonic() < self._looked + OUTSIDE_SECONDS:
            return
        self._looked, self._replaced = time.monotonic(), self._board.replaced
        if not self.begun:
            return
        if self._status is None:
            self._status = StatusWriter(self._folder, self._board)
        self._status.write()
        asked = self._control.searchers()
        if asked is not None and asked != self._asked:
            self._asked = asked
            self._board.supervisor["searchers_wanted"] = asked

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
            replica.release()
        folder.release()


def _supervise(
    config: Config,
    folder: RunFolder,
    replica: RunFolder | None,
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
    here = folder if replica is None else replica
    outside = Outside(here, config.search, board)

    def trainer_arguments(cluster: str | None) -> dict[str, Any]:
        begun = replica is None and outside.begun  # otherwise the trainer's node knows
        # The first trainer goes back to the checkpoint that was named. Once it has, the next goes on from the newest.
        came_back = isinstance(resume, Path) and begun and not given_up & later_checkpoints(folder, resume)
        return {
            "config": config,
            "resume": came_back or resume or begun,
            "accept_lost_replay": accept_lost_replay and not outside.begun,  # of what was lost before
            "host": Host(board=board.memory.handle(), owner=owner, cluster=cluster),
        }

    with trainers(config, board, replica, owner) as (start, cluster):
        supervisor = Supervisor(
            config.runtime,
            board,
            logs=folder.logs,
            start_trainer=lambda: start(target, trainer_arguments(cluster)),
            newest_checkpoint=partial(newest_step, here),
            look_outside=outside.look,
        )
        try:
            with _signals(supervisor), above_the_table(board):
                outside.exit_status = supervisor.run()
                return outside.exit_status
        finally:
            supervisor.close()
            outside.close()
            board.memory.close()


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


def open_replica(config: Config, *, resume: bool) -> RunFolder | None:
    """The folder of the second copy of a run, on this node, laid out like the run folder, which is on the trainer's node:
    what the run tells of itself is here too. Empty where the run is new; None without replay.durability=node."""
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
def hosted(config: Config, folder: RunFolder) -> Iterator[Host]:
    """A host for a trainer in this process, with a thread that looks after its status."""
    board, ended = Board.create(), threading.Event()
    outside = Outside(folder, config.search, board)

    def run() -> None:
        try:
            while not ended.wait(LOOK_SECONDS):
                outside.look()
        except Exception:
            logger.exception("the status of the run is not written any more")

    thread = threading.Thread(target=run, daemon=True, name="outside")
    thread.start()
    try:
        yield Host(board=board.memory.handle(), owner=Holder.of_this_process())
    except Exception as error:
        tell_failure(folder, error)  # before the status says how the run has ended
        raise
    finally:
        ended.set()
        thread.join()
        outside.close()
        board.memory.close()


@contextmanager
def trainers(
    config: Config, board: Board, replica: RunFolder | None, owner: Holder
) -> Iterator[tuple[StartTrainer, str | None]]:
    """What starts the trainer of a run: as a process of this machine or, under runtime.kind=ray, as an actor of a cluster,
    with the cluster's address."""
    if config.runtime.kind == "local" or config.takes_turns:
        yield start_local_trainer, None
        return
    from tba.runtime.cluster.connect import cluster

    with cluster(config.runtime) as address:
        from tba.runtime.cluster.roles import ClusterTrainers

        yield ClusterTrainers(config, board, replica, owner).start, address


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
