"""Numbers of a study, worked out by hand."""

import json
import math

import pytest
from studies import TUNE, plan_study, write_record, write_run

from tba.observe.files import write_json
from tba.run.compare import as_json, as_markdown, choose_value, estimate, gather, grid_of, tuning_grid


def test_the_standard_error_divides_by_n_minus_1_and_by_n():
    # deviations -1, 0, 1: variance 2 / 2 = 1, standard error sqrt(1 / 3)
    assert estimate([1.0, 2.0, 3.0]) == (2.0, pytest.approx(math.sqrt(1 / 3)))
    assert estimate([5.0]) == (5.0, None)
    assert estimate([5.0, None, math.nan]) == (5.0, None)
    assert estimate([]) == (None, None)


def test_tuning_takes_the_best_mean_over_its_columns():
    # means 0.5, 0.6, 0.55
    scores = {1e-4: {"a": 0.4, "b": 0.6}, 3e-4: {"a": 0.3, "b": 0.9}, 1e-3: {"a": 0.55, "b": 0.55}}
    assert choose_value(scores) == 3e-4


def test_a_failed_tuning_run_is_worse_than_any_number():
    assert choose_value({0.1: {"a": 0.1, "b": 0.1}, 1.0: {"a": 0.9, "b": None}}) == 0.1
    assert choose_value({0.1: {"a": None, "b": None}, 1.0: {"a": 0.9, "b": None}}) == 1.0


def test_of_equal_values_the_smaller_is_taken():
    assert choose_value({1.0: {"a": 0.5}, 0.1: {"a": 0.5}}) == 0.1
    assert choose_value({1.0: {"a": None}, 0.1: {"a": None}}) == 0.1


def test_a_row_is_tuned_once_all_its_tuning_runs_have_ended(tmp_path):
    plan = plan_study(tmp_path, tune={**TUNE, "columns": ["1", "1.2"]})
    low_1, low_2, high_1, high_2 = plan.tuning["slow"]
    for cell, accuracy in ((low_1, 0.3), (low_2, 0.5), (high_1, 0.8)):
        write_run(cell, accuracy)
    assert gather(plan).tuned == {}
    write_record(high_2, error="RuntimeError: no")
    results = gather(plan)
    assert results.tuned == {"slow": 1e-4}
    assert results.tuning == {"slow": {1e-4: {"1": 0.3, "1.2": 0.5}, 1e-3: {"1": 0.8, "1.2": None}}}
    assert tuning_grid(results)[1] == ["slow", "40", "failed", "0.0001"]


def test_a_study_reports_mean_and_standard_error_of_every_number(tmp_path):
    plan = plan_study(tmp_path, seeds=[0, 1, 2], also=["cost"])
    cells = {(cell.row, cell.column, cell.seed): cell for runs in plan.runs.values() for cell in runs}
    write_run(cells["slow", "1", 0], 0.5, kl=2.0, seconds=2.0, cost=1.0)
    write_run(cells["slow", "1", 1], 0.7, kl=4.0, seconds=4.0, cost=2.0)
    write_record(cells["slow", "1", 2], error="FloatingPointError: loss is nan")
    write_run(cells["fast", "1", 0], 0.25)
    results = gather(plan)
    assert grid_of(results, "accuracy") == [
        ["", "1", "1.2"],
        ["slow", "60.0 ± 10.0 (2/3, 1 failed)", "-"],
        ["fast", "25.0 (1/3)", "-"],
    ]
    assert grid_of(results, "cost")[1][1] == "1.5 ± 0.5 (2/3, 1 failed)"
    assert grid_of(results, "off_policy_kl")[1][1] == "3 ± 1 (2/3, 1 failed)"
    write_json(tmp_path / "results.json", as_json(results, command="tba compare x"))
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["accuracy"]["slow"]["1"] == {"mean": pytest.approx(0.6), "error": pytest.approx(0.1)}
    assert written["runs"]["slow"]["1"]["1"] == {
        "accuracy": 0.7,
        "cost": 2.0,
        "off_policy_kl": 4.0,
        "seconds": 4.0,
        "responses_generated": 16,
        "lag": 2.0,
    }
    assert written["failures"] == {"slow/1/seed-2": "FloatingPointError: loss is nan"}
    assert (written["commits"], written["command"]) == (["abc"], "tba compare x")


@pytest.mark.parametrize(
    "changes", [{"outcome": "failed"}, {"outcome": "interrupted"}, {"outcome": "collapsed"}, {"final_step": 10}]
)
def test_the_summary_of_a_run_that_did_not_finish_is_no_result(tmp_path, changes):
    plan = plan_study(tmp_path)
    cell = plan.runs["slow", None][0]
    write_run(cell, 0.5)
    assert cell.state() == "done"
    path = cell.folder.summary
    path.write_text(json.dumps({**json.loads(path.read_text()), "outcome": "finished", "steps": 20, **changes}))
    assert cell.state() == "missing"
    assert gather(plan).runs["slow"]["1"] == {}


def test_a_half_finished_study_can_be_shown(tmp_path):
    plan = plan_study(tmp_path)
    write_run(plan.runs["slow", None][0], 0.5)
    write_record(plan.runs["fast", None][0], error="ValueError: a | b [/red]")
    results = gather(plan)
    text = as_markdown(results, command="tba compare x")
    assert "| slow | 50.0 (1/2)        | -   |" in text
    assert "| fast | - (0/2, 1 failed) | -   |" in text
    assert "ValueError: a \\| b [/red]" in text
    assert "Made by `tba compare x`, commit abc, " in text
