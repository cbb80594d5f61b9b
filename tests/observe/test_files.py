"""Where a run writes: sinks get the same numbers, no file is seen half written, no foreign folder is replaced."""

import json
import logging
import math
import os
import shutil
from pathlib import Path

import pytest

from tba.config import load_config
from tba.observe.files import OutputLost, Sinks, WriteFailures, keep_lines, write_json
from tba.observe.run_folder import RunFolder
from tba.replay.database import open_database
from tba.run.checks import check_before_loading
from tba.tasks.rewards.worker import open_log


def sinks(folder: Path, *settings: str, failures: WriteFailures | None = None) -> Sinks:
    return Sinks(load_config(None, settings), RunFolder(folder), failures or WriteFailures())


def test_jsonl_lines_are_valid_json_also_for_nan(tmp_path):
    sink = sinks(tmp_path)
    sink.write(3, {"reward": math.nan, "loss": 0.5})
    sink.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 3, "reward": None, "loss": 0.5}


def test_tensorboard_gets_the_same_numbers(tmp_path):
    pytest.importorskip("tensorboard", reason="the tensorboard extra is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = sinks(tmp_path, "observe.sinks=[tensorboard]")
    sink.write(3, {"reward": 0.5})
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(3, 0.5)]


def test_a_missing_logger_is_named_before_training(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "wandb", None)
    folder = RunFolder.create(tmp_path / "run", overwrite=False)
    with pytest.raises(ValueError, match="pip install wandb"):
        sinks(folder.path, "observe.sinks=[wandb]")


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


def test_foreign_names_among_the_checkpoints_are_ignored(tmp_path):
    folder = RunFolder.create(tmp_path / "run", overwrite=False)
    for name in ("step-2", "step-10", "step-old", "step-3.backup", "healthy-step-1", "step-12"):
        (folder.checkpoints / name).mkdir()
        if name != "step-12":
            (folder.checkpoints / name / "manifest.json").touch()
    (folder.checkpoints / "step-99").touch()
    assert sorted(folder.checkpoints_by_step()) == [2, 10]
    assert folder.newest_checkpoint().name == "step-10"


@pytest.mark.parametrize(("kept", "want"), [(0, ""), (2, "a\nb\n"), (3, "a\nb\n"), (9, "a\nb\n")])
def test_lines_are_kept_whole(tmp_path, kept, want):
    path = tmp_path / "metrics.jsonl"
    path.write_text("a\nb\nunfinis")
    keep_lines(path, kept)
    assert path.read_text() == want


def test_metrics_go_on_where_their_file_was_deleted(tmp_path):
    sink = sinks(tmp_path / "run")
    sink.write(1, {"loss": 0.5})
    shutil.rmtree(tmp_path / "run")
    sink.write(2, {"loss": 0.25})
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text()) == {"step": 2, "loss": 0.25}


def test_what_cannot_be_written_is_told_once_by_its_kind_and_nothing_is_foretold(tmp_path, caplog):
    failures, blocked = WriteFailures(), tmp_path / "a file"
    blocked.write_text("")
    for step in range(3):
        sinks(blocked, failures=failures).write(step, {})
    with failures.tolerated("samples in", blocked):
        (blocked / "samples.jsonl").write_text("")
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert f"metrics in {blocked} cannot be written ([Errno 17] File exists" in caplog.messages[0]
    assert "training goes on" not in caplog.text, "where the disk is full, the durable replay ends the run"
    failures.raise_lost()  # neither must not be lost


def test_a_lost_checkpoint_is_named_again_in_the_end(tmp_path, caplog):
    failures = WriteFailures()
    for step in (1, 2, 2):
        path = tmp_path / f"step-{step}"
        with failures.tolerated("checkpoint", path, must_not_be_lost=True):
            (tmp_path / f".step-{step}.partial").mkdir()
            raise OSError(28, "No space left on device")
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert not list(tmp_path.iterdir())  # a part of one would keep the next from being written
    assert f"checkpoint {tmp_path}/step-1 cannot be written ([Errno 28] No space left" in caplog.text
    with pytest.raises(
        OutputLost, match=rf"2 of its files could not be written: {tmp_path}/step-1, {tmp_path}/step-2\."
    ):
        failures.raise_lost()


def test_what_is_written_later_is_not_lost(tmp_path):
    """As the summary of a run is, whose first one met a full disk."""
    failures = WriteFailures()
    for error in (OSError(28, "No space left"), None):
        with failures.tolerated("summary", tmp_path / "summary.json", must_not_be_lost=True):
            if error is not None:
                raise error
    failures.raise_lost()


def test_an_output_that_cannot_be_written_is_refused_and_left_as_it_was(tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(FileExistsError, match=r"file is a file, not a folder: choose another output"):
            RunFolder.check(path, overwrite=True)
    with pytest.raises(ValueError, match=r"run folder /proc/sys cannot be written: "):
        check_before_loading(load_config(None, ["output=/proc", "name=sys"]), resume=True)
    with pytest.raises(ValueError, match=r"run folder /proc/run cannot be written: .* \(/proc\)"):
        RunFolder.check(Path("/proc/run"), overwrite=False)
    RunFolder.check(tmp_path / "new" / "run", overwrite=False)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_status_that_the_supervisor_writes_at_once_does_not_make_a_new_folder_an_old_run(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "status.json").write_text("{}")
    (tmp_path / "run" / ".status.json.4711").write_text("{")
    assert RunFolder.create(tmp_path / "run", overwrite=False).logs.is_dir()


@pytest.mark.parametrize(("mask", "folders", "files"), [(0o077, 0o700, 0o600), (0o022, 0o755, 0o644)])
def test_a_run_folder_is_as_readable_as_the_umask_says(tmp_path, mask, folders, files):
    before = os.umask(mask)
    try:
        folder = RunFolder.create(tmp_path / "run", overwrite=False)
        write_json(folder.status, {})
        sinks(folder.path).write(1, {"reward": 0.5})
        open_database(folder.replay, "process").close()
        open_log(folder.logs / "rewards.log").close()
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in (folder.path, *folder.path.rglob("*"))}
    assert len(modes) >= 7
    assert modes == {path: folders if path.is_dir() else files for path in modes}
