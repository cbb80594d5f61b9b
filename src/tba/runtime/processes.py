"""Start a role in a process of its own, watch it, stop it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import cloudpickle

from tba.runtime.fork_server import ForkedProcess, ForkServer
from tba.runtime.link import Failed, Link


class RoleDied(RuntimeError):
    """A process ended that should have gone on."""


class RoleProcess:
    """A child process with a Link. It ends itself when this process is gone, however that happened."""

    def __init__(
        self,
        name: str,
        target: Callable[..., None],
        arguments: dict[str, Any],
        *,
        log: Path,
        fds: Sequence[int] = (),
        threads: int = 1,
        forked: bool = False,
    ) -> None:
        """`fds` are descriptors that it inherits. `forked` saves a process that needs torch its imports."""
        self.name = name
        self.log = log
        ours, theirs = Pipe()
        environment = role_environment(threads)
        self._process: subprocess.Popen[bytes] | ForkedProcess
        if forked and sys.platform == "linux":
            server = ForkServer.shared(threads, environment)
            self._process = server.start(name, link=theirs.fileno(), descriptors=fds, log=log, environment=environment)
        else:
            self._process = _popen(theirs.fileno(), fds, log, environment)
        theirs.close()
        ours.send_bytes(json.dumps(sys.path).encode())
        ours.send_bytes(cloudpickle.dumps((target, arguments)))
        self.link = Link(ours, on_close=lambda: None)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def check(self) -> None:
        """Raise with the log's last lines when the process has ended."""
        status = self._process.poll()
        if status is None:
            return
        words = next((m.error for m in self.link.drain() if isinstance(m, Failed)), f"exit status {status}")
        raise RoleDied(f"{self.name} ended ({words}). Last lines of {self.log}:\n{last_lines(self.log)}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def wait(self, timeout_seconds: float) -> bool:
        """True when it has ended within the time."""
        try:
            self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


def stop_all(processes: Sequence[RoleProcess], message: Any, *, timeout_seconds: float) -> None:
    """Ask all to stop, wait together, kill what remains."""
    for process in processes:
        process.link.send(message)
    deadline = time.monotonic() + timeout_seconds
    for process in processes:
        if not process.wait(max(0.0, deadline - time.monotonic())):
            process.kill()


def last_lines(path: Path, count: int = 20) -> str:
    """The end of a log file, for an error message."""
    if not path.exists():
        return "(no log)"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(f"    {line}" for line in lines[-count:]) or "    (empty)"


def _popen(link: int, fds: Sequence[int], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with log.open("ab") as stream:
        # A session of its own: Ctrl-C reaches the trainer alone, which saves and then stops the others.
        return subprocess.Popen(
            [sys.executable, "-m", "tba.runtime.child", str(link)],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            pass_fds=(link, *fds),
            env=environment,
            start_new_session=True,
        )


def role_environment(threads: int) -> dict[str, str]:
    """Thread counts are fixed before torch starts: processes that share cores must not fight over them."""
    pinned = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    return {**os.environ, **pinned, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


def prepare_to_fork(threads: int, *, preload: Sequence[str]) -> None:
    """Roles will be started soon: have what they need imported meanwhile."""
    if sys.platform == "linux":
        ForkServer.shared(threads, role_environment(threads), preload)
