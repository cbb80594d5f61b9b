"""Metrics: how parts are put together, standard errors, names that are not listed."""

from pathlib import Path

import pytest

from tba.config import load_config
from tba.observe.display import shown
from tba.observe.files import Sinks, WriteFailures
from tba.observe.metrics import (
    Evaluation,
    mean_metrics,
    metric,
    moving_metric,
    reduce_metrics,
    standard_error,
)
from tba.observe.run_folder import RunFolder


def test_parts_of_a_step_are_put_together_by_each_metrics_rule():
    first = {"loss": 1.0, "reward": 0.0, "tb/max_abs_residual": 3.0}
    second = {"loss": 2.0, "reward": 1.0, "tb/max_abs_residual": 2.0}
    parts = [(first, 1.0), (second, 3.0)]
    assert reduce_metrics(parts) == {"loss": 3.0, "reward": 0.75, "tb/max_abs_residual": 3.0}


def test_a_mean_has_its_standard_error_beside_it():
    # Mean 2.5; squares 2.25 + 0.25 + 0.25 + 2.25 = 5, over 3, over 4
    assert standard_error([1, 2, 3, 4]) == pytest.approx((5 / 12) ** 0.5)
    assert standard_error([1]) is None
    assert mean_metrics({"success": [True, False], "kl": [3.0]}) == {
        "success": 0.5,
        "success_standard_error": 0.5,
        "kl": 3.0,
    }
    metrics = {"success": 0.5, "success_standard_error": 0.1, "vendi": 7.0, "num_prompts": 1.0}
    found = Evaluation.of(metrics)
    assert (found.values, found.errors) == ({"success": 0.5, "vendi": 7.0}, {"success": 0.1})
    assert found.counts == {"num_prompts": 1.0}
    assert shown("success", 0.5, 0.1) == "50.0% ± 10.0"
    assert shown("kl", 3.0, 0.125) == "3 ± 0.12"


def test_a_metric_that_is_not_listed_is_refused():
    with pytest.raises(KeyError, match="not listed"):
        metric("surprise")
    with pytest.raises(KeyError, match="not listed"):
        Sinks(load_config(), RunFolder(Path(".")), WriteFailures()).write(0, {"surprise": 1.0})


def test_the_metric_that_moved_is_the_first_beyond_its_noise():
    start = {"accuracy": 0.0, "accuracy_standard_error": 0.01, "reward": 0.08, "reward_standard_error": 0.01}
    end = {"accuracy": 0.005, "accuracy_standard_error": 0.01, "reward": 0.59, "reward_standard_error": 0.01}
    assert moving_metric([start, end]) == "reward"
    assert moving_metric([start, {**end, "accuracy": 0.1}]) == "accuracy"
    assert moving_metric([start, start]) == "accuracy"
    assert moving_metric([]) == moving_metric([{}]) == ""
