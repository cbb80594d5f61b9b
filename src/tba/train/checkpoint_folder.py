"""The folder of a checkpoint: what makes it whole, how it is found, and how it is dropped, replaced or given a second name.

A process may be killed at any line here: what it leaves has the ending .partial, or lacks the manifest, and does not count.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path

from tba.observe.files import MANIFEST, RunFolder, sync

logger = logging.getLogger("tba")


class CorruptCheckpoint(RuntimeError):
    """A checkpoint is not what was written; the message names the file."""


def find_checkpoint(folder: RunFolder) -> Path | None:
    """The newest whole checkpoint of a run that can be resumed. A corrupt one is named in a warning and set aside; None
    where none is left."""
    found = {(step, path.name.startswith("step-")): path for step, path in folder.resumable()}
    for key in sorted(found, reverse=True):
        try:
            check_manifest(found[key])
            return found[key]
        except CorruptCheckpoint as error:
            aside = found[key].with_name(f"corrupt-{found[key].name}")
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(found[key], aside)
            logger.warning("%s It is set aside as %s.", error, aside)
    return None


def write_manifest(path: Path) -> None:
    """Sync every file of a folder to disk and write manifest.json: from now on the folder is whole."""
    files = {}
    for file in sorted(path.iterdir()):
        files[file.name] = {"bytes": file.stat().st_size, "sha256": _digest(file)}
        sync(file)
    manifest = path / MANIFEST
    manifest.write_text(json.dumps({"format": 1, "files": files}, indent=2) + "\n", encoding="utf-8")
    for name in files:
        (path / name).chmod(
            manifest.stat().st_mode
        )  # as the umask says: safetensors leaves its files to the owner alone
    sync(manifest)
    sync(path)


def check_manifest(path: Path) -> None:
    """Raise CorruptCheckpoint unless every file is there, as it was written."""
    try:
        files = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpoint(f"checkpoint {path} has no manifest that can be read ({error}).") from None
    for name, wanted in files.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != wanted["bytes"]:
            size = file.stat().st_size if file.is_file() else "no"
            raise CorruptCheckpoint(f"checkpoint {path} is damaged: {name} has {size} bytes, not {wanted['bytes']}.")
        if _digest(file) != wanted["sha256"]:
            raise CorruptCheckpoint(
                f"checkpoint {path} is damaged: {name} has another checksum than when it was written."
            )


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def drop_folder(path: Path) -> None:
    """Remove a checkpoint so that no part of it is ever taken for a whole one."""
    leaving = path.with_name(f".{path.name}.dropped.partial")
    os.replace(path, leaving)
    shutil.rmtree(leaving)


def replace_folder(source: Path, target: Path) -> None:
    if target.exists():
        drop_folder(target)
    os.replace(source, target)
    sync(target.parent)


def link_folder(source: Path, name: str) -> None:
    """Give a whole checkpoint a second name; its files are never changed, so they need not be copied."""
    partial_path = source.with_name(f".{name}.partial")
    shutil.rmtree(partial_path, ignore_errors=True)
    shutil.copytree(source, partial_path, copy_function=_link)
    sync(partial_path)
    replace_folder(partial_path, source.with_name(name))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)
