"""Whole studies on the shipped model."""

import json
import os
import shutil
import sys

import pytest
from studies import TUNE, plan_study, run_study, write_study

from tba.cli import main
from tba.config import ConfigError
from tba.models.paths import resolve_path
from tba.observe.run_folder import Claim
from tba.run import train
from tba.trainer.step import NonFiniteLoss, TrainStep

pytestmark = pytest.mark.slow

STAMPED = ("summary.json", "record.json", "metrics.jsonl")


def steps_of(folder) -> list[dict]:
    """The optimizer steps in a run's metrics."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]


def stamps(root) -> dict[str, int]:
    """When each run's files were written."""
    return {str(path): path.stat().st_mtime_ns for path in root.rglob("*") if path.name in STAMPED}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished study's folder."""
    folder = tmp_path_factory.mktemp("finished")
    run_study(folder)
    return folder


def test_a_study_does_every_run_and_writes_its_results(finished):
    root = finished / "studies" / "tiny"
    written = json.loads((root / "results.json").read_text())
    seeds = {row: {column: set(runs) for column, runs in columns.items()} for row, columns in written["runs"].items()}
    assert seeds == {row: {column: {"0", "1"} for column in ("1", "1.2")} for row in ("slow", "fast")}
    assert written["command"].startswith("tba compare ")
    assert written["runs"]["slow"]["1"]["0"]["responses_generated"] == 16
    assert "| slow |" in (root / "results.md").read_text()


def test_a_run_of_a_study_equals_the_same_run_alone(finished):
    run = next(cell for cell in plan_study(finished).runs["fast", None] if (cell.column, cell.seed) == ("1", 1))
    alone = run.config.model_copy(update={"output": finished, "name": "alone"})
    train(alone)
    expected = steps_of(finished / "alone")
    assert expected[0]["grad_norm"] > 0
    for name in ("loss", "kl", "grad_norm", "reward"):
        assert [step[name] for step in steps_of(run.folder.path)] == [step[name] for step in expected]


def test_resuming_does_nothing_twice_and_a_run_with_other_settings_is_run_again(finished, tmp_path, capsys):
    shutil.copytree(finished / "studies", tmp_path / "studies")
    before = stamps(tmp_path)
    run_study(tmp_path)
    assert stamps(tmp_path) == before
    assert "slow" in capsys.readouterr().out
    columns = {"1": {}, "1.2": {"generate.temperature": 1.3}}
    run_study(tmp_path, changes={"columns": columns})
    changed = {path for path, stamp in stamps(tmp_path).items() if before[path] != stamp}
    assert changed == {path for path in before if "/1.2/" in path}
    assert "runs/fast/1.2/seed-1 was run with other settings (generate.temperature 1.2 -> 1.3): run again" in (
        capsys.readouterr().err
    )


def test_failed_runs_are_written_down_and_tried_again_only_when_asked(tmp_path, capsys):
    """The model of a row is not there at first."""
    changes = {"rows": {"good": {}, "bad": {"model.path": f"{tmp_path}/model"}}, "columns": {"1": {}}, "seeds": [0]}
    results = run_study(tmp_path, changes=changes)
    assert set(results.runs["good"]["1"]) == {0}
    assert "there is no such folder" in results.failures["bad/1/seed-0"]
    (bad,) = plan_study(tmp_path, **changes).runs["bad", None]
    assert bad.state() == "failed"
    assert "- (0/1, 1 failed)" in capsys.readouterr().out

    shutil.copytree(resolve_path("tba:arithmetic"), tmp_path / "model")
    assert run_study(tmp_path, changes=changes).failures
    results = run_study(tmp_path, changes=changes, retry_failed=True)
    assert not results.failures
    assert set(results.runs["bad"]["1"]) == {0}


def test_a_run_that_diverges_does_not_stop_the_others(tmp_path, monkeypatch):
    real, calls = TrainStep.gradients, []

    def first_diverges(*arguments, **named):
        calls.append(1)
        if len(calls) == 1:
            raise NonFiniteLoss("loss is nan.")
        return real(*arguments, **named)

    monkeypatch.setattr(TrainStep, "gradients", first_diverges)
    changes = {"rows": {"wild": {}, "tame": {}}, "columns": {"1": {}}, "seeds": [0]}
    results = run_study(tmp_path, changes=changes)
    assert list(results.failures) == ["wild/1/seed-0"]
    assert results.runs["tame"]["1"]


def test_a_study_with_a_run_that_failed_names_it_and_ends_with_status_1_after_the_results(
    tmp_path, capsys, monkeypatch
):
    rows = {"good": {}, "bad": {"model.path": f"{tmp_path}/model"}}
    path = write_study(tmp_path, rows=rows, columns={"1": {}}, seeds=[0])
    monkeypatch.setattr(sys, "argv", ["tba", "compare", str(path), "--output", str(tmp_path / "studies")])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    assert ended.value.code == 1
    assert "runs/bad/1/seed-0: failed, ValueError: model.path=" in printed.err
    assert "tba: 1 run failed: correct" in printed.err
    assert "1 failed" in printed.out
    results = json.loads((tmp_path / "studies" / "tiny" / "results.json").read_text())
    assert set(results["runs"]) == {"good", "bad"}


def test_every_row_is_run_with_its_tuned_value(tmp_path):
    changes = {"tune": TUNE, "columns": {"1": {}}, "seeds": [0]}
    results = run_study(tmp_path, changes=changes)
    tuning = json.loads((tmp_path / "studies" / "tiny" / "results.json").read_text())["tuning"]
    for row, tried in tuning.items():
        assert set(tried) == {"0.0001", "0.001"}
        best = 1e-3 if tried["0.001"]["1"] > tried["0.0001"]["1"] else 1e-4
        assert results.tuned[row] == best
        (run,) = plan_study(tmp_path, **changes).runs[row, best]
        assert [step["learning_rate"] for step in steps_of(run.folder.path)] == [best, best]


def test_settings_that_only_the_objective_knows_are_checked_before_the_first_run(tmp_path):
    rows = {"good": {}, "a": {"objective.trust_regio": "exact"}, "b": {"objective.name": "tbb"}}
    with pytest.raises(ConfigError) as raised:
        run_study(tmp_path, changes={"rows": rows, "columns": {"1": {}}, "seeds": [0]})
    assert "did you mean objective.trust_region?\n      in runs/a/1/seed-0" in str(raised.value)
    assert "objective.name=tbb is unknown" in str(raised.value)
    assert "in runs/b/1/seed-0" in str(raised.value)
    assert not (tmp_path / "studies").exists()


def test_an_unknown_metric_is_said_at_the_first_evaluation(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"metric='acc' is not in the first evaluation of runs/slow/1/seed-0: it has accuracy\.",
    ):
        run_study(tmp_path, changes={"metric": "acc"})
    [summary] = tmp_path.rglob("summary.json")
    assert json.loads(summary.read_text())["steps"] == 0
    run_study(tmp_path, changes={"rows": {"slow": {}}, "columns": {"1": {}}, "seeds": [0]})  # the metric was corrected


def test_a_study_leaves_the_runs_of_other_processes_alone_and_says_for_which_it_waited(tmp_path):
    changes = {"rows": {"only": {}}, "columns": {"1": {}}}
    first, second = plan_study(tmp_path, **changes).runs["only", None]
    held = Claim.take(first.record.parent)  # a lock is respected whoever holds it, this process included
    with pytest.raises(RuntimeError, match=rf"waited 0 s .*: runs/only/1/seed-0 \(process {os.getpid()}\)\."):
        run_study(tmp_path, changes=changes, wait_seconds=0)
    assert (first.state(), second.state()) == ("missing", "done")
    held.release()
    run_study(tmp_path, changes=changes)
    assert first.state() == "done"
