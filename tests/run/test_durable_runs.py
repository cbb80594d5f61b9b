"""Runs with a durable replay: what they received is in the file, and another run can start from it."""

import json
import sqlite3

import numpy as np
import pytest
from problem import make_config

from tba.replay.database import DurableReplayError, load_groups
from tba.run import train
from tba.run.export_groups import GroupFilter, export
from tba.types import GroupId, TrajectoryGroup

pytestmark = pytest.mark.slow


@pytest.fixture
def made(monkeypatch):
    """Tokens of every group that is made in this process, by its id."""
    groups, make = {}, TrajectoryGroup.__init__

    def noting(self, **fields):
        make(self, **fields)
        groups[self.id] = [t.completion.token_ids.tolist() for t in self.trajectories]

    monkeypatch.setattr(TrajectoryGroup, "__init__", noting)
    return groups


def test_a_synchronous_run_stores_every_group_under_ids_that_are_the_same_each_time(folder, made):
    config = make_config(folder, "mode=sync", "name=durable-sync", "train.max_steps=3")
    train(config)
    sent, path = dict(made), config.run_folder / "replay.sqlite"
    stored = list(load_groups(path))
    assert [s.group.id for s in stored] == [f"searcher-0.0/{number}" for number in range(12)]
    assert {s.group.id: [t.completion.token_ids.tolist() for t in s.group.trajectories] for s in stored} == sent
    assert [s.step for s in stored] == [0] * 4 + [1] * 4 + [2] * 4
    assert not path.with_name("replay.sqlite-wal").exists()


def test_an_asynchronous_run_stores_what_it_received_and_is_sent_all_acknowledgements(folder):
    config = make_config(folder, "name=durable-async", "replay.durability=power")
    summary = train(config)
    ids = [GroupId.parse(stored.group.id) for stored in load_groups(config.run_folder / "replay.sqlite")]
    assert [group.number for group in ids] == list(range(len(ids)))
    assert {group.sender for group in ids} == {"searcher-0"}
    assert len({group.incarnation for group in ids}) == 1
    assert ids[0].incarnation != "0"
    database = sqlite3.connect(config.run_folder / "replay.sqlite")
    generated = database.execute("SELECT SUM(responses + lost) FROM groups").fetchone()[0]
    assert generated == summary["responses_generated"]


def test_with_durability_off_nothing_is_written(folder):
    config = make_config(folder, "mode=sync", "name=durable-off", "train.max_steps=1", "replay.durability=off")
    train(config)
    assert not list(config.run_folder.glob("replay*"))


def test_another_run_starts_from_an_export_with_the_same_tokens_and_rewards(folder, tmp_path):
    first = make_config(folder, "mode=sync", "name=exported", "train.max_steps=2")
    train(first)
    count = export(first.run_folder / "replay.sqlite", tmp_path / "responses.jsonl", GroupFilter())
    assert count == 32
    second = make_config(
        folder,
        "mode=sync",
        "name=imported",
        "train.max_steps=1",
        f"replay.imports=[{tmp_path}/responses.jsonl]",
        "replay.on_policy_probability=0.5",
    )
    train(second)
    imported = [
        stored.group
        for stored in load_groups(second.run_folder / "replay.sqlite")
        if stored.group.id.startswith("import.")
    ]
    wanted = [json.loads(line) for line in (tmp_path / "responses.jsonl").read_text().splitlines()]
    found = [(g.prompt.id, t) for g in imported for t in g.trajectories]

    exported = [[line[name] for name in ("id", "completion_ids", "rewards", "finish")] for line in wanted]
    stored = [[id, t.completion.token_ids.tolist(), dict(t.rewards), t.completion.finish] for id, t in found]
    assert sorted(map(json.dumps, stored)) == sorted(map(json.dumps, exported))
    assert all(np.isnan(t.completion.behaviour_log_probs).all() for _, t in found)


def test_a_replay_that_cannot_be_opened_stops_the_run_before_it_starts(folder, monkeypatch):
    monkeypatch.setattr("tba.replay.database.network_filesystem", lambda path: "nfs4")
    config = make_config(folder, "mode=sync", "name=no-local-disk")
    with pytest.raises(DurableReplayError, match=r"is a local disk, which SQLite needs: set TMPDIR"):
        train(config)
