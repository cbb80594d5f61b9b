"""Commands and scripts in processes of their own, which need not wait for torch to be imported once more.

A command is a fork of the process that this process forks roles from, and becomes by exec what it is: the real `python -m
tba train ...`. What is spared are the imports of the process that its own roles are forked from: that is its child as ever,
but was forked as well (runtime/role_process.py, OWN_SERVER). Without this, each command takes seven seconds of a core first.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tba.runtime.links import Link
from tba.runtime.processes import RoleProcess, prepare_roles
from tba.runtime.role_process import OWN_SERVER

STANDARD = {"stdout": 1, "stderr": 2}


def heed_signals() -> None:
    """For a process that is to be interrupted: these tests may run under nohup or in the background of a script."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Command:
    """A command that runs, with what is needed of subprocess.Popen. It leads a session, does not outlive its context, and
    what it writes to the `captured` streams is read all the time."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        captured: Sequence[str] = ("stderr",),
        prepare: Callable[[], object] = heed_signals,
        folder: Path | None = None,
        target: Callable[..., None] | None = None,
    ) -> None:
        """`prepare` is called in the new process before it becomes the command; `folder` is where it runs; `target` is what
        makes the process the command (default: exec)."""
        self.args = list(command)
        prepare_roles()  # what a trainer and searchers need, for the first one here
        pipes = {name: os.pipe() for name in captured}
        self._role = RoleProcess(
            "command",
            become if target is None else target,
            {
                "command": self.args,
                "streams": {STANDARD[name]: writing for name, (_, writing) in pipes.items()},
                "environment": dict(os.environ),
                "folder": os.getcwd() if folder is None else str(folder),
                "prepare": prepare,
            },
            log=None,
            fds=[writing for _, writing in pipes.values()],
            forked=True,
            starts_roles=True,
        )
        self._texts: dict[str, str] = {}
        self._readers = []
        for name, (reading, writing) in pipes.items():
            os.close(writing)
            self._readers.append(threading.Thread(target=self._read, args=(name, reading), daemon=True))
            self._readers[-1].start()

    @property
    def pid(self) -> int:
        return self._role.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._role.status

    def poll(self) -> int | None:
        return self._role.status

    def send_signal(self, number: int) -> None:
        self._role.signal(number)

    def kill(self) -> None:
        if self._role.alive:
            self._role.kill()

    def wait(self, timeout: float = 300.0) -> int:
        if not self._role.wait(timeout):
            raise subprocess.TimeoutExpired(self.args, timeout)
        status = self.returncode
        assert status is not None
        return status

    def communicate(self, timeout: float = 300.0) -> tuple[str, str]:
        """Wait for its end, and for that of everybody who writes where it did; returns what was captured."""
        self.wait(timeout)
        for reader in self._readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout)
        return self._texts.get("stdout", ""), self._texts.get("stderr", "")

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self._role.link.close()

    def _read(self, name: str, descriptor: int) -> None:
        with open(descriptor, encoding="utf-8", errors="replace") as stream:
            self._texts[name] = stream.read()


def become(
    link: Link,
    *,
    command: list[str],
    streams: Mapping[int, int],
    environment: dict[str, str],
    folder: str,
    prepare: Callable[[], object],
) -> None:
    """The target of a command's process."""
    _take_streams(streams)
    own = os.environ.get(OWN_SERVER)
    kept = {0, 1, 2} if own is None else {0, 1, 2, int(own.split()[0])}
    for descriptor in {int(name) for name in os.listdir("/dev/fd")} - kept:
        try:
            os.set_inheritable(descriptor, False)
        except OSError:  # it was that of the listing itself
            continue
    os.chdir(folder)
    prepare()
    os.execve(command[0], command, environment if own is None else {**environment, OWN_SERVER: own})


def become_python(
    link: Link,
    *,
    command: list[str],
    streams: Mapping[int, int],
    environment: dict[str, str],
    folder: str,
    prepare: Callable[[], object],
) -> None:
    """The target of a process that runs a script as `python PATH.py` does, or a module as `python -m NAME` does, but keeps
    what was imported."""
    _take_streams(streams)
    os.chdir(folder)
    prepare()
    sys.argv[:] = command
    if command[0].endswith(".py"):
        sys.path.insert(0, str(Path(command[0]).parent))
        runpy.run_path(command[0], run_name="__main__")
    else:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)


def _take_streams(streams: Mapping[int, int]) -> None:
    for number, descriptor in streams.items():
        os.dup2(descriptor, number)


def run_python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script or a module to its end, in a process of its own that has imported torch already."""
    return run_command([program, *arguments], target=become_python)


def run_command(
    command: Sequence[str], *, folder: Path | None = None, target: Callable[..., None] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return what it wrote."""
    with Command(command, captured=("stdout", "stderr"), folder=folder, target=target) as process:
        output, errors = process.communicate()
        return subprocess.CompletedProcess(process.args, process.wait(), output, errors)
