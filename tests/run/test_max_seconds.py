"""Runs that end by train.max_seconds: real ones on a tiny model. Nothing is asserted that depends on their speed."""

import pytest
from problem import make_config, records_so_far, steps_of

from tba import TBAConfig
from tba.cli.training import given_config
from tba.config import ConfigError
from tba.observe.run_folder import RunFolder
from tba.run import train
from tba.run.resume import RunFinished

pytestmark = pytest.mark.slow

BY_TIME = (
    "train.max_steps=null",
    "model.device=cpu",
    "train.keep_checkpoints=1",
    "train.learning_rate={kind: linear, start: 1e-3}",
)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_run_ends_by_its_seconds_and_goes_on_when_it_gets_more(folder, mode):
    def timed(seconds: float):
        return make_config(folder, f"mode={mode}", f"name=timed-{mode}", f"train.max_seconds={seconds}", *BY_TIME)

    config = timed(1.0)
    first = train(config)
    run = RunFolder(config.run_folder)
    assert (first["outcome"], first["final_step"]) == ("finished", first["steps"])
    assert first["seconds"] >= 1.0
    assert [path.name for path in run.checkpoints.glob("step-*")] == [f"step-{first['steps']}"]
    assert steps_of(config) == list(range(1, first["steps"] + 1))
    rates = [record["learning_rate"] for record in records_so_far(config) if "learning_rate" in record]
    assert all(0.0 <= rate < rates[0] for rate in rates[1:]), "it falls with the seconds"
    with pytest.raises(RunFinished, match=r"of train\.max_seconds=1, nothing is left to do"):
        train(config, resume=True)

    more = first["seconds"] + 0.5  # a slow machine has used more than it was given
    second = train(timed(more), resume=True)
    assert (second["outcome"], second["final_step"]) == ("finished", second["steps"])
    assert second["steps"] >= first["steps"]
    assert second["seconds"] >= more
    seconds = [record["seconds"] for record in records_so_far(config) if "loss" in record]
    assert seconds == sorted(seconds), "those of the first process count"
    assert all(used > first["seconds"] - 0.1 for used in seconds[first["steps"] :])


def test_the_steps_end_a_run_that_has_time_left(folder):
    summary = train(make_config(folder, "mode=sync", "name=both", "train.max_steps=2", "train.max_seconds=1000"))
    assert (summary["outcome"], summary["steps"], summary["final_step"]) == ("finished", 2, 2)


def test_the_command_and_the_api_take_seconds_and_leave_the_steps_open():
    def limits(train):
        return train.max_steps, train.max_seconds

    assert limits(given_config([], {"train.max_seconds": 180.0}).train) == (None, 180.0)
    both = given_config([], {"train.max_steps": 5, "train.max_seconds": 180.0})
    assert limits(both.train) == (5, 180.0)
    assert limits(TBAConfig(train={"max_seconds": 60}).config.train) == (None, 60.0)
    with pytest.raises(ConfigError, match="leaves the number of steps open"):
        TBAConfig(train={"max_seconds": 60}, save_steps=0.1)
