"""Entry point of a role's process: `python -m tba.runtime.child FD`.

The parent sends its module search path and (target, keyword arguments) over the socket FD, and the target runs with a
Link to the parent. A process started this way does not import the parent's main script again, so training scripts need no
`if __name__ == "__main__"`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from multiprocessing.connection import Connection

import cloudpickle

from tba.runtime.fork_server import die_with_parent
from tba.runtime.link import Failed, Link


def run_role(link_descriptor: int) -> int:
    """What the parent asked for, to its end; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    connection = Connection(link_descriptor)
    search_path, payload = connection.recv_bytes(), connection.recv_bytes()
    link = Link(connection, on_close=_parent_is_gone)
    try:
        sys.path[:] = json.loads(search_path)
        target, arguments = cloudpickle.loads(payload)
        target(link, **arguments)
    except Exception as error:  # the process boundary: told to the parent, logged, and the exit status says so
        traceback.print_exc()
        link.send(Failed(error=f"{type(error).__name__}: {error}"))
        return 1
    return 0


def _parent_is_gone() -> None:
    """Nobody is left to work for: end at once, whatever the main thread is doing."""
    os._exit(3)


if __name__ == "__main__":
    die_with_parent()
    status = run_role(int(sys.argv[1]))
    sys.stdout.flush()
    os._exit(status)
