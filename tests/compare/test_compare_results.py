"""Numbers of a study, worked out by hand."""

import json
import math

import pytest
from studies import TUNE, plan_study, write_run

from tba.compare.display import as_markdown, metric_grid, tuning_grid
from tba.compare.plot import save_plot
from tba.compare.results import Estimate, as_json, choose_value, estimate, gather, tuned_values
from tba.compare.runner import show_results
from tba.compare.runs import state_of, write_failed


def test_the_standard_error_divides_by_n_minus_1_and_by_n():
    # deviations -1, 0, 1: variance 2 / 2 = 1, standard error sqrt(1 / 3)
    assert estimate([1.0, 2.0, 3.0]) == Estimate(mean=2.0, error=pytest.approx(math.sqrt(1 / 3)))
    assert estimate([5.0]) == Estimate(mean=5.0, error=None)
    assert estimate([5.0, None, math.nan]) == Estimate(mean=5.0, error=None)
    assert estimate([]) == Estimate(mean=None, error=None)


def test_tuning_takes_the_best_mean_over_its_columns():
    # means 0.5, 0.6, 0.55
    assert choose_value({1e-4: [0.4, 0.6], 3e-4: [0.3, 0.9], 1e-3: [0.55, 0.55]}) == 3e-4


def test_a_failed_tuning_run_is_worse_than_any_number():
    assert choose_value({0.1: [0.1, 0.1], 1.0: [0.9, None]}) == 0.1
    assert choose_value({0.1: [None, None], 1.0: [0.9, None]}) == 1.0


def test_of_equal_values_the_smaller_is_taken():
    assert choose_value({1.0: [0.5], 0.1: [0.5]}) == 0.1
    assert choose_value({1.0: [None], 0.1: [None]}) == 0.1


def test_a_row_is_tuned_once_all_its_tuning_runs_are_settled(tmp_path):
    plan = plan_study(tmp_path, tune={**TUNE, "columns": ["1", "1.2"]})
    low_1, low_2, high_1, high_2 = plan.tuning["slow"]
    for cell, accuracy in ((low_1, 0.3), (low_2, 0.5), (high_1, 0.8)):
        write_run(cell, accuracy)
    assert tuned_values(plan, lambda cell: cell.folder.exists()) == {}
    write_failed(high_2, RuntimeError("no"))
    assert tuned_values(plan, lambda cell: cell.folder.exists()) == {"slow": 1e-4}
    results = gather(plan)
    tried = results.tuning["rows"]["slow"]["tried"]
    assert tried[0] == {"value": 1e-4, "mean": pytest.approx(0.4), "by_column": {"1": 0.3, "1.2": 0.5}}
    assert tried[1] == {"value": 1e-3, "mean": None, "by_column": {"1": 0.8, "1.2": None}}
    assert tuning_grid(results)[1] == ["slow", "40", "failed", "0.0001"]


def test_a_study_reports_mean_standard_error_and_measures_of_every_cell(tmp_path):
    plan = plan_study(tmp_path, seeds=[0, 1, 2])
    cells = {(cell.row, cell.column, cell.seed): cell for runs in plan.runs.values() for cell in runs}
    write_run(cells["slow", "1", 0], 0.5, kl=(1.0, None, 3.0), seconds=2.0)  # off-policy KL 2
    write_run(cells["slow", "1", 1], 0.7, kl=(4.0,) * 20, seconds=4.0)  # off-policy KL 4; last tenth: steps 19 and 20
    write_failed(cells["slow", "1", 2], FloatingPointError("loss is nan"))
    write_run(cells["fast", "1", 0], 0.25)
    results = gather(plan)
    assert metric_grid(results) == [
        ["", "1", "1.2"],
        ["slow", "60.0 ± 10.0 (2/3, 1 failed)", "-"],
        ["fast", "25.0 (1/3)", "-"],
    ]
    cell = as_json(results, command="tba compare x")["cells"][0]
    assert (cell["row"], cell["column"], cell["values"]) == ("slow", "1", {"0": 0.5, "1": 0.7})
    assert (cell["mean"], cell["standard_error"]) == (pytest.approx(0.6), pytest.approx(0.1))
    assert cell["off_policy_kl"] == {"mean": 3.0, "standard_error": pytest.approx(1.0)}
    assert (cell["seconds"]["mean"], cell["responses_generated"]["mean"], cell["lag"]["mean"]) == (3.0, 16.0, 2.0)
    assert cell["kl"]["mean"] == pytest.approx((3 + 19.5) / 2)
    assert cell["response_length"]["mean"] == pytest.approx((30 + 195) / 2)
    failures = as_json(results, command="")["failures"]
    assert failures == [{"row": "slow", "column": "1", "seed": 2, "error": "FloatingPointError: loss is nan"}]


@pytest.mark.parametrize(
    "changes", [{"outcome": "failed"}, {"outcome": "interrupted"}, {"outcome": "collapsed"}, {"final_step": 10}]
)
def test_the_summary_of_a_run_that_did_not_finish_is_no_result(tmp_path, changes):
    """Also beside the cell.json of an earlier run in that folder."""
    plan = plan_study(tmp_path)
    cell = plan.runs["slow", None][0]
    write_run(cell, 0.5)
    assert state_of(cell) == "done"
    path = cell.folder / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "outcome": "finished", "steps": 20, **changes}))
    assert state_of(cell) == "missing"
    assert gather(plan).cells["slow", "1"].values == {}


def test_a_half_finished_study_can_be_shown_and_plotted(tmp_path, capsys):
    plan = plan_study(tmp_path, metric="accuracy")
    cell = plan.runs["slow", None][0]
    write_run(cell, 0.5)
    write_failed(plan.runs["fast", None][0], ValueError("a | b [/red]"))
    results = gather(plan)
    show_results(plan, results)
    assert "ValueError: a | b [/red]" in capsys.readouterr().out
    text = as_markdown(results, command="tba compare x", commit="abc", cpu_count=2)
    assert "| slow | 50.0 (1/2) | - |" in text
    assert "ValueError: a \\| b [/red]" in text
    assert "Made by `tba compare x`, commit abc, 2 cores." in text
    save_plot(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert json.dumps(as_json(results, command=""))
