"""A durable replay that has lost groups: a run that resumes says how many, and goes on only where that is accepted."""

import os
import shutil
import sqlite3
import tempfile

import numpy as np
import pytest
from test_durable import group, ids_in, make_store

from tba.replay.database import DurableReplayError, check_stored, find_database, place_database, read_stored
from tba.types import HighWaterMarks


def check(home, *, last_row=20, gives_up=False, accept_lost=False):
    check_stored(home, last_row=last_row, gives_up=gives_up, accept_lost=accept_lost)


def fill(store, numbers) -> None:
    for number in numbers:
        store.append(group(number, tokens=range(1000 * number, 1000 * number + 900)), step=0)
    store.flush()


@pytest.fixture
def home(tmp_path):
    """A file with twenty groups, each on pages of its own."""
    store = make_store(tmp_path / "replay.sqlite")
    fill(store, range(20))
    store.close()
    return tmp_path / "replay.sqlite"


def damaged(home, kind: str) -> None:
    content = bytearray(home.read_bytes())
    if kind == "bit":
        content[content.index(np.arange(7100, 7140, dtype="<i4").tobytes())] ^= 1
    elif kind == "page":
        page = content.index(np.arange(7300, 7340, dtype="<i4").tobytes()) // 4096 * 4096
        content[page : page + 4096] = b"\xa5" * 4096
    elif kind == "truncated":
        del content[len(content) // 2 // 4096 * 4096 :]
    elif kind == "root":
        content[4096:8192] = bytes(4096)
    home.write_bytes(content)


def test_a_whole_file_is_gone_on_with(home):
    check(home)
    check(home, last_row=25)  # the checkpoint holds groups that were never committed
    assert [path.name for path in home.parent.iterdir() if path.name.startswith("replay.sqlite")] == ["replay.sqlite"]


@pytest.mark.parametrize(
    ("kind", "lost", "kept"),
    [("bit", "1", 19), ("page", "1", 19), ("truncated", r"\d+", None), ("root", "20", 0)],
)
def test_damage_is_refused_with_the_number_of_groups_and_salvaged_where_it_is_accepted(home, kind, lost, kept, caplog):
    damaged(home, kind)
    content = home.read_bytes()
    message = rf"{home} is damaged \(.+\)\. {lost} of 20 stored groups are lost\. .*--resume --accept-lost-replay"
    with pytest.raises(DurableReplayError, match=message):
        check(home)
    assert home.read_bytes() == content, "nothing is changed before it is accepted"
    check(home, accept_lost=True)
    assert "the run goes on without them" in caplog.text
    aside = home.with_name("replay.sqlite.damaged-1")
    assert aside.read_bytes() == content
    left = ids_in(home)
    assert len(left) == kept if kept is not None else 0 < len(left) < 20
    assert ("searcher-3.aa/7" in left) == (kept is None)
    store = make_store(home)
    assert not left or not store.append(group(int(left[-1].rpartition("/")[2])), step=1)  # it has come before
    store.append(group(20), step=1)
    store.close()
    check(home)
    assert len(ids_in(home)) == len(left) + 1


@pytest.mark.parametrize("is_old", [False, True], ids=["", "of an older version"])
def test_a_deleted_file_is_lost_replay(home, is_old):
    if is_old:
        home.with_name("replay.stored").unlink()
    home.unlink()
    with pytest.raises(DurableReplayError, match=rf"{home} does not exist on .*\. 20 of 20 stored groups are lost"):
        check(home)
    check(home, accept_lost=True)
    make_store(home).close()
    check(home)


def test_groups_that_were_acknowledged_after_the_newest_checkpoint_are_missed_too(home, tmp_path):
    """The -wal file is deleted while the run goes on, which is then killed."""
    store = make_store(home)
    fill(store, range(20, 25))
    later = tmp_path / "later"
    later.mkdir()
    for name in ("replay.sqlite", "replay.stored"):
        shutil.copy(home.with_name(name), later / name)
    store.close()
    with pytest.raises(DurableReplayError, match=r"lacks the newest groups\. 5 of 25 stored groups are lost"):
        check(later / "replay.sqlite", last_row=18)
    check(later / "replay.sqlite", last_row=18, gives_up=True)  # they will be made again
    check(later / "replay.sqlite", last_row=18, accept_lost=True)
    assert len(ids_in(later / "replay.sqlite")) == 20


def test_a_run_that_is_killed_while_it_gives_groups_up_has_lost_nothing(home):
    store = make_store(home)
    store.return_to(12, HighWaterMarks({"searcher-3.aa": 11}))
    assert read_stored(home) == 12
    store.go_on_after(15)  # three that the checkpoint holds were never committed
    store.append(group(3), step=1)  # came before
    store.close()
    assert read_stored(home) == 12
    check(home, last_row=15)


def test_a_file_without_its_tables_is_new_where_nothing_was_stored(tmp_path):
    """Of a run that was killed while it made it."""
    sqlite3.connect(tmp_path / "replay.sqlite").execute("PRAGMA journal_mode = WAL")
    check(tmp_path / "replay.sqlite", last_row=0)
    with pytest.raises(DurableReplayError, match="20 of 20 stored groups are lost"):
        check(tmp_path / "replay.sqlite")


def test_a_job_with_another_folder_for_temporary_files_follows_the_location_or_says_what_is_lost(tmp_path, monkeypatch):
    home, jobs = tmp_path / "run" / "replay.sqlite", [tmp_path / "job1", tmp_path / "job2"]
    for folder in (home.parent, *jobs):
        folder.mkdir()
    monkeypatch.setattr("tba.replay.database.network_filesystem", lambda path: "nfs4" if path == home.parent else None)
    monkeypatch.setattr(tempfile, "tempdir", str(jobs[0]))
    first = make_store(place_database(home), final_copy=home)
    fill(first, range(4))
    first.close()  # copied back
    second = place_database(home)
    store = make_store(second, final_copy=home)
    fill(store, range(4, 6))
    monkeypatch.setattr(tempfile, "tempdir", str(jobs[1]))
    check(home)
    assert place_database(home) == find_database(home) == second
    store.final_copy = None  # as where the process is killed: nothing is copied back
    store.close()
    shutil.copytree(
        home.parent, tmp_path / "copied"
    )  # of another run now, which must not write to the first one's file
    copied = place_database(tmp_path / "copied" / "replay.sqlite")
    assert copied == tmp_path / "copied" / "replay.sqlite"
    assert len(ids_in(copied)) == 6
    os.rename(jobs[0], tmp_path / "gone")
    with pytest.raises(
        DurableReplayError, match=rf"{second} does not exist on .*, and {home} is an older copy\. 2 of 6 stored"
    ):
        check(home)
    check(home, accept_lost=True)
    third = place_database(home)
    assert third.is_relative_to(jobs[1])
    assert len(ids_in(third)) == 4
