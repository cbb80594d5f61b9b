"""Study files: how runs are put together, and what is said when they cannot be."""

import json
from pathlib import Path

import pytest
from studies import STUDY, TUNE, plan_study, write_run, write_study

from tba.config import ConfigError
from tba.run.study import folder_name, load_study, make_study, quick_study


def test_a_run_is_base_then_row_then_column_then_tuned_value_then_seed(tmp_path):
    base = {"train": {"max_steps": 5, "learning_rate": 0.5}, "objective": {"beta": 0.1}, "evaluate": {"num_prompts": 7}}
    plan = plan_study(
        tmp_path,
        base=base,
        rows={"a": {"train.max_steps": 6, "objective.beta": 0.2, "train.learning_rate": 0.6}},
        columns={"x": {"mode": "sync", "objective": {"beta": 0.3}}},
        seeds=[4],
        tune={**TUNE, "columns": ["x"], "overrides": {"evaluate.num_prompts": 3}},
    )
    (run,) = plan.runs["a", 1e-3]
    config = run.config
    assert (config.train.max_steps, config.objective.beta.start, config.train.learning_rate.start) == (6, 0.3, 1e-3)
    assert (config.mode, config.seed, config.evaluate.num_prompts, config.observe.progress) == ("sync", 4, 7, False)
    assert run.folder.path == tmp_path / "studies" / "tiny" / "runs" / "a" / "x" / "seed-4"
    first, second = plan.tuning["a"]
    assert first.folder.path == tmp_path / "studies" / "tiny" / "tuning" / "a" / "x" / "train.learning_rate=0.0001"
    assert (first.config.seed, first.config.evaluate.num_prompts, first.config.train.learning_rate.start) == (
        100,
        3,
        1e-4,
    )
    assert second.config.train.learning_rate.start == 1e-3


def test_bad_overrides_are_reported_for_all_runs_at_once(tmp_path):
    rows = {"slow": {"train.learning_rat": 1}, "fast": {"train.max_steps": 0}, "good": {}}
    columns = {"1": {}, "long": {"generate.max_new_tokens": 8, "generate.min_new_tokens": 9}}
    with pytest.raises(ConfigError) as raised:
        plan_study(tmp_path, rows=rows, columns=columns, seeds=[0])
    message = str(raised.value)
    assert "did you mean train.learning_rate?\n      in runs/slow/1/seed-0, runs/slow/long/seed-0\n" in message
    assert "train.max_steps" in message
    assert "in runs/fast/1/seed-0, runs/fast/long/seed-0" in message
    assert "generate.min_new_tokens=9 is above generate.max_new_tokens=8" in message
    assert "in runs/good/long/seed-0" in message
    assert not (tmp_path / "studies").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": [0]}, "unknown key seed: allowed are name, base, rows, columns, seeds,"),
        ({"quick": {"seed": [0]}}, "unknown key quick.seed: allowed are seeds, rows, columns, overrides."),
        ({"rows": {"a": {"seed": 3}}}, "rows.a sets seed, which the study sets itself: list seeds under `seeds`"),
        ({"seeds": [1, 1]}, "has a value twice"),
        (
            {"base": {"train.max_steps": 5, "train": {"max_steps": 6}}},
            "train.max_steps is given twice, nested and dotted: keep one of them",
        ),
        ({"columns": {"a b": {}, "a/b": {}}}, "'a b' and 'a/b' would share the folder a_b"),
        ({"tune": {**TUNE, "columns": ["9"]}}, "tune.columns has '9', which the study does not have: it has 1, 1.2"),
        ({"tune": {**TUNE, "seed": 1}}, "tune.seed=1 is also one of seeds"),
        ({"quick": {"rows": ["x"]}}, "quick.rows has 'x'"),
        ({"rows": None}, "rows: Input should be a valid dictionary"),
    ],
)
def test_what_is_wrong_with_a_study_is_said(changes, message):
    with pytest.raises(ConfigError) as raised:
        make_study({**STUDY, **changes})
    assert message in str(raised.value)


def test_quick_is_a_smaller_study_of_its_own(tmp_path):
    quick = {"seeds": [7], "columns": ["1.2"], "overrides": {"train.max_steps": 1}}
    study = load_study(write_study(tmp_path, quick=quick, tune=TUNE), quick=True)
    assert (study.name, study.seeds, list(study.columns), study.tune) == ("tiny-quick", (7,), ["1.2"], None)
    assert list(study.rows) == ["slow", "fast"]
    plan = plan_study(tmp_path, **{name: getattr(study, name) for name in ("name", "rows", "columns", "seeds")})
    (run,) = plan.runs["fast", None]
    assert (run.config.train.max_steps, run.config.generate.temperature) == (1, 1.2)


def test_a_study_without_a_quick_form_says_so():
    with pytest.raises(ConfigError, match="no `quick` section"):
        quick_study(make_study(STUDY))


def test_unquoted_numbers_and_empty_overrides_are_understood(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text("name: n\nrows: {tb: }\ncolumns: {0: {}, 10: }\nseeds: [0]\n")
    study = load_study(path)
    assert (study.rows, study.columns) == ({"tb": {}}, {"0": {}, "10": {}})


@pytest.mark.parametrize(
    ("label", "name"), [("tb", "tb"), ("beta 0.05/long", "beta_0.05_long"), ("..", "__"), ("β=1", "β=1")]
)
def test_labels_are_made_safe_for_file_names(label, name):
    assert folder_name(label) == name
    assert Path("root", folder_name(label)).parent == Path("root")


def test_a_study_file_that_is_not_there_or_no_yaml_is_said(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_study(tmp_path / "nothing.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_study(tmp_path / "bad.yaml")


def test_a_run_with_another_default_is_another_run(tmp_path):
    (cell,) = plan_study(tmp_path, rows={"a": {}}, columns={"1": {}}, seeds=[0]).runs["a", None]
    write_run(cell, 0.5)
    assert (cell.state(), cell.changes()) == ("done", "")
    record = json.loads(cell.record.read_text())
    record["settings"] |= {"train.publish_every": 7, "train.share_prompts": True}
    cell.record.write_text(json.dumps(record))
    assert cell.state() == "changed"
    assert cell.changes() == "train.publish_every 7 -> 1, train.share_prompts True -> None"
    cell.record.write_text(json.dumps({**record, "settings": cell.settings}))
    assert cell.state() == "done"


def test_the_runs_of_a_study_that_was_moved_are_its_runs(tmp_path):
    (cell,) = plan_study(tmp_path / "a", rows={"a": {}}, columns={"1": {}}, seeds=[0]).runs["a", None]
    write_run(cell, 0.5)
    (tmp_path / "a").rename(tmp_path / "b")
    (moved,) = plan_study(tmp_path / "b", rows={"a": {}}, columns={"1": {}}, seeds=[0]).runs["a", None]
    assert moved.state() == "done"


def test_a_seed_that_is_no_list_is_told_how_to_write_it():
    with pytest.raises(ConfigError, match=r"seeds: a list is needed, got 3: write \[3\]"):
        make_study({**STUDY, "seeds": 3})


def test_a_study_without_columns_is_told_how_to_have_one():
    with pytest.raises(
        ConfigError, match=r"columns is missing: a study needs name, rows, columns, seeds \(columns: {all"
    ):
        make_study({name: value for name, value in STUDY.items() if name != "columns"})
