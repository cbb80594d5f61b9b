"""A process for code that may hang or take all memory (a user's rewards), and the guard above it.

    searcher -- guard: python -m tba.tasks.rewards.worker FD
                  |-- worker, a fork of it: makes its service (imports the reward's file), answers over the socket FD
                        |-- whatever the service starts

The guard copies the worker's output to the log, of which the end is kept. When the worker ends, when the searcher asks or is
gone, the guard kills everything that the worker started. It is their subreaper: they become its children even where they
have a session of their own. Nothing here imports torch or pydantic: a killed worker is back in a moment.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO

import cloudpickle

from tba.runtime.links import Failed, Link, pickled
from tba.runtime.processes import popen, role_environment
from tba.tasks.outcomes import Outcome
from tba.tasks.rewards.functions import NamedRewards, RewardSet
from tba.tasks.rewards.load_function import PASS_ON, WITHHELD, describe

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""Linux's numbers of two prctl options: a signal for the parent's death, and to be the parent of orphans below."""
LOG_BYTES = 1_000_000
"""Size of a log beyond which its beginning is dropped; half of it stays."""
STOP_SECONDS = 5.0
"""Time for a guard to end what its worker has started, before it is killed itself."""
LINE_SECONDS = 0.5
"""Time for a worker that hangs to write at which line it is."""
SECRET = re.compile(
    r"(^|_)(TOKEN|KEYS?|AUTH|PAT)(_|$)|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|APIKEY|^(AWS|AZURE)_", re.IGNORECASE
)
"""Names of environment variables that a reward gets only where search.reward_environment names them."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """First word of a worker: its functions are loaded, the clock of its first call starts. Ready(per_sample=False)"""

    per_sample: bool
    """Whether samples may be scored one by one after a call that hung."""
    is_async: bool = False
    """Whether every reward is `async def`, so that a call waits instead of computing."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Answer of a worker: Scored(outcomes=[{"score": 1.0}, RewardFailed("...")], spent=False)"""

    outcomes: Sequence[Outcome]
    spent: bool
    """Whether the worker has no memory left and must be replaced."""


class JobService:
    """Base of services that do one job after another, by `__call__`. `greeting` is their worker's first word."""

    greeting: Any

    def __call__(self, *job: Any) -> Any:
        raise NotImplementedError

    def serve(self, connection: Connection) -> None:
        # A job may hold the main thread for ever: the reader's thread ends the process where the other end is gone.
        link = Link(connection, on_close=lambda: os._exit(3))
        link.send(self.greeting)
        while (job := link.receive(timeout_seconds=None)) is not None:
            link.send(self(*job))


class RewardService(JobService):
    """Calls a user's reward functions for the samples of one prompt."""

    def __init__(self, rewards: NamedRewards) -> None:
        self._rewards = RewardSet(rewards)
        self.greeting = Ready(per_sample=self._rewards.per_sample, is_async=self._rewards.is_async)

    def __call__(self, *job: Any) -> Scored:
        outcomes = self._rewards.score(*job)
        return Scored(outcomes=outcomes, spent=self._rewards.out_of_memory)


class WorkerProcess:
    """A worker and its guard, seen from the process that has work for it. It ends when this process is gone."""

    def __init__(
        self, make: Callable[[], Any], *, log: Path, passed_on: Collection[str] = (), memory_bytes: int | None = None
    ) -> None:
        """`make` is called in the worker. It gives the service, whose `serve(connection)` answers until the end.
        `passed_on` are the variables with secrets that it gets; `memory_bytes` None = half of the memory there is."""
        # The worker inherits `theirs` through the guard; sys.path and the service travel over it first.
        ours, theirs = Pipe()
        environment = role_environment(threads=1)
        withheld = sorted(name for name in environment if SECRET.search(name) and name not in passed_on)
        environment = {name: value for name, value in environment.items() if name not in withheld}
        # `describe` in load_function.py reads it, to name a withheld variable in the reward's own error.
        environment[WITHHELD] = ",".join(withheld)
        with open_log(log) as stream:
            if withheld and not os.fstat(stream.fileno()).st_size:
                stream.write(f"rewards do not get {', '.join(withheld)}; {PASS_ON} passes one on.\n".encode())
                stream.flush()
            self._process = popen("tba.tasks.rewards.worker", theirs.fileno(), (), stream, environment)
        # Held open here, it would keep `ours` from seeing the worker's end.
        theirs.close()
        # Two messages: sys.path must be in place before cloudpickle imports modules by name.
        with suppress(BrokenPipeError, ConnectionResetError):  # it died at once: seen by the link
            ours.send_bytes(json.dumps(sys.path).encode())
            ours.send_bytes(cloudpickle.dumps((make, memory_bytes or memory_limit())))
        self.link = Link(ours, on_close=lambda: None)

    @property
    def end(self) -> str:
        """How it ended, as a message. The guard ends a moment after the worker, whose status it has."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        status = self._process.poll()
        if status is not None and status > 128:
            return f"killed by signal {status - 128}"
        return f"exit status {status}"

    def log_line(self) -> None:
        """Have the log say at which line the worker is."""
        self._process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """End the worker and everything that it has started."""
        # SIGTERM goes to the guard, which kills all that the worker has started and ends itself.
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            # A guard that is killed leaves orphans in other sessions behind, so this is the last resort.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def open_log(path: Path) -> BinaryIO:
    """The log to append to; nothing is kept where it cannot be opened, because rewards are worth more than their log."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a+b")
    except OSError:
        return open(os.devnull, "a+b")


def memory_limit() -> int:
    """Bytes that a worker may use: half of the machine's or the container's memory."""
    # In a container SC_PHYS_PAGES is the whole machine's memory, not the container's.
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no cgroup, or `max`
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total // 2


def run_worker(descriptor: int) -> int:
    """Do the jobs that arrive until the other end is gone; returns the exit status."""
    connection = Connection(descriptor)
    search_path, payload = connection.recv_bytes(), connection.recv_bytes()
    try:
        sys.path[:] = json.loads(search_path)
        make, limit = cloudpickle.loads(payload)
        # Private writable memory: a limit of the address space would count libraries and what CUDA only reserves.
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        service = make()
    except (Exception, SystemExit) as error:  # a user's file: the searcher gets the error and stops the run
        traceback.print_exc()
        # ValueErrors are the package's own messages, which name the file already.
        failed = Failed(error=str(error) if isinstance(error, ValueError) else describe(error))
        connection.send_bytes(pickled(failed))
        return 1
    service.serve(connection)
    return 0


def guard(worker: int, output: int, wake: int) -> int:
    """Copy the worker's output to the log until it ends or this process is asked to end, then kill what it has started.
    Returns the worker's exit status, or 128 + the signal that ended it."""
    # One loop for output and signals: the wake-up pipe carries the numbers of the signals that came.
    watched, status = [output, wake], 0
    while True:
        ready, _, _ = select.select(watched, [], [])
        if output in ready and not copy_output(output):
            # An output at its end is always readable, and select would spin.
            watched.remove(output)
        if wake in ready:
            asked = os.read(wake, 64)
            if signal.SIGUSR1 in asked:
                with suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGUSR1)
                # What is asked for next may be the end of the worker, in the middle of what it writes now.
                deadline = time.monotonic() + LINE_SECONDS
                while (left := deadline - time.monotonic()) > 0 and select.select([output], [], [], left)[0]:
                    if not copy_output(output):
                        break
            if signal.SIGTERM in asked:
                break
            # One SIGCHLD may stand for the ends of several children, so all are reaped each time.
            ended = reap()
            if worker in ended:
                status = ended[worker]
                break
    # First the processes, then the rest of the output: one that lives would hold the pipe open.
    end_children()
    # A process that could not be killed must not keep the guard reading for ever.
    os.set_blocking(output, False)
    while output in watched and copy_output(output):
        pass
    return status


def copy_output(output: int) -> bool:
    """Append what the worker has printed to the log, whose beginning is dropped when it is too long; False at the end."""
    try:
        text = os.read(output, 65_536)
    except BlockingIOError:
        return False
    with suppress(OSError):  # a full disk: the log is lost, the rewards are not
        # Descriptor 1 is the log, opened for reading and appending by `open_log` (a+b).
        size = os.fstat(1).st_size
        if size + len(text) > LOG_BYTES:
            kept = os.pread(1, LOG_BYTES // 2, max(0, size - LOG_BYTES // 2))
            os.ftruncate(1, 0)
            os.write(1, f"(the beginning of this log, {size - len(kept)} bytes, was dropped)\n".encode() + kept)
        os.write(1, text)
    return bool(text)


def reap() -> dict[int, int]:
    """Children that have ended, with their exit status, or 128 + the signal that ended them."""
    ended = {}
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(found[1])
            # A negative code is minus the signal, so this is 128 + the signal, as shells write it.
            ended[found[0]] = code if code >= 0 else 128 - code
    return ended


def end_children() -> None:
    """Kill all processes below this one. Orphans become children of this subreaper, so that those of the next round are
    found where one had children of its own."""
    if sys.platform != "linux":
        os.killpg(0, signal.SIGKILL)
    deadline = time.monotonic() + STOP_SECONDS / 2
    while time.monotonic() < deadline:
        # Children only: grandchildren become children when their parent dies, and the next round finds them.
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError, IndexError, ValueError):
                # The command's name stands in brackets and may hold anything; the state and the parent follow it.
                parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
                if parent == os.getpid():
                    os.kill(int(name), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def main() -> int:
    """Run as the guard; the worker is forked before any thread exists."""
    # `popen` in runtime/processes.py passes the descriptor's number as the only argument.
    descriptor, parent = int(sys.argv[1]), os.getpid()
    reading, writing = os.pipe()
    wake, waken = os.pipe()
    # set_wakeup_fd demands a pipe that does not block: a signal handler must not wait for a reader.
    os.set_blocking(waken, False)
    signal.set_wakeup_fd(waken)
    # A handler of their own: ignored ones would not be written to the pipe that the guard waits for.
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # before the fork: what the worker starts may be orphaned at once
    worker = os.fork()
    if worker == 0:
        # The child must not write its own signals into the guard's pipe, nor ignore those that end it.
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        # Set after the fork, because a fork clears it.
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the guard died before the signal of its death was asked for
            return 3
        # The worker prints into the guard's pipe; the log itself is written by the guard alone.
        for stream in (1, 2):
            os.dup2(writing, stream)
        for unused in (reading, writing, wake, waken):
            os.close(unused)
        # faulthandler dumps from C, also while the reward holds the interpreter.
        faulthandler.register(signal.SIGUSR1, file=2)
        return run_worker(descriptor)
    # The guard must not hold the worker's ends: the searcher would not see the worker die, nor the guard EOF.
    os.close(descriptor)
    os.close(writing)
    # SIGTERM and not SIGKILL: the guard has to end the worker's processes when the searcher is gone.
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    return guard(worker, reading, wake)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    # Imported once more under its own name: what is sent must not be of a module `__main__`, which the searcher has not.
    # Pickle names classes by module: Ready and Scored of `__main__` could not be read on the other side.
    from tba.tasks.rewards import worker

    code = worker.main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
