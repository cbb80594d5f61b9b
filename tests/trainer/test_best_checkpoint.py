"""The weights of the best evaluation are kept, whenever its result arrives."""

import threading

import pytest
from builders import tiny_llama, tiny_tokenizer
from transformers import AutoModelForCausalLM

from tba.config import TrainConfig, load_config
from tba.observe.run_folder import RunFolder
from tba.trainer.checkpoint import Checkpoints
from tba.trainer.optimizer import MasterAdamW


@pytest.fixture
def checkpoints(tmp_path):
    model = tiny_llama()
    folder = RunFolder.create(tmp_path / "run", overwrite=False)
    optimizer = MasterAdamW(model.parameters(), TrainConfig())
    return Checkpoints(folder, model, tiny_tokenizer(), optimizer, heads=[], parts={}, keep=1)


def names(checkpoints):
    checkpoints.wait()
    return sorted(path.name for path in checkpoints.folder.checkpoints.iterdir())


def test_the_best_stays_until_another_is_as_good(checkpoints):
    checkpoints.keep_best(0, 0.3)  # the start model, of which nothing is saved
    checkpoints.save_evaluated(10)
    checkpoints.keep_best(12, 0.5)  # evaluated a little later than it was asked for
    assert names(checkpoints) == ["best-step-10"]
    AutoModelForCausalLM.from_pretrained(checkpoints.folder.checkpoints / "best-step-10")
    checkpoints.save_evaluated(20)
    checkpoints.save_evaluated(30)
    checkpoints.keep_best(20, 0.4)
    assert names(checkpoints) == ["best-step-10", "evaluated-step-30"]
    checkpoints.keep_best(30, 0.5)
    assert names(checkpoints) == ["best-step-30"]
    assert checkpoints.best == (30, 0.5)


def test_a_run_that_never_beats_its_start_keeps_no_best(checkpoints):
    checkpoints.keep_best(0, 0.6)
    checkpoints.save_evaluated(10)
    checkpoints.keep_best(10, 0.5)
    assert names(checkpoints) == []
    assert checkpoints.best == (0, 0.6)


def test_without_checkpoints_the_best_step_is_still_told(checkpoints):
    checkpoints.keep = 0
    checkpoints.keep_best(0, 0.3)
    checkpoints.save_evaluated(10)
    checkpoints.keep_best(10, 0.5)
    assert names(checkpoints) == []
    assert checkpoints.best == (10, 0.5)


def test_weights_whose_evaluation_never_came_do_not_outlive_the_run(checkpoints):
    checkpoints.save_evaluated(10)
    checkpoints.drop_unjudged()
    assert names(checkpoints) == []


def test_training_goes_on_while_a_checkpoint_is_being_written(checkpoints):
    disk_is_free = threading.Event()
    busy = checkpoints._writer.submit(disk_is_free.wait, 60.0)  # the disk takes its time over something large
    checkpoints.save_held(10)
    checkpoints.save_evaluated(10)
    checkpoints.keep_best(10, 0.5)
    checkpoints.release(10)
    assert not busy.done()
    disk_is_free.set()
    assert names(checkpoints) == ["best-step-10"]


def test_evaluations_are_due_every_tenth_of_a_run_unless_told_otherwise():
    def due(*overrides):
        config = load_config(None, ["train.max_steps=50", *overrides])
        return [
            step
            for step in range(1, 51)
            if config.evaluation_due(step, progress=config.progress_at(step), before=config.progress_at(step - 1))
        ]

    assert due() == list(range(5, 51, 5))
    assert due("evaluate.every=20") == [20, 40, 50]
    assert due("evaluate.every=0") == [50]


def test_evaluations_of_a_run_by_seconds_are_due_whenever_a_tenth_of_it_has_passed():
    config = load_config(None, ["train.max_seconds=60"])
    ends = [0.0, 5.0, 7.0, 11.0, 26.0, 29.9, 59.0, 61.0]  # of the steps; tenths end at 6, 12, 18, 24, 30 ... 60 s
    progress = [config.progress_at(step, seconds) for step, seconds in enumerate(ends)]
    due = [
        step for step in range(1, 8) if config.evaluation_due(step, progress=progress[step], before=progress[step - 1])
    ]
    assert due == [2, 4, 6, 7]
