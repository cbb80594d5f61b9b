"""How a trainer goes back: a process that resumes a run, and a run that leaves a collapse behind.

Both load a checkpoint, and both have to deal with what came after it: the durable replay holds groups that the checkpoint's
buffer does not. An asynchronous run that resumes takes them in again, since nobody will generate just these once more. Where
searcher and trainer take turns they will be generated again, token by token; after a collapse, or where an earlier
checkpoint was named, they are what the policy said that is given up. In these cases they are removed.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from tba.train.checkpoint_folder import CorruptCheckpoint, check_manifest
from tba.train.health import MOST_ROLLBACKS, Collapsed, Health

if TYPE_CHECKING:
    from tba.train.loop import Trainer

logger = logging.getLogger("tba")

GENTLER = 0.5
"""Factor of the learning rate, or of the drift that `auto` aims at, with each rollback."""


def resume(trainer: Trainer, checkpoint: Path | None) -> None:
    """Go on from a checkpoint, or where there was none from the start: a new run is a run of which nothing is left. Where
    later checkpoints could have been gone on from, their steps are given up with what was generated for them."""
    if checkpoint is not None:
        load(trainer, checkpoint)
    gives_up = trainer.config.takes_turns or trainer.checkpoints.has_later(trainer.step_index)
    if gives_up:
        forget_rows(trainer)
    leave_behind(trainer)
    if not gives_up and trainer.durable is not None and trainer.last_row is not None:
        take_in_stored(trainer, after=trainer.last_row)
        trainer.durable.go_on_after(trainer.last_row)


def load(trainer: Trainer, checkpoint: Path) -> None:
    """Load a checkpoint. What does not load costs nothing: what came after it is left behind only then."""
    trainer.updates.forget()  # an older version has not saved what is trained a second time
    trainer.checkpoints.load(checkpoint)


def forget_rows(trainer: Trainer) -> None:
    """Remove the groups of the durable replay that came after the checkpoint."""
    if trainer.durable is not None and trainer.last_row is not None:
        trainer.durable.return_to(trainer.last_row, trainer.replay.marks)


def leave_behind(trainer: Trainer) -> None:
    """Drop later checkpoints, then the lines of their steps: a process that is killed in between leaves a run that can go on
    from what is left. An evaluation that came after the checkpoint was saved may be the best one."""
    trainer.checkpoints.drop_after(trainer.step_index)
    trainer.recorder.cut_files()
    trainer.checkpoints.recall_best({step: trainer.score(metrics) for step, metrics in trainer.recorder.late})
    trainer.recorder.best = trainer.checkpoints.best


def take_in_stored(trainer: Trainer, *, after: int) -> None:
    """Add the groups of the durable replay after this row, in the order of their arrival, as if they arrived now."""
    assert trainer.durable is not None
    taken = 0
    for stored in trainer.durable.load(after=after):
        if trainer.add_to_buffer(stored.group):
            taken += 1
            if stored.group.visit >= 0:  # imported ones were not counted the first time either
                trainer.count(stored.group)
    if taken:
        logger.info("%d groups that were stored after step %d was saved are taken in again.", taken, trainer.step_index)


def roll_back(trainer: Trainer, health: Health) -> None:
    """Restore the newest checkpoint from before the collapse, everything that a resumed process would restore, and go on
    with a gentler step. What came after it is removed, and searchers begin anew: nothing of the weights given up arrives
    later."""
    alarm, path, recorder = health.alarm, health.kept, trainer.recorder
    assert alarm is not None
    assert path is not None
    try:
        check_manifest(path)
    except CorruptCheckpoint as error:
        raise Collapsed(f"stopped at step {recorder.steps}: {alarm.words} It cannot be rolled back: {error}") from None
    rollbacks, is_regular = recorder.rollbacks, path.name.startswith("step-")
    load(trainer, path)
    forget_rows(trainer)
    leave_behind(trainer)
    to, factor = trainer.step_index, GENTLER ** (len(rollbacks) + 1)
    trainer.rate.soften(factor)
    recorder.rollbacks = [*rollbacks, {**vars(alarm), "to": to, "learning_rate_factor": factor}]
    if is_regular:
        trainer.checkpoints.pinned = to  # the only one from before: the next rollback may need it
    if trainer.config.mode != "fixed_lag":  # lagged weights have loaded what is due themselves
        trainer.publisher.publish(trainer.train_step.weights(to))
    if trainer.restart_searchers is not None:
        trainer.restart_searchers(trainer.replay.marks.by_source)
    logger.warning(
        "step %d: %s The run goes back to %s and on with %g of its learning rate (rollback %d of at most %d).",
        alarm.step,
        alarm.words,
        path,
        factor,
        len(recorder.rollbacks),
        MOST_ROLLBACKS,
    )
