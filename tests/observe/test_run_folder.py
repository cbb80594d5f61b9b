"""A run folder belongs to one living process at a time."""

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tba.observe.run_folder import CLAIM, Claim, FolderInUse, Holder, RunFolder, holder_of

TAKE = "import os, pathlib, sys, time; from tba.observe.run_folder import Claim; Claim.take(pathlib.Path(sys.argv[1]));"


@contextmanager
def claimed(folder, then: str = "print(flush=True); sys.stdin.read()"):
    """Another process that has the folder, and has written a line."""
    command = [sys.executable, "-c", TAKE + then, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.line = other.stdout.readline()
        yield other
        other.kill()


def test_a_folder_that_a_living_process_has_is_refused_with_its_pid_and_host(tmp_path):
    with claimed(tmp_path) as other:
        message = f"in use by process {other.pid} on this host \\({socket.gethostname()}\\)"
        with pytest.raises(FolderInUse, match=message):
            RunFolder.create(tmp_path, overwrite=True)
        assert holder_of(tmp_path).pid == other.pid
    assert RunFolder.create(tmp_path, overwrite=False).path == tmp_path  # it was killed: the kernel has freed the lock
    assert holder_of(tmp_path).pid == os.getpid()


@pytest.mark.parametrize(
    ("text", "who"),
    [
        # From another pid namespace, of a container with this host's name: there is no such process here.
        (
            json.dumps({"pid": 2**22 + 1, "host": socket.gethostname(), "time": 0.0}),
            f"process {2**22 + 1} on this host",
        ),
        (json.dumps({"pid": 7, "host": "elsewhere", "time": 0.0}), "process 7 on host elsewhere"),
        ("{", "another process"),
    ],
)
def test_the_lock_counts_and_not_the_process_that_the_file_names(tmp_path, text, who):
    with claimed(tmp_path):
        (tmp_path / CLAIM).write_text(text)
        with pytest.raises(FolderInUse, match=f"in use by {who}"):
            Claim.take(tmp_path)
    Claim.take(tmp_path)


def test_a_child_that_outlives_the_process_does_not_keep_the_folder(tmp_path):
    # The child speaks, once it has let go of the lock.
    forks = "child = os.fork(); child or (print(os.getpid(), flush=True), time.sleep(600))"
    with claimed(tmp_path, f"{forks}; sys.stdin.read()") as other, pytest.raises(FolderInUse):
        Claim.take(tmp_path)
    os.kill(int(other.line), 0)
    Claim.take(tmp_path)
    os.kill(int(other.line), 9)


def test_a_process_goes_on_under_the_lock_of_its_supervisor_alone(tmp_path):
    owner = Holder.of_this_process()
    held = Claim.take(tmp_path, holder=owner)
    under = Claim.take(tmp_path, holder=owner)
    under.release()
    with pytest.raises(FolderInUse):
        Claim.take(tmp_path, holder=replace(owner, time=0.0))  # another supervisor, of the same process id
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_a_claim_that_a_process_of_another_host_left_is_taken_with_a_warning(tmp_path, caplog):
    (tmp_path / CLAIM).write_text(json.dumps({"pid": 7, "host": "elsewhere", "time": 0.0}))
    Claim.take(tmp_path)
    assert "was in use by process 7 on host elsewhere" in caplog.text


def test_a_copied_folder_is_free(tmp_path):
    (tmp_path / "a").mkdir()
    Claim.take(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    Claim.take(tmp_path / "b")


def test_a_file_system_without_locks_is_told_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    def no_locks(*arguments) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    claim = Claim.take(tmp_path)
    assert f"{tmp_path}: the file system has no locks" in caplog.text
    claim.release()
    assert list(tmp_path.iterdir()) == []


def test_a_released_folder_can_be_claimed_again_and_holds_nothing(tmp_path):
    claim = Claim.take(tmp_path)
    with pytest.raises(FolderInUse):
        Claim.take(tmp_path)  # also by the same process: two runs in two threads are two runs
    claim.release()
    second = Claim.take(tmp_path)
    claim.release()  # once more, which is not the second's
    with pytest.raises(FolderInUse):
        Claim.take(tmp_path)
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_never_began_leaves_no_folder(tmp_path):
    claim = Claim.take(tmp_path / "runs" / "a")
    claim.release()
    assert list(tmp_path.iterdir()) == []
    begun = Claim.take(tmp_path / "runs" / "b")
    (tmp_path / "runs" / "b" / "config.yaml").write_text("seed: 0")
    begun.release()
    assert (tmp_path / "runs" / "b" / "config.yaml").is_file()


def test_the_last_step_is_found_among_lines_that_are_no_records(tmp_path):
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('{"step": 3, "loss": 1.0}\n5\n["loss"]\n{"st')
    assert folder.last_step()["step"] == 3


def test_an_earlier_run_is_replaced_as_a_whole(tmp_path):
    first = RunFolder.create(tmp_path / "run", overwrite=False)
    first.config.write_text("seed: 0")
    (first.logs / "old.log").write_text("old")
    first.metrics.write_text("old")
    with pytest.raises(FolderInUse):
        RunFolder.create(tmp_path / "run", overwrite=True)
    first.release()
    with pytest.raises(FileExistsError, match="exists already"):
        RunFolder.create(tmp_path / "run", overwrite=False)
    second = RunFolder.create(tmp_path / "run", overwrite=True)
    assert {path.name for path in second.path.rglob("*")} == {"logs", "checkpoints", CLAIM}
