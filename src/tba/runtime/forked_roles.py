"""Roles in a moment: processes that are forked from one that has imported torch already (fork_server.py), as the one who
starts them sees them.

    process = ForkServer.start_role("searcher-0", link=7, descriptors=(), log=Path("searcher-0.log"), environment=...)
    process.poll(), process.wait(5.0), process.kill()
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import psutil

from tba.runtime.fork_server import HEADER_BYTES, OWN_SERVER, Start, Started, module_command, packed, receive

logger = logging.getLogger("tba")

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
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


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
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", START_SECONDS, 0))
        self._process = process
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._started: list[int] = []
        self._statuses: dict[int, int] = {}
        self._ended: dict[int, float] = {}
        """By process: when a role was first seen to have ended of which the server has not told yet."""
        self._alive = True
        threading.Thread(target=self._read, daemon=True, name="fork-server-reader").start()

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
            if server is None or not server._alive:
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
        numbers, seconds = (link, *descriptors), START_SECONDS if self._started else IMPORT_SECONDS
        message = packed(
            Start(
                name=name,
                link=link,
                descriptors=numbers,
                log=None if log is None else str(log),
                environment=dict(environment),
                folder=os.getcwd(),
                starts_roles=starts_roles,
                until=time.monotonic() + seconds,
            )
        )
        with self._lock:
            seen = len(self._started)
            socket.send_fds(self._socket, [message[:HEADER_BYTES]], list(numbers))
            self._socket.sendall(message[HEADER_BYTES:])
            with self._changed:
                # A second more: an answer that is given just in time must not be missed.
                self._changed.wait_for(lambda: len(self._started) > seen or not self._alive, seconds + 1.0)
            if len(self._started) == seen:
                how = f"has not answered for {seconds} s" if self._alive else "has ended; its last lines are on stderr"
                raise ServerGone(f"the process that roles are forked from (process {self._process.pid}) {how}.")
            return ForkedProcess(self, self._started[seen])

    def status(self, pid: int) -> int | None:
        """Exit status of a role, None while it runs."""
        with self._changed:
            told = self._statuses.get(pid, None if self._alive else -signal.SIGKILL)
        found = status_of_zombie(pid) if told is None else None
        if found is None:
            return told
        waited = time.monotonic() - self._ended.setdefault(pid, time.monotonic())
        return found if waited > TELL_SECONDS else None

    def wait(self, pid: int, timeout: float | None) -> int:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while (status := self.status(pid)) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"role {pid}", timeout or 0.0)
            with self._changed:
                self._changed.wait(min(LOOK_SECONDS, deadline - time.monotonic()))  # a server that hangs tells nothing
        return status

    def close(self) -> None:
        """End the server and, with it, every role that still runs."""
        self._socket.close()
        with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
            self._process.kill()
            self._process.wait(KILL_SECONDS)

    def _read(self) -> None:
        while (message := receive(self._socket)) is not None:
            with self._changed:
                if isinstance(message, Started):
                    for known in (self._statuses, self._ended):
                        known.pop(message.pid, None)  # an earlier role may have had this number
                    self._started.append(message.pid)
                else:
                    self._statuses[message.pid] = message.status
                self._changed.notify_all()
        self._lost()

    def _lost(self) -> None:
        with self._changed:
            self._alive = False
            self._changed.notify_all()


def status_of_zombie(pid: int) -> int | None:
    """Exit status of a process that has ended and that its parent has not asked about, because it hangs; None = it runs, or
    its parent knows."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return os.waitstatus_to_exitcode(int(fields[49])) if fields[0] == "Z" else None
