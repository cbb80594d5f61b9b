"""Runs that are killed in the middle and resumed: real child processes, SIGKILL, and every logged number compared exactly."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from problem import SETTINGS, make_config, wait_for

from tba.config import ConfigError, load_config
from tba.launch import train
from tba.observe.files import RunFolder
from tba.train.checkpoint import check_manifest

SLOW_REWARDS = """
import os, time

def sevens(completions, want, **columns):
    while os.path.exists(os.environ["TBA_TEST_HOLD"]):
        time.sleep(0.01)
    return [text.split().count(word) / max(1, len(text.split())) for text, word in zip(completions, want)]
"""
MEASURED_TIMES = ("seconds", "time/", "perf/", "searcher/")

RUNS = {
    "tb with replay": ["mode=sync", "replay.on_policy_probability=0.5", "replay.inverse_temperature=1"],
    "ppo": ["mode=sync", "objective.name=ppo", "train.updates_per_batch=2"],
    "fixed_lag": ["mode=fixed_lag", "lag_steps=1", "train.learning_rate=auto", "search.skip_unsolved_after=1"],
    "resets": ["mode=sync", "objective.name=tb_learned_z", "reference.reset_every=3"]
    + ["replay.on_reference_reset=recompute", "replay.on_policy_probability=0.5"],
}


def command(folder: Path, name: str, *overrides: str) -> list[str]:
    return [
        *(sys.executable, "-m", "tba", "train", "--model", str(folder / "model"), "--data", str(folder / "data.jsonl")),
        *("--reward", f"{folder}/rewards.py:sevens", *SETTINGS, f"output={folder}/runs", f"name={name}"),
        *("train.max_steps=9", "train.checkpoint_every=1", "evaluate.every=4", *overrides),
    ]


def lines(path: Path) -> list[dict]:
    """Of metrics.jsonl, without what a clock measured."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(MEASURED_TIMES)} for line in found]


def run_and_kill(arguments: list[str], run: RunFolder, *, after: int) -> None:
    """Start a run and kill it with all its children as soon as a checkpoint of that step, or a later one, is there."""
    process = subprocess.Popen(arguments, start_new_session=True, stderr=subprocess.PIPE)
    reached = wait_for(
        lambda: process.poll() is not None
        or (run.checkpoints.is_dir() and max(run.checkpoints_by_step(), default=0) >= after)
    )
    os.killpg(process.pid, signal.SIGKILL)
    _, errors = process.communicate()
    assert reached
    assert process.returncode == -signal.SIGKILL, errors.decode()


@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_continues_with_the_same_tokens_and_losses(folder, name):
    whole = RunFolder(folder / "runs" / f"{name} whole")
    subprocess.run(command(folder, whole.path.name, *RUNS[name]), check=True, capture_output=True)
    killed = RunFolder(folder / "runs" / f"{name} killed")
    arguments = command(folder, killed.path.name, *RUNS[name])
    run_and_kill(arguments, killed, after=5)
    assert not killed.summary.exists()
    subprocess.run([*arguments, "--resume"], check=True, capture_output=True)
    assert [line["step"] for line in lines(killed.metrics) if "loss" in line] == list(range(1, 10))
    assert lines(killed.metrics) == lines(whole.metrics)
    assert killed.samples.read_text() == whole.samples.read_text()
    left, right = (json.loads(run.summary.read_text()) for run in (killed, whole))
    assert {**left, "seconds": 0} == {**right, "seconds": 0}
    assert sorted(p.name for p in killed.checkpoints.iterdir()) == sorted(p.name for p in whole.checkpoints.iterdir())
    weights = [run.newest_checkpoint() / "optimizer.safetensors" for run in (killed, whole)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
