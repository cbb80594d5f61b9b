"""What a run writes: metrics by their rules, files that are never half written."""

import json
import math

import pytest

from tba.observe.closing import Curve, shown, text_plot
from tba.observe.files import RunFolder, write_json
from tba.observe.metrics import Evaluation, mean_metrics, metric, reduce_metrics, standard_error
from tba.observe.sinks import JsonlSink, Sinks


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
        Sinks([]).write(0, {"surprise": 1.0})


def test_jsonl_lines_are_valid_json_also_for_nan(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(3, {"reward": math.nan, "loss": 0.5})
    sink.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 3, "reward": None, "loss": 0.5}


def test_tensorboard_gets_the_same_numbers(tmp_path):
    pytest.importorskip("tensorboard", reason="the tensorboard extra is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from tba.observe.sinks import TensorBoardSink

    sink = TensorBoardSink(tmp_path)
    sink.write(3, {"reward": 0.5})
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(3, 0.5)]


def test_a_missing_logger_is_named_before_training(tmp_path, monkeypatch):
    import sys

    from tba.config import load_config
    from tba.observe.sinks import make_sinks

    monkeypatch.setitem(sys.modules, "wandb", None)
    folder = RunFolder.create(tmp_path / "run", overwrite=False)
    with pytest.raises(ValueError, match="pip install wandb"):
        make_sinks(load_config(None, ["observe.sinks=[wandb]"]), folder)


def test_writes_leave_no_partial_file(tmp_path):
    write_json(tmp_path / "a.json", {"x": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"x": object()})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_that_is_no_run_is_never_replaced(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is not a run folder"):
        RunFolder.create(tmp_path, overwrite=True)
    assert (tmp_path / "precious.txt").exists()


def test_the_text_plot_has_its_first_point_low_and_its_last_high():
    lines = text_plot(Curve("accuracy", [(0, 0.1), (50, 0.3), (100, 0.5)])).splitlines()
    assert lines[0].strip().startswith("50.0%")
    assert lines[0].endswith("*")
    assert lines[9].strip().startswith("10.0% |*")


def test_shares_are_shown_in_percent_and_the_rest_as_numbers():
    assert shown("win_rate_greedy", 0.625) == "62.5%"
    assert shown("pass@8", 0.5) == "50.0%"
    assert shown("kl", 3.14159) == "3.14"
