"""The clock of benchmarks/time_to_target.py, and that its arms are settings which a run accepts."""

import sys
from pathlib import Path

import pytest

from tba.config import load_config

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from target_bench.runs import line_of
from target_bench.scenarios import SCENARIOS, Arm

VINEPPO = SCENARIOS["vineppo"]


def lines(seconds: dict[int, float], scores: dict[int, float]) -> list[dict[str, float]]:
    other = {"off_policy/lag_mean": 1.0, "time/step": 0.3, "buffer/generated": 640.0, "buffer/trained": 512.0}
    steps = [{"step": step, "seconds": at, **other} for step, at in seconds.items()]
    return [*steps, *({"step": step, "seconds": 0.0, VINEPPO.metric: score} for step, score in scores.items())]


STEPS = {1: 5.0, 2: 6.0, 3: 10.0, 4: 11.0, 5: 12.0}
"""Steps take 1 s; the evaluation after the second takes three more of a synchronous run."""
SCORES = {0: 0.3, 2: 0.4, 5: 0.6}


@pytest.mark.parametrize(("mode", "last"), [("mode=sync", 4.0), ("mode=async", 7.0)])
def test_only_a_synchronous_run_has_its_evaluations_taken_off_the_clock(mode, last):
    found = line_of(VINEPPO, Arm(name="arm", overrides=(mode,)), lines(STEPS, SCORES))
    assert found["curve"] == [[0.0, 0.3], [1.0, 0.4], [last, 0.6]]
    assert (found["steps"], found["step_seconds"], found["lag"]) == (5, 1.0, 1.0)


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_every_arm_is_a_config_that_is_accepted(scenario):
    for arm in scenario.arms:
        assert load_config(None, [*arm.overrides, "model.device=cpu"]).search.count in (1, 4, 12)
