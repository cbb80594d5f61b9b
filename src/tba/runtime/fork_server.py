"""Roles in a moment: forks of a process that has imported torch and the package.

    process = ForkServer.start_role("searcher-0", link=7, descriptors=(), log=Path("searcher-0.log"), environment=...)
    process.poll(), process.wait(5.0), process.kill()

Importing torch and transformers takes 4 to 15 s of a core; a fork takes some milliseconds and shares the memory of what was
imported. The server runs no threads, so a fork of it is a process as good as new. A role gets the caller's environment,
working folder and file descriptors (under the caller's numbers) with its request. The server never touches a GPU, which
does not survive a fork: a role that uses one sets it up for itself.

    caller -> server   Start, with the descriptors as SCM_RIGHTS, and one more, to which the role's exit status goes
    server -> caller   the process of the role

The server ends when the caller's end of the socket closes, and its forks with it,
however the caller ended.

A role that will start roles itself, such as a trainer with ranks, gets a server of its own: a fork of this one, made before
the role begins, whose socket the role finds by a variable of its environment (OWN_SERVER). A program that the role becomes
by exec finds it there too.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import logging
import math
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ClassVar, NoReturn

import psutil

from tba.runtime.role_process import INTERRUPTED, die_with_parent, run_role, show_as

logger = logging.getLogger("tba")

MAX_DESCRIPTORS = 64
OWN_SERVER = "TBA_OWN_FORK_SERVER"
"""Variable of the environment of a role that has a server of its own: descriptor of its socket and number of its process,
as in `5 4711`."""

PRELOADED = ("torch", "transformers", "transformers.models.auto.modeling_auto")
"""What every role needs; those who start roles name what theirs need besides."""
IMPORT_SECONDS = 300
"""Time for a new server to import what roles need and to fork the first one."""
START_SECONDS = 15
"""Time for a server to fork a role later on, which takes milliseconds."""
KILL_SECONDS = 10
"""Time for a server to end that was killed."""
TELL_SECONDS = 1.0
"""Time for a server to tell how a role has ended, before the system is asked."""
LOOK_SECONDS = 0.05
"""Longest time between two looks at a role whose end is waited for."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Caller to server: fork a role that talks over descriptor `link`. A byte with the descriptors follows."""

    name: str
    """What `ps` and `top` show (15 letters of it)."""
    link: int
    descriptors: tuple[int, ...]
    """The numbers that the descriptors which come with this message have in the caller, and get in the role."""
    log: str | None
    """None = standard output and error are among the descriptors."""
    environment: Mapping[str, str]
    folder: str
    starts_roles: bool
    """Whether the role gets a server of its own."""
    until: float
    """Time (time.monotonic) after which nobody wants the role any more: another server has started it."""


def module_command(module: str, *arguments: str) -> list[str]:
    """Command that runs a module of the package. `python -m` would look for modules in the working folder first, where a
    user's json.py or types.py stands for Python's own."""
    root = str(Path(__file__).resolve().parents[2])
    code = f"import sys; sys.path[:] = [*filter(None, sys.path), {root!r}]; import runpy; "
    code += "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
    return [sys.executable, "-c", code, module, *arguments]


# The server


def serve(caller: socket.socket) -> None:
    """The server: fork a role for each Start, tell of each one that ends, until the caller is gone."""
    connection = Connection(os.dup(caller.fileno()))
    wake_up, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, Connection] = {}
    """By process: where its exit status goes."""
    while True:
        ready, _, _ = select.select([caller.fileno(), wake_up], [], [])
        if wake_up in ready:
            os.read(wake_up, 4096)
        _tell_ended(running)
        if caller.fileno() not in ready:
            continue
        try:
            message: Start = connection.recv()
            _, (status, *descriptors), _, _ = socket.recv_fds(caller, 1, MAX_DESCRIPTORS)
        except (EOFError, OSError, ValueError):
            return
        forked = os.fork() if time.monotonic() < message.until else None
        if forked == 0:
            _become_role(message, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        if forked is None:
            os.close(status)
        else:
            running[forked] = Connection(status, readable=False)
            connection.send(forked)


def _tell_ended(running: dict[int, Connection]) -> None:
    for pid in list(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with running.pop(pid) as told, suppress(BrokenPipeError):  # nobody wants to know
                told.send(os.waitstatus_to_exitcode(status))


def _become_role(start: Start, descriptors: list[int]) -> NoReturn:
    """In the fork: take the caller's descriptors, environment and folder, and run the role to its end."""
    status = 1
    try:
        die_with_parent()
        show_as(start.name)
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Descriptors are parked above all that are open or wanted while they are given their numbers.
        spare = max(*map(int, os.listdir("/proc/self/fd")), *start.descriptors) + 1
        parked = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, spare) for descriptor in descriptors]
        os.chdir(start.folder)  # which need not be the server's: the log's path may be relative
        if start.log is not None:
            log = os.open(start.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
        # Everything of the server's goes: a role that held its socket would keep it open for ever.
        os.closerange(3, spare)
        for held, number in zip(parked, start.descriptors):
            os.dup2(held, number)
            os.close(held)
        os.environ.clear()
        os.environ.update(start.environment)
        if start.starts_roles:
            _fork_own_server(below=spare)
        _use_threads(int(start.environment["OMP_NUM_THREADS"]))
        status = run_role(start.link)
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BaseException:
        traceback.print_exc()  # os._exit below would hide it
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _use_threads(count: int) -> None:
    """What torch read in the environment that the server was started with is not what this role was given."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(count)


def _fork_own_server(*, below: int) -> None:
    """In the fork, which has no thread yet: make it a server of its own. Its open descriptors have numbers `below`."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    pid = os.fork()
    if pid == 0:
        os.dup2(theirs.fileno(), 3)
        os.closerange(4, below)
        die_with_parent()
        show_as("tba-forks")
        os.setsid()
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 1)
        serve(socket.socket(fileno=3))
        os._exit(0)
    theirs.close()
    ours.set_inheritable(True)
    os.environ[OWN_SERVER] = f"{ours.detach()} {pid}"


# Its caller


class ForkedProcess:
    """A role, with the methods of subprocess.Popen that are needed of it."""

    def __init__(self, pid: int, told: Connection) -> None:
        """`told` brings the exit status, and ends with the server."""
        self.pid = pid
        self._told = told
        self._status: int | None = None
        self._ended = math.inf
        """When the role was first seen to have ended, of which the server has not told yet."""
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while (status := self._look(min(LOOK_SECONDS, max(0.0, deadline - time.monotonic())))) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"role {self.pid}", timeout or 0.0)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _look(self, seconds: float) -> int | None:
        """Exit status, None while it runs; waits for it no longer than the time."""
        with self._lock:
            if self._status is None and self._told.poll(seconds):
                try:
                    self._status = self._told.recv()
                except EOFError:  # its server is gone, and the role with it
                    self._status = -signal.SIGKILL
            elif self._status is None and (found := status_of_zombie(self.pid)) is not None:  # a server that hangs
                self._ended = min(self._ended, time.monotonic())
                self._status = found if time.monotonic() > self._ended + TELL_SECONDS else None
            return self._status


class ServerGone(RuntimeError):
    """The server has ended, or hangs."""


class ForkServer:
    """A server, as its caller sees it. One serves all runs of a process."""

    _shared: ClassVar[ForkServer | None] = None
    _preload: ClassVar[tuple[str, ...]] = ()
    """What a server that takes the place of a dead one imports."""
    _environment: ClassVar[Mapping[str, str]] = {}
    """And its environment."""
    _shared_lock = threading.Lock()

    def __init__(self, connection: socket.socket, process: psutil.Process) -> None:
        self._socket = connection
        self._connection = Connection(os.dup(connection.fileno()))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", START_SECONDS, 0))
        self._process = process
        self._lock = threading.Lock()
        self._has_started = False
        """Whether it has forked a role, so that its imports are done."""

    @classmethod
    def begin(cls, environment: Mapping[str, str], preload: Sequence[str]) -> ForkServer:
        """A new server, in a process that imports what its roles need."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        process = psutil.Popen(
            module_command("tba.runtime.fork_server", str(theirs.fileno()), *PRELOADED, *preload),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env=dict(environment),
            start_new_session=True,
        )
        theirs.close()
        return cls(ours, process)

    @classmethod
    def own(cls) -> ForkServer | None:
        """The server that was made for this process before it began; None = there is none."""
        found = os.environ.pop(OWN_SERVER, None)
        if found is None:
            return None
        descriptor, pid = map(int, found.split())
        connection = socket.socket(fileno=descriptor)
        connection.set_inheritable(False)
        return cls(connection, psutil.Process(pid))

    @classmethod
    def shared(cls, environment: Mapping[str, str] | None = None, preload: Sequence[str] = ()) -> ForkServer:
        """The server of this process, started if it is not there, with this environment or that of the one before.
        `preload` names modules that its roles will need; whoever knows that roles will be started asks for it early, and
        the imports run meanwhile."""
        with cls._shared_lock:
            server = cls._shared
            cls._preload = tuple(preload) or cls._preload
            cls._environment = environment or cls._environment
            if server is None or not server.lives:
                server = cls._shared = cls.own() or cls.begin(cls._environment, cls._preload)
                atexit.register(server.close)
            return server

    @classmethod
    def start_role(
        cls,
        name: str,
        *,
        link: int,
        descriptors: Sequence[int],
        log: Path | None,
        environment: Mapping[str, str],
        starts_roles: bool = False,
    ) -> ForkedProcess:
        """Fork a role from the shared server; from a new one if that has died or hangs. The roles of one that hangs go
        on: it is their parent until it is closed."""
        for attempt in range(2):
            server = cls.shared()
            try:
                return server.start(
                    name,
                    link=link,
                    descriptors=descriptors,
                    log=log,
                    environment=environment,
                    starts_roles=starts_roles,
                )
            except (OSError, ServerGone) as error:
                with cls._shared_lock:
                    if cls._shared is server:
                        cls._shared = None
                if attempt:
                    raise
                logger.warning("%s Another one takes its place.", error)
        raise AssertionError

    def start(
        self,
        name: str,
        *,
        link: int,
        descriptors: Sequence[int],
        log: Path | None,
        environment: Mapping[str, str],
        starts_roles: bool,
    ) -> ForkedProcess:
        """Fork a role; returns as soon as it runs."""
        numbers, seconds = (link, *descriptors), START_SECONDS if self._has_started else IMPORT_SECONDS
        message = Start(
            name=name,
            link=link,
            descriptors=numbers,
            log=None if log is None else str(log),
            environment=dict(environment),
            folder=os.getcwd(),
            starts_roles=starts_roles,
            until=time.monotonic() + seconds,
        )
        told, telling = Pipe(duplex=False)
        how = f"has not answered for {seconds} s"
        try:
            with self._lock:
                self._connection.send(message)
                socket.send_fds(self._socket, [b" "], [telling.fileno(), *numbers])
                # A second more: an answer that is given just in time must not be missed.
                if self._connection.poll(seconds + 1.0):
                    pid, self._has_started = self._connection.recv(), True
                    return ForkedProcess(pid, told)
        except (EOFError, ConnectionError):
            how = "has ended; its last lines are on stderr"
        finally:
            telling.close()
        raise ServerGone(f"the process that roles are forked from (process {self._process.pid}) {how}.")

    @property
    def lives(self) -> bool:
        try:
            return self._process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def close(self) -> None:
        """End the server and, with it, every role that still runs."""
        self._socket.close()
        with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
            self._process.kill()
            self._process.wait(KILL_SECONDS)


def status_of_zombie(pid: int) -> int | None:
    """Exit status of a process that has ended and that its parent has not asked about, because it hangs; None = it runs, or
    its parent knows."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return os.waitstatus_to_exitcode(int(fields[49])) if fields[0] == "Z" else None


def main() -> None:
    die_with_parent()
    show_as("tba-forks")
    connection = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # nothing of what is imported becomes garbage, and looking for it takes an eighth of the time
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.enable()
    gc.freeze()  # or the first collection in a role would copy every page of what was imported
    serve(connection)


if __name__ == "__main__":
    # Messages are of the classes of the imported module, not of this file run as a script.
    importlib.import_module("tba.runtime.fork_server").main()
