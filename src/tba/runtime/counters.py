"""Numbers in shared memory that all roles see at once. Each number has one writer. Reading never waits."""

from __future__ import annotations

import logging
import math
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from tba.observe.display import RoleStatus, weights_of
from tba.runtime.deadlines import Idleness

logger = logging.getLogger("tba")

RAM = Path("/dev/shm")


class SharedMemory:
    """Bytes that several processes see alike. Where there is /proc they have no name, so nothing is left of them."""

    def __init__(self, fd: int, num_bytes: int, *, path: str | None = None) -> None:
        """`path` is the file to remove at the end, where it has a name."""
        self.fd, self.num_bytes, self._path = fd, num_bytes, path
        self.handle = path or f"/proc/{os.getpid()}/fd/{fd}"
        """How other processes find it while the one that made it lives."""
        self._map = mmap.mmap(fd, num_bytes)

    @classmethod
    def create(cls, num_bytes: int, folders: Sequence[Path] | None = None) -> SharedMemory:
        """New zeroed memory in the first folder that has room: in RAM or else on disk. All of it is reserved at once: a
        file that only claims its size ends a process with SIGBUS when it is written and there is no room any more."""
        on_disk = Path(tempfile.gettempdir())
        folders = folders or ([RAM, on_disk] if RAM.is_dir() else [on_disk])
        size, refusals = f"{num_bytes / 2**20:.1f} MiB", list[str]()
        for folder in folders:
            if not folder.is_dir():
                refusals.append(f"{folder} is no folder")
                continue
            fd, path = tempfile.mkstemp(prefix="tba-", dir=folder)
            try:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(fd, 0, num_bytes)
                else:
                    for start in range(0, num_bytes, mmap.PAGESIZE):  # macOS: what is written is reserved
                        os.pwrite(fd, bytes(min(mmap.PAGESIZE, num_bytes - start)), start)
            except OSError as error:
                os.close(fd)
                os.unlink(path)
                room = os.statvfs(folder)
                free = f"{room.f_bavail * room.f_frsize / 2**20:.1f} MiB"
                refusals.append(f"{folder} has {free} free ({error.strerror or error})")
                continue
            if refusals:
                why = "; ".join(refusals)
                logger.warning("%s of shared memory lie in %s, which may be slower: %s.", size, folder, why)
            if sys.platform == "linux":  # others reach it through /proc, so it needs no name
                os.unlink(path)
            return cls(fd, num_bytes, path=None if sys.platform == "linux" else path)
        raise MemoryError(
            f"{size} of memory that roles share cannot be reserved: {'; '.join(refusals)}. Make room in one of "
            "them, give a container more (docker run --shm-size=...), or set TMPDIR to a folder with room."
        )

    @classmethod
    def attach(cls, handle: str) -> SharedMemory:
        fd = os.open(handle, os.O_RDWR)
        memory = cls(fd, os.fstat(fd).st_size)
        memory.handle = handle
        memory.close()  # the mapping has a descriptor of its own, which goes with the last view of it
        return memory

    def array(self, dtype: np.dtype | type, *, offset: int = 0, count: int = -1) -> np.ndarray:
        return np.frombuffer(self._map, dtype=dtype, offset=offset, count=count)

    def close(self) -> None:
        """Give up the descriptor, once; views that are still in use keep the mapping alive."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            if self._path is not None:
                Path(self._path).unlink(missing_ok=True)


SILENT_SECONDS = 1.0
"""Time without a heartbeat from which on a role is taken to be suspended or hung."""
MAX_SEARCHERS = 64
"""Most searchers of a run: the shared counters have a row for each."""
SUPERVISOR_FIELDS = ("trainer_restarts", "replaced_before", "searchers_wanted")
"""`replaced_before`: searchers that earlier trainers replaced. `searchers_wanted`: asked for from outside, 0 = none."""
TRAINER_FIELDS = (
    *("wait", "wait_seconds", "beats", "step", "lost", "pid", "seconds", "made"),
    *("batch_prompts", "prompts_wanted", "done", "of", "table_lines", "pool_beats", "searchers", "replaced"),
    "most_lag",
)
"""`beats` rises whenever the trainer looks for groups or publishes weights, 0 = it is not that far yet. `pool_beats`
rises while its thread looks after searchers; `searchers` is the number that it has begun with, 0 = it has none yet, or
none any more; `replaced` are those that died or hung since this trainer began. `lost` is the number of rollouts so far
that brought nothing to train on, `seconds` the time from the trainer's start to its last beat, `made` the number of
steps that this process has made. `batch_prompts` and `prompts_wanted` are those of the batch that is waited for. `done`
and `of` count the responses of an evaluation where the roles take turns, `of` = 0: none goes on. `table_lines` is the
height of the table that the trainer shows on the terminal, 0 = there is none. `most_lag` is the number of versions that
responses may be behind, by the length of an update."""
SHOWN = (
    *("version", "groups", "responses", "tokens", "wait_seconds", "failures", "tool_calls", "tool_errors"),
    "mismatch_kl",
)
"""Fields of a searcher's row that are metrics."""
TRAINERS_OF_SEARCHER = ("pid", "place")
"""Fields of a searcher's row that the trainer writes; they come last in SEARCHER_FIELDS."""
SEARCHER_FIELDS = ("heartbeat", "work", "wait", *SHOWN, "done", "of", *TRAINERS_OF_SEARCHER)
"""`heartbeat` rises while the process lives, `work` only while it decodes or evaluates, not while it waits.
`mismatch_kl` is how far engine and trainer were apart on the canary of the version that was compared last, NaN before
the first. `done` and `of` count the responses of an evaluation, `of` = 0: none goes on."""
WIDTHS = [len(SUPERVISOR_FIELDS), len(TRAINER_FIELDS), *[len(SEARCHER_FIELDS)] * MAX_SEARCHERS]

Place = Literal["none", "empty", "filled", "given_up"]
PLACES: tuple[Place, ...] = ("none", "empty", "filled", "given_up")
"""Whether a searcher with this number is wanted, and whether there is a process for it."""

Wait = Literal["none", "first_fill", "replay_ratio", "pace", "channel_full", "durable_replay"]
"""The named places where a role may wait, and no others."""
WAITS_FOR: dict[Wait, str] = {
    "none": "works",
    "first_fill": "waits for groups that fill a batch",
    "replay_ratio": "waits for new responses from the searchers",
    "pace": "waits for newer weights, or for rewards",
    "channel_full": "waits for the trainer to take in groups",
    "durable_replay": "waits for groups to be written to the durable replay",
}
WAITS: tuple[Wait, ...] = tuple(WAITS_FOR)


class SharedCounters:
    """The numbers of all roles in shared memory: `counters.trainer["wait_seconds"]`, `counters.searcher(0)["responses"]`."""

    def __init__(self, memory: SharedMemory) -> None:
        self.memory = memory
        self.values = memory.array(np.float64)
        # np.split gives views, so an assignment to a field is a store into the shared memory.
        parts = np.split(self.values, np.cumsum(WIDTHS)[:-1])
        self.supervisor = RoleCounters(parts[0], SUPERVISOR_FIELDS)
        self.trainer = RoleCounters(parts[1], TRAINER_FIELDS)
        self._searchers = [RoleCounters(part, SEARCHER_FIELDS) for part in parts[2:]]

    @classmethod
    def create(cls) -> SharedCounters:
        return cls(SharedMemory.create(8 * sum(WIDTHS)))

    def searcher(self, index: int) -> RoleCounters:
        return self._searchers[index]

    @staticmethod
    def own_part(searcher: int | None) -> slice:
        """Where the numbers that a searcher writes lie, or the trainer and all its searchers (None)."""
        if searcher is None:
            return slice(WIDTHS[0], sum(WIDTHS))
        # `pid` and `place` lie at the end of a row and belong to the trainer, so a searcher's own part is one slice.
        start = sum(WIDTHS[: 2 + searcher])
        return slice(start, start + len(SEARCHER_FIELDS) - len(TRAINERS_OF_SEARCHER))

    def places(self) -> dict[int, Place]:
        found = {index: PLACES[int(row["place"])] for index, row in enumerate(self._searchers)}
        return {index: place for index, place in found.items() if place != "none"}

    def searcher_pids(self) -> list[int]:
        """Processes of the searchers that run, each on its own machine."""
        return [pid for row in self._searchers if (pid := int(row["pid"]))]

    def searchers_progress(self) -> float:
        """A number that changes while any searcher works, and when one is replaced."""
        rows = [self._searchers[index] for index, place in self.places().items() if place == "filled"]
        # A process that loads its model shows nothing yet, and a silent one is replaced by the SearcherPool.
        absent = [row["heartbeat"] == 0 or row.silence() > SILENT_SECONDS for row in rows]
        if any(absent) or self._is_suspended():
            # The clock changes at every look, so the deadline of the role that waits does not count.
            return time.monotonic()
        # A new searcher's `work` starts at 0; the first term keeps the sum from returning to an old value by chance.
        return 1e9 * self.replaced + sum(row["work"] for row in rows)

    def trainer_progress(self) -> float:
        """A number that changes while the trainer works, and while another one starts or makes its first step, in which
        kernels are compiled: a trainer that hangs there is the supervisor's business."""
        moves = self._is_suspended() or not self.trainer["made"]
        return time.monotonic() if moves else self.trainer["beats"]

    def _is_suspended(self) -> bool:
        """Whether the trainer's process does nothing, because it is suspended or starting a searcher takes long."""
        return self.trainer.silence() > SILENT_SECONDS

    @property
    def replaced(self) -> float:
        """Number of searchers of the run that died or hung, and whose place another one took."""
        return self.supervisor["replaced_before"] + self.trainer["replaced"]

    def trainer_begins(self) -> None:
        # This comes before the rows are cleared: `replaced` adds the number of the trainer that has ended.
        self.supervisor["replaced_before"] = self.replaced
        for row in (self.trainer, *self._searchers):
            row.clear()

    def heartbeats(self) -> dict[str, float]:
        running = [index for index, place in self.places().items() if place == "filled"]
        return {f"searcher-{index}": self._searchers[index]["heartbeat"] for index in running}

    def statuses(self) -> list[RoleStatus]:
        trainer = self.trainer

        def evaluates(row: RoleCounters, step: float) -> str:
            return f"evaluates {weights_of(int(step))}: {row['done']:.0f} of {row['of']:.0f} responses"

        def status(name: str, doing: str, row: RoleCounters, responses: float) -> RoleStatus:
            seconds = trainer["seconds"] or math.inf  # rates are 0 before the trainer's first beat
            return RoleStatus(
                name=name,
                doing=doing,
                waited_share=row["wait_seconds"] / seconds,
                responses_per_second=responses / seconds,
                pid=int(row["pid"]) or None,
            )

        doing = WAITS_FOR[trainer.wait] if trainer["beats"] else "starts"
        if doing == WAITS_FOR["none"] and not trainer["made"]:
            doing = "makes its first step, which compiles kernels on a GPU"
        elif doing == WAITS_FOR["none"] and self.places():  # without searchers it generates too
            doing = "trains"
        if trainer["of"]:
            doing = evaluates(trainer, trainer["step"])
        elif trainer.wait == "first_fill" and trainer["prompts_wanted"]:
            batch = "a batch" if trainer["step"] else "the first batch"
            doing = f"waits for {batch}: {trainer['batch_prompts']:.0f} of {trainer['prompts_wanted']:.0f} prompts"
        found = [status("trainer", doing, trainer, 0.0)]
        for index, place in self.places().items():
            row = self._searchers[index]
            if place == "filled":
                doing = "generates" if row.wait == "none" else WAITS_FOR[row.wait]
                doing = doing if row["heartbeat"] else "loads the model"
                doing = evaluates(row, row["version"]) if row["of"] else doing
            else:
                doing = "has been given up" if place == "given_up" else "starts again"
            found.append(status(f"searcher-{index}", doing, row, row["responses"]))
        return found

    def metrics(self) -> dict[str, float]:
        places = self.places()
        return {
            "searchers/alive": float(sum(place == "filled" for place in places.values())),
            "searchers/replaced": self.replaced,
            "trainer/restarts": self.supervisor["trainer_restarts"],
            **{f"searcher/{index}/{name}": self._searchers[index][name] for index in places for name in SHOWN},
        }


class RoleCounters:
    """Named float64 numbers of one role."""

    def __init__(self, values: np.ndarray, fields: tuple[str, ...]) -> None:
        self._values = values
        self._index = {name: place for place, name in enumerate(fields)}
        self._alive = next((name for name in ("heartbeat", "pool_beats") if name in fields), None)
        self._silence = Idleness()

    def silence(self) -> float:
        """Time for which the role has shown no heartbeat, as far as this process has seen."""
        return 0.0 if self._alive is None else self._silence.look(self[self._alive])

    def __getitem__(self, name: str) -> float:
        return float(self._values[self._index[name]])

    def __setitem__(self, name: str, value: float) -> None:
        # An aligned float64 is stored whole, so a reader in another process sees the old number or the new one.
        self._values[self._index[name]] = value

    def clear(self) -> None:
        """Set all to zero, or to NaN where that is a value, for a new process in the role."""
        self._values[:] = [math.nan if name == "mismatch_kl" else 0.0 for name in self._index]

    @property
    def wait(self) -> Wait:
        return WAITS[int(self["wait"])]
