"""Role processes in a moment: a server process imports torch and the package once, and each role is a fork of it.

Importing torch and transformers takes 4 to 15 s of a core; a fork takes some milliseconds and shares the memory of what was
imported. The server runs no threads, so a fork of it is a process as good as new. A role gets the caller's environment,
working folder and file descriptors (under the caller's numbers) with its request. The server never touches a GPU, which
does not survive a fork: a role that uses one sets it up for itself.

    caller -> server   Start, with the descriptors as SCM_RIGHTS; Kill
    server -> caller   Started, Ended

The server ends when the caller's end of the socket closes, and its forks with it, however the caller ended.

A role that will start roles itself, such as a trainer with ranks, gets a server of its own: a fork of this one, made before
the role begins, whose socket the role finds by a variable of its environment (OWN_SERVER). A program that the role becomes
by exec finds it there too.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
FIRST_SPARE_DESCRIPTOR = 512
"""Descriptors are parked from here on while a fork gives them their numbers."""
MAX_DESCRIPTORS = 64
INTERRUPTED = 130
"""Exit status after Ctrl-C."""
OWN_SERVER = "TBA_OWN_FORK_SERVER"
"""Variable of the environment of a role that has a server of its own: descriptor of its socket, number of its process and
the number of threads that its forks have, as in `5 4711 1`."""
PRELOADED = ("torch", "transformers", "transformers.models.auto.modeling_auto")
"""What every role needs; those who start roles name what theirs need besides."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Caller to server: fork a role that talks over descriptor `link`."""

    name: str
    """What `ps` and `top` show (15 letters of it)."""
    link: int
    descriptors: tuple[int, ...]
    """The numbers that the descriptors which come with this message have in the caller, and get in the role."""
    log: str | None
    """None = standard output and error are among the descriptors."""
    environment: Mapping[str, str]
    folder: str
    threads: int
    """The number that this server's forks have."""
    starts_roles: bool
    """Whether the role gets a server of its own."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """Caller to server: kill this role, unless it has ended: the server knows which process numbers are still its own."""

    pid: int


@dataclass(frozen=True, kw_only=True)
class Started:
    """Server to caller, one for each Start, in their order."""

    pid: int


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Server to caller: a role has ended, with its exit status or minus the number of the signal that killed it."""

    pid: int
    status: int


class ForkedProcess:
    """A role, with the methods of subprocess.Popen that are needed of it."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self._server = server

    def poll(self) -> int | None:
        return self._server.status(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        return self._server.wait(self.pid, timeout)

    def kill(self) -> None:
        self._server.kill(self.pid)


class ServerProcess(Protocol):
    """What its caller needs of a server's process."""

    def kill(self) -> None: ...

    def wait(self) -> int: ...


class OwnServerProcess:
    """A server that is a child of this process, but was not started by it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> int:
        with suppress(ChildProcessError):  # somebody has waited for it already
            return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return 0


class ServerGone(RuntimeError):
    """The server has ended."""


class ForkServer:
    """The caller's end. One server serves all runs of a process that pin the same number of threads."""

    _shared: ClassVar[dict[int, ForkServer]] = {}
    _preloads: ClassVar[dict[int, tuple[str, ...]]] = {}
    """What a server that takes the place of a dead one imports."""
    _shared_lock = threading.Lock()

    def __init__(self, connection: socket.socket, process: ServerProcess, threads: int) -> None:
        self._socket = connection
        self._process = process
        self._threads = threads
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._started: list[int] = []
        self._statuses: dict[int, int] = {}
        self._alive = True
        threading.Thread(target=self._read, daemon=True, name="fork-server-reader").start()

    @classmethod
    def begin(cls, threads: int, environment: Mapping[str, str], preload: Sequence[str]) -> ForkServer:
        """A new server, in a process that imports what its roles need."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        process = subprocess.Popen(
            [sys.executable, "-m", "tba.runtime.fork_server", str(theirs.fileno()), *PRELOADED, *preload],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env=dict(environment),
            start_new_session=True,
        )
        theirs.close()
        return cls(ours, process, threads)

    @classmethod
    def own(cls, threads: int) -> ForkServer | None:
        """The server that was made for this process before it began; None = there is none, or with other threads."""
        descriptor, pid, its_threads = map(int, os.environ.get(OWN_SERVER, "0 0 0").split())
        if its_threads != threads:
            return None
        del os.environ[OWN_SERVER]
        connection = socket.socket(fileno=descriptor)
        connection.set_inheritable(False)
        return cls(connection, OwnServerProcess(pid), threads)

    @classmethod
    def shared(cls, threads: int, environment: Mapping[str, str], preload: Sequence[str] = ()) -> ForkServer:
        """The server for this number of threads, started if it is not there. `preload` names modules that its roles will
        need; whoever knows that roles will be started asks for it early, and the imports run meanwhile."""
        with cls._shared_lock:
            server = cls._shared.get(threads)
            preload = cls._preloads[threads] = tuple(preload) or cls._preloads.get(threads, ())
            if server is None or not server._alive:
                server = cls._shared[threads] = cls.own(threads) or cls.begin(threads, environment, preload)
                atexit.register(server.close)
            return server

    @classmethod
    def start_role(
        cls,
        threads: int,
        name: str,
        *,
        link: int,
        descriptors: Sequence[int],
        log: Path | None,
        environment: Mapping[str, str],
        starts_roles: bool = False,
    ) -> ForkedProcess:
        """Fork a role from the shared server; from a new one if that has just died."""
        for attempt in range(2):
            server = cls.shared(threads, environment)
            try:
                return server.start(
                    name,
                    link=link,
                    descriptors=descriptors,
                    log=log,
                    environment=environment,
                    starts_roles=starts_roles,
                )
            except (OSError, ServerGone):
                server._lost()
                if attempt:
                    raise
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
        numbers = (link, *descriptors)
        message = pickle.dumps(
            Start(
                name=name,
                link=link,
                descriptors=numbers,
                log=None if log is None else str(log),
                environment=dict(environment),
                folder=os.getcwd(),
                threads=self._threads,
                starts_roles=starts_roles,
            )
        )
        with self._lock:
            seen = len(self._started)
            socket.send_fds(self._socket, [struct.pack("<I", len(message))], list(numbers))
            self._socket.sendall(message)
            with self._changed:
                self._changed.wait_for(lambda: len(self._started) > seen or not self._alive)
            if len(self._started) == seen:
                raise ServerGone("the process that roles are forked from has ended; its last words are on stderr.")
            return ForkedProcess(self, self._started[seen])

    def status(self, pid: int) -> int | None:
        """Exit status of a role, None while it runs."""
        with self._changed:
            return self._statuses.get(pid, None if self._alive else -signal.SIGKILL)

    def wait(self, pid: int, timeout: float | None) -> int:
        with self._changed:
            if not self._changed.wait_for(lambda: pid in self._statuses or not self._alive, timeout):
                raise subprocess.TimeoutExpired(f"role {pid}", timeout or 0.0)
        status = self.status(pid)
        assert status is not None
        return status

    def kill(self, pid: int) -> None:
        if self.status(pid) is None:
            self._send(Kill(pid=pid))

    def close(self) -> None:
        """End the server and, with it, every role that still runs."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _send(self, message: Any) -> None:
        data = pickle.dumps(message)
        try:
            with self._lock:
                self._socket.sendall(struct.pack("<I", len(data)) + data)
        except OSError:
            self._lost()  # its roles die with it

    def _read(self) -> None:
        while (message := _receive(self._socket)) is not None:
            with self._changed:
                if isinstance(message, Started):
                    self._statuses.pop(message.pid, None)  # an earlier role may have had this number
                    self._started.append(message.pid)
                else:
                    self._statuses[message.pid] = message.status
                self._changed.notify_all()
        self._lost()

    def _lost(self) -> None:
        with self._changed:
            self._alive = False
            self._changed.notify_all()


def _receive(connection: socket.socket) -> Any | None:
    """The next message of a socket; None at its end."""
    header = _read_exactly(connection, 4)
    data = None if header is None else _read_exactly(connection, struct.unpack("<I", header)[0])
    return None if data is None else pickle.loads(data)


def _read_exactly(connection: socket.socket, count: int) -> bytes | None:
    data = b""
    while len(data) < count:
        try:
            part = connection.recv(count - len(data))
        except OSError:
            return None
        if not part:
            return None
        data += part
    return data


def serve(connection: socket.socket) -> None:
    """The server: fork a role for each Start, tell of each one that ends, until the caller is gone."""
    wake_up, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: set[int] = set()
    while True:
        ready, _, _ = select.select([connection.fileno(), wake_up], [], [])
        if wake_up in ready:
            os.read(wake_up, 4096)
        for pid, status in _ended(running):
            running.discard(pid)
            _reply(connection, Ended(pid=pid, status=status))
        if connection.fileno() not in ready:
            continue
        header, descriptors, _, _ = socket.recv_fds(connection, 4, MAX_DESCRIPTORS)
        data = _read_exactly(connection, struct.unpack("<I", header)[0]) if len(header) == 4 else None
        if data is None:
            return
        message = pickle.loads(data)
        if isinstance(message, Kill):
            if message.pid in running:
                os.kill(message.pid, signal.SIGKILL)
            continue
        pid = os.fork()
        if pid == 0:
            _become_role(message, descriptors)
        running.add(pid)
        for descriptor in descriptors:
            os.close(descriptor)
        _reply(connection, Started(pid=pid))


def _ended(running: set[int]) -> list[tuple[int, int]]:
    found = []
    for pid in running:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            found.append((pid, os.waitstatus_to_exitcode(status)))
    return found


def _reply(connection: socket.socket, message: Any) -> None:
    data = pickle.dumps(message)
    connection.sendall(struct.pack("<I", len(data)) + data)


def _become_role(start: Start, descriptors: list[int]) -> NoReturn:
    """In the fork: take the caller's descriptors, environment and folder, and run the role to its end."""
    status = 1
    try:
        die_with_parent()
        show_as(start.name)
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        spare = max(FIRST_SPARE_DESCRIPTOR, *start.descriptors) + 1
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
            _fork_own_server(start.threads, below=spare)
        from tba.runtime.processes import run_role

        status = run_role(start.link)
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BaseException:
        traceback.print_exc()  # os._exit below would hide it
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _fork_own_server(threads: int, *, below: int) -> None:
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
    os.environ[OWN_SERVER] = f"{ours.detach()} {pid} {threads}"


def die_with_parent() -> None:
    """Have Linux kill this process when its parent ends: a main thread stuck in C code lets no Python thread run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def show_as(name: str) -> None:
    """Have `ps` and `top` show this process under a name, 15 letters of it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


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
