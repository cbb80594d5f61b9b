"""The folder of a run: its paths, its lock, its files, and the files that a new run of its name may replace.

The process that owns the run (`tba train`, or the Python process of a script) holds a lock on a file in the folder for the
length of the run, so that no two runs share it. The kernel frees the lock when the process ends. The content of the file is
for messages. A trainer also finds its own supervisor there:

    {"pid": 4711, "host": "node7", "time": 1790000000.0}

`overwrite=true` removes the files that a run has written, and never a folder with other files in it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

logger = logging.getLogger("tba")

CLAIM = ".claim.json"
MANIFEST = "manifest.json"
"""File of a checkpoint that is written last: a folder without it is not whole."""
SAVED = ".saved-model.json"
"""File with the names of those that `save_model`, `save_metrics` and `save_state` of TBATrainer have written into the run
folder itself."""
CARD = "README.md"
"""The model's card, which is added to a checkpoint when the run is over."""
PLOT = "evaluations.png"
"""The picture of a run's evaluations."""
FILES = (
    r"\.?(config\.yaml|(status|control|summary)\.json)(\.\d+)?",  # with a number: being written
    r"(metrics|samples)\.jsonl",
    r"\.?(replay|groups)\.(sqlite|location|stored)[\w.-]*",
    r"failed-batch-step-\d+\.safetensors",
    re.escape(PLOT),
)
"""Names of the files that a run writes."""
FOLDERS = {
    "checkpoints": r"\.?([a-z]+-)*step-\d+(\.\w+)*",
    "logs": r".+\.log",
    "tensorboard": r".+",
    "wandb": r".+",
    "sources": r"\d+|origins\.json",  # copies of the user's Python files
}
"""Folders that a run writes, with the names of what lies in them."""
LINK = r"checkpoint-\d+"
"""TBATrainer's link to a checkpoint, by the name that TRL gives it."""
EARLIER = r"earlier-(\d+)"
"""Folder in a run folder with an earlier run; it is never removed."""


class RunFolder:
    """Paths inside runs/<name>/: config.yaml, metrics.jsonl, samples.jsonl, replay.sqlite, checkpoints/step-N/, logs/,
    sources/, status.json, summary.json. checkpoint-N are TBATrainer's links to checkpoints/step-N, earlier-N/ the runs
    that it has moved aside."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.replay = path / "replay.sqlite"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.sources = path / "sources"
        self.status = path / "status.json"
        self.control = path / "control.json"
        self.summary = path / "summary.json"
        self._claim: Claim | None = None

    @classmethod
    def check(cls, path: Path, *, overwrite: bool, keep_earlier: bool = False) -> None:
        """Refuse a folder that `create` would refuse, and an output that cannot be written, before anything is loaded or
        made."""
        folder = cls(path)
        above = (path, *path.absolute().parents)
        if broken := next((parent for parent in above if parent.is_symlink() and not parent.exists()), None):
            raise FileExistsError(
                f"{broken} is a link to {os.readlink(broken)}, which is not there: choose another output=..., or correct it."
            )
        existing = next(parent for parent in above if parent.exists())
        if not existing.is_dir():
            raise FileExistsError(f"{existing} is a file, not a folder: choose another output=... or name=...")
        if existing == path and not keep_earlier:
            folder._refuse_replacing(overwrite)
        cls.check_writable(path, existing)

    @classmethod
    def check_writable(cls, path: Path, existing: Path | None = None) -> None:
        """Refuse a run folder that cannot be written; `existing` is the folder above it that is there, None = itself."""
        existing = existing or path
        try:
            with tempfile.TemporaryFile(dir=existing) as probe:
                probe.write(bytes(2**20))  # so much must fit into the output folder before a run starts
                probe.flush()
        except OSError as error:
            raise ValueError(
                f"run folder {path} cannot be written: {error.strerror} ({existing}). Choose another output=..., or free it."
            ) from None

    @classmethod
    def create(cls, path: Path, *, overwrite: bool) -> RunFolder:
        """Claim a run folder and make it empty, see `clear`."""
        folder = cls(path)
        folder.claim()
        try:
            folder.clear(overwrite=overwrite)
        except BaseException:
            folder.release()
            raise
        return folder

    def clear(self, *, overwrite: bool, keep_earlier: bool = False) -> None:
        """Make a claimed folder that of a new run. An earlier run of the same name is only replaced, or moved aside, when
        asked for."""
        if keep_earlier:
            move_aside(self.path)
        else:
            self._refuse_replacing(overwrite)
            if is_begun(self.path):
                remove_contents(self.path)
        self.logs.mkdir()
        self.checkpoints.mkdir()

    def reopen(self) -> None:
        """Go on in a claimed folder whose run is to be resumed."""
        if not self.config.is_file() or not self.config.stat().st_size:
            lacks = "its config.yaml is empty" if self.config.is_file() else "it has no config.yaml"
            raise FileNotFoundError(
                f"there is no run to resume in {self.path} ({lacks}): give the config or the name of a run "
                "that was started before, or start it without --resume."
            )
        for folder in (self.logs, self.checkpoints):
            if folder.exists() and not folder.is_dir():
                raise FileExistsError(f"{folder} is a file, and a run has a folder there: move it away, then --resume.")
            folder.mkdir(exist_ok=True)

    def claim(self, *, holder: Holder | None = None) -> None:
        """Lock the folder for this process, or for its supervisor, until `release`; see `Claim.take`."""
        self._claim = Claim.take(self.path, holder=holder)

    def release(self) -> None:
        """The run is over: the folder may be used by another."""
        if self._claim is not None:
            self._claim.release()

    def _refuse_replacing(self, overwrite: bool) -> None:
        if not is_begun(self.path):
            return
        if not overwrite:
            raise FileExistsError(
                f"run folder {self.path} exists already: choose another name (name=...), or replace it with overwrite=true."
            )
        if not self.config.exists():
            raise FileExistsError(f"{self.path} is not a run folder (it has no config.yaml) and is not replaced.")
        refuse_foreign(self.path)

    def last_step(self) -> dict[str, Any]:
        """The last line of metrics.jsonl that is of an optimizer step; {"step": 0} where there is none."""
        try:
            with self.metrics.open("rb") as file:
                # The last 64 KiB: the file of a long run is large, and `tba status` wants its last line.
                file.seek(max(0, os.fstat(file.fileno()).st_size - 65_536))
                lines = file.read().decode("utf-8", errors="replace").splitlines()
        except OSError:
            return {"step": 0}
        for line in reversed(lines):
            try:
                record = json.loads(line)
            except ValueError:  # cut off at either end
                continue
            # Lines of evaluations have no loss.
            if isinstance(record, dict) and "loss" in record:
                return record
        return {"step": 0}

    def newest_checkpoint(self) -> Path:
        """The checkpoint of the highest step. A FileNotFoundError names the run folder when there is none."""
        found = self.checkpoints_by_step()
        if not found:
            raise FileNotFoundError(f"run folder {self.path} has no checkpoint yet.")
        return found[max(found)]

    def checkpoints_by_step(self, prefix: str = "step-") -> dict[int, Path]:
        """Folders of the whole checkpoints whose name is `prefix` and a step, by their step; others in there are ignored."""
        named = [(re.fullmatch(rf"{prefix}(\d+)", path.name), path) for path in self.checkpoints.glob(f"{prefix}*")]
        # Without a manifest it is not one of ours, or not whole.
        return {int(match[1]): path for match, path in named if match is not None and (path / MANIFEST).is_file()}


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint, which its name says; 0 for a folder that is none."""
    number = checkpoint.name.rpartition("step-")[2]
    return int(number) if number.isdecimal() else 0


# The lock

_held: set[int] = set()
"""Descriptors of the locks of this process."""


class FolderInUse(FileExistsError):
    """Another run writes in the folder."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that owns a run: Holder(pid=4711, host="node7", time=1790000000.0)"""

    pid: int
    host: str
    time: float
    """Seconds since 1970 when this was made: two containers may have one host name and the same process ids."""

    @classmethod
    def of_this_process(cls) -> Holder:
        return cls(pid=os.getpid(), host=socket.gethostname(), time=time.time())


@dataclass
class Claim:
    """The right to write in a folder, from `take` to `release` or the end of the process."""

    path: Path
    descriptor: int | None
    """Open file with the lock; None = the supervisor of this process has it, or it was released."""
    made: list[Path] = field(default_factory=list)
    """Folders that did not exist before, the innermost first."""

    @classmethod
    def take(cls, folder: Path, *, holder: Holder | None = None) -> Claim:
        """Lock a folder, which is made where it does not exist, for this process, or for a supervisor that may have it
        already. FolderInUse names the process that has it."""
        path, made = folder / CLAIM, [parent for parent in (folder, *folder.parents) if not parent.exists()]
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                found = holder_of(folder)
                # The lock is that of this trainer's own supervisor, which has given it its Holder.
                if found is not None and found == holder:
                    return cls(path, None)
                host, who = socket.gethostname(), "another process"
                if found is not None:
                    where = f"this host ({host})" if found.host == host else f"host {found.host}"
                    who = f"process {found.pid} on {where}"
                raise FolderInUse(
                    f"run folder {folder} is in use by {who}: choose another name (name=...), or end that run (tba stop "
                    f"{folder})."
                ) from None
            except OSError as error:
                message = "%s: the file system has no locks (%s), so nothing keeps a second run out of this folder."
                logger.warning(message, folder, error)
            if _is_at(path, descriptor):
                break
            os.close(descriptor)  # released between the two calls: the file is no longer the one in the folder
        # From here on a forked child closes it: the lock is of the open file, which a child would keep open.
        _held.add(descriptor)
        claim = cls(path, descriptor, made)
        try:
            _warn_of_another_host(folder)
            text = json.dumps(asdict(holder or Holder.of_this_process())) + "\n"
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, text.encode(), 0)
            os.fsync(descriptor)  # or a trainer on another node would see an empty file on a network disk
        except BaseException:
            claim.release()
            raise
        return claim

    def release(self) -> None:
        """Give the folder up; where nothing was written in it, it is as it was before. May be called more than once."""
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is None:
            return
        with suppress(OSError):  # whatever has become of the folder
            # While the lock is held: after it, another process may have taken the file.
            if _is_at(self.path, descriptor):
                self.path.unlink()
        _held.remove(descriptor)
        os.close(descriptor)
        with suppress(OSError):  # something is in there
            for folder in self.made:
                folder.rmdir()


def holder_of(folder: Path) -> Holder | None:
    """The process that took the claim on a folder last; None = the folder has no claim that can be read."""
    try:
        return Holder(**json.loads((folder / CLAIM).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _warn_of_another_host(folder: Path) -> None:
    """A run that was killed on another host leaves its claim, without the lock."""
    last = holder_of(folder)
    if last is not None and last.host != socket.gethostname():
        logger.warning(
            "%s was in use by process %d on host %s, which did not release it and has no lock on it now. If that process "
            "still runs, the file system does not share its locks between hosts: end one of the two runs.",
            *(folder, last.pid, last.host),
        )


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _close_in_child() -> None:
    """A lock lasts until its last descriptor is closed: a forked child that outlives this process must not keep it."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


# What a run writes, as opposed to files that are not the run's


def others_entry(*paths: Path, writable: int = stat.S_IWOTH) -> str | None:
    """Why files or folders may hold what another user has written: `a/config.yaml belongs to user 1005`. None = all of them
    are this user's or root's, and no other user may write them by the mode bits `writable`."""
    for entry in paths:
        try:
            found = entry.stat()
        except OSError:  # it was removed meanwhile, or is a link to nothing
            continue
        if found.st_uid not in (0, os.geteuid()):
            return f"{entry} belongs to user {found.st_uid}"
        if found.st_mode & writable:
            return f"{entry} can be written by other users (mode {stat.S_IMODE(found.st_mode):o}; chmod go-w ends that)"
    return None


def _entries(run: Path) -> list[Path]:
    """Entries of a run folder without its claim, a script's own saves, and earlier runs."""
    kept = {CLAIM, SAVED, *saved_names(run)}
    return [entry for entry in run.iterdir() if entry.name not in kept and not re.fullmatch(EARLIER, entry.name)]


def is_begun(run: Path) -> bool:
    """Whether a folder holds a run: more than the status that the supervisor writes from the moment of the claim."""
    return any("status.json" not in entry.name for entry in _entries(run))


def foreign(run: Path) -> list[str]:
    """Entries of a run folder that no run has written, by their path in it. Of a link only the link is looked at, and of a
    checkpoint the files that its manifest lists are the run's."""
    found: list[Path] = []
    for entry in _entries(run):
        if not _is_own(entry):
            found.append(entry)
        elif entry.is_dir() and not entry.is_symlink():
            found += [own for own in entry.iterdir() if not re.fullmatch(FOLDERS[entry.name], own.name)]
            for manifest in entry.glob(f"*/{MANIFEST}"):
                with suppress(OSError, ValueError, KeyError, TypeError):  # half a manifest says nothing
                    listed = {MANIFEST, CARD, *json.loads(manifest.read_text(encoding="utf-8"))["files"]}
                    found += [file for file in manifest.parent.iterdir() if file.name not in listed]
    return [str(path.relative_to(run)) for path in found]


def _is_own(entry: Path) -> bool:
    """Whether something in a run folder has the name of what a run writes."""
    if entry.is_dir() and not entry.is_symlink():
        return entry.name in FOLDERS
    if entry.is_symlink() and (entry.name in FOLDERS or re.fullmatch(LINK, entry.name)):
        return True
    return any(re.fullmatch(name, entry.name) for name in FILES)


def saved_names(run: Path) -> set[str]:
    """Names of the files that a script has saved in a run folder."""
    try:
        return set(json.loads((run / SAVED).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return set()


def refuse_foreign(run: Path) -> None:
    """Refuse to replace a folder that holds more than a run."""
    found = foreign(run)
    if found:
        names = ", ".join(sorted(found)[:3]) + (", ..." if len(found) > 3 else "")
        raise FileExistsError(
            f"{run} holds what no run wrote ({names}) and is not replaced: move that elsewhere, or choose another name "
            "(name=...)."
        )


def remove_contents(run: Path) -> None:
    """Remove all of a run but the claim on its folder; a folder with anything else in it is refused before."""
    refuse_foreign(run)
    for entry in run.iterdir():
        if re.fullmatch(EARLIER, entry.name):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != CLAIM:
            entry.unlink(missing_ok=True)  # a status that was being written has its name by now


def move_aside(run: Path) -> None:
    """Move an earlier run in a folder to earlier-N in there; what no run wrote, or a script has saved, stays."""
    own = sorted(entry for entry in _entries(run) if _is_own(entry))
    if not own or not is_begun(run):
        return
    # Numbers only rise, even after a folder in between was deleted.
    before = [int(found[1]) for entry in run.iterdir() if (found := re.fullmatch(EARLIER, entry.name))]
    target = run / f"earlier-{max(before, default=0) + 1}"
    target.mkdir()
    for entry in own:
        entry.rename(target / entry.name)
    logger.warning("%s held an earlier run: it is now %s.", run, target)
