"""A run that collapses: it stops, warns in words or goes back, and the weights from before are kept."""

import json
import logging
import math
import sqlite3

import pytest
from problem import make_config, write_problem
from transformers import AutoModelForCausalLM

from tba.observe.run_folder import RunFolder
from tba.replay.database import load_groups
from tba.run import evaluate_model, train
from tba.trainer.health import Alarm, Collapsed, CollapseGuard

pytestmark = pytest.mark.slow

ABSURD = "train.learning_rate={kind: cosine, start: 1e-4, end: 1.0}"
"""Rises to a thousand times what the tiny model bears: within seventy steps its responses are one or two tokens long."""
SETTINGS = ("mode=sync", "seed=3", "train.max_steps=100", "evaluate.num_prompts=1", "objective.beta=0.05", ABSURD)

LAYERS = 2
"""Layers of the start model: with one it does not collapse so soon."""

OUTAGE = """
from pathlib import Path

SEEN = Path(__file__).with_name("seen")

def judge(completions, **columns):
    with SEEN.open("ab") as file:
        file.write(bytes(len(completions)))
    if SEEN.stat().st_size in range(320, 560):
        return [-len(text.split()) / 8 for text in completions]
    return [0.5] * len(completions)
"""
"""A judge that likes everything, but for an outage of fifteen steps after the first twenty, in which it dislikes words."""


@pytest.fixture(autouse=True)
def healthy_every_five_steps(monkeypatch):
    """In runs of less than sixty steps."""
    monkeypatch.setattr("tba.trainer.health.LEAST_EVERY", 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("problem")
    write_problem(path, layers=LAYERS)
    return path


def test_a_collapsed_run_stops_and_its_healthy_checkpoint_loads(folder):
    config = make_config(folder, *SETTINGS, "name=stop", "observe.on_collapse=stop")
    with pytest.raises(Collapsed, match="the run is collapsing, since about step"):
        train(config)
    run = RunFolder(config.run_folder)
    summary = json.loads(run.summary.read_text())
    collapse = summary["collapse"]
    assert summary["outcome"] == "collapsed"
    assert summary["steps"] == collapse["step"] < 100
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    alarms = [record["guard/alarm"] for record in records if "loss" in record]
    assert alarms == [0.0] * (collapse["step"] - 1) + [1.0]

    (kept,) = run.checkpoints.iterdir()
    assert kept == run.path / collapse["checkpoint"] == run.newest_checkpoint()
    step = int(kept.name.removeprefix("step-"))
    assert step < collapse["since"] <= step + 10 + 1
    AutoModelForCausalLM.from_pretrained(kept)
    assert json.loads((kept / "trainer.json").read_text())["step"] == step
    assert "solved" in evaluate_model(str(run.path), [])


def test_by_default_it_warns_once_trains_on_and_pins_the_checkpoint_from_before(folder, caplog):
    settings = [*SETTINGS, "train.max_steps=88", ABSURD.replace("}", ", steps: 100}"), "train.keep_checkpoints=3"]
    config = make_config(folder, *settings, "name=warn", "train.checkpoint_every=4")
    with caplog.at_level(logging.WARNING, logger="tba"):
        summary = train(config)
    assert summary["steps"] == 88
    assert sum("is collapsing" in record.message for record in caplog.records) == 1
    run = RunFolder(config.run_folder)
    pinned = max(step for step in range(0, 80, 4) if step < summary["collapse"]["since"])
    assert summary["collapse"]["checkpoint"] == f"checkpoints/step-{pinned}"
    assert sorted(run.checkpoints_by_step()) == [pinned, 80, 84, 88]


def test_a_run_without_a_collapse_leaves_only_its_own_checkpoints(folder, monkeypatch):
    monkeypatch.setattr("tba.trainer.health.LEAST_EVERY", 2)
    settings = ["mode=sync", "train.max_steps=5"]
    config = make_config(folder, *settings, "name=well")
    assert train(config)["collapse"] is None
    assert {path.name for path in RunFolder(config.run_folder).checkpoints.iterdir()} - {"best-step-5"} == {"step-5"}

    none = make_config(folder, *settings, "name=none", "train.keep_checkpoints=0")
    train(none)
    assert list(RunFolder(none.run_folder).checkpoints.iterdir()) == []


def test_the_guard_can_be_switched_off(folder):
    config = make_config(folder, "mode=sync", "train.max_steps=2", "name=unguarded", "observe.on_collapse=off")
    train(config)
    lines = RunFolder(config.run_folder).metrics.read_text()
    assert "guard/" not in lines


def records_of(run: RunFolder) -> list[dict]:
    found = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [record for record in found if "loss" in record]


@pytest.mark.parametrize("mode", [["mode=sync"], ["mode=fixed_lag"], ["mode=async"]], ids=str)
def test_a_run_that_collapses_goes_back_and_on_more_gently(tmp_path, mode, caplog):
    write_problem(tmp_path, layers=LAYERS)
    (tmp_path / "rewards.py").write_text(OUTAGE)
    config = make_config(
        tmp_path, "seed=3", "train.max_steps=36", "evaluate.num_prompts=1", "objective.beta=0.05", *mode,
        "train.learning_rate=3e-3", "observe.on_collapse=rollback",
        "replay.max_lag=1", reward="judge",
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, logger="tba"):
        summary = train(config)
    run = RunFolder(config.run_folder)
    (rollback,) = summary["rollbacks"]
    to = rollback["to"]
    assert to < rollback["since"] < rollback["step"]
    assert sum("The run goes back to" in record.message for record in caplog.records) == 1
    assert summary["steps"] == 36
    assert summary["collapse"] is None

    records = records_of(run)
    assert [record["step"] for record in records] == list(range(1, 37)), "abandoned steps are cut off, as by a resume"
    assert [record["guard/rollbacks"] for record in records] == [0.0] * to + [1.0] * (36 - to)
    assert [record["learning_rate"] for record in records] == pytest.approx([3e-3] * to + [1.5e-3] * (36 - to))
    assert all(math.isfinite(record[name]) for record in records for name in ("loss", "kl", "reward", "grad_norm"))
    assert records[-1]["completions/mean_length"] > 3.0
    assert min(record["off_policy/lag_max"] for record in records) >= 0

    # What the policy said that was given up is gone; what is stored is what was counted.
    stored = list(load_groups(run.replay))
    assert len({row.group.id for row in stored}) == len(stored)
    assert all(row.group.version <= row.step for row in stored)
    assert [row.step for row in stored] == sorted(row.step for row in stored)
    with sqlite3.connect(run.replay) as database:
        (responses,) = database.execute("SELECT SUM(responses + lost) FROM groups").fetchone()
    assert responses == summary["responses_generated"]


def test_a_run_goes_back_a_bounded_number_of_times(tmp_path, monkeypatch):
    monkeypatch.setattr("tba.trainer.health.MOST_ROLLBACKS", 1)
    write_problem(tmp_path, layers=LAYERS)
    (tmp_path / "rewards.py").write_text(OUTAGE.replace("in range(320, 560)", "% 640 >= 320"))  # it comes again
    config = make_config(
        tmp_path, "mode=sync", "seed=3", "train.max_steps=80", "evaluate.num_prompts=1", "objective.beta=0.05",
        "train.learning_rate=3e-3", "observe.on_collapse=rollback",
        reward="judge",
    )  # fmt: skip
    with pytest.raises(Collapsed, match=r"Rollbacks before this: 1\."):
        train(config)
    run = RunFolder(config.run_folder)
    summary = json.loads(run.summary.read_text())
    assert len(summary["rollbacks"]) == 1
    assert summary["collapse"]["step"] == summary["steps"]
    records = records_of(run)
    assert [record["step"] for record in records] == list(range(1, summary["steps"] + 1))
    assert (records[-1]["guard/alarm"], records[-1]["guard/rollbacks"]) == (1.0, 1.0)


def test_a_run_without_checkpoints_cannot_go_back(folder):
    with pytest.raises(ValueError, match="rollback needs checkpoints, and train"):
        make_config(folder, "observe.on_collapse=rollback", "train.keep_checkpoints=0")


CLOCKED = ("seconds", "time/", "perf/", "guard/rollbacks")
"""Beginnings of the names of metrics that a clock decides, or that a rollback is meant to change."""


def what_came_of(run: RunFolder) -> tuple:
    """Everything that a run leaves, without times."""
    found = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    lines = [{name: value for name, value in line.items() if not name.startswith(CLOCKED)} for line in found]
    rows = [
        (row.arrival, row.group.id, row.step, [t.completion.token_ids.tolist() for t in row.group.trajectories])
        for row in load_groups(run.replay)
    ]
    weights = (run.newest_checkpoint() / "model.safetensors").read_bytes()
    return lines, rows, run.samples.read_text(), weights


@pytest.mark.parametrize(
    "settings",
    [
        ["mode=sync", "objective.name=ppo", "train.updates_per_batch=2", "replay.on_policy_probability=0.5"],
        ["mode=fixed_lag", "replay.max_lag=2", "train.learning_rate=auto"],
        # At step 9 the reference is that of step 6; at step 5 it was the start model.
        [
            *("mode=sync", "objective.name=tb_learned_z", "reference.reset_every=6"),
            *("replay.on_reference_reset=recompute", "replay.on_policy_probability=0.5"),
        ],
    ],
    ids=["ppo", "fixed_lag", "resets"],
)
def test_a_run_that_goes_back_forgets_everything_that_came_after(folder, settings, monkeypatch, request):
    """With the learning rate as it was, the steps that are made again are the same, bit for bit. That is so on a CPU: on a
    GPU sums are made in an order that changes."""
    case = request.node.callspec.id
    configs = [
        make_config(
            folder, *settings, f"name={case}-{end}", "train.max_steps=12", "evaluate.every=4", "model.device=cpu",
            "observe.on_collapse=rollback",
        )
        for end in ("whole", "back")
    ]  # fmt: skip
    train(configs[0])
    alarms, judge = [], CollapseGuard.step

    def alarmed_once(guard: CollapseGuard, step: int, metrics) -> Alarm | None:
        found = judge(guard, step, metrics)
        if step == 9 and not alarms:
            alarms.append(step)
            return Alarm(rule="reward", metric="reward", value=0.0, healthy=1.0, message="a test.", step=9, since=8)
        return found

    monkeypatch.setattr(CollapseGuard, "step", alarmed_once)
    monkeypatch.setattr("tba.trainer.loop.GENTLER", 1.0)
    summary = train(configs[1])
    assert [(rollback["step"], rollback["to"]) for rollback in summary["rollbacks"]] == [(9, 5)]
    whole, back = (what_came_of(RunFolder(config.run_folder)) for config in configs)
    assert back == whole
