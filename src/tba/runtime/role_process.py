"""What the process of a role does first: `python -m tba.runtime.role_process FD`, or a fork of the fork server.

The parent sends its module search path and (target, keyword arguments) over the socket FD. The target runs with a Link to
the parent. A process started this way does not import the parent's main script again, so training scripts need no
`if __name__ == "__main__"`.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import logging
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection

import cloudpickle

from tba.runtime.deadlines import write_stacks_when_asked
from tba.runtime.links import Failed, Link, RunCannotGoOn

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
INTERRUPTED = 130
"""Exit status after Ctrl-C."""


def die_with_parent() -> None:
    """Have Linux kill this process when its parent ends: a main thread stuck in C code lets no Python thread run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def show_as(name: str) -> None:
    """Have `ps` and `top` show this process under a name, 15 letters of it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


def run_role(link_descriptor: int) -> int:
    """Run the target that the parent sends; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # whoever started this process may have blocked some, as Ray does
    write_stacks_when_asked()  # to the log, which is stderr
    connection = Connection(link_descriptor)
    first, payload = json.loads(connection.recv_bytes()), connection.recv_bytes()
    show_as(first["name"])
    link = Link(connection, on_close=_parent_is_gone)
    try:
        sys.path[:] = first["search_path"]
        target, arguments = cloudpickle.loads(payload)
        if isinstance(target, bytes):
            target, more = cloudpickle.loads(target)
            arguments = {**more, **arguments}
        if isinstance(target, str):
            module, _, name = target.partition(":")
            target = getattr(importlib.import_module(module), name)
        gc.freeze()  # or the first collections of a process that was not forked would walk through all of torch
        gc.enable()
        return target(link, **arguments) or 0
    except Exception as error:  # the process boundary: told to the parent, logged, and the exit status says so
        traceback.print_exc()
        final = isinstance(error, RunCannotGoOn)
        link.send(Failed(error=str(error) if final else f"{type(error).__name__}: {error}", final=final))
        return 1


def _parent_is_gone() -> None:
    """Nobody is left to work for: end at once, whatever the main thread is doing."""
    os._exit(3)


if __name__ == "__main__":
    die_with_parent()
    gc.disable()  # until its target is imported, as in the fork server: looking for garbage takes an eighth of that time
    try:
        status = run_role(int(sys.argv[1]))
    except KeyboardInterrupt:
        status = INTERRUPTED
    sys.stdout.flush()
    os._exit(status)
