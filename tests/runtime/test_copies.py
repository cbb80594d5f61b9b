"""Copies of a run folder between nodes: what is there, whole checkpoints only, and where a trainer starts. The actor is a
real one of a private Ray cluster; the disks of two nodes are two folders."""

import hashlib
import json
import os
import sys
from dataclasses import replace
from itertools import takewhile

import pytest

from tba.observe.claim import FolderInUse, Holder
from tba.observe.files import MANIFEST, RunFolder

# Ray reads them when it is imported.
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4, "RAY_USAGE_STATS_ENABLED": "0"}
ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")

OWNER = Holder.of_this_process()


@pytest.fixture(scope="module")
def cluster():
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def here(tmp_path):
    """The run folder on the trainer's node."""
    folder = RunFolder.create(tmp_path / "here" / "run", overwrite=False, holder=OWNER)
    folder.config.write_text("seed: 0\n")
    return folder


@pytest.fixture
def copy(tmp_path):
    from tba.runtime.cluster.copies import RunCopy

    return RunCopy(RunFolder.create(tmp_path / "copy", overwrite=False))


def host_of(folder: RunFolder):
    """The actor of a trainer that has this run folder."""
    from tba.runtime.cluster.host import CONCURRENCY_GROUPS, RoleHost

    make = ray.remote(num_cpus=0, concurrency_groups=CONCURRENCY_GROUPS)
    return make(RoleHost).remote(name="trainer", searcher=None, search_path=sys.path, copied=folder.path)


def save(folder: RunFolder, name: str, content: bytes, *, digest: str | None = None) -> None:
    path = folder.checkpoints / name
    path.mkdir()
    (path / "weights").write_bytes(content)
    wanted = {"bytes": len(content), "sha256": digest or hashlib.sha256(content).hexdigest()}
    (path / MANIFEST).write_text(json.dumps({"format": 1, "files": {"weights": wanted}}))


def follow(copy, actor, folder: RunFolder) -> None:
    from tba.runtime.cluster.copies import what_is_there

    copy.follow(actor, what_is_there(folder), wait=True)


def test_a_copy_follows_its_run_and_becomes_the_run_folder_of_another_node(cluster, here, copy, tmp_path, monkeypatch):
    monkeypatch.setattr("tba.runtime.cluster.copies.BLOCK_BYTES", 3)  # of this process: what is handed over, in parts
    actor = host_of(here)
    follow(copy, actor, here)
    assert copy.folder.config.read_text() == "seed: 0\n"
    save(here, "step-5", b"0123456789")
    save(here, "evaluated-step-6", b"")
    here.metrics.write_text('{"step": 1}\n')
    follow(copy, actor, here)
    save(here, "step-10", b"abc")
    for file in sorted((here.checkpoints / "step-5").iterdir()):
        file.unlink()
    follow(copy, actor, here)
    assert [path.name for path in copy.folder.checkpoints.iterdir()] == ["step-10"]
    save(here, "healthy-step-9", b"0123456789")
    follow(copy, actor, here)

    there = RunFolder(tmp_path / "there" / "run")
    there.logs.mkdir(parents=True)
    (there.logs / "searcher-0.log").write_text("words")
    other = host_of(there)
    assert ray.get(other.begun_at.remote(OWNER, False)) is None
    for block in takewhile(lambda block: block[0] != "config.yaml", copy._blocks()):  # cut off before its end
        ray.get(other.write_block.remote(*block))
    assert there.metrics.is_file()
    assert ray.get(other.begun_at.remote(OWNER, True)) is None
    assert copy.hand_over(other, None, OWNER, False)
    assert ray.get(other.begun_at.remote(OWNER, True)) == 10
    assert (there.checkpoints / "healthy-step-9" / "weights").read_bytes() == b"0123456789"
    assert there.metrics.read_text() == '{"step": 1}\n'
    assert (there.logs / "searcher-0.log").read_text() == "words"
    # Where the run has come as far, it stays as it is.
    assert not copy.hand_over(other, 10, OWNER, False)
    assert not copy.hand_over(other, 11, OWNER, False)


def test_a_checkpoint_that_arrives_damaged_does_not_count(cluster, here, copy, caplog):
    actor = host_of(here)
    save(here, "step-5", b"good")
    follow(copy, actor, here)
    save(here, "step-10", b"bad", digest="0" * 64)
    follow(copy, actor, here)
    assert list(copy.folder.checkpoints_by_step()) == [5]
    assert "step-10/weights has another checksum than its manifest says" in caplog.text


def test_a_run_folder_of_another_run_is_put_aside_and_that_of_a_living_one_is_refused(here):
    from tba.runtime.cluster.copies import begun_at, make_room

    stranger = replace(OWNER, pid=1, started="gone")
    assert begun_at(here, OWNER, resume=False) == -1
    assert begun_at(here, stranger, resume=False) is None
    with pytest.raises(FolderInUse):
        make_room(here, stranger, resume=False)
    here.release()
    make_room(here, stranger, resume=False)
    (aside,) = here.path.parent.iterdir()
    assert aside.name.startswith("run.before-")
    assert (aside / "config.yaml").is_file()
