"""A trainer whose GPU fails at its third step; the one that is resumed is well."""

from tba.cli import training
from tba.trainer.loop import Trainer


def run_trainer(link, *, resume: bool, **arguments) -> int:
    step = Trainer.step

    def fails(trainer):
        if trainer.step_index == 3:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return step(trainer)

    if not resume:
        Trainer.step = fails
    return training.run_trainer(link, resume=resume, **arguments)
