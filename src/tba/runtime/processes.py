"""Start a role in a process of its own, watch it, stop it. role_process.py has the child's side."""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Protocol

import cloudpickle
import psutil

from tba.runtime.deadlines import dump_stacks
from tba.runtime.links import Link
from tba.runtime.role_process import OWN_SERVER

logger = logging.getLogger("tba")

ROLE_MODULES = (
    *("torch", "transformers", "transformers.models.auto.modeling_auto"),
    *("tba.searcher.process", "tba.run.start"),
)
"""Modules that trainer and searchers need. The process that they are forked from imports them once."""
KILL_SECONDS = 10.0
IMPORT_SECONDS = 300
"""Time for a new server to import what roles need and to fork the first one."""
START_SECONDS = 15
"""Time for a server to fork a role later on, which takes milliseconds."""
CHECK_SECONDS = 0.05


class RoleDied(RuntimeError):
    """A process ended that should have gone on."""


class Role(Protocol):
    """A role as its starter sees it: a process of this machine, or an actor that stands for one of another machine."""

    name: str

    @property
    def link(self) -> Link: ...
    @property
    def log(self) -> Path | None: ...
    @property
    def pid(self) -> int: ...
    @property
    def alive(self) -> bool: ...
    @property
    def status(self) -> int | None: ...
    def wait(self, timeout_seconds: float) -> bool: ...
    def kill(self) -> None: ...
    def signal(self, number: int) -> None: ...
    def show_stacks(self) -> None: ...


class RoleProcess:
    """A child process with a link. It ends itself when this process is gone, however that happened."""

    def __init__(
        self,
        name: str,
        target: Callable[..., int | None] | str | bytes,
        arguments: Mapping[str, Any],
        *,
        log: Path | None,
        fds: Sequence[int] = (),
        threads: int = 1,
        forked: bool = False,
        starts_roles: bool = False,
        without: Sequence[str] = (),
        queued: bool = False,
        unread: Callable[[bytes | None], None] | None = None,
    ) -> None:
        """`target` is a function, `module:function` where this process should not import the module, or a pickled
        (function, arguments) that this process need not understand. `log` None = it writes where this process does. `fds`
        are descriptors that it inherits. `forked` saves a process that needs torch its imports, on Linux; one that
        `starts_roles` saves theirs too. `without` names variables of this process's environment that it does not get.
        `queued` and `unread` are the link's."""
        self.name, self.log = name, log
        ours, theirs = Pipe()
        environment = {name: value for name, value in role_environment(threads).items() if name not in without}
        self._process: subprocess.Popen[bytes] | ForkedProcess
        with nullcontext() if log is None else log.open("ab") as stream:
            if forked and sys.platform == "linux":
                # The server reads /proc and uses prctl (role_process.py), which only Linux has.
                out, err = (1, 2) if stream is None else [stream.fileno()] * 2
                own = {1: out, 2: err, **{number: number for number in fds}}
                self._process = ForkServer.start_role(
                    name, link=theirs.fileno(), descriptors=own, environment=environment, starts_roles=starts_roles
                )
            else:
                self._process = popen("tba.runtime.role_process", theirs.fileno(), fds, stream, environment)
        # Otherwise this process would hold the child's end open and never see it close.
        theirs.close()
        # The child reads these two messages before it makes its own Link.
        with suppress(BrokenPipeError, ConnectionResetError):  # it died at once: seen by `alive`
            ours.send_bytes(json.dumps({"name": name, "search_path": sys.path}).encode())
            ours.send_bytes(cloudpickle.dumps((target, dict(arguments))))
        self.link = Link(ours, queued=queued, unread=unread)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def status(self) -> int | None:
        """Exit status, or minus the number of the signal that killed it; None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """End it by force. One that does not end at once (in a driver, on a dead network disk) is left to itself."""
        self._process.kill()
        if not self.wait(KILL_SECONDS):
            logger.warning("%s (process %d) does not end although it was killed.", self.name, self.pid)

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def show_stacks(self) -> None:
        dump_stacks([self.pid])

    def wait(self, timeout_seconds: float) -> bool:
        """Wait for its end; True when it came within the time."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_seconds)
        return not self.alive


STOP_SECONDS = 10.0
"""Time for searchers and ranks to end when asked, before they are killed."""


def stop_all(processes: Sequence[Role], message: Any, *, timeout_seconds: float) -> None:
    """Ask all to stop, wait together, kill what remains."""
    for process in processes:
        process.link.send(message)
    deadline = time.monotonic() + timeout_seconds
    for process in processes:
        if not process.wait(max(0.0, deadline - time.monotonic())):
            process.kill()


def last_lines(path: Path | None, count: int = 20) -> str:
    """The end of a log file, for an error message."""
    if path is None or not path.exists():
        return "(no log)"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(f"    {line}" for line in lines[-count:]) or "    (empty)"


def module_command(module: str, *arguments: str) -> list[str]:
    """`python -m` would look in the working folder first, where a user's json.py or types.py stands for Python's own."""
    root = str(Path(__file__).resolve().parents[2])
    code = f"import sys; sys.path[:] = [*filter(None, sys.path), {root!r}]; import runpy; "
    code += "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
    return [sys.executable, "-c", code, module, *arguments]


def popen(
    module: str, link: int, fds: Sequence[int], log: BinaryIO | None, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """The process finds its end of the link under the number `link`. `log` None = it writes where this one does."""
    # A session of its own: Ctrl-C reaches the supervisor alone, which has the trainer save and then stops the others.
    return subprocess.Popen(
        module_command(module, str(link)),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(link, *fds),
        env=dict(environment),
        start_new_session=True,
    )


def prepare_roles() -> None:
    """Roles will be started soon: have what they need imported while this process goes on."""
    if sys.platform == "linux":
        ForkServer.living()


def role_environment(threads: int) -> dict[str, str]:
    """Thread counts are fixed before torch starts: processes that share cores must not fight over them."""
    pinned = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    ours = {name: value for name, value in os.environ.items() if name != OWN_SERVER}  # it is this process's alone
    return {**ours, **pinned, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


# The fork server, as its caller sees it


class ForkedProcess:
    """A role, with the methods of subprocess.Popen that are needed of it."""

    def __init__(self, pid: int, told: Connection) -> None:
        """`told` is the pipe that brings the exit status. It closes with the server."""
        self.pid = pid
        self._told = told
        self._status: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (status := self._look(min(CHECK_SECONDS, max(0.0, deadline - time.monotonic())))) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"role {self.pid}", timeout)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _look(self, seconds: float) -> int | None:
        """Exit status, None while it runs; waits for it no longer than the time."""
        # The pool's thread and the trainer's may both ask, and the status comes over the pipe only once.
        with self._lock:
            if self._status is None and self._told.poll(seconds):
                try:
                    self._status = self._told.recv()
                except EOFError:  # its server is gone, and the role with it
                    self._status = -signal.SIGKILL
            elif self._status is None:
                # A server that hangs reports no exit status, and does not reap its children either.
                with suppress(OSError):  # it has gone altogether
                    # The name may hold spaces and parentheses: behind it field 0 is the state, 49 the exit code.
                    fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
                    self._status = os.waitstatus_to_exitcode(int(fields[49])) if fields[0] == "Z" else None
            return self._status


class ServerGone(RuntimeError):
    """The server has ended, or hangs."""


class ForkServer:
    """A server, as its caller sees it. One serves all runs of a process."""

    _shared: ClassVar[ForkServer | None] = None
    _shared_lock = threading.Lock()

    def __init__(self, connection: socket.socket, process: psutil.Process) -> None:
        self._socket = connection
        # A server that hangs does not read: sending it a request must not block for ever.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", START_SECONDS, 0))
        self._requests = Connection(os.dup(connection.fileno()), readable=False)
        self._process = process
        self._lock = threading.Lock()
        self._seconds = IMPORT_SECONDS
        atexit.register(self.close)

    @classmethod
    def living(cls) -> ForkServer:
        """The server of this process: one made before it began, or a new one, which imports in the background."""
        with cls._shared_lock:
            if cls._shared is None or not cls._shared.lives:
                # The variable is used once: after that server has died, a new one is started instead.
                own = os.environ.pop(OWN_SERVER, None)
                if own is None:
                    cls._shared = cls._begin()
                else:
                    descriptor, pid = map(int, own.split())
                    connection = socket.socket(fileno=descriptor)
                    # It was inheritable for an exec only: a process that this one starts must not hold the socket open.
                    connection.set_inheritable(False)
                    cls._shared = cls(connection, psutil.Process(pid))
            return cls._shared

    @classmethod
    def _begin(cls) -> ForkServer:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        # Some libraries (OpenBLAS on ARM) never use more threads than there were when they were loaded, so the server has
        # all of them. Each role gets its own number as it starts. NumPy's products have one.
        environment = {**role_environment(os.cpu_count() or 1), "OPENBLAS_NUM_THREADS": "1"}
        try:
            process = psutil.Popen(
                module_command("tba.runtime.role_process", "serve", str(theirs.fileno()), *ROLE_MODULES),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise OSError(
                f"the run's processes cannot be started: {error.strerror}; `ulimit -a` shows limits."
            ) from None
        theirs.close()
        return cls(ours, process)

    @classmethod
    def start_role(cls, name: str, **request: Any) -> ForkedProcess:
        """`descriptors` are the caller's, by the numbers that the role has for them. One that `starts_roles` gets a
        server of its own. A server that has died or hangs is replaced, and its roles end with it."""
        server = cls.living()
        try:
            return server._start(name, **request)
        except ServerGone as error:
            # A server that hangs is killed. If it woke up, it would fork a role that no process watches.
            server.close()
            logger.warning("%s Another one takes its place.", error)
        return cls.living()._start(name, **request)

    def _start(
        self,
        name: str,
        *,
        link: int,
        descriptors: Mapping[int, int],
        environment: Mapping[str, str],
        starts_roles: bool = False,
    ) -> ForkedProcess:
        request = {"name": name, "link": link, "numbers": [link, *descriptors], "starts_roles": starts_roles}
        request |= {"environment": dict(environment), "folder": os.getcwd()}
        told, telling = Pipe(duplex=False)
        how = f"has not answered for {self._seconds} s"
        try:
            # One request at a time: the descriptors must follow their own request over the socket.
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
        self._requests.close()
        self._socket.close()
        with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
            self._process.kill()
            self._process.wait(KILL_SECONDS)
