"""What a resumed run does with the rows of its durable replay that came after the checkpoint."""

import json
import logging
import os
import shutil
import signal
import sqlite3
import sys
from collections import Counter

import pytest
from commands import Command
from problem import make_config, wait_for, with_settings

from tba.observe.run_folder import RunFolder
from tba.replay.database import load_groups
from tba.run import train

pytestmark = pytest.mark.slow

CLOCKED = ("seconds", "time/", "perf/")


def rows(run: RunFolder) -> list[tuple[int, str, int]]:
    """Arrival, id and step of every stored group."""
    return [(stored.arrival, stored.group.id, stored.step) for stored in load_groups(run.replay)]


def lines(run: RunFolder) -> list[dict]:
    found = [json.loads(line) for line in run.metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [{name: value for name, value in line.items() if not name.startswith(CLOCKED)} for line in found]


def steps(run: RunFolder) -> list[int]:
    return [line["step"] for line in lines(run) if "loss" in line]


def keep_only(run: RunFolder, name: str) -> None:
    """Remove the other checkpoints."""
    for path in run.checkpoints.iterdir():
        if path.name != name:
            shutil.rmtree(path)


def assert_nothing_is_lost(run: RunFolder, before: list[tuple[int, str, int]], summary: dict) -> None:
    """Every row of before is there, once; all are counted; and no response is younger than the weights it is trained by."""
    after = rows(run)
    assert after[: len(before)] == before
    assert len(after) > len(before)
    assert set(Counter(group_id for _, group_id, _ in after).values()) == {1}
    with sqlite3.connect(run.replay) as database:
        (stored,) = database.execute("SELECT SUM(responses + lost) FROM groups").fetchone()
    assert stored == summary["responses_generated"]
    lags = [line[f"off_policy/lag_{kind}"] for line in lines(run) if "loss" in line for kind in ("mean", "max")]
    assert min(lags) >= 0
    ages = [line["buffer/age_mean"] for line in lines(run) if "loss" in line]
    assert min(ages) >= 0


def test_an_asynchronous_run_takes_in_again_what_came_after_its_checkpoint(folder):
    settings = ["name=later-rows", "train.checkpoint_every=2", "train.keep_checkpoints=9"]
    train(make_config(folder, *settings))
    run = RunFolder(folder / "runs" / "later-rows")
    before = rows(run)
    assert max(step for _, _, step in before) > 2
    longer = make_config(folder, *settings, "train.max_steps=16")
    keep_only(run, "step-2")  # as if the run had been killed before its next checkpoint
    summary = train(longer, resume=True)
    assert steps(run) == list(range(1, 17))
    assert_nothing_is_lost(run, before, summary)
    rollouts = Counter(stored.group.rollout for stored in load_groups(run.replay))
    assert set(rollouts.values()) == {1}, "no rollout is made twice"


def test_an_asynchronous_run_that_goes_back_forgets_what_came_after_the_checkpoint(folder):
    settings = ["name=goes-back", "train.checkpoint_every=2", "train.keep_checkpoints=9", "train.max_steps=12"]
    settings += ["replay.max_lag=3"]
    train(make_config(folder, *settings))
    run = RunFolder(folder / "runs" / "goes-back")
    before = rows(run)
    summary = train(make_config(folder, *settings), resume=run.checkpoints / "step-2")
    assert steps(run) == list(range(1, 13))
    assert [row for row in rows(run) if row[2] < 2] == [row for row in before if row[2] < 2]
    with sqlite3.connect(run.replay) as database:
        (stored,) = database.execute("SELECT SUM(responses + lost) FROM groups").fetchone()
    assert stored == summary["responses_generated"]
    lags = [line["off_policy/lag_max"] for line in lines(run) if "loss" in line]
    assert max(lags) <= 3, "nothing is trained on that the weights given up have generated, 10 steps of it"


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again_and_keeps_its_rows(folder, caplog):
    run = RunFolder(folder / "runs" / "no-checkpoint")
    settings = ["train.max_steps=30", "name=no-checkpoint"]
    command = [
        *(sys.executable, "-m", "tba", "train", "--model", f"{folder}/model", "--data", f"{folder}/data.jsonl"),
        *("--reward", f"{folder}/rewards.py:sevens", *with_settings(f"output={folder}/runs", *settings)),
    ]
    with Command(command) as process:
        # Steps may run ahead of the disk: what counts here is what has been committed.
        wait_for(lambda: process.poll() is not None or (run.metrics.is_file() and len(rows(run)) >= 12), 300)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    before = rows(run)
    assert len(before) >= 12
    assert not any(run.checkpoints.iterdir())
    with caplog.at_level(logging.WARNING, logger="tba"):
        summary = train(make_config(folder, *settings), resume=True)
    assert "the run begins again at step 0, with the start model. What it generated is kept" in caplog.text
    assert steps(run) == list(range(1, 31))
    assert_nothing_is_lost(run, before, summary)


def test_a_synchronous_run_makes_the_rows_after_its_checkpoint_again(folder):
    config = make_config(
        folder, "mode=sync", "name=sync-rows", "train.checkpoint_every=1", "train.keep_checkpoints=9"
    )  # fmt: skip
    train(config)
    run = RunFolder(config.run_folder)
    before, tokens = rows(run), tokens_of(run)
    assert len(before) == 24
    train(config, resume=run.checkpoints / "step-2")
    assert rows(run) == before
    assert tokens_of(run) == tokens


def tokens_of(run: RunFolder) -> list[list[int]]:
    stored = load_groups(run.replay)
    return [t.completion.token_ids.tolist() for row in stored for t in row.group.trajectories]


def test_a_synchronous_run_without_a_checkpoint_is_made_again_as_it_was(folder, caplog):
    config = make_config(folder, "mode=sync", "name=sync-again", "train.keep_checkpoints=0", "train.max_steps=3")
    train(config)
    run = RunFolder(config.run_folder)
    before = lines(run), rows(run), run.samples.read_text()
    run.summary.unlink()  # as if it had been killed before its end
    with caplog.at_level(logging.WARNING, logger="tba"):
        train(config, resume=True)
    assert "has no checkpoint: the run begins again at step 0, with the start model. Set" in caplog.text
    assert (lines(run), rows(run), run.samples.read_text()) == before
