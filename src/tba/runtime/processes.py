"""Start a role in a process of its own, watch it, stop it.

The child is a fork of a process that has imported torch already (fork_server.py), or a new one. What it does first stands in
role_process.py.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import cloudpickle

from tba.runtime.deadlines import dump_stacks
from tba.runtime.fork_server import OWN_SERVER, ForkedProcess, ForkServer, module_command
from tba.runtime.links import Link

logger = logging.getLogger("tba")

ROLE_MODULES = ("tba.search.role", "tba.launch.start")
"""What trainer and searchers need, imported once by the process that they are forked from."""
KILL_SECONDS = 10.0
"""Time for a process to end that was killed."""


class RoleDied(RuntimeError):
    """A process ended that should have gone on."""


class Role(Protocol):
    """A role as its starter sees it: a process of this machine, or an actor that stands for one of another machine."""

    name: str

    @property
    def link(self) -> Link: ...

    @property
    def log(self) -> Path | None:
        """None = it writes where this process does."""
        ...

    @property
    def pid(self) -> int:
        """Its process, on the machine that it runs on."""
        ...

    @property
    def alive(self) -> bool: ...

    @property
    def status(self) -> int | None:
        """Exit status, or minus the number of the signal that killed it; None while it runs."""
        ...

    def wait(self, timeout_seconds: float) -> bool:
        """Wait for its end; True when it came within the time."""
        ...

    def kill(self) -> None:
        """End it by force, at once."""
        ...

    def signal(self, number: int) -> None:
        """Send its process a signal, unless it has ended."""
        ...

    def show_stacks(self) -> None:
        """Have it write to its log what every thread is doing."""
        ...


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
        are descriptors that it inherits. `forked` saves a process that needs torch its imports; one that
        `starts_roles` saves theirs too. `without` names variables of this process's environment that it does not get.
        `queued` and `unread` are the link's."""
        self.name = name
        self.log = log
        ours, theirs = Pipe()
        environment = {name: value for name, value in role_environment(threads).items() if name not in without}
        self._process: subprocess.Popen[bytes] | ForkedProcess
        with nullcontext() if log is None else log.open("ab") as stream:
            if forked and sys.platform == "linux":
                prepare_roles()
                out, err = (1, 2) if stream is None else [stream.fileno()] * 2
                own = {1: out, 2: err, **{number: number for number in fds}}
                self._process = ForkServer.start_role(
                    name, link=theirs.fileno(), descriptors=own, environment=environment, starts_roles=starts_roles
                )
            else:
                self._process = popen("tba.runtime.role_process", theirs.fileno(), fds, stream, environment)
        theirs.close()
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
        """End it by force. One that even that does not end at once (in a driver, on a dead network disk) is left to itself:
        waiting for it would stop the run that replaces it."""
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
        try:
            self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


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


def popen(
    module: str, link: int, fds: Sequence[int], log: BinaryIO | None, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """A new process that runs a module, which finds the other end of the link under the number that is its argument. `log`
    None = it writes where this process does."""
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


def may_fork() -> bool:
    """Whether roles are forks of a process that has imported torch. With a GPU too: that process never touches it, and each
    role sets it up for itself."""
    return sys.platform == "linux"


def prepare_roles() -> None:
    """Roles will be started soon: have what they need imported while this process goes on."""
    if may_fork():
        ForkServer.prepare(server_environment(), ROLE_MODULES)


def role_environment(threads: int) -> dict[str, str]:
    """Thread counts are fixed before torch starts: processes that share cores must not fight over them."""
    pinned = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    ours = {name: value for name, value in os.environ.items() if name != OWN_SERVER}  # it is this process's alone
    return {**ours, **pinned, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


def server_environment() -> dict[str, str]:
    """Of the process that roles are forked from. Some libraries (OpenBLAS on ARM) never use more threads than there were
    when they were loaded, so it has all of them: a role is told how many of them are its own. NumPy's products have one."""
    return {**role_environment(os.cpu_count() or 1), "OPENBLAS_NUM_THREADS": "1"}
