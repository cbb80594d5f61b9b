"""A run folder belongs to one living process at a time."""

import json
import os
import shutil
import socket
import subprocess
import sys

import pytest

from tba.observe.claim import NAME, Claim, FolderInUse, holder_of
from tba.observe.files import RunFolder


def write_claim(folder, **changes) -> None:
    """A claim of this process, with some of its values changed, in a file of its own number."""
    Claim.take(folder)
    path = folder / NAME
    claim = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(claim))


def test_a_folder_that_a_living_process_has_is_refused_with_its_pid_and_host(tmp_path):
    code = (
        "import sys, pathlib; from tba.observe.claim import Claim; Claim.take(pathlib.Path(sys.argv[1]));"
        "print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        words = f"in use by process {other.pid} on this host \\({socket.gethostname()}\\)"
        with pytest.raises(FolderInUse, match=words):
            RunFolder.check(tmp_path, overwrite=True)
        with pytest.raises(FolderInUse, match=words):
            RunFolder.create(tmp_path, overwrite=True)
        assert holder_of(tmp_path)["pid"] == other.pid
        other.stdin.close()
    assert RunFolder.create(tmp_path, overwrite=False).path == tmp_path  # it is gone: its claim is taken over
    assert holder_of(tmp_path)["pid"] == os.getpid()


def test_a_process_id_that_is_used_again_does_not_hold_the_folder(tmp_path):
    write_claim(tmp_path, started="another boot:1234")
    Claim.take(tmp_path)


def test_a_claim_of_another_host_holds_and_says_what_to_delete(tmp_path):
    write_claim(tmp_path, host="elsewhere")
    with pytest.raises(FolderInUse, match=rf"process {os.getpid()} on host elsewhere.* gone, delete .*{NAME}"):
        Claim.take(tmp_path)


def test_a_copied_folder_is_not_claimed(tmp_path):
    (tmp_path / "a").mkdir()
    write_claim(tmp_path / "a", host="elsewhere")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    Claim.take(tmp_path / "b")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": null}'])
def test_a_claim_that_is_none_does_not_hold_the_folder(tmp_path, text):
    (tmp_path / NAME).write_text(text)
    Claim.take(tmp_path)


def test_a_released_folder_can_be_claimed_again_and_holds_nothing(tmp_path):
    claim = Claim.take(tmp_path)
    with pytest.raises(FolderInUse):
        Claim.take(tmp_path)  # also by the same process: two runs in two threads are two runs
    claim.release()
    claim.release()
    assert list(tmp_path.iterdir()) == []
    Claim.take(tmp_path)


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
    assert {path.name for path in second.path.rglob("*")} == {"logs", "checkpoints", NAME}
