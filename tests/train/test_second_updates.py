"""When a trainer makes a second update: in time that it would have waited, of batches that are there too late."""

import pytest
from problem import folder, make_config  # noqa: F401

from tba.config import Config
from tba.launch.defaults import with_objective_defaults
from tba.launch.run import load_inputs
from tba.launch.sync_run import SyncRun
from tba.observe.files import RunFolder
from tba.runtime.board import Board


class Timetable:
    """A gate that finds some batches there when the trainer comes for them, and others after a wait."""

    def __init__(self, ready: list[bool]):
        self.ready, self.row = ready, {}

    def is_open(self, trainer) -> bool:
        return self.ready[trainer.step_index]

    def wait(self, trainer) -> float:
        return 0.0


def second_updates(config: Config, ready: list[bool]) -> list[bool]:
    """Which steps made one, with batches that are there at once or are not; trainer and engine are real ones."""
    config = with_objective_defaults(config)
    place = RunFolder.create(config.run_folder, overwrite=False)
    run, made = SyncRun.make(config, place, load_inputs(config), Board.create()), []
    run.trainer.gate = Timetable(ready)
    try:
        for _ in ready:
            before = run.trainer.counts.again
            run.step()
            made.append(run.trainer.counts.again > before)
    finally:
        run.close()
    return made


LATE, READY = False, True


@pytest.mark.parametrize(
    ("ready", "made"),
    [
        # None in the first two steps, whose batches are late because the searchers have only begun.
        ([LATE] * 6, [False, False, True, True, True, True]),
        ([READY] * 6, [False] * 6),
        # One that came late is remembered for three steps: the last four are not all ready.
        ([READY, READY, READY, LATE, READY, READY, READY, READY], [False, False, False, True, True, True, True, False]),
        ([LATE, READY, READY, READY, READY, LATE], [False, False, True, True, False, True]),
    ],
    ids=["all late", "all ready", "one late", "late at first"],
)
def test_second_updates_are_made_unless_the_last_four_batches_were_all_there_in_time(folder, ready, made):  # noqa: F811
    steps = f"train.max_steps={len(ready) + 1}"
    name = f"name=again-{''.join(str(int(there)) for there in ready)}"
    config = make_config(folder, "mode=sync", name, steps, "train.second_update_after=1")
    assert second_updates(config, ready) == made
