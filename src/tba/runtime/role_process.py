"""The entry point of a role's process, and the fork server. A role is a new process (`python -m
tba.runtime.role_process FD`) or a fork of the server (`... role_process serve FD MODULE ...`).

The parent sends its module search path and (target, keyword arguments) over the socket FD. The target runs with a Link to
the parent. The parent's main script is not imported again, so training scripts need no `if __name__ == "__main__"`.

Importing torch and transformers takes 4 to 15 s of a core; a fork takes some milliseconds. The server runs no threads and
never touches a GPU, neither of which survives a fork.

    caller -> server   environment, folder and descriptors; these as SCM_RIGHTS, of which the first is a pipe
    server -> caller   over that pipe: the process of the role, and its exit status when it has ended

The server ends when the caller's end of the socket closes, and its forks with it. A role that will start roles itself, such
as a trainer, gets a server of its own: a fork of this one, whose socket the role finds by OWN_SERVER, also after an exec.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import json
import logging
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import cloudpickle

from tba.runtime.deadlines import write_stacks_when_asked
from tba.runtime.links import Failed, Link, RunCannotGoOn

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
INTERRUPTED = 130
MAX_DESCRIPTORS = 64
OWN_SERVER = "TBA_OWN_FORK_SERVER"
"""Variable of a role that has a server of its own: descriptor of its socket and number of its process, as in `5 4711`."""


def die_with_parent() -> None:
    """Have Linux kill this process when its parent ends: a main thread stuck in C code lets no Python thread run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def show_as(name: str) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


def run_role(link_descriptor: int) -> int:
    """Run the target that the parent sends; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the starter of this process may have blocked some, as Ray does
    write_stacks_when_asked()  # to the log, which is stderr
    connection = Connection(link_descriptor)
    first, payload = json.loads(connection.recv_bytes()), connection.recv_bytes()
    show_as(first["name"])
    link = Link(connection, on_close=lambda: os._exit(3))  # with the parent, whatever the main thread is doing
    try:
        sys.path[:] = first["search_path"]
        target, arguments = cloudpickle.loads(payload)
        # Bytes are a target that an actor passed on without importing it (cluster/roles.py); its arguments come with it.
        if isinstance(target, bytes):
            target, more = cloudpickle.loads(target)
            arguments = {**more, **arguments}
        if isinstance(target, str):
            module, _, name = target.partition(":")
            target = getattr(importlib.import_module(module), name)
        gc.freeze()  # or the first collections of a process that was not forked would walk through all of torch
        gc.enable()
        return target(link, **arguments) or 0
    except Exception as error:  # the process boundary: sent to the parent, logged, and shown by the exit status
        traceback.print_exc()
        final = isinstance(error, RunCannotGoOn)
        link.send(Failed(error=str(error) if final else f"{type(error).__name__}: {error}", final=final))
        return 1


# The fork server


def serve(caller: socket.socket) -> None:
    """The server: fork a role for each request and report the end of each, until the caller is gone."""
    requests = Connection(os.dup(caller.fileno()), writable=False)
    # `select` must return when a child ends: the handler does nothing, but the signal writes a byte into this pipe.
    wake_up, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, Connection] = {}
    while True:
        ready, _, _ = select.select([caller.fileno(), wake_up], [], [])
        if wake_up in ready:
            os.read(wake_up, 4096)
        # One byte may stand for several ends, so every child is asked.
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with running.pop(pid) as told, suppress(BrokenPipeError):  # the caller has closed its end
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
        # The first descriptor, the pipe for the exit status, stays with the server; the role has the others.
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
        # A session of its own: Ctrl-C in the terminal reaches the supervisor alone.
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
        # The fork must not return: the server's loop lies on this stack and would go on in it.
        os._exit(status)


def _fork_own_server(*, below: int) -> None:
    """In the fork, which has no thread yet: make it a server of its own. Its open descriptors have numbers `below`."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    pid = os.fork()
    if pid == 0:
        # Descriptor 3 is the server's end. Those above it close, or the role's pipes would stay open after the role.
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
    # The role may become another program by exec, which must find the socket open.
    ours.set_inheritable(True)
    os.environ[OWN_SERVER] = f"{ours.detach()} {pid}"


def main() -> int:
    die_with_parent()
    # Nothing of what is imported becomes garbage, and looking for it takes an eighth of the time.
    gc.disable()
    if sys.argv[1] != "serve":
        return run_role(int(sys.argv[1]))
    show_as("tba-forks")
    connection = socket.socket(fileno=int(sys.argv[2]))
    for name in sys.argv[3:]:
        importlib.import_module(name)
    gc.enable()
    gc.freeze()  # or the first collection in a role would copy every page of what was imported
    serve(connection)
    return 0


if __name__ == "__main__":
    try:
        # The functions of the imported module, not of this file run as a script: a role would import it a second time.
        status = importlib.import_module("tba.runtime.role_process").main()
    except KeyboardInterrupt:
        status = INTERRUPTED
    sys.stdout.flush()
    os._exit(status)
