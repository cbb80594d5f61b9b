"""Roles in a moment: forks of a process that has imported torch and the package.

    process = ForkServer.start_role("searcher-0", link=7, descriptors={1: 1, 2: 2}, environment=...)
    process.poll(), process.wait(5.0), process.kill()

Importing torch and transformers takes 4 to 15 s of a core; a fork takes some milliseconds and shares the memory of what was
imported. The server runs no threads, so a fork of it is a process as good as new. A role gets the caller's environment,
working folder and file descriptors (under the caller's numbers) with its request. The server never touches a GPU, which
does not survive a fork: a role that uses one sets it up for itself.

    caller -> server   the request, then its descriptors as SCM_RIGHTS, of which the first is a pipe
    server -> caller   over that pipe: the process of the role, and its exit status when it has ended

The server ends when the caller's end of the socket closes, and its forks with it, however the caller ended.

A role that will start roles itself, such as a trainer, gets a server of its own: a fork of this one, made before the role
begins, whose socket the role finds by a variable of its environment (OWN_SERVER). A program that the role becomes by exec
finds it there too.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import logging
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
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, NoReturn

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
LOOK_SECONDS = 0.05
"""Longest time between two looks at a role whose end is waited for."""


def module_command(module: str, *arguments: str) -> list[str]:
    """Command that runs a module of the package. `python -m` would look for modules in the working folder first, where a
    user's json.py or types.py stands for Python's own."""
    root = str(Path(__file__).resolve().parents[2])
    code = f"import sys; sys.path[:] = [*filter(None, sys.path), {root!r}]; import runpy; "
    code += "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
    return [sys.executable, "-c", code, module, *arguments]


# The server


def serve(caller: socket.socket) -> None:
    """The server: fork a role for each request, tell of each one that ends, until the caller is gone."""
    requests = Connection(os.dup(caller.fileno()), writable=False)
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
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with running.pop(pid) as told, suppress(BrokenPipeError):  # nobody wants to know
                    told.send(os.waitstatus_to_exitcode(status))
        if caller.fileno() not in ready:
            continue
        try:
            request = requests.recv()
            _, descriptors, _, _ = socket.recv_fds(caller, 1, MAX_DESCRIPTORS)
        except (EOFError, OSError):
            return
        forked = os.fork()
        if forked == 0:
            _become_role(request, descriptors[1:])
        running[forked] = Connection(descriptors[0], readable=False)
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        with suppress(BrokenPipeError):
            running[forked].send(forked)


def _become_role(request: Mapping[str, Any], descriptors: list[int]) -> NoReturn:
    """In the fork: take the caller's descriptors, environment and folder, and run the role to its end."""
    status = 1
    try:
        die_with_parent()
        show_as(request["name"])
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Descriptors are parked above all that are open or wanted while they are given their numbers.
        spare = max(*map(int, os.listdir("/proc/self/fd")), *request["numbers"]) + 1
        parked = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, spare) for descriptor in descriptors]
        # Everything of the server's goes: a role that held its socket would keep it open for ever.
        os.closerange(3, spare)
        for held, number in zip(parked, request["numbers"]):
            os.dup2(held, number)
            os.close(held)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        if request["starts_roles"]:
            _fork_own_server(below=spare)
        # What torch read in the environment that the server was started with is not what this role was given.
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(int(request["environment"]["OMP_NUM_THREADS"]))
        status = run_role(request["link"])
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BaseException:
        traceback.print_exc()  # os._exit below would hide it
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


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
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (status := self._look(min(LOOK_SECONDS, max(0.0, deadline - time.monotonic())))) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"role {self.pid}", timeout)
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
            elif self._status is None:
                self._status = _status_of_zombie(self.pid)  # where its server hangs
            return self._status


class ServerGone(RuntimeError):
    """The server has ended, or hangs."""


class ForkServer:
    """A server, as its caller sees it. One serves all runs of a process."""

    _shared: ClassVar[ForkServer | None] = None
    _settings: ClassVar[tuple[Mapping[str, str], tuple[str, ...]]] = ({}, ())
    """Environment and imports of the next server."""
    _shared_lock = threading.Lock()

    def __init__(self, connection: socket.socket, process: psutil.Process) -> None:
        self._socket = connection
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", START_SECONDS, 0))
        self._requests = Connection(os.dup(connection.fileno()), readable=False)
        self._process = process
        self._lock = threading.Lock()
        self._seconds = IMPORT_SECONDS
        """Time for an answer."""
        atexit.register(self.close)

    @classmethod
    def prepare(cls, environment: Mapping[str, str], preload: Sequence[str]) -> None:
        """Roles will be started soon: start the server, unless it is there, with this environment. `preload` names modules
        that its roles will need. The imports run while the caller goes on."""
        with cls._shared_lock:
            cls._settings = (environment, tuple(preload))
        cls._living()

    @classmethod
    def _living(cls) -> ForkServer:
        """The server of this process: the one that was made for it before it began, or else a new one."""
        with cls._shared_lock:
            if cls._shared is None or not cls._shared.lives:
                own = os.environ.pop(OWN_SERVER, None)
                cls._shared = cls._begin(*cls._settings) if own is None else cls._own(*map(int, own.split()))
            return cls._shared

    @classmethod
    def _begin(cls, environment: Mapping[str, str], preload: Sequence[str]) -> ForkServer:
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
    def _own(cls, descriptor: int, pid: int) -> ForkServer:
        connection = socket.socket(fileno=descriptor)
        connection.set_inheritable(False)
        return cls(connection, psutil.Process(pid))

    @classmethod
    def start_role(cls, name: str, **request: Any) -> ForkedProcess:
        """Fork a role that talks over descriptor `link`. `descriptors` are those it has besides: the caller's, by the
        numbers that the role has for them. One that `starts_roles` gets a server of its own. A server that has died or
        hangs is replaced, and its roles end with it."""
        server = cls._living()
        try:
            return server._start(name, **request)
        except ServerGone as error:
            server.close()
            logger.warning("%s Another one takes its place.", error)
        return cls._living()._start(name, **request)

    def _start(
        self,
        name: str,
        *,
        link: int,
        descriptors: Mapping[int, int],
        environment: Mapping[str, str],
        starts_roles: bool = False,
    ) -> ForkedProcess:
        """Fork a role; returns as soon as it runs."""
        request = {"name": name, "link": link, "numbers": [link, *descriptors], "starts_roles": starts_roles}
        request |= {"environment": dict(environment), "folder": os.getcwd()}
        told, telling = Pipe(duplex=False)
        how = f"has not answered for {self._seconds} s"
        try:
            with self._lock:
                self._requests.send(request)
                socket.send_fds(self._socket, [b" "], [telling.fileno(), link, *descriptors.values()])
            telling.close()  # or the server's end would not be seen here
            if told.poll(self._seconds):
                process, self._seconds = ForkedProcess(told.recv(), told), START_SECONDS
                return process
        except (EOFError, OSError):
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
        self._requests.close()
        self._socket.close()
        with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
            self._process.kill()
            self._process.wait(KILL_SECONDS)


def _status_of_zombie(pid: int) -> int | None:
    """Exit status of a process that has ended and that its parent has not asked about yet; None = it runs, or its parent
    knows."""
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
    # The functions of the imported module: a role would import it a second time.
    importlib.import_module("tba.runtime.fork_server").main()
