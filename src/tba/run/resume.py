"""Resuming a run: the checkpoint from which it continues, and the settings that may have changed since its start."""

from __future__ import annotations

import logging
import math
from pathlib import Path

from tba.config import Config, ConfigError, load_config
from tba.observe.files import read_summary
from tba.observe.run_folder import RunFolder, step_of
from tba.replay.database import check_stored
from tba.run.checks import before_collapse
from tba.run.resolve import FILLED
from tba.run.study import flatten
from tba.trainer.checkpoint import check_manifest, find_checkpoint, last_row_of

logger = logging.getLogger("tba")


class RunFinished(ValueError):
    """There is no step left to make of the run that is to be resumed."""


MAY_CHANGE = (
    *("name", "output", "overwrite", "model.device"),
    *("evaluate.every", "train.checkpoint_every", "train.keep_checkpoints", "train.ranks", "train.max_seconds"),
    "search.num_searchers",  # as `tba scale` changes them while a run goes on
    *("search.reward_timeout_seconds", "search.reward_workers"),
    "search.reward_environment",
)
MAY_CHANGE_SECTIONS = ("runtime.", "observe.")
"""Settings, and whole sections, that may be others after a resume: they change how a run is watched and where it runs,
not what it learns. train.max_steps may grow besides."""


def resumed_config(config: Config, folder: RunFolder) -> Config:
    """The config that a run goes on with: the given one, with what was left out as it was resolved when the run was started,
    also on another machine. A ConfigError names the settings that differ and may not."""
    stored = load_config(folder.config)
    if stored.objective.name == config.objective.name:
        for section in dict.fromkeys(key.partition(".")[0] for key in FILLED):
            given, values = getattr(config, section), getattr(stored, section)
            keys = [name for place, _, name in (key.partition(".") for key in FILLED) if place == section]
            missing = {name: getattr(values, name) for name in keys if getattr(given, name) is None}
            if section == "objective":
                missing |= {name: value for name, value in values.settings.items() if name not in given.settings}
            config = config.model_copy(update={section: given.model_copy(update=missing)})
    asked, before = flatten(config.model_dump(mode="json")), flatten(stored.model_dump(mode="json"))
    if (config.train.max_steps or math.inf) >= (stored.train.max_steps or math.inf):
        # A larger number is allowed: it is taken out of the comparison.
        asked["train.max_steps"] = before["train.max_steps"]
    differing = [
        f"{key} was {before.get(key)!r} and is {asked.get(key)!r}"
        for key in sorted(asked.keys() | before.keys())
        if asked.get(key) != before.get(key) and key not in MAY_CHANGE and not key.startswith(MAY_CHANGE_SECTIONS)
    ]
    if differing:
        raise ConfigError(
            f"{folder.path} cannot be resumed with other settings: {'; '.join(differing)}. Leave them as they were "
            "(train.max_steps may grow), or start a new run under another name."
        )
    return config


def checkpoint_to_resume(folder: RunFolder, config: Config, resume: bool | str | Path) -> Path | None:
    """The newest whole checkpoint, or the one that was named; None = the run died before it had one, and begins again.
    Refuses a run that is finished."""
    summary = read_summary(folder) or {}
    path = find_checkpoint(folder) if resume is True else _named(folder, Path(str(resume)))
    if path is None:
        # The checkpoints of a run that finished were removed, or it had none (train.keep_checkpoints=0).
        if summary.get("outcome") == "finished":
            raise FileNotFoundError(
                f"run folder {folder.path} has no checkpoint to resume from: start without --resume (overwrite=true "
                "replaces the folder), and set train.checkpoint_every for checkpoints before the end."
            )
        is_stored = not config.is_synchronous and config.replay.durability != "off"
        kept_groups = " What it generated is kept and trained on." if is_stored else ""
        advice = "" if config.train.checkpoint_every else " Set train.checkpoint_every for checkpoints before the end."
        logger.warning(
            "run folder %s has no checkpoint: the run begins again at step 0, with the start model.%s%s",
            *(folder.path, kept_groups, advice),
        )
        return None
    step = step_of(path)
    if resume is True and (found := before_collapse(folder, path)) is not None:
        kept, since = found
        logger.warning(
            "%s collapsed, since about step %d, and goes on from its newest checkpoint, of step %d. To go on from before "
            "the collapse, with half the learning rate should it come again: tba train %s --resume "
            "observe.on_collapse=rollback",
            *(folder.path, since, step, kept),
        )
    steps, seconds = summary.get("steps", 0), summary.get("seconds", 0.0)
    seconds = seconds if step >= steps > 0 else 0.0  # an earlier checkpoint has used less
    # A run that was killed at its very end, failed there, or never got its last evaluation goes on from there.
    evaluated = summary.get("final_step")
    is_complete = summary.get("outcome") == "finished" and (evaluated is None or evaluated >= step)
    if is_complete and config.progress_at(step, seconds) >= 1.0:
        limit, used = ("max_steps", step) if config.progress_at(step) >= 1.0 else ("max_seconds", seconds)
        raise RunFinished(
            f"{folder.path} is finished: {limit.removeprefix('max_').removesuffix('s')} {used:g} of "
            f"train.{limit}={getattr(config.train, limit):g}, nothing is left to do. Raise train.{limit} to train on."
        )
    return path


def check_replay(config: Config, folder: RunFolder, checkpoint: Path | None, *, accept_lost: bool) -> None:
    """Refuse to go on from a checkpoint where the durable replay has lost groups, unless that is accepted."""
    if config.replay.durability == "off":
        return
    step, last_row = (0, 0) if checkpoint is None else (step_of(checkpoint), last_row_of(checkpoint) or 0)
    # The same rule as Trainer.resume: groups after the checkpoint are then removed, and cannot be missed.
    gives_up = config.is_synchronous or any(later > step for later in folder.checkpoints_by_step())
    if config.replay.durability == "node":
        last_row = 0  # a trainer on another disk gets its groups from the replica
    check_stored(folder.replay, last_row=last_row, gives_up=gives_up, accept_lost=accept_lost)


def _named(folder: RunFolder, path: Path) -> Path:
    whole = {found.resolve() for found in folder.checkpoints_by_step().values()}
    if path.resolve() not in whole:
        names = ", ".join(sorted(found.name for found in whole)) or "none"
        raise FileNotFoundError(f"{path} is no whole checkpoint of {folder.path} with a state; it has {names}.")
    check_manifest(path)
    return path
