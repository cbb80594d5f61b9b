"""Whole studies on the shipped model."""

import json
import shutil
import sys

import pytest
from studies import TUNE, plan_study, run_study, write_study
from typer.testing import CliRunner

from tba.cli import app, main
from tba.compare.runs import changed_settings, changes, differences, read_steps, state_of
from tba.compare.study import flatten
from tba.config import Config, ConfigError
from tba.launch import train
from tba.models.names import resolve_path
from tba.train.step import NonFiniteLoss, TrainStep

STAMPED = ("summary.json", "cell.json", "metrics.jsonl")


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
    assert [(cell["row"], cell["column"], set(cell["values"])) for cell in written["cells"]] == [
        (row, column, {"0", "1"}) for row in ("slow", "fast") for column in ("1", "1.2")
    ]
    assert written["command"].startswith("tba compare ")
    assert written["cells"][0]["responses_generated"]["mean"] == 16.0
    assert "| slow |" in (root / "results.md").read_text()
    assert (root / "plot.png").stat().st_size > 10_000
    assert not list(root.rglob("*.claim.json"))


def test_a_run_of_a_study_equals_the_same_run_alone(finished):
    """The model is loaded once: what an earlier run trained must not be seen by a later one."""
    run = next(cell for cell in plan_study(finished).runs["fast", None] if (cell.column, cell.seed) == ("1", 1))
    alone = run.config.model_copy(update={"output": finished, "name": "alone"})
    train(alone)
    lines = (finished / "alone" / "metrics.jsonl").read_text().splitlines()
    expected = [record for record in map(json.loads, lines) if "loss" in record]
    assert expected[0]["grad_norm"] > 0
    for name in ("loss", "kl", "grad_norm", "reward"):
        assert [step[name] for step in read_steps(run)] == [step[name] for step in expected]


def test_a_setting_that_came_after_a_run_does_not_make_it_another_run():
    now = flatten(Config().model_dump(mode="json"))
    before = {key: value for key, value in now.items() if key != "train.offload_optimizer"}
    assert changed_settings(before, now) == []
    assert changed_settings(before, {**now, "train.offload_optimizer": True}) == ["train.offload_optimizer"]
    assert changed_settings({**before, "train.max_steps": 2}, {**now, "train.max_steps": 3}) == ["train.max_steps"]
    assert changed_settings({**now, "train.of_old": 1}, now) == ["train.of_old"]


def test_a_default_that_came_after_a_run_and_is_off_does_not_make_it_another_run(finished):
    (run, *_) = plan_study(finished).runs["fast", None]
    record = json.loads((run.folder / "cell.json").read_text())
    assert record["defaults"].pop("train.second_update_after") == 0  # as a version has written that did not know it
    del record["config"]["train"]["second_update_after"]
    assert differences(run, record) == []
    run.recorded_defaults["train.second_update_after"] = 3
    assert differences(run, record) == ["the default of train.second_update_after None -> 3"]
    run.recorded_defaults["train.second_update_after"] = 0


def test_a_run_that_another_default_of_its_objective_made_is_run_again(finished, tmp_path):
    shutil.copytree(finished / "studies", tmp_path / "studies")
    (run, *_) = plan_study(tmp_path).runs["fast", None]
    assert (state_of(run), changes(run)) == ("done", "")
    record = json.loads((run.folder / "cell.json").read_text())
    beta = record["defaults"]["objective.beta.start"]
    record["defaults"]["objective.beta.start"] = 3.0
    (run.folder / "cell.json").write_text(json.dumps(record))
    assert (state_of(run), changes(run)) == ("changed", f"the default of objective.beta.start 3.0 -> {beta}")
    del record["defaults"]  # as an older version wrote it
    (run.folder / "cell.json").write_text(json.dumps(record))
    assert state_of(run) == "done"


def test_resuming_does_nothing_twice_and_a_changed_config_is_run_again(finished, tmp_path, capsys):
    shutil.copytree(finished / "studies", tmp_path / "studies")
    before = stamps(tmp_path)
    run_study(tmp_path)
    assert stamps(tmp_path) == before
    assert "slow" in capsys.readouterr().out
    columns = {"1": {}, "1.2": {"generate.temperature": 1.3}}
    run_study(tmp_path, changes={"columns": columns})
    changed = {path for path, stamp in stamps(tmp_path).items() if before[path] != stamp}
    assert changed == {path for path in before if "/1.2/" in path}
    assert "runs/fast/1.2/seed-1 was run with another config (generate.temperature 1.2 -> 1.3): run again" in (
        capsys.readouterr().err
    )


def test_failed_runs_are_written_down_and_tried_again_only_when_asked(tmp_path, capsys):
    """The model of a row is not there at first."""
    changes = {"rows": {"good": {}, "bad": {"model.path": f"{tmp_path}/model"}}, "columns": {"1": {}}, "seeds": [0]}
    results = run_study(tmp_path, changes=changes)
    assert set(results.cells["good", "1"].values) == {0}
    assert "there is no such folder" in results.cells["bad", "1"].failures[0]
    (bad,) = plan_study(tmp_path, **changes).runs["bad", None]
    failed = json.loads((bad.folder / "failed.json").read_text())
    assert (failed["config"], failed["error"][:10]) == (bad.recorded_config, "ValueError")
    assert "- (0/1, 1 failed)" in capsys.readouterr().out

    shutil.copytree(resolve_path("tba:arithmetic"), tmp_path / "model")
    assert run_study(tmp_path, changes=changes).cells["bad", "1"].failures
    results = run_study(tmp_path, changes=changes, retry_failed=True)
    assert not results.cells["bad", "1"].failures
    assert set(results.cells["bad", "1"].values) == {0}


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
    assert results.cells["wild", "1"].failures
    assert results.cells["tame", "1"].values


def test_a_study_whose_only_run_failed_says_so_and_ends_with_an_error(tmp_path, capsys, monkeypatch):
    changes = {"rows": {"bad": {"model.path": f"{tmp_path}/model"}}, "columns": {"1": {}}, "seeds": [0]}
    path = write_study(tmp_path, **changes)
    monkeypatch.setattr(sys, "argv", ["tba", "compare", str(path), "--output", str(tmp_path / "studies")])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert "tba: no run of tiny has a result, all 1 failed; the first: ValueError: model.path=" in printed.err
    assert "Traceback" not in printed.err
    assert "1 failed" in printed.out
    assert (tmp_path / "studies" / "tiny" / "results.json").is_file()


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
    assert "bad/1/seed-0 failed: ValueError: model.path=" in printed.err
    assert "tba: 1 run failed: correct" in printed.err
    assert "1 failed" in printed.out
    results = json.loads((tmp_path / "studies" / "tiny" / "results.json").read_text())
    assert len(results["cells"]) == 2


def test_every_row_is_run_with_its_tuned_value(tmp_path):
    changes = {"tune": TUNE, "columns": {"1": {}}, "seeds": [0]}
    results = run_study(tmp_path, changes=changes)
    tuning = json.loads((tmp_path / "studies" / "tiny" / "results.json").read_text())["tuning"]
    for row, (low, high) in ((row, tried["tried"]) for row, tried in tuning["rows"].items()):
        best = 1e-3 if high["mean"] > low["mean"] else 1e-4
        assert (low["value"], high["value"], results.tuned[row]) == (1e-4, 1e-3, best)
        (run,) = plan_study(tmp_path, **changes).runs[row, best]
        assert [step["learning_rate"] for step in read_steps(run)] == [best, best]
    assert tuning["overrides"] == {"train.max_steps": 1}


def test_settings_that_only_the_objective_knows_are_checked_before_the_first_run(tmp_path):
    rows = {"good": {}, "a": {"objective.max_drif": 1.0}, "b": {"objective.name": "tbb"}}
    with pytest.raises(ConfigError) as raised:
        run_study(tmp_path, changes={"rows": rows, "columns": {"1": {}}, "seeds": [0]})
    assert "did you mean objective.max_drift?\n      in runs/a/1/seed-0" in str(raised.value)
    assert "objective.name=tbb is unknown" in str(raised.value)
    assert "in runs/b/1/seed-0" in str(raised.value)
    assert not (tmp_path / "studies").exists()


def test_an_unknown_metric_is_said_after_the_first_run(tmp_path):
    with pytest.raises(
        ConfigError, match=r"metric='acc' is not in `final` of .*: it has accuracy, and the study's `metric` is one"
    ):
        run_study(tmp_path, changes={"metric": "acc"})
    assert len(list(tmp_path.rglob("summary.json"))) == 1


def test_the_list_shows_the_state_of_every_run(tmp_path):
    changes = {"rows": {"only": {}}, "columns": {"1": {}}, "tune": {**TUNE, "values": [1e-4]}, "seeds": [0]}
    path = write_study(tmp_path, **changes)
    shown = CliRunner().invoke(app, ["compare", str(path), "--output", str(tmp_path / "studies"), "--list"])
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.split("\n")[:2] == [
        " missing  tuning/only/1/train.learning_rate=0.0001",
        "missing (its row is not tuned yet)  runs/only/1/seed-0",
    ]
    assert not (tmp_path / "studies").exists()
    run_study(tmp_path, changes=changes)
    shown = CliRunner().invoke(app, ["compare", str(path), "--output", str(tmp_path / "studies"), "--list"])
    assert shown.stdout.split()[::2] == ["done", "done"]
