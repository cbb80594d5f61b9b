"""The second copy of replay.durability=node, on the supervisor's node: the run folder and every group (replica.py).

    trainer's node -> what_is_there, read_block -> RunCopy: runs/NAME.replica -> write_block -> the next trainer's node
    trainer -> RemoteReplica -> runs/NAME.replica/groups.sqlite -> the next trainer

A checkpoint is in the copy whole or not at all. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import secrets
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tba.config import Config
from tba.observe.run_folder import MANIFEST, Claim, Holder, RunFolder, holder_of
from tba.runtime.cluster import NAMESPACE
from tba.runtime.links import pickled
from tba.runtime.replica import GROUPS, Replica

if TYPE_CHECKING:
    from tba.types import TrajectoryGroup

logger = logging.getLogger("tba")

BLOCK_BYTES = 32 * 2**20
COPIED = ("step-", "best-step-")
"""Beginnings of the names of the checkpoints that are copied: not of those whose evaluation has not come."""
FILES = ("config.yaml", "metrics.jsonl", "samples.jsonl", "summary.json")
"""Other files that are copied. A run that resumes cuts off lines that came after its checkpoint."""


# On the trainer's node


def what_is_there(folder: RunFolder) -> dict[str, str]:
    """Copied parts of a run folder: {"config.yaml": "", "checkpoints/step-20": checksum of its manifest}"""
    found = {folder.config.name: ""} if folder.config.is_file() else {}
    if folder.summary.is_file():
        found[folder.summary.name] = str(folder.summary.stat().st_mtime_ns)
    for prefix in COPIED:
        for path in folder.checkpoints_by_step(prefix).values():
            with suppress(OSError):  # dropped meanwhile
                found[f"checkpoints/{path.name}"] = hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()
    return found


def begun_at(folder: RunFolder, owner: Holder, resume: bool) -> int | None:
    """Step of the newest checkpoint of the run on this node's disk; -1 = it has none yet, None = the run is not there."""
    if not folder.config.is_file() or not (resume or holder_of(folder.path) == owner):
        return None
    return _newest_step(folder)


def _newest_step(folder: RunFolder) -> int:
    return max(folder.checkpoints_by_step(), default=-1)


def read_block(folder: RunFolder, name: str, offset: int) -> bytes | None:
    with suppress(FileNotFoundError), (folder.path / name).open("rb") as file:
        file.seek(offset)
        return file.read(BLOCK_BYTES)
    return None


def write_block(folder: RunFolder, name: str, offset: int, block: bytes) -> None:
    path = folder.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("r+b" if offset else "wb") as file:
        file.seek(offset)
        file.write(block)


def make_room(folder: RunFolder, owner: Holder, resume: bool) -> None:
    """Remove what an earlier trainer of the run has left on this node, but for logs: searchers of this node may be
    writing them. Another run of this name is put aside, unless it goes on."""
    is_foreign = folder.config.is_file() and begun_at(folder, owner, resume) is None
    # The folder is locked while it is changed: no other run of this node may begin in it meanwhile.
    claim = Claim.take(folder.path)
    try:
        if is_foreign:
            aside = folder.path.with_name(f"{folder.path.name}.before-{secrets.token_hex(4)}")
            os.replace(folder.path, aside)
            logger.warning("%s is another run's, and is now %s.", folder.path, aside)
        for path in set(folder.path.glob("*")) - {folder.logs}:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    finally:
        claim.release()


# On the supervisor's node


class RunCopy:
    """The copy of a run folder, in a folder that is laid out like it."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._have: dict[str, str] = {}
        """Files that were copied last, as `what_is_there` lists them."""
        self._fetching = threading.Thread()
        self._last_error = ""

    def follow(self, actor: Any, found: Mapping[str, str], *, wait: bool = False) -> None:
        """Have the copy become like what is on the node of an actor, in the background; `wait` = until it is."""
        if wait and self._fetching.is_alive():
            self._fetching.join()
        # One fetch at a time: the contents are compared again at the next look, so nothing is missed.
        if found == self._have or self._fetching.is_alive():
            return
        self._fetching = threading.Thread(target=self._fetch, args=(actor, dict(found)), daemon=True, name="run-copy")
        self._fetching.start()
        if wait:
            self._fetching.join()

    def hand_over(self, actor: Any, begun: int | None, owner: Holder, resume: bool) -> bool:
        """Write the run folder on the node of an actor, where the run has come to a checkpoint `begun` (`begun_at`);
        False where that is no older than the copy, or nothing was copied yet."""
        with self._lock:
            if not self.folder.config.is_file() or (begun is not None and begun >= _newest_step(self.folder)):
                return False
            ray.get(actor.with_folder.remote(make_room, owner, resume))
            for name in self._names():
                offset = 0
                while block := read_block(self.folder, name, offset):
                    ray.get(actor.with_folder.remote(write_block, name, offset, block))
                    offset += len(block)
            return True

    def _names(self) -> list[str]:
        checkpoints = [path for prefix in COPIED for path in self.folder.checkpoints_by_step(prefix).values()]
        # The manifest last: a folder without one does not count.
        paths = [path for folder in checkpoints for path in sorted(folder.iterdir()) if path.name != MANIFEST]
        paths += [folder / MANIFEST for folder in checkpoints]
        # And the config last of all: without one the run has not begun there, also where this is cut off.
        paths += [self.folder.path / name for name in reversed(FILES) if name != self.folder.summary.name]
        return [str(path.relative_to(self.folder.path)) for path in paths]

    def _fetch(self, actor: Any, found: dict[str, str]) -> None:
        try:
            with self._lock:
                new = [name for name in found if "/" in name and self._have.get(name) != found[name]]
                # The newest first: the others may be dropped before they are here.
                new.sort(key=lambda name: int(name.rpartition("-")[2]), reverse=True)
                fetched = {name: self._fetch_checkpoint(actor, name) for name in new}
                # After the checkpoints were written and before they count: no line that they know of is missing.
                for name in FILES:
                    self._fetch_file(actor, name, self.folder.path / name)
                # A checkpoint gets its name only when all its files are here and match their checksums.
                for name, partial in fetched.items():
                    if partial is not None:
                        shutil.rmtree(self.folder.path / name, ignore_errors=True)  # one of the same step, made again
                        os.replace(partial, self.folder.path / name)
                for prefix in COPIED:
                    for path in self.folder.checkpoints_by_step(prefix).values():
                        if f"checkpoints/{path.name}" not in found:
                            shutil.rmtree(path)
                # A checkpoint that vanished during the copy is left out, so the next look compares it again.
                self._have = {name: state for name, state in found.items() if fetched.get(name, name) is not None}
        except ray.exceptions.RayError as error:
            logger.warning("the copy of the run was interrupted: %s", str(error).strip().splitlines()[0])
        except (OSError, ValueError) as error:
            if str(error) != self._last_error:  # it is tried again at every look
                logger.error("%s: the run could not be copied: %s", self.folder.path, error)
            self._last_error = str(error)

    def _fetch_checkpoint(self, actor: Any, name: str) -> Path | None:
        """Copy a checkpoint beside its place; returns where it is, None where it was dropped meanwhile."""
        path = self.folder.path / name
        partial = path.with_name(f".{path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        if self._fetch_file(actor, f"{name}/{MANIFEST}", partial / MANIFEST) is None:
            return None
        files = json.loads((partial / MANIFEST).read_text(encoding="utf-8"))["files"]
        for file, wanted in files.items():
            digest = self._fetch_file(actor, f"{name}/{file}", partial / Path(file).name)
            if digest is None:
                return None
            if digest != wanted["sha256"]:
                raise ValueError(f"{name}/{file} has another checksum than its manifest says.")
        return partial

    def _fetch_file(self, actor: Any, name: str, path: Path) -> str | None:
        """Copy one file in blocks; returns its SHA-256, None where it is not there."""
        digest, offset = hashlib.sha256(), 0
        # The file is written beside its place and renamed: a fetch that is cut off leaves the earlier copy as it was.
        temporary = path.with_name(f".{path.name}.fetched")
        with temporary.open("wb") as file:
            while block := ray.get(actor.with_folder.remote(read_block, name, offset)):
                file.write(block)
                digest.update(block)
                offset += len(block)
        # b'' is the end of a file, None a file that is not there.
        if block is None:
            temporary.unlink()
            return None
        os.replace(temporary, path)
        return digest.hexdigest()


# The replica


def replica_actor(config: Config, folder: RunFolder, owner: Holder) -> Any:
    """The replica of a run, in an actor on this node, which lives as long as this process."""
    # soft=False: on the trainer's node the second copy would be lost with the first.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    make: Any = ray.remote(num_cpus=0)(Replica)
    actor = make.options(name=_replica_name(owner), scheduling_strategy=here).remote(
        (folder.path / GROUPS).absolute(), capacity=config.replay.capacity
    )
    ray.get(actor.ids.remote())  # it is there before a trainer looks for it
    return actor


class RemoteReplica:
    """The replica of a run, as its trainer sees it."""

    def __init__(self, owner: Holder) -> None:
        self._actor = ray.get_actor(_replica_name(owner), namespace=NAMESPACE)
        self._storing: dict[Any, str] = {}

    def add(self, group: TrajectoryGroup) -> None:
        stored = self._actor.add.remote(group.id, len(group.trajectories), pickled(group))
        self._storing[stored] = group.id

    def stored(self) -> set[str]:
        calls = list(self._storing)
        # The timeout is 0: the trainer calls this between its steps and must not wait for another node.
        done, _ = ray.wait(calls, num_returns=len(calls), timeout=0.0) if calls else ([], [])
        _results(done)
        return {self._storing.pop(call) for call in done}

    def groups(self, *, after: Mapping[str, int]) -> Iterator[TrajectoryGroup]:
        """`Replica.rows`, unpickled."""
        for body in self._actor.rows.options(num_returns="streaming").remote(after=dict(after)):
            yield pickle.loads(_results(body))

    def return_to(self, marks: Mapping[str, int]) -> None:
        _results(self._actor.return_to.remote(dict(marks)))
        # Calls of one actor run in order, so every `add` that was under way came before.
        self._storing = {}


def _replica_name(owner: Holder) -> str:
    """The process that owns the run is its only one."""
    return f"replica of {owner.pid} on {owner.host} at {owner.time}"


def _results(calls: Any) -> Any:
    """Results of calls of the replica. Its own errors are raised as they were raised there."""
    try:
        return ray.get(calls)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
