"""Processes that benchmarks start and end, with everything that those have started in turn."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress


def run_alone(command: Sequence[str], *, seconds: float) -> int | None:
    """Exit status of a command; None where it was stopped after so many seconds.

    Whatever it has started is ended with it: vLLM's engine is a process of its own, which outlives the one that asked for it
    and holds the GPU's memory.
    """
    process = subprocess.Popen(command, start_new_session=True)  # its own group: the signal below is for all of it
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
