"""Which checkpoints stay when the guard speaks: real folders, metrics by hand, empty files for weights."""

import logging

import pytest

from tba.config import load_config
from tba.observe.recorder import Recorder
from tba.observe.run_folder import MANIFEST, RunFolder
from tba.trainer.checkpoint import Checkpoints
from tba.trainer.health import Collapsed, Health
from tba.types import ResponseCounts

WELL = {
    "completions/mean_length": 200.0,
    "completions/clipped_ratio": 0.05,
    "entropy": 0.5,
    "reward": 0.6,
    "kl": 10.0,
}
ILL = WELL | {"completions/mean_length": 4.0}
"""Breaks a rule from the 6th such batch on, so the alarm comes with the 8th (test_collapse_guard.py)."""


class EmptyCheckpoints(Checkpoints):
    def _write(self, step: int) -> None:
        self.wait()  # as the real one does
        (self.folder.checkpoints / f"step-{step}").mkdir()
        (self.folder.checkpoints / f"step-{step}" / MANIFEST).touch()


@pytest.fixture
def make_health(tmp_path):
    recorders = []

    def make(*overrides: str) -> Health:
        config = load_config(None, ["train.max_steps=1000", "observe.progress=false", *overrides])
        folder = RunFolder.create(tmp_path / f"run-{len(recorders)}", overwrite=False)
        recorders.append(Recorder(config, folder, decode=lambda group: [], reward_weights={}, counts=ResponseCounts()))
        parts = {"model": None, "tokenizer": None, "optimizer": None, "heads": (), "parts": {}}
        return Health(config, recorders[-1], EmptyCheckpoints(folder, **parts, keep=config.train.keep_checkpoints))

    yield make
    for recorder in recorders:
        recorder.close()


def run(health: Health, metrics: dict[str, float], first: int, last: int) -> None:
    every = health.config.train.checkpoint_every
    for step in range(first, last + 1):
        if every is not None and step % every == 0:
            health.checkpoints.save(step)
        health.recorder.step_done(step)
        health.step(step, metrics)
        health.save_if_due(step)


def saved(health: Health) -> list[str]:
    health.checkpoints.wait()
    return sorted(path.name for path in health.recorder.folder.checkpoints.iterdir())


def test_only_the_newest_healthy_checkpoint_stays_once_it_is_proven(make_health):
    health = make_health("train.max_steps=200")
    run(health, WELL, 1, 50)
    assert saved(health) == ["step-20", "step-40"], "40 may still turn out to be of a collapse"
    run(health, WELL, 51, 51)
    assert saved(health) == ["step-40"]


def healthy_steps(health: Health, last: int, tick=lambda: None) -> list[int]:
    """Steps at which a healthy checkpoint is saved."""
    found = []
    for step in range(1, last + 1):
        tick()
        run(health, WELL, step, step)
        found += [step] * (step in health.checkpoints.held)
    return found


def test_by_default_a_healthy_checkpoint_comes_every_tenth_of_the_run(make_health):
    assert healthy_steps(make_health(), 220) == [100, 200]
    assert healthy_steps(make_health("train.max_steps=50"), 50) == [20, 40]


def test_of_a_run_by_seconds_it_comes_with_tenths_of_them_that_are_at_least_twenty_steps_apart(
    make_health, monkeypatch
):
    health, now = make_health("train.max_steps=null", "train.max_seconds=100"), [0.0]
    monkeypatch.setattr("tba.observe.recorder.time.perf_counter", lambda: now[0])
    health.recorder.clock.start()

    def tick() -> None:
        now[0] += 0.6

    # Tenths are over with steps 17 (10.2 s), 34, 50 and 67; 17 is too early, and 50 too soon after 34.
    assert healthy_steps(health, 70, tick) == [34, 67]


def test_one_saved_when_the_collapse_had_begun_does_not_count(make_health):
    health = make_health("train.max_steps=200")
    run(health, WELL, 1, 57)
    run(health, ILL, 58, 65)  # broken from step 63 on, by batches since step 56
    assert health.recorder.collapse["since"] == 56
    assert health.recorder.collapse["checkpoint"] == "checkpoints/step-40"
    assert saved(health) == ["step-40"]
    run(health, ILL, 66, 190)
    assert saved(health) == ["step-40"], "nothing is saved as healthy while the alarm lasts"


def test_a_regular_checkpoint_from_before_is_pinned(make_health):
    health = make_health("train.checkpoint_every=10", "train.keep_checkpoints=3", "train.max_steps=200")
    run(health, WELL, 1, 57)
    run(health, ILL, 58, 120)
    assert health.recorder.collapse["checkpoint"] == "checkpoints/step-50"
    assert saved(health) == ["step-100", "step-110", "step-120", "step-50"]


def test_without_checkpoints_the_alarm_still_comes(make_health):
    health = make_health("train.keep_checkpoints=0")
    run(health, WELL, 1, 60)
    run(health, ILL, 61, 70)
    assert health.recorder.collapse["checkpoint"] is None
    assert saved(health) == []


def test_a_recovered_run_says_so_once_and_in_its_summary(make_health, caplog):
    health = make_health()
    with caplog.at_level(logging.WARNING, logger="tba"):
        run(health, WELL, 1, 60)
        run(health, ILL, 61, 75)
        run(health, WELL, 76, 100)
    assert [("is collapsing" in r.message, "has recovered" in r.message) for r in caplog.records] == [
        (True, False),
        (False, True),
    ]
    assert health.recorder.summary()["collapse"]["recovered"] == 87  # quiet from step 78 on, for ten steps
    assert health.step(101, WELL)["guard/alarm"] == 0.0


@pytest.mark.parametrize("setting", ["train.updates_per_batch=4", "replay.max_replay_ratio=4"])
def test_further_updates_on_a_batch_are_no_news(make_health, setting):
    health = make_health(setting)
    run(health, WELL, 1, 240)
    run(health, ILL, 241, 268)  # seven new batches; the eighth comes at step 269
    assert health.alarm is None
    run(health, ILL, 269, 269)
    assert health.alarm is not None


def test_stop_raises_with_the_words_and_the_checkpoint(make_health):
    health = make_health("observe.on_collapse=stop", "train.max_steps=200")
    run(health, WELL, 1, 60)
    health.stop_if_asked()
    run(health, ILL, 61, 68)
    with pytest.raises(Collapsed, match=r"responses have shrunk .* is kept: .*step-40"):
        health.stop_if_asked()


def test_a_run_goes_back_to_a_checkpoint_whose_last_batches_are_from_before(make_health):
    health = make_health("observe.on_collapse=rollback", "train.max_steps=200")
    run(health, WELL, 1, 67)
    assert not health.rolls_back
    run(health, ILL, 68, 75)  # since step 66: of the batches before it the checkpoint of step 60 has seen six
    assert health.recorder.collapse["since"] == 66
    assert health.rolls_back
    assert health.kept.name == "step-40"
    assert saved(health) == ["step-40", "step-60"], "an older one may be needed"


def test_a_checkpoint_that_the_run_went_back_to_in_vain_is_passed_over(make_health):
    health = make_health("observe.on_collapse=rollback", "train.max_steps=200")
    run(health, WELL, 1, 67)
    health.recorder.rollbacks = [{"to": 40}]
    run(health, ILL, 68, 75)
    assert health.kept.name == "step-60", "there is no older one"


def test_a_run_that_went_back_as_often_as_it_may_stops(make_health):
    health = make_health("observe.on_collapse=rollback", "train.max_steps=200")
    health.recorder.rollbacks = [{"to": 20}, {"to": 20}]
    run(health, WELL, 1, 67)
    run(health, ILL, 68, 75)
    assert not health.rolls_back
    with pytest.raises(Collapsed, match=r"is kept: .*step-40\. Rollbacks before this: 2\."):
        health.stop_if_asked()


def test_a_run_without_a_checkpoint_from_before_stops(make_health):
    health = make_health("observe.on_collapse=rollback")
    run(health, WELL, 1, 60)
    run(health, ILL, 61, 68)
    assert not health.rolls_back
    with pytest.raises(Collapsed, match="There is no checkpoint from before"):
        health.stop_if_asked()
