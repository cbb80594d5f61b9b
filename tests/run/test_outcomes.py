"""However a run ends, summary.json says so; what it has is saved first where its weights are sound."""

import gc
import json
import os

import pytest
from problem import make_config, wait_for

from tba.observe.files import read_summary
from tba.observe.run_folder import RunFolder
from tba.run import train
from tba.run.modes import AsyncRun, SyncRun
from tba.trainer.optimizer import MasterAdamW
from tba.trainer.step import NonFiniteLoss, TrainStep


def summary_of(config) -> dict:
    return json.loads(RunFolder(config.run_folder).summary.read_text())


def failing_after(count: int, real, error: Exception):
    """The function, but for its call number `count` + 1, which does its work and then raises."""
    calls = [0]

    def wrapped(*arguments, **named):
        calls[0] += 1
        result = real(*arguments, **named)
        if calls[0] == count + 1:
            raise error
        return result

    return wrapped


def test_a_loss_that_is_not_finite_saves_tells_and_can_be_resumed(folder, monkeypatch):
    config = make_config(folder, "name=not-finite", "mode=sync")
    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "gradients", failing_after(3, TrainStep.gradients, NonFiniteLoss("loss is nan.")))
        with pytest.raises(NonFiniteLoss):
            train(config)
    summary = summary_of(config)
    assert (summary["outcome"], summary["steps"]) == ("failed", 3)
    assert summary["error"].startswith("NonFiniteLoss: step 3 stopped before the optimizer moved: loss is nan.")
    assert summary["start"] == summary["final"]
    assert RunFolder(config.run_folder).newest_checkpoint().name == "step-3"
    assert train(config, resume=True)["outcome"] == "finished"
    assert summary_of(config)["steps"] == 6


def test_weights_in_the_middle_of_an_update_are_not_saved(folder, monkeypatch):
    config = make_config(folder, "name=half", "mode=sync", "train.checkpoint_every=2")
    broken = failing_after(3, MasterAdamW.step, RuntimeError("CUDA error: an illegal memory access"))
    monkeypatch.setattr(MasterAdamW, "step", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        train(config)
    assert summary_of(config)["error"] == "RuntimeError: CUDA error: an illegal memory access"
    assert sorted(RunFolder(config.run_folder).checkpoints_by_step()) == [2]


def test_a_last_evaluation_that_fails_does_not_cost_the_summary_and_is_made_up_for(folder, monkeypatch, caplog):
    config = make_config(folder, "name=unevaluated", "mode=sync", "train.max_steps=2")
    real = SyncRun.evaluate

    def evaluate(run) -> None:
        if run.trainer.done:
            assert summary_of(config)["outcome"] == "finished", "it was written before"
            raise ValueError("no grader")
        real(run)

    with monkeypatch.context() as patch:
        patch.setattr(SyncRun, "evaluate", evaluate)
        summary = train(config)
    assert (summary["outcome"], summary["steps"], summary["final_step"]) == ("finished", 2, 0)
    assert "no evaluation of version 2: ValueError: no grader" in caplog.text
    assert train(config, resume=True)["final_step"] == 2
    with pytest.raises(ValueError, match="is finished: step 2"):
        train(config, resume=True)


def test_the_summary_is_there_while_the_last_evaluation_is_waited_for(folder, monkeypatch):
    config = make_config(folder, "name=waits", "train.max_steps=2")
    real, seen = AsyncRun.wait_for_evaluation, []

    def wait_for_evaluation(run, version: int) -> None:
        seen.append(summary_of(config)["outcome"])
        real(run, version)

    monkeypatch.setattr(AsyncRun, "wait_for_evaluation", wait_for_evaluation)
    assert train(config)["final_step"] == 2
    assert seen == ["finished"]


def shared_memory() -> int:
    """Descriptors of memory that roles share. A mapping has one too, until nobody has a view of it."""
    gc.collect()
    found = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{entry}").startswith("/dev/shm/")
        except OSError:
            continue
    return found


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="shared memory is told from other files by its folder")
@pytest.mark.parametrize("part", ["make_recorder", "make_trainer"])
def test_a_run_that_cannot_be_made_leaves_no_shared_memory_and_says_why(folder, monkeypatch, part):
    def refuses(*_, **__):
        raise OSError("no more of these")

    config, before = make_config(folder, f"name=unmade-{part}"), shared_memory()
    monkeypatch.setattr(f"tba.run.modes.{part}", refuses)
    with pytest.raises(OSError, match="no more of these"):
        train(config)
    # The thread that reads what the fork server says may hold the last view for a moment, on a busy machine.
    assert wait_for(lambda: shared_memory() <= before, 20)
    assert summary_of(config) == {"outcome": "failed", "error": "OSError: no more of these"}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"steps": 6}', '{"outcome": "splendid"}'])
def test_nonsense_is_no_summary(text, tmp_path):
    folder = RunFolder(tmp_path)
    folder.summary.write_text(text)
    assert read_summary(folder) is None
