"""The files that a response passes on its way from the engine to the loss.

    python benchmarks/walk.py        # the files of src/tba in the order of the walk, and how many they are

One synchronous step runs under a profile until an objective has returned its loss. A file is on the walk when one of its
functions is handed, or hands back, a completion, a trajectory, a group or a batch, or is called while such a function runs:
what a reader may have to open to follow a response. Data types, settings, metrics, the task's grading and the model's own
arithmetic are left out. Asynchronous runs pass the group channel besides (ASYNCHRONOUS_ONLY).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import tba
from tba.config import load_config
from tba.launch import train
from tba.types import Batch, Completion, Trajectory, TrajectoryGroup

PACKAGE = Path(tba.__file__).parent
CARRIED = (Completion, Trajectory, TrajectoryGroup, Batch)
SETTINGS = [
    "mode=sync", "train.max_steps=1", "train.responses_per_step=16", "train.learning_rate=1e-4", "evaluate.every=0",
    "evaluate.num_prompts=1", "observe.progress=false",
]  # fmt: skip


def carries(value: Any) -> bool:
    """Whether it is, or holds one level down, what the walk follows."""
    if isinstance(value, CARRIED):
        return True
    if isinstance(value, (list, tuple)) and value:
        return isinstance(value[0], CARRIED) or (isinstance(value[0], tuple) and any(map(carries, value[0])))
    return any(isinstance(held, CARRIED) for held in vars(value).values()) if _is_ours(value) else False


def _is_ours(value: Any) -> bool:
    """A small dataclass of the package, such as a finished group; not a role or a buffer, which hold everything."""
    fields = getattr(type(value), "__dataclass_fields__", {})
    return type(value).__module__.startswith("tba.") and 0 < len(fields) <= 4


def is_handed(frame: FrameType) -> bool:
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return any(carries(frame.f_locals.get(name)) for name in names if name != "self")


LEFT_OUT = ("observe/", "config/", "models/", "kernels/", "launch/", "tasks/", "types.py")
ASYNCHRONOUS_ONLY = ("runtime/ends.py", "runtime/links.py", "runtime/local.py")


def follower(files: dict[str, None]) -> Callable[[FrameType, str, Any], None]:
    held: list[bool] = []
    """For each call of the package that has not returned, whether it or one above it was handed something."""

    def follow(frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(str(PACKAGE)):
            return
        file = str(Path(frame.f_code.co_filename).relative_to(PACKAGE))
        if event == "call":
            held.append(bool(held and held[-1]) or is_handed(frame))
            if held[-1]:
                files[file] = None
        else:
            if held:
                held.pop()
            if carries(argument):
                files[file] = None
            if file.startswith("objectives/") and type(argument).__name__ == "Loss":
                sys.setprofile(None)

    return follow


def main() -> None:
    files: dict[str, None] = {}
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(None, [*SETTINGS, f"output={folder}", "name=walk"])
        sys.setprofile(follower(files))
        try:
            train(config)
        finally:
            sys.setprofile(None)
    on_the_way = [file for file in files if not file.startswith(LEFT_OUT)]
    on_the_way += [file for file in ASYNCHRONOUS_ONLY if file not in on_the_way]
    print("\n".join(on_the_way))
    print(f"{len(on_the_way)} files")


if __name__ == "__main__":
    main()
