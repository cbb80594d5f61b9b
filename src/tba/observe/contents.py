"""What a run folder may hold: what a run writes there, told from what somebody else has put there. `overwrite=true` removes
the first, and never a folder with anything of the second."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from tba.observe.claim import NAME as CLAIM

logger = logging.getLogger("tba")

MANIFEST = "manifest.json"
"""File of a checkpoint that is written last: a folder without it is not whole."""
SOURCES = "sources"
"""Folder with a copy of the user's Python files."""
SAVED = ".saved-model.json"
"""File with the names of those that `save_model`, `save_metrics` and `save_state` of TBATrainer have written into the run
folder itself."""
CARD = "README.md"
"""The model's card, which is added to a checkpoint when the run is over."""
PLOT = "evaluations.png"
"""The picture of a run's evaluations."""
FILES = (
    re.escape(SAVED),
    re.escape(CLAIM),
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
    SOURCES: r"\d+|origins\.json",
}
"""Folders that a run writes, with the names of what lies in them."""
LINK = r"checkpoint-\d+"
"""TBATrainer's link to a checkpoint, by the name that TRL gives it."""
EARLIER = r"earlier-(\d+)"
"""Folder in a run folder with an earlier run; it is never removed."""
MOST_NAMED = 3


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


def is_begun(run: Path) -> bool:
    """Whether a folder holds more than the claim on it, what a script has saved there before its run, earlier runs, and the
    status that the supervisor writes from the moment of the claim."""
    names = {entry.name for entry in run.iterdir()} - {CLAIM, SAVED, *saved_names(run)}
    return any("status.json" not in name and not re.fullmatch(EARLIER, name) for name in names)


def foreign(run: Path) -> list[str]:
    """What lies in a run folder and was not written by a run, by its path in there."""
    return [str(path.relative_to(run)) for path in _foreign(run)]


def _foreign(run: Path) -> Iterator[Path]:
    saved = saved_names(run)
    for entry in run.iterdir():
        if entry.name in saved or re.fullmatch(EARLIER, entry.name):
            continue
        if not _is_own(entry):
            yield entry
        elif entry.is_dir() and not entry.is_symlink():  # of a link only the link is removed
            yield from _foreign_in(entry, FOLDERS[entry.name])


def _is_own(entry: Path) -> bool:
    """Whether something in a run folder has the name of what a run writes."""
    if entry.is_dir() and not entry.is_symlink():
        return entry.name in FOLDERS
    if entry.is_symlink() and (entry.name in FOLDERS or re.fullmatch(LINK, entry.name)):
        return True
    return any(re.fullmatch(name, entry.name) for name in FILES)


def _foreign_in(folder: Path, names: str) -> Iterator[Path]:
    for entry in folder.iterdir():
        if not re.fullmatch(names, entry.name):
            yield entry
        elif (entry / MANIFEST).is_file():
            try:
                written = {MANIFEST, CARD, *json.loads((entry / MANIFEST).read_text(encoding="utf-8"))["files"]}
            except (OSError, ValueError, KeyError, TypeError):
                continue  # half a manifest says nothing
            yield from (file for file in entry.iterdir() if file.name not in written)


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
        names = ", ".join(sorted(found)[:MOST_NAMED]) + (", ..." if len(found) > MOST_NAMED else "")
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
    own = sorted(entry for entry in run.iterdir() if entry.name not in (CLAIM, SAVED) and _is_own(entry))
    own = [entry for entry in own if entry.name not in saved_names(run)]
    if not own or not is_begun(run):
        return
    before = [int(found[1]) for entry in run.iterdir() if (found := re.fullmatch(EARLIER, entry.name))]
    target = run / f"earlier-{max(before, default=0) + 1}"
    target.mkdir()
    for entry in own:
        entry.rename(target / entry.name)
    logger.warning("%s held an earlier run: it is now %s.", run, target)
