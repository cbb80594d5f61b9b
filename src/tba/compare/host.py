"""Where results were made: the code's commit and the machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

GIT_SECONDS = 10.0


def commit_hash() -> str | None:
    """Of the package's own repository, with `-dirty` where files were changed since; None = no git, or not in one."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def cpu_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
