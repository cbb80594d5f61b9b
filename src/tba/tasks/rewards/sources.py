"""The user's Python files of a run, copied into its folder: RUN/sources/0/rewards.py with the neighbours that it imports.

A run is evaluated with its own rewards, also after their file is gone. While it is there it is used, because it may read
other files beside it.
"""

from __future__ import annotations

import ast
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tba.config import Config
from tba.observe.files import write_json
from tba.observe.run_folder import RunFolder

logger = logging.getLogger("tba")

ORIGINS = "origins.json"
"""File in sources/ that says which folder each of its folders is a copy from: {"0": "/home/me/problem"}"""
LARGEST_BYTES = 2**20
"""Size beyond which a Python file is data, and is not copied."""


def copy_sources(config: Config, folder: RunFolder) -> None:
    """Copy the files that a config names (rewards, environments, a task of the user's own), and the modules beside them that
    they import, into the run folder."""
    environment = config.task.environment
    code = [*(own.function for own in config.task.rewards), *environment.code]
    code += [config.task.name] if config.task.is_own_file else []
    paths = dict.fromkeys(own.rpartition(":")[0] for own in code if isinstance(own, str))
    # Of a function given in Python the config has "<python>:name".
    files = [Path(path).expanduser().absolute() for path in paths if path and not path.startswith("<")]
    if not files:
        return
    # A number for each folder: two folders may both have a rewards.py.
    origins = {str(number): parent for number, parent in enumerate(dict.fromkeys(file.parent for file in files))}
    for number, parent in origins.items():
        waiting, found = [file for file in files if file.parent == parent], set[Path]()
        while waiting:
            file = waiting.pop()
            # Modules may import each other in a circle.
            if file in found or file.stat().st_size > LARGEST_BYTES:
                continue
            found.add(file)
            for name in _imported_names(file):
                module, package = file.parent / f"{name}.py", file.parent / name
                waiting += [module] if module.is_file() else []
                waiting += sorted(package.rglob("*.py")) if (package / "__init__.py").is_file() else []
        for file in found:
            copy = folder.sources / number / file.relative_to(parent)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
    write_json(folder.sources / ORIGINS, {number: str(parent) for number, parent in origins.items()})


def _imported_names(file: Path) -> Iterator[str]:
    """First parts of the names of the modules that a file imports anywhere."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [node.module] if node.module else [alias.name for alias in node.names]
            # `from . import x` has no module: the names themselves may be neighbours.
            yield from (name.partition(".")[0] for name in names)


def with_sources(config: Config, folder: RunFolder) -> Config:
    """The config of a run with the copies in its folder where the user's own files are gone; one that has changed since is
    named in a warning."""
    try:
        origins = json.loads((folder.sources / ORIGINS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return config
    copies = {Path(origin): folder.sources / number for number, origin in origins.items()}

    # The user's file wins while it is there; a copy is used only where it is gone.
    def found(place: Any) -> Any:
        if not isinstance(place, str):
            return place
        path, _, name = place.rpartition(":")
        file = Path(path).expanduser()
        copy = copies.get(file.parent, folder.sources) / file.name
        if not copy.is_file():
            return place
        if not file.is_file():
            logger.warning("%s is gone: its copy %s is used.", file, copy)
            return f"{copy.absolute()}:{name}"
        if file.read_bytes() != copy.read_bytes():
            logger.warning("%s has changed since the run: what it gives now is used. The run's own is %s.", file, copy)
        return place

    task, environment = config.task, config.task.environment
    classes = {name: found(place) for name, place in environment.classes.items()}
    update = {
        "rewards": tuple(reward.model_copy(update={"function": found(reward.function)}) for reward in task.rewards),
        "environment": environment.model_copy(
            update={
                "classes": classes,
                "tools": tuple(map(found, environment.tools)),
                "agent": found(environment.agent),
            }
        ),
        "name": found(task.name) if task.is_own_file else task.name,
    }
    return config.model_copy(update={"task": task.model_copy(update=update)})
