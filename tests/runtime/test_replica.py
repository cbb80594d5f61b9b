"""The second copy of groups: it is there before a searcher is told, survives a kill, and has no group
twice. Searchers are real processes here."""

import os
import pickle
import subprocess
import sys

import pytest
import targets
from test_searcher_pool import Run

from tba.runtime.links import pickled
from tba.runtime.replica import Replica, ReplicaFailed


@pytest.fixture
def replica(tmp_path):
    replica = Replica(tmp_path / "groups.sqlite", capacity=1000)
    yield replica
    replica.close()


class Copies:
    """A replica as its trainer sees it, in this process: it stores a group only when it is asked what it has stored."""

    def __init__(self, replica) -> None:
        self._replica = replica
        self._waiting = []

    def add(self, group) -> None:
        self._waiting.append(group)

    def stored(self) -> set[str]:
        stored, self._waiting = self._waiting, []
        for group in stored:
            self._replica.add(group.id, 1, pickled(group))
        return {group.id for group in stored}

    def groups(self, *, after):
        return map(pickle.loads, self._replica.rows(after=after))

    def return_to(self, marks) -> None:
        self._replica.return_to(marks)


@pytest.fixture
def run(tmp_path, replica):
    run = Run(tmp_path / "logs", num_searchers=1, copies=Copies(replica))
    yield run
    run.close()


def reopened(path, capacity: int = 1000) -> Replica:
    return Replica(path, capacity=capacity)


def test_a_group_is_kept_once_and_in_the_order_of_arrival(replica):
    replica.add("searcher-0.a/0", 8, b"zero")
    replica.add("searcher-1.b/0", 8, b"other")
    replica.add("searcher-0.a/0", 8, b"zero")  # sent again
    replica.add("searcher-0.a/1", 8, b"one")
    assert list(replica.rows()) == [b"zero", b"other", b"one"]
    assert replica.ids() == ["searcher-0.a/0", "searcher-1.b/0", "searcher-0.a/1"]


def test_rows_leave_when_newer_ones_hold_the_capacity(tmp_path):
    replica = reopened(tmp_path / "groups.sqlite", capacity=16)
    for number in range(4):
        replica.add(f"searcher-0.a/{number}", 8, b"")
    assert replica.ids() == ["searcher-0.a/2", "searcher-0.a/3"]
    replica.close()
    replica = reopened(tmp_path / "groups.sqlite", capacity=16)
    replica.add("searcher-0.a/4", 8, b"")
    assert replica.ids() == ["searcher-0.a/3", "searcher-0.a/4"]
    replica.close()


def test_what_a_trainer_gave_up_is_forgotten(replica):
    for group in ("searcher-0.a/0", "searcher-0.a/1", "searcher-1.b/0"):
        replica.add(group, 8, b"")
    replica.return_to({"searcher-0.a": 0})
    assert replica.ids() == ["searcher-0.a/0"]


KILLED = """
import sys
from pathlib import Path
from tba.runtime.replica import Replica
replica, number = Replica(Path(sys.argv[1]), capacity=10**9), 0
while True:
    for number in range(number, number + 3):
        replica.add(f"searcher-0.a/{number}", 1, bytes(1000))
    print(number, flush=True)
    number += 1
"""


def test_what_is_committed_survives_kill_9(tmp_path):
    path = tmp_path / "groups.sqlite"
    with subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True) as process:
        told = [int(process.stdout.readline()) for _ in range(50)]
        process.kill()
        told += [int(line) for line in process.stdout.read().splitlines()]
    replica = reopened(path)
    ids = replica.ids()
    replica.close()
    assert ids[: told[-1] + 1] == [f"searcher-0.a/{number}" for number in range(told[-1] + 1)]
    assert len(ids) == len(set(ids))


def test_a_searcher_is_told_of_a_group_only_when_the_replica_has_it(run, replica):
    runtime = run.runtime
    runtime.start_searchers(targets.looks_into_the_replica, {"path": str(replica.path)})
    run.drain_until(lambda: run.groups)
    runtime.acknowledge([run.groups[0].id])
    run.drain_until(lambda: len(run.groups) == 2)
    assert run.groups[1].id.endswith("/11")


def test_a_trainer_gets_the_groups_that_it_has_not_on_disk(run, replica):
    """As one on another node, or one that was killed while it got them."""
    for number in range(3):
        replica.add(f"searcher-0.a/{number}", 1, pickled(targets.numbered_group(0, "a", number)))
    run.runtime.start_searchers(targets.waits, {}, stored={"searcher-0.a": 0})
    run.drain_until(lambda: len(run.groups) == 2)
    assert [group.id for group in run.groups] == ["searcher-0.a/1", "searcher-0.a/2"]


def test_a_replica_that_cannot_be_written_says_where_and_what_to_do(tmp_path):
    with pytest.raises(ReplicaFailed, match=r"nowhere/groups\.sqlite could not be opened.*output="):
        reopened(tmp_path / "nowhere" / "groups.sqlite")


@pytest.mark.parametrize("change", ["owner", "mode", "write-ahead log", "folder"])
def test_rows_that_another_user_may_have_written_are_refused(tmp_path, change):
    """A trainer unpickles them, which would run what another user wants."""
    path = tmp_path / "replica" / "groups.sqlite"
    path.parent.mkdir()
    reopened(path).close()
    if change == "mode":
        path.chmod(0o620)
    elif change == "folder":
        path.parent.chmod(0o777)
    elif os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    else:
        changed = path if change == "owner" else path.with_name("groups.sqlite-wal")
        changed.touch()
        os.chown(changed, 12345, 12345)
    with pytest.raises(ReplicaFailed, match=r"replica.*(belongs to user 12345|can be written by other users)"):
        reopened(path)
