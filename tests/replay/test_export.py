"""`tba replay`: which groups are listed, and what is written."""

import dataclasses
import json
import random
import sqlite3
import sys
from datetime import datetime

import numpy as np
import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from tba.cli import app, main
from tba.config import ModelConfig
from tba.models.paths import resolve_path
from tba.replay.database import DurableReplayError
from tba.replay.durable import GroupStore
from tba.run.export_groups import GroupFilter, export, parse_time, parse_versions, table
from tba.types import Completion, Prompt, Trajectory, TrajectoryGroup

RUNNER = CliRunner()


def group(number, prompt, version, rewards, *, tokens=(5, 6), lost=0):
    ids = np.array(tokens, np.int32)
    log_probs = np.zeros(len(ids), np.float32)
    trajectories = tuple(
        Trajectory(
            completion=Completion(
                prompt_id=prompt,
                sample_index=sample,
                token_ids=ids + sample,
                behaviour_log_probs=log_probs,
                policy_log_probs=log_probs,
                version_spans=((0, version),),
                finish="length" if sample else "stop",
            ),
            rewards={"right": reward},
            log_ref=log_probs,
            reference_version=0,
            loss_mask=np.ones(len(ids), np.bool_),
        )
        for sample, reward in enumerate(rewards)
    )
    text = [{"role": "user", "content": prompt}]
    asked = Prompt(id=prompt, token_ids=np.array([1], np.int32), text=text)
    return TrajectoryGroup(id=f"searcher-0.aa/{number}", prompt=asked, trajectories=trajectories, num_lost=lost)


@pytest.fixture
def run(tmp_path):
    """A run folder with four groups, received at 1000, 2000, 3000 and 4000 seconds."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").touch()
    times = iter([1000.0, 2000.0, 3000.0, 4000.0])
    store = GroupStore(
        folder / "replay.sqlite",
        durability="process",
        capacity=100,
        reward_weights={"right": 1.0},
        clock=lambda: next(times),
    )
    store.append(group(0, "a", 3, [0.0, 1.0]), step=3)
    store.append(group(1, "b", 4, [1.0, 1.0], lost=2), step=5)
    store.append(group(2, "a", 5, [float("nan"), 0.25]), step=6)
    store.append(dataclasses.replace(group(3, "c", 6, []), num_lost=4), step=6)
    store.close()
    return folder


@pytest.mark.parametrize(
    ("wanted", "arrivals"),
    [
        (GroupFilter(), [1, 2, 3, 4]),
        (GroupFilter(limit=2), [3, 4]),
        (GroupFilter(prompt="a"), [1, 3]),
        (GroupFilter(prompt="a", limit=1), [3]),
        (GroupFilter(rewards=(0.5, None)), [1, 2]),  # means .5, 1 and .125; the fourth has none
        (GroupFilter(rewards=(None, 0.5)), [1, 3]),
        (GroupFilter(rewards=(0.2, 0.9)), [1]),
        (GroupFilter(versions=(4, None)), [2, 3]),
        (GroupFilter(versions=(4, 4)), [2]),
        (GroupFilter(times=(2000.0, 3000.0)), [2, 3]),
    ],
)
def test_groups_are_found_by_prompt_reward_version_and_time(run, wanted, arrivals):
    assert wanted.arrivals(run / "replay.sqlite") == arrivals


def test_the_table_shows_a_line_for_each_group(run):
    header, *lines, last = table(run / "replay.sqlite", GroupFilter())
    assert header.split() == [
        *("arrival", "time", "group", "prompt", "step", "version", "responses", "reward", "components")
    ]
    at = datetime.fromtimestamp(2000).isoformat(sep=" ", timespec="seconds")
    assert lines[1].split() == [
        "2",
        *at.split(),
        "searcher-0.aa/1",
        "b",
        "5",
        "4",
        "2",
        "(2",
        "lost)",
        "1",
        "right",
        "1",
    ]
    assert lines[3].split()[4:] == ["c", "6", "-", "0", "(4", "lost)", "-", "right", "-"]
    assert last == f"4 of 4 groups (6 responses) in {run}/replay.sqlite"


def test_an_export_has_a_line_for_each_response_with_its_exact_tokens(run, tmp_path):
    assert export(run / "replay.sqlite", tmp_path / "x.jsonl", GroupFilter(prompt="a")) == 4
    lines = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [(line["completion_ids"], line["rewards"], line["finish"]) for line in lines] == [
        ([5, 6], {"right": 0.0}, "stop"),
        ([6, 7], {"right": 1.0}, "length"),
        ([5, 6], {"right": None}, "stop"),
        ([6, 7], {"right": 0.25}, "length"),
    ]
    origin = {"version": 5, "reference_version": 0, "step": 6, "time": 3000.0, "sample_index": 0}
    expected = {"id": "a", "prompt": [{"role": "user", "content": "a"}], "group": "searcher-0.aa/2", **origin}
    assert {name: lines[2][name] for name in expected} == expected
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_an_export_of_a_run_has_the_text_of_each_response_where_its_tokenizer_is_to_be_had(run, tmp_path):
    """The fixture's config is empty: the run is one of the shipped model."""
    target = tmp_path / "x.jsonl"
    done = RUNNER.invoke(app, ["replay", str(run), "--prompt", "a", "--limit", "1", "--export", str(target)])
    assert done.exit_code == 0, done.output
    tokenizer = AutoTokenizer.from_pretrained(resolve_path(ModelConfig().path))
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert [line["completion"] for line in lines] == [tokenizer.decode([5, 6]), tokenizer.decode([6, 7])]
    (run / "config.yaml").unlink()
    done = RUNNER.invoke(
        app, ["replay", str(run / "replay.sqlite"), "--prompt", "a", "--limit", "1", "--export", str(target)]
    )
    assert "token ids without their text" in done.output
    assert [json.loads(line).get("completion") for line in target.read_text().splitlines()] == [None, None]


def test_parquet_holds_the_same(run, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    assert export(run / "replay.sqlite", tmp_path / "x.parquet", GroupFilter()) == 6
    rows = parquet.read_table(tmp_path / "x.parquet").to_pylist()
    assert [row["completion_ids"] for row in rows] == [[5, 6], [6, 7]] * 3
    assert [row["rewards"] for row in rows[3:]] == [[("right", 1.0)], [("right", None)], [("right", 0.25)]]
    assert json.loads(rows[0]["prompt"]) == [{"role": "user", "content": "a"}]


def test_parquet_without_its_package_is_an_error_that_names_it(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as Python does for a package that is not there
    with pytest.raises(ValueError, match=r"pip install pyarrow .*or export to FILE.jsonl"):
        export(run / "replay.sqlite", tmp_path / "x.parquet", GroupFilter())
    assert not (tmp_path / "x.parquet").exists()


def test_the_command_lists_and_exports(run, tmp_path):
    listed = RUNNER.invoke(app, ["replay", str(run), "--version", "4:", "--limit", "1"])
    assert listed.exit_code == 0
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ["arrival", "3", "1"]
    options = ["--min-reward", "0.5", "--until", "1970-01-01T06:00", "--export", str(tmp_path / "good.jsonl")]
    done = RUNNER.invoke(app, ["replay", str(run / "replay.sqlite"), *options])
    assert json.loads(done.stdout) == {"responses": 4, "file": str(tmp_path / "good.jsonl")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--version", "x"], "--version: 'x' is no version: write one (12) or a range (10:20, 10: or :20)"),
        (["--since", "noon"], "--since: 'noon' is no time: write 2026-11-16"),
        (["--export", "x.csv"], "--export x.csv: the name must end with .jsonl or .parquet"),
        (["--export", "nowhere/x.jsonl"], "--export nowhere/x.jsonl: there is no folder nowhere."),
        (["--export", "/proc/x.jsonl"], "--export /proc/x.jsonl cannot be written: No such file or directory."),
        (["--min-reward", "1", "--max-reward", "0"], "--min-reward and --max-reward: the first bound is above"),
        (["--version", "9:3"], "--version: the first bound is above the second, so that no group is left. Swap them."),
        (["--since", "1h", "--until", "2h"], "--since and --until: the first bound is above the second"),
    ],
)
def test_a_wrong_option_is_one_line(run, options, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tba", "replay", str(run), *options])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr().err
    assert (ended.value.code, len(printed.splitlines())) == (2, 1)
    assert message in printed


def test_a_file_that_is_no_database_is_refused_without_advice_for_training(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"prompt": "a"}\n' * 100)
    with pytest.raises(DurableReplayError, match=r"data.jsonl could not be read \(DatabaseError: file is not a data"):
        list(table(tmp_path / "data.jsonl", GroupFilter()))


def test_a_folder_that_is_no_run_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tba", "replay", str(tmp_path)])
    with pytest.raises(SystemExit):
        main()
    assert "is no run folder (it has no config.yaml) and no SQLite file" in capsys.readouterr().err


def test_versions_and_times_are_read():
    assert parse_versions("12") == (12, 12)
    assert parse_versions(f"12:{10**30}") == (12, 2**63 - 1)  # SQLite knows no larger number
    assert parse_versions("10:20") == (10, 20)
    assert parse_versions("10:") == (10, None)
    assert parse_versions(":20") == (None, 20)
    assert parse_time("1970-01-02T00:00:00+00:00") == 86400.0
    assert parse_time("1h") == pytest.approx(parse_time("0s") - 3600.0, abs=60.0)


@pytest.mark.parametrize(
    ("column", "value"), [("rewards", 2.5), ("rewards", "[1]"), ("time", 1e300), ("payload", 7), ("reward", b"\xff")]
)
def test_a_damaged_row_is_told_and_the_others_are_listed_and_exported(run, tmp_path, caplog, column, value):
    path = run / "replay.sqlite"
    with sqlite3.connect(path) as database:
        database.execute(f"UPDATE groups SET {column} = ? WHERE arrival = 2", (value,))
    lines = list(table(path, GroupFilter()))
    assert [line.split()[0] for line in lines[1:-1]] == ["1", "2", "3", "4"]
    assert ("corrupt: " in lines[2]) == (column != "payload"), "of which a listing reads nothing"
    assert export(path, tmp_path / "out.jsonl", GroupFilter()) == 4, "the responses of groups 1 and 3"
    assert "row 2 is corrupt and left out" in caplog.text


def test_random_damage_to_the_file_is_an_error_that_names_it_or_costs_some_rows(run, tmp_path):
    content, rng, path = (run / "replay.sqlite").read_bytes(), random.Random(0), tmp_path / "damaged.sqlite"
    errors = []
    for _ in range(100):
        damaged = bytearray(content)
        for _ in range(rng.choice((1, 5, 50))):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        for read in (
            lambda: list(table(path, GroupFilter())),
            lambda: export(path, tmp_path / "o.jsonl", GroupFilter()),
        ):
            try:
                read()
            except DurableReplayError as error:  # any other one fails this test
                errors.append(str(error))
    assert 0 < len(errors) < 200
    assert all(str(path) in error for error in errors)


@pytest.mark.parametrize("name", ["metrics.jsonl", "table.parquet"])
def test_an_export_replaces_an_earlier_one_and_nothing_else(run, tmp_path, name):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    own = tmp_path / name
    own.write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match=f"--export .*{name} is there and holds something else, which would be lost"):
        export(run / "replay.sqlite", own, GroupFilter())
    assert own.read_text() == '{"step": 1}\n'
    own.write_text("")
    assert export(run / "replay.sqlite", own, GroupFilter()) == 6
    assert export(run / "replay.sqlite", own, GroupFilter(prompt="b")) == 2
