"""A private CUDA MPS daemon: roles that share a GPU run their kernels side by side instead of in turns.

It must be there before the first process touches the GPU. Under MPS the processes share one context on the GPU: a fault in
a searcher's kernel may take the trainer down with it; the last checkpoint stays.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tba.config import Config
from tba.runtime.placement import RolePlacement, sees_gpu

logger = logging.getLogger("tba.runtime")

CONTROL = "nvidia-cuda-mps-control"
TIMEOUT_SECONDS = 20.0
WATCH = 'while kill -0 "$1" 2>/dev/null; do sleep 1; done; echo quit | "$2"; rm -rf "$3"'
"""Arguments: process, control program, folder."""
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
PRIORITY, BELOW_NORMAL = "CUDA_MPS_CLIENT_PRIORITY", "1"


def why_no_mps(config: Config) -> str | None:
    """What speaks against a daemon for this run; None = nothing. Looks at the machine without touching the GPU."""
    if config.runtime.mps == "off":
        return "runtime.mps=off"
    if config.takes_turns:
        return f"in {config.mode} mode one process uses the GPU"
    placement = RolePlacement.of(config)  # what speaks for auto being cuda here is looked at next
    if set(placement.devices) == {"cpu"} or not sees_gpu():
        return "there is no NVIDIA GPU to share"
    if not placement.shared_gpus:
        return "every role has a GPU of its own"
    if PIPES in os.environ:
        return f"{PIPES} is set: that daemon is used"
    torch = sys.modules.get("torch")  # who has not imported it cannot have touched the GPU
    if torch is not None and torch.cuda.is_initialized():
        return "this process uses the GPU already, and a daemon must be there before"
    if shutil.which(CONTROL) is None:
        return f"{CONTROL} is not on the PATH"
    return None


def start_mps(config: Config) -> bool:
    """Start a daemon that lives as long as this process, for it and its children. Returns False, with a log line, where it
    is not wanted or not allowed; `runtime.mps=on` then raises."""
    reason = why_no_mps(config)
    if reason is None:
        folder = Path(tempfile.mkdtemp(prefix="tba-mps-"))
        os.environ[PIPES], os.environ[LOGS] = str(folder), str(folder)
        reason = _start()
        if reason is None:
            _end_with_this_process(folder)
            return True
        _forget(folder)
    if config.runtime.mps == "on":
        raise RuntimeError(f"runtime.mps=on, but {reason}.")
    logger.info("no MPS daemon: %s.", reason)
    return False


def give_way_to_searchers(config: Config) -> None:
    """In the trainer's own process, before it touches the GPU: where searchers share the GPU through a daemon, their kernels
    go first. A decode step is hundreds of small kernels that would each wait for the trainer's large ones; the other way
    round little is lost (notes/gpu.md)."""
    if PIPES in os.environ and not config.takes_turns and RolePlacement.of(config).shared_gpus:
        os.environ.setdefault(PRIORITY, BELOW_NORMAL)


def _start() -> str | None:
    """What went wrong; None = it runs."""
    try:
        found = subprocess.run([CONTROL, "-d"], capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    except (subprocess.TimeoutExpired, OSError) as error:
        return f"{CONTROL} -d failed: {error}"
    return None if found.returncode == 0 else f"{CONTROL} -d failed: {(found.stderr or found.stdout).strip()[:300]}"


def _end_with_this_process(folder: Path) -> None:
    """A process beside the daemon ends it after this one: it cannot end while its clients live."""
    subprocess.Popen(
        ["sh", "-c", WATCH, "tba-mps-watch", str(os.getpid()), CONTROL, str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _forget(folder: Path) -> None:
    os.environ.pop(PIPES, None)
    os.environ.pop(LOGS, None)
    shutil.rmtree(folder, ignore_errors=True)
