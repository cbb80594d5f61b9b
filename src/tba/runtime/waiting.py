"""Waiting with a name, a deadline and a metric: the only way a role may wait."""

from __future__ import annotations

import time
from collections.abc import Callable

from tba.runtime.board import WAITS, Row, Wait

POLL_SECONDS = 0.002


class WaitedTooLong(RuntimeError):
    """A deadline passed; the message names who waited, for what, and what to look at."""


def wait_until(
    ready: Callable[[], bool], *, name: Wait, row: Row, deadline_seconds: float, explain: Callable[[], str]
) -> float:
    """Poll until ready; returns the seconds waited. `explain` words the error when the deadline passes."""
    if ready():
        return 0.0
    started = time.monotonic()
    row["wait"] = WAITS.index(name)
    try:
        while not ready():
            if time.monotonic() - started > deadline_seconds:
                raise WaitedTooLong(f"{explain()} (waited {deadline_seconds:g} s: {name})")
            time.sleep(POLL_SECONDS)
    finally:
        seconds = time.monotonic() - started
        row["wait"] = 0
        row["wait_seconds"] += seconds
    return seconds
